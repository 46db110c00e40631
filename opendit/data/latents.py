"""Write tars of cached latents, and read them as a data set. ``latents_index`` describes index.json.

    latents-256-00000-of-00012.tar          latents-256-00000-of-00012.tar.index     index.json
      __opendit__/shard.json                the tar's settings, and the files that couldn't be read
      000000000.safetensors  000000000.txt
      000000001.safetensors  000000001.txt

A member's name is the sample's row in the original data set. The caption is in ``.txt``, or the class in ``.cls``.
The safetensors member has these tensors, where F is 2 if the mirror image is stored, else 1:

    moments  (F, 2C, [t,] h, w) float16   mean and standard deviation
    tokens   (L, D) float16 or bfloat16   caption's tokens without padding
    pooled   (P,) float16 or bfloat16     caption's pooled vector
    features (F, N, W) float16            with --repa: a vision encoder's features for the latent's N tokens
    first_latents (F, C, t, h, w) float16 for image-to-video models: means of the clip, grey after its first frame
    first_tokens  (F, L, D) float16       first frame's tokens, if the model has an image encoder

In another program's tars, a sample's latents are an array in its member ``.npz``, ``.npy`` or ``.safetensors``.
``preprocess.py index DIR --latents FORM`` writes the tars' indexes and an ``index.json``. Values are not multiplied by
the VAE's scaling factor. A leading batch dimension of 1 is removed. For C latent channels, FORM is:

    mean_std     (2C, [t,] h, w)   mean and standard deviation
    mean_logvar  (2C, [t,] h, w)   mean and logarithm of the variance: diffusers' ``latent_dist.parameters``
    sample       (C, [t,] h, w)    the mean, or a latent that was drawn once and never changes
"""

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from opendit.common.json_file import MIB, open_regular, parse_json, read_bounded
from opendit.common.json_models import parse_text
from opendit.common.safe_files import refuse_links, remove, replacing
from opendit.common.tensor_files import write_file, write_tensors
from opendit.common.utils import DataError, hash_parts
from opendit.data.base import (
    PLAIN,
    BadSample,
    CachedFeatures,
    Description,
    Embedding,
    Fingerprint,
    FirstFrames,
    Item,
    Medium,
    Shapes,
    Size,
    View,
    count_media,
    flip_note,
    of_moments,
)
from opendit.data.files import Ignored, Verification, files_below
from opendit.data.latents_index import (
    INDEX,
    LATENTS_SIZES,
    OLD_FILES,
    REPAIR,
    SHARD,
    VERSION,
    check_indexes,
    choose_index,
    read_indexes,
)
from opendit.data.picture_file import picture_suffixes
from opendit.data.row_arrays import kept_array
from opendit.data.shards.dataset import IndexedTar, ShardDataset, open_remote, remote_shards
from opendit.data.shards.index import (
    BLOCK,
    ROW,
    Fields,
    TarIndex,
    empty_header,
    index_of,
    members,
    scan,
    tar_blocks,
    write_index,
)
from opendit.data.shards.store import FileCache, LocalTars, Remote, RemoteTars, expand
from opendit.data.sources import Request
from opendit.encoders.published_text import PublishedText
from opendit.encoders.text import TextEncoder


class LatentDataset(ShardDataset):
    """Data set of cached latents in tars. A sample's ``x`` is means and standard deviations: float32 (2C, h, w) for a
    picture, (2C, t, h, w) for a clip.

    index: the index for one picture size. tars: the tars in ``index``, in order. empty_caption: the empty string's
    embedding; None without an encoder. random_flip: None means True if mirror images are stored. options: seed and
    max_bad of ``PicturesAndClips``.

    Raises ValueError, beginning with ``name``, for clips with other settings, missing mirror images for
    ``random_flip``, or an index that contradicts the tars."""

    empty_captions = True  # accept empty captions
    names_file = INDEX

    def __init__(
        self,
        name: str,
        index: dict[str, Any],
        tars: Sequence[IndexedTar],
        *,
        store: LocalTars | RemoteTars | None = None,
        empty_caption: Embedding | None = None,
        random_flip: bool | None = None,
        use_video: bool = False,
        num_frames: int = 16,
        frame_interval: int = 1,
        fps: float | None = None,
        **options: Any,
    ):
        pairs = [(tar, shard) for tar, shard in zip(tars, index["shards"], strict=True) if shard["count"]]
        kept, names = [tar for tar, _ in pairs], index["class_names"]
        super().__init__(name, kept, index["image_size"], store=store, class_names=names, **options)
        if self.conditioning != (indexed := index.get("conditioning", "label")):
            words = {"text": "captions", "label": "classes"}
            raise ValueError(
                f"{name}: {INDEX} tells of {words[indexed]}, its tars have {words[self.conditioning]}; {REPAIR}"
            )
        self.random_window, self.use_video, self.empty_caption = False, use_video, empty_caption
        self._keys = [shard.get("shape_key", 0) for _, shard in pairs]
        self._latent_shapes = [shard.get("latent_shape") for _, shard in pairs]
        made = index.get("video")
        if use_video != (made is not None):
            what = (
                "clips; add --use_video"
                if made
                else ("pictures; make them again with preprocess.py latents --use_video, or leave --use_video out")
            )
            raise ValueError(f"{name}: holds latents of {what}")
        for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval), ("fps", fps)):
            if made and (of_made := made.get(flag)) != value:
                there, here = (f"no --{flag}" if n is None else f"--{flag} {n:g}" for n in (of_made, value))
                fix = f"leave --{flag} out" if of_made is None else f"pass {there}"
                raise ValueError(
                    f"{name}: holds latents made with {there}, but this run has {here}; {fix}, or make latents for it"
                )
        if random_flip and not index["flips"]:
            raise ValueError(f"{name}: holds no mirrored latents; make them again with --flip")
        self.index, self.vae = index, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        # A scale or shift is a number, or a list with one number per channel.
        scale, shift = index["scaling_factor"], index["shift_factor"]
        self.scaling_factor: float | tuple[float, ...] = tuple(scale) if isinstance(scale, list) else scale
        self.shift_factor: float | tuple[float, ...] = tuple(shift) if isinstance(shift, list) else shift
        channels, *sides = index["latent_shape"]
        self.sample_shape = (2 * channels, *sides)
        self.conditioning = index.get("conditioning", "label")
        text = index.get("text")
        self.text_encoder, self.max_tokens = (text["encoder"], text["max_tokens"]) if text else (None, 0)
        stored, self.features = index.get("features"), None
        if stored is not None:
            rows, columns = stored["grid"]
            self.features = CachedFeatures(stored["encoder"], (rows, columns), stored["width"])

    def _tensors(self, row: int) -> dict[str, Tensor]:
        """Read a sample's tensors. Raises BadSample if the tensors can't be read or contradict the index."""
        try:
            tensors = self._read_tensors(row)
            views, sides = 2 if self.index["flips"] else 1, [*self.sample_shape[1:]]
            if (own := self._latent_shapes[self.find_record(row)[0]]) is not None:
                sides = own[1:]
            elif len(sides) == 3 and tensors["moments"].shape[2] == 1:
                sides[0] = 1  # a picture in a data set of clips has one frame
            expected = {"moments": [views, self.sample_shape[0], *sides]}
            if (first := self.index.get("first_frames")) is not None:
                expected["first_latents"] = [views, self.sample_shape[0] // 2, *sides]
            if self.features is not None:
                expected["features"] = [views, math.prod(self.features.grid), self.features.width]
            for name, shape in expected.items():
                if list(tensors[name].shape) != shape:
                    raise ValueError(f"{name} of shape {list(tensors[name].shape)}, not {shape}")
            if self.features is not None and tensors["features"].dtype != torch.half:
                raise ValueError(f"features of {tensors['features'].dtype}, not torch.float16")
            if first and list(tensors["first_tokens"].shape[::2]) != [views, first]:
                raise ValueError(f"first_tokens of shape {list(tensors['first_tokens'].shape)}")
            if self.text_encoder and len(tensors["tokens"]) > self.max_tokens:
                raise ValueError(f"{len(tensors['tokens'])} tokens, not up to {self.max_tokens}")
        except BadSample:
            raise
        except Exception as error:  # other programs' files may raise any type
            raise BadSample(self.source(row), f"{type(error).__name__}: {error}") from error
        return tensors

    def _read_tensors(self, row: int) -> dict[str, Tensor]:
        content, foreign = self.read_medium(row), self.index.get("foreign")
        if foreign is None:
            return load(content)
        number, _, record = self.find_record(row)
        suffix = self.shards[number].index.header.suffixes[record.suffix]
        return {"moments": read_moments(content, suffix, foreign, self.sample_shape)}

    def read(self, row: int, view: View = PLAIN) -> Item:
        tensors, embedding = self._tensors(row), None
        if self.text_encoder is not None:
            embedding = padded(tensors["tokens"], tensors["pooled"], self.max_tokens)
        which, width, first = int(view.flip), self.index.get("first_frames"), None
        if width is not None:
            tokens = tensors["first_tokens"][which] if width else torch.empty(0, 0)
            first = FirstFrames(tensors["first_latents"][which], tokens)
        features = tensors["features"][which] if self.features else None
        moments = tensors["moments"][which].float()
        return self._labelled(row, Item(moments, embedding=embedding, features=features, first=first))

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        """Return the original size as a Medium, and the latents as frames in false colours."""
        moments, video, along = self.read(row).x, self.index.get("video"), 1
        if video and (latent_frames := self.sample_shape[1]) > 1:  # the first latent frame encodes only one frame
            along = 1 + (moments.shape[1] - 1) * (video["num_frames"] - 1) // (latent_frames - 1)
        size = self.index["image_size"]
        height, width = (side * size // self.sample_shape[-1] for side in moments.shape[-2:])
        return Medium(along, height, width), of_moments(moments)[1]

    def shapes(self) -> Shapes:
        rates = [self.index["data_fps"]] if "data_fps" in self.index else []
        return Shapes(keys=self._shape_keys(), latents=self._sizes, frame_rates=lambda: rates)

    def _shape_keys(self) -> np.ndarray | int:
        if len(set(self._keys)) < 2:
            return self._keys[0]
        if self._kinds is None:
            make = partial(np.repeat, np.array(self._keys, np.int16), [len(shard) for shard in self.shards])
            self._kinds = kept_array(len(self), lambda: hash_parts("keys of latents", self._identity()), make)
        return self._kinds

    def _sizes(self) -> list[tuple[int, Size]]:
        """Return (end row, (frames, height, width) of the latents) for each tar."""
        lengths: dict[int, int] = {}
        sizes: list[Size] = []
        for key, own in zip(self._keys, self._latent_shapes, strict=True):
            if own is None:
                if key not in lengths:
                    lengths[key] = self._frames(key)
                own = [0, lengths[key], *self.sample_shape[-2:]]
            frames, height, width = (1, *own[1:])[-3:]
            sizes.append((frames, height, width))
        return list(zip(self.starts[1:].tolist(), sizes, strict=True))

    def _frames(self, key: int) -> int:
        """Return the number of latent frames in the first readable sample with this shape key."""
        frames = self.sample_shape[1] if len(self.sample_shape) == 4 else 1
        first = self._keys.index(key)
        for row in range(self._starts[first], self._starts[first + 1]) if frames > 1 else ():
            with suppress(BadSample):
                return self._tensors(row)["moments"].shape[2]
        return frames

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, self._contents, self._checksums())

    def _contents(self) -> str:
        return hash_parts(*(f"{file} {sha256}" for file, sha256 in sorted(self.checksums.items())))

    def _checksums(self) -> Verification | None:
        if not isinstance(self.store, LocalTars):
            return None
        return Verification(Path(self.shards[0].path).parent, self.checksums, self.shown)

    @property
    def checksums(self) -> dict[str, str]:
        return {shard["file"]: shard["sha256"] for shard in self.index["shards"]} | self.index.get("checksums", {})

    def _identity(self) -> str:
        # Checksums and caption counts are left out, because older caches lack them and must keep their identity.
        shards = [{key: value for key, value in shard.items() if key != "sha256"} for shard in self.index["shards"]]
        index = {key: value for key, value in self.index.items() if key not in ("checksums", "captions")}
        return hash_parts(json.dumps({**index, "version": VERSION, "shards": shards}, sort_keys=True))

    def _cut_captions(self) -> tuple[str, ...]:
        if self.text_encoder is None:
            return ()
        most = f"the {self.max_tokens:,} tokens of --text_encoder {self.text_encoder}"
        if (found := self.index.get("captions")) is None:
            return (f"captions: an earlier version embedded them, and did not count those that it cut to {most}",)
        if not found["cut"]:
            return ()
        among = f"of the {found['counted']:,} looked at among {found['rows']:,}"
        return (
            f"captions: {found['cut']:,} {among} were cut to {most} when they were embedded; the longest had "
            f"{found['longest']:,}",
        )

    def describe(self) -> Description:
        of_tars = zip(self.shards, self._keys, self._latent_shapes, strict=True)
        clips = sum(len(tar) for tar, key, own in of_tars if (own[1] > 1 if own else key == max(self._keys)))
        names = (
            "conditioning class_names sample_shape random_flip seed max_bad vae scaling_factor shift_factor "
            "text_encoder max_tokens empty_caption features"
        ).split()
        return Description(
            text=self._text_of(clips),
            kind="latents",
            first_frames=self.index.get("first_frames"),
            cut_captions=self._cut_captions(),
            counted_captions=((len(self), self.counted_captions),),
            largest_label=self._find_largest_label,
            **{name: getattr(self, name) for name in names},
        )

    def _text_of(self, clips: int) -> str:
        shape, size = "x".join(map(str, self.index["latent_shape"])), self.index["image_size"]
        what = f"{len(self):,} pictures"
        if self.index.get("video"):
            what = count_media(clips, len(self) - clips)
        text = f"with captions ({f'encoded by {self.text_encoder}' if self.text_encoder else 'not encoded'})"
        words = text if self.conditioning == "text" else f"of {len(self.class_names):,} classes"
        tokens = self.index.get("settings", {}).get("bucket_tokens")
        size = f"{size}x{size}" if tokens is None else f"of shapes near {size}x{size}, --bucket_tokens {tokens}"
        features = f", features by {self.features.encoder}" if self.features else ""
        return (
            f"{self.shown.removeprefix('--data_path ')}: cached latents ({shape}, --vae {self.vae}) of {what} {words}, "
            f"{size}, {flip_note(self.random_flip)}{features}{self.note}"
        )


def open_source(asked: Request) -> ShardDataset | None:
    """Open a folder of cached latents, or the data at an address. Return None for other local paths."""
    if asked.path is None:
        return _open_address(asked)
    folder = asked.located
    if not folder.is_dir():
        return None
    indexes = read_indexes(folder)
    if indexes is None:
        if any(folder.glob(OLD_FILES)):
            raise ValueError(
                f"{asked.shown}: holds unfinished latents in safetensors files of an earlier version; make them again "
                "with preprocess.py latents in another folder"
            )
        if any(folder.glob("latents-*-of-*.tar")):
            raise ValueError(
                f"{asked.shown}: holds unfinished latents; run the preprocess.py command that made them again"
            )
        return None
    asked.check_split()
    index = choose_index(indexes, asked.shown, asked.image_size)
    text, tars = index.get("text"), open_tars(folder, index)
    read, name = partial(read_bounded, folder / EMPTY, MOST_EMPTY), f"--data_path {folder}: {EMPTY}"
    empty = read_empty_caption(read, text, name) if text else None
    latents = LatentDataset(asked.shown, index, tars, empty_caption=empty, max_bad=asked.max_bad, **asked.of_latents())
    if next(files_below(str(folder), picture_suffixes(), Ignored(), visits=1), None) is not None:
        latents.note = "; the pictures that are in the folder as well are not read"
    return latents


def _open_address(asked: Request) -> ShardDataset:
    remote, cache = Remote(asked.data_path), FileCache.of_environment()
    try:
        expand([asked.data_path])  # raises ValueError for braces that can't be expanded
        return _open_remote_latents(asked, remote, cache) or open_remote(asked, remote, cache)
    except (DataError, ValueError, OSError) as error:
        raise ValueError(f"{asked.shown}: {str(error).removeprefix(f'{asked.shown}: ')}") from error


def _open_remote_latents(asked: Request, remote: Remote, cache: FileCache) -> LatentDataset | None:
    """Open cached latents on a web server or in a bucket. Return None if the folder has no index.json."""
    folder, indexes = asked.data_path.rstrip("/"), fetch_latents_indexes(asked.data_path, remote)
    if indexes is None:
        return None
    index = choose_index(indexes, asked.shown, asked.image_size)
    tars, _ = remote_shards([f"{folder}/{shard['file']}" for shard in index["shards"]], remote, cache)
    for tar, shard in zip(tars, index["shards"], strict=True):
        check_tar(tar.index, shard, tar.path)
    headers = [(tar.path, tar.index.header) for tar in tars if len(tar)]
    paths, checksums, sizes = zip(*[(path, header.sha256, header.tar_bytes) for path, header in headers], strict=True)
    store, empty = RemoteTars(paths, checksums, sizes, remote, cache), None
    if text := index.get("text"):
        name = f"{folder}/{EMPTY}"
        empty = read_empty_caption(partial(remote.read_all, name, MOST_EMPTY), text, name)
    options = asked.of_latents() | {"empty_caption": empty, "max_bad": asked.max_bad}
    return LatentDataset(asked.shown, index, tars, store=store, **options)


ABOUT = "__opendit__/shard.json"  # WebDataset's readers skip members with double underscores
SUFFIX = "safetensors"
FIELDS = Fields((SUFFIX,), (("txt",),), (("cls",),), empty=True)
HEADERS = 3 * BLOCK + 512  # estimated bytes per sample besides the arrays: tar headers, caption or class, tensor names
SUFFIXES = ("safetensors", "npz", "npy")
MIRRORED = "_flip"  # ending of a mirror image's array
_USUAL = ("moments", "latents", "latent")  # preferred names of arrays
_TIMES = 128  # maximum unpacked bytes in a .npz per latent value


def tar_name(image_size: int, shard: int, shards: int) -> str:
    return f"latents-{image_size}-{shard:05d}-of-{shards:05d}.tar"


class CachedSample(NamedTuple):
    """A sample in a tar of latents."""

    row: int  # the sample's row in the original data set
    tensors: dict[str, Tensor]  # see the module's docstring
    label: int
    caption: str | None = None  # stored instead of ``label``


def write_shard(path: Path, samples: Sequence[CachedSample], settings: dict[str, Any], skipped: list[str]) -> str:
    """Write a tar and then its index, both atomically. Return the tar's SHA-256. skipped: see ``LatentsShard``."""
    refuse_links(path.parent, [path.name, index_of(path).name])
    for left in path.parent.glob(f"{index_of(path).name}.*.partial"):  # left by a killed process
        remove(left)
    about = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True).encode()
    with replacing(path, temporary=path.name + ".partial") as new:
        sha256 = write_file(new, tar_blocks(_members(about, samples)))["sha256"]
        if samples:
            found = scan(Path(new.name), FIELDS, plan=_plan(settings), sha256=sha256)
            if found[0].rows != len(samples):
                raise ValueError(f"{path}: {found[0].left_out} samples can't be used: {found[0].examples[0]}")
        else:  # all source files for this tar were unreadable
            size = os.fstat(new.fileno()).st_size
            header = empty_header(size, sha256, _plan(settings))
            found = header, np.zeros(0, ROW), b""
        remove(index_of(path))
    write_index(index_of(path), *found)
    return sha256


def _plan(settings: dict[str, Any]) -> str:
    return hash_parts(json.dumps(settings, sort_keys=True))


def _members(about: bytes, samples: Sequence[CachedSample]) -> Iterator[tuple[str, int, tuple[bytes]]]:
    yield ABOUT, len(about), (about,)
    for row, tensors, label, caption in samples:
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        yield f"{row:09d}.{SUFFIX}", len(content), (content,)
        text = str(label).encode() if caption is None else caption.encode("utf-8", "replace")
        yield f"{row:09d}.{'cls' if caption is None else 'txt'}", len(text), (text,)


def read_header(path: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """Return (sample count, settings, skipped files) of a complete tar from :func:`write_shard`, else None."""
    try:
        header = TarIndex(index_of(path)).header
        with open(open_regular(path), "rb") as file:
            member = next(members(file), None)
            if member is None or member.name != ABOUT or os.fstat(file.fileno()).st_size != header.tar_bytes:
                return None
            file.seek(member.offset_data)
            about = parse_text(file.read(min(member.size, SHARD.most_bytes)).decode(), SHARD, path)
    except (OSError, ValueError):
        return None
    return (header.rows, about["settings"], about["skipped"]) if header.plan == _plan(about["settings"]) else None


def complete_tars(folder: Path, settings: dict[str, Any]) -> set[str]:
    """Return the names of the complete tars for one picture size. Raises ValueError if a tar has other settings."""
    kept = set()
    for path in sorted(folder.glob(f"latents-{settings['image_size']}-*.tar")):
        header = read_header(path)
        if header is None:
            continue  # a damaged tar is computed again
        other = sorted(key for key in settings if settings.get(key) != header[1].get(key))
        if other:
            changes = (f"{key} {str(header[1].get(key))[:12]} there, {str(settings[key])[:12]} now" for key in other)
            raise ValueError(
                f"--output {folder}: holds latents of other settings ({'; '.join(changes)}); pass another folder or "
                "empty this one"
            )
        kept.add(path.name)
    return kept


def open_tars(folder: Path, index: dict[str, Any]) -> list[IndexedTar]:
    """Open the tars of an index. Raises ValueError, naming the tar, if one is missing or differs from the index."""
    tars = []
    for shard in index["shards"]:
        path = folder / shard["file"]
        if not path.is_file() or not index_of(path).is_file():
            gone = index_of(path) if path.is_file() else path
            raise ValueError(f"{gone} is missing, or no regular file; {REPAIR}")
        if (size := path.stat().st_size) != shard["bytes"]:
            raise ValueError(f"{path} has {size:,} bytes instead of {shard['bytes']:,}; {REPAIR}")
        tars.append(IndexedTar(str(path), check_tar(TarIndex(index_of(path)), shard, str(path))))
    return tars


def fetch_latents_indexes(address: str, remote: Remote) -> list[dict[str, Any]] | None:
    """Read the latents' indexes behind an address. Return None without index.json, or if the address is a tar's."""
    name = f"{address.rstrip('/')}/{INDEX}"
    content = None if address.lower().endswith(".tar") else remote.read_if_there(name, LATENTS_SIZES.most_bytes)
    return None if content is None else check_indexes(parse_json(content, name), name)


def check_tar(index: TarIndex, shard: dict[str, Any], name: str) -> TarIndex:
    """Return ``index``. Raises ValueError if the tar contradicts ``shard``, its entry in index.json."""
    header = index.header
    if (header.rows, header.tar_bytes, header.sha256) != (shard["count"], shard["bytes"], shard.get("sha256")):
        raise ValueError(f"{index_of(name)} is of another tar than index.json means; {REPAIR}")
    return index


# ------------------------------------------------------------------------------------------ latents of other programs


def arrays_of(
    content: bytes, suffix: str, shape: tuple[int, ...], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the arrays in a member, by name; a ``.npy`` has the name "". shape: (2C, [t,] h, w). names: the arrays to
    read from a ``.npz``; None for all numeric ones. May raise any exception."""
    if suffix == ".safetensors":
        return load(content)
    if suffix == ".npy":
        return {"": torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))}
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        if (size := sum(member.file_size for member in packed.infolist())) > (most := _TIMES * int(np.prod(shape))):
            raise ValueError(f"its .npz unpacks to {size:,} bytes, more than {most:,}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files if names is None or name in names}
    return {name: torch.from_numpy(array) for name, array in found.items() if array.dtype.kind in "fi"}


def choose_arrays(arrays: Mapping[str, Tensor], form: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the name of the latents' array and, if there is one, of the mirror image's array. Raises ValueError if no
    array has the shape, or if several have the shape and none has a name in ``_USUAL``."""
    stored = _stored_shape(form, shape)
    fits = [name for name in arrays if _fits(arrays[name], stored) and not name.endswith(MIRRORED)]
    chosen = [name for name in _USUAL if name in fits][:1] or fits
    if len(chosen) != 1:
        of = ", ".join(f"{name[:40] or 'a .npy'} {list(array.shape)}" for name, array in arrays.items())
        which = "several of them fit" if fits else f"none is {list(stored)} of floating point"
        raise ValueError(f"it has {of or 'no arrays'}, and {which}")
    mirrored = f"{chosen[0]}{MIRRORED}"
    return (chosen[0], mirrored) if mirrored in arrays and _fits(arrays[mirrored], stored) else (chosen[0],)


def read_moments(content: bytes, suffix: str, foreign: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Return a sample's mean and standard deviation, (F, 2C, [t,] h, w) fp32, where F is 2 with a mirror image.
    foreign: see ``ForeignTars``. Raises ValueError if an array is missing, not finite or of another shape, and the
    errors of :func:`arrays_of`."""
    names = [foreign[key] for key in ("array", "mirrored") if key in foreign]
    arrays, stored = arrays_of(content, suffix, shape, names), _stored_shape(foreign["form"], shape)
    views = []
    for name in names:
        if name not in arrays:
            raise ValueError(f"it has no array {name!r}")
        if not _fits(arrays[name], stored):
            raise ValueError(f"latents of shape {list(arrays[name].shape)}, not {list(stored)}")
        views.append(_moments(arrays[name].reshape(stored).float(), foreign["form"]))
    found = torch.stack(views)
    if not found.isfinite().all():
        raise ValueError("latents that are not finite")
    return found


def _moments(x: Tensor, form: str) -> Tensor:
    if form == "sample":
        return torch.cat([x, torch.zeros_like(x)])
    if form == "mean_logvar":
        mean, logvar = x.chunk(2)
        return torch.cat([mean, torch.exp(0.5 * logvar.clamp(-30, 20))])  # the limits are diffusers'
    return x


def _stored_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 2, *shape[1:]) if form == "sample" else shape


def _fits(array: Tensor, shape: tuple[int, ...]) -> bool:
    return array.is_floating_point() and tuple(array.shape) in (shape, (1, *shape))


EMPTY, MOST_EMPTY = "empty-caption.safetensors", 256 * MIB
AnyEncoder = TextEncoder | PublishedText
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EmbeddingForm(NamedTuple):
    """Format of cached embeddings."""

    width: int  # a token's width
    pooled: int  # a pooled vector's width
    dtype: str = "fp16"  # a key of ``DTYPES``

    def numbers(self, max_tokens: int) -> int:
        """Return the number of elements in an embedding of ``max_tokens`` tokens."""
        return max_tokens * self.width + self.pooled


def form_of(encoder: AnyEncoder) -> EmbeddingForm:
    if isinstance(encoder, PublishedText):
        half = "bf16" if encoder.dtype == torch.bfloat16 else "fp16"
        return EmbeddingForm(encoder.width, encoder.pooled_width, half)
    return EmbeddingForm(encoder.width, encoder.width)


def embed(encoder: AnyEncoder, captions: list[str], **how: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (tokens (L_i, D) without padding, pooled vector (P,)) for each caption, on the CPU in the dtype of
    :func:`form_of`. how: more arguments for ``encoder.encode``. Raises DataError if an element overflows the dtype."""
    made, dtype = encoder.encode(captions, **how), DTYPES[form_of(encoder).dtype]
    tokens, mask, pooled = made.tokens.to(dtype).cpu(), made.mask.cpu(), made.pooled.to(dtype).cpu()
    parts = [(row[kept], vector) for row, kept, vector in zip(tokens, mask, pooled, strict=True)]
    for caption, (row, vector) in zip(captions, parts, strict=True):
        if not (row.isfinite().all() and vector.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            raise DataError(f"the embedding of the caption {caption!r} overflows {name}; take another --text_encoder")
    return parts


def write_empty_caption(folder: Path, encoder: AnyEncoder) -> str:
    """Write the empty string's embedding to the file ``EMPTY`` atomically. Return the file's SHA-256."""
    how = {"away": True} if isinstance(encoder, PublishedText) else {}
    tokens, pooled = embed(encoder, [""], **how)[0]
    with replacing(folder / EMPTY, temporary=EMPTY + ".partial") as new:
        return write_tensors(new, {"tokens": tokens, "pooled": pooled}, {})["sha256"]


def read_empty_caption(read: Callable[[], bytes], text: dict[str, Any], name: str) -> Embedding:
    """Return the empty string's embedding, padded to ``max_tokens``. read: returns the bytes of the file ``EMPTY``.
    text: see ``TextEncoding``. Raises ValueError, naming the file, if the file can't be read or is damaged."""
    try:
        found = load(read())
        if found.keys() != {"tokens", "pooled"}:
            raise ValueError(f"it holds {', '.join(found)}, not tokens and pooled")
        tokens, pooled = found["tokens"], found["pooled"]
        most, dtype = text["max_tokens"], DTYPES[text.get("dtype", "fp16")]
        width = text.get("pooled", tokens.shape[-1] if tokens.dim() else 0)
        if tokens.dim() != 2 or len(tokens) > most or pooled.shape != (width,):
            of = f"tokens (up to {most}, D) and pooled ({text.get('pooled', 'D')},)"
            raise ValueError(f"it holds {tuple(tokens.shape)} and {tuple(pooled.shape)}, not {of}")
        return padded(tokens.to(dtype), pooled.to(dtype), most)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{name} can't be read ({error}); copy it or run preprocess.py again") from error


def padded(tokens: Tensor, pooled: Tensor, max_tokens: int) -> Embedding:
    """Return an embedding with tokens (L, D) zero-padded to (max_tokens, D). The mask is True for real tokens."""
    out = tokens.new_zeros(max_tokens, tokens.shape[1])
    out[: len(tokens)] = tokens
    return Embedding(out, torch.arange(max_tokens) < len(tokens), pooled)
