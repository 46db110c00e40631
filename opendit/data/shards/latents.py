"""Cached latents in tars, written by ``preprocess.py latents`` or by other programs, and the data set that reads them.

    latents-256-00000-of-00012.tar          latents-256-00000-of-00012.tar.index     index.json
      __opendit__/shard.json                the settings it was made with and the files that couldn't be read
      000000000.safetensors  000000000.txt
      000000001.safetensors  000000001.txt

A sample's number is its row in the original data set. A second member holds its caption (``.txt``) or class (``.cls``).
The safetensors member has the tensors

    moments  (F, 2C, [t,] h, w) float16   mean and standard deviation; F = 2: also of the mirror image
    tokens   (L, D) float16               with captions and an encoder: the caption's tokens, without padding,
    pooled   (P,) float16                 and its pooled vector; bfloat16 is also possible, see ``text_cache``
    features (F, N, W) float16            with --repa: a vision encoder's features of the picture's N tokens

A folder may hold pictures of several sizes, with separate tars for each size. ``empty-caption.safetensors``: see
``text_cache``.

In tars of another program, a sample's array is in its member ``.npz``, ``.npy`` or ``.safetensors``.
``preprocess.py index DIR --latents FORM`` writes the tars' indexes and an ``index.json`` that describes the arrays, and
``TarLatents`` reads them in place. FORM is one of the following, where C is the number of the VAE's latent channels.
The values are not yet multiplied by the VAE's scaling factor.

    mean_std     (2C, [t,] h, w)   mean and standard deviation
    mean_logvar  (2C, [t,] h, w)   mean and logarithm of the variance: diffusers' ``latent_dist.parameters``
    sample       (C, [t,] h, w)    the mean, or a latent that was drawn once and is used unchanged each time

A leading batch dimension of 1 is removed. The mirror image of the array NAME, if there is one, is NAME_flip.
"""

import io
import json
import math
import os
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from opendit.common.json_file import open_regular, parse_json
from opendit.common.json_models import parse_text
from opendit.common.safe_files import refuse_links, remove, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, BadSample, Description, Embedding, Fingerprint, Item, Shapes, Size, View
from opendit.data.contents import Checksums
from opendit.data.latents_index import (
    INDEX,
    LATENTS_SIZES,
    REPAIR,
    SHARD,
    TARS_VERSION,
    CachedLatents,
    ShardForm,
    check_indexes,
)
from opendit.data.medium import Medium
from opendit.data.row_arrays import kept_array
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import ROW, TarIndex, empty_header, index_of, write_index
from opendit.data.shards.scan import BLOCK, Fields, member_header, members, scan
from opendit.data.shards.store import LocalTars, Remote, RemoteTars
from opendit.data.text_cache import padded

ABOUT = "__opendit__/shard.json"  # double underscores: not a sample for readers of WebDataset's tars
SUFFIX = "safetensors"
FIELDS = Fields((SUFFIX,), (("txt",),), (("cls",),), empty=True)
HEADERS = 3 * BLOCK + 512  # bytes of a sample without its numbers: two members' headers, a class or caption, names
SUFFIXES = ("safetensors", "npz", "npy")
MIRRORED = "_flip"
_USUAL = ("moments", "latents", "latent")  # preferred names of the array, if several have its shape
_TIMES = 128  # bytes of a sample's arrays for each number of its latents: a small .npz can unpack to any size


def tars_of(image_size: int) -> ShardForm:
    """Return the shard form of tars of pictures of one size."""
    return ShardForm(f"latents-{image_size}-*.tar", partial(_name, image_size), read_header, write_shard, TARS_VERSION)


def _name(image_size: int, shard: int, shards: int) -> str:
    return f"latents-{image_size}-{shard:05d}-of-{shards:05d}.tar"


def write_shard(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], skipped: list[str]) -> str:
    """Write a tar and then its index, each under a temporary name first, and return the tar's SHA-256.

    tensors: moments (n, F, 2C, ...), labels and rows (n,), and with captions those of ``text_cache``."""
    refuse_links(path.parent, [path.name, index_of(path).name])
    for left in path.parent.glob(f"{index_of(path).name}.*.partial"):  # of a process that was killed
        remove(left)
    about = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True).encode()
    count = len(tensors["rows"])
    with replacing(path, temporary=path.name + ".partial") as new:
        sha256 = write_file(new, _blocks(about, tensors))["sha256"]
        if count:
            found = scan(Path(new.name), FIELDS, plan=_plan(settings), sha256=sha256)
            if found[0].rows != count:
                raise ValueError(f"{path}: {found[0].left_out} samples can't be used: {found[0].examples[0]}")
        else:  # none of its files could be read
            size = os.fstat(new.fileno()).st_size
            header = empty_header(size, sha256, _plan(settings))
            found = header, np.zeros(0, ROW), b""
        remove(index_of(path))
    write_index(index_of(path), *found)
    return sha256


def _plan(settings: dict[str, Any]) -> str:
    return hash_parts(json.dumps(settings, sort_keys=True))


def _blocks(about: bytes, tensors: dict[str, Tensor]) -> Iterator[bytes]:
    """Yield the bytes of a tar, which depend on the samples alone."""
    total = 0
    for name, content in [(ABOUT, about), *_members(tensors)]:
        block = member_header(name, len(content)) + content + bytes(-len(content) % BLOCK)
        yield block
        total += len(block)
    yield bytes(2 * BLOCK + -(total + 2 * BLOCK) % tarfile.RECORDSIZE)


def _members(tensors: dict[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    texts, words = tensors.get("captions"), tensors.get("tokens")
    first_text = first_word = 0
    for i, row in enumerate(tensors["rows"].tolist()):
        mine = {name: tensors[name][i].contiguous() for name in ("moments", "features") if name in tensors}
        if words is not None:
            end = int(tensors["token_ends"][i])
            mine |= {"tokens": words[first_word:end].contiguous(), "pooled": tensors["pooled"][i].contiguous()}
            first_word = end
        yield f"{row:09d}.{SUFFIX}", save(mine)
        if texts is None:
            yield f"{row:09d}.cls", str(int(tensors["labels"][i])).encode()
        else:
            end = int(tensors["caption_ends"][i])
            text = texts[first_text:end].numpy().tobytes().decode("utf-8", "surrogatepass")
            yield f"{row:09d}.txt", text.encode("utf-8", "replace")
            first_text = end


def read_header(path: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """Return (number of samples, settings, skipped files) of a tar; None if it is not a complete tar written by
    :func:`write_shard`."""
    try:
        header = TarIndex(index_of(path)).header
        with open(open_regular(path), "rb") as file:
            member = next(members(file), None)
            if member is None or member.name != ABOUT or os.fstat(file.fileno()).st_size != header.tar_bytes:
                return None
            file.seek(member.at)
            about = parse_text(file.read(min(member.size, SHARD.most_bytes)).decode(), SHARD, path)
    except (OSError, ValueError):
        return None
    return (header.rows, about["settings"], about["skipped"]) if header.plan == _plan(about["settings"]) else None


def open_tars(folder: Path, index: dict[str, Any]) -> list[IndexedTar]:
    """Open the tars of an index. Raises ValueError, which names a tar that is missing or differs from the index."""
    tars = []
    for shard in index["shards"]:
        path = folder / shard["file"]
        if not path.is_file() or not index_of(path).is_file():
            gone = index_of(path) if path.is_file() else path
            raise ValueError(f"{gone} is missing, or no regular file; {REPAIR}")
        if (size := path.stat().st_size) != shard["bytes"]:
            raise ValueError(f"{path} has {size:,} bytes instead of {shard['bytes']:,}; {REPAIR}")
        tars.append(IndexedTar(str(path), str(path), check_tar(TarIndex(index_of(path)), shard, str(path))))
    return tars


def fetch_latents_indexes(address: str, remote: Remote) -> list[dict[str, Any]] | None:
    """Read the indexes of a folder behind an address; see ``read_indexes``. Raises ValueError, DataError or OSError."""
    name = f"{address.rstrip('/')}/{INDEX}"
    content = None if address.lower().endswith(".tar") else remote.read_if_there(name, LATENTS_SIZES.most_bytes)
    return None if content is None else check_indexes(parse_json(content, name), name)


def check_tar(index: TarIndex, shard: dict[str, Any], name: str) -> TarIndex:
    """Return ``index``. Raises ValueError if its tar is not the one that ``shard``, an entry of index.json,
    describes."""
    header = index.header
    if (header.rows, header.tar_bytes, header.sha256) != (shard["count"], shard["bytes"], shard.get("sha256")):
        raise ValueError(f"{index_of(name)} is of another tar than index.json means; {REPAIR}")
    return index


# ------------------------------------------------------------------------------------------ latents of other programs


def arrays_of(
    content: bytes, suffix: str, shape: tuple[int, ...], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the arrays of numbers in a member, by name; that of a ``.npy`` is called "".

    names: only these are unpacked. shape: (2C, [t,] h, w) of the latents among them. Raises ValueError for a ``.npz``
    that unpacks to far more than such latents take, and any exception for damaged bytes."""
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
    """Return the name of the array of latents, and that of its mirror image if there is one.

    Raises ValueError if no array has the shape, or several without a usual name."""
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
    """Return the mean and standard deviation (F, 2C, [t,] h, w) fp32 of a sample, and of its mirror image if F is 2.

    foreign: the index's description of these latents: ``form``, ``array`` and, with mirror images, ``mirrored``. Raises
    ValueError for an array that is missing, of another shape or not finite, and as :func:`arrays_of`."""
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


# ------------------------------------------------------------------------------------------ the data set


class TarLatents(CachedLatents, ShardDataset):
    """Cached latents in tars; ``x`` is a picture's means and standard deviations (2C, h, w) float32, or a clip's
    (2C, t, h, w). The attributes are those of ``latents.LatentDataset``.

    index: of one size. tars: its shards. empty_caption: the empty string's embedding, None without an encoder.
    Raises ValueError, which begins with ``name``, for flags that don't fit these latents.
    """

    empty_captions = True  # a table's rows may have such
    names_file = INDEX

    def __init__(
        self,
        name: str,
        index: dict[str, Any],
        tars: Sequence[IndexedTar],
        *,
        store: LocalTars | RemoteTars | None = None,
        empty_caption: Embedding | None = None,
        seed: int = 0,
        max_bad: float = 0.05,
        **of_run: Any,
    ):
        pairs = [(tar, shard) for tar, shard in zip(tars, index["shards"], strict=True) if shard["count"]]
        kept = [tar for tar, _ in pairs]
        if store is None:
            store = LocalTars([tar.path for tar in kept], [tar.index.header.tar_bytes for tar in kept])
        names = index["class_names"]
        super().__init__(name, kept, index["image_size"], store=store, class_names=names, seed=seed, max_bad=max_bad)
        if self.conditioning != (told := index.get("conditioning", "label")):
            words = {"text": "captions", "label": "classes"}
            raise ValueError(
                f"{name}: {INDEX} tells of {words[told]}, its tars have {words[self.conditioning]}; {REPAIR}"
            )
        self._take(index, name, **of_run)
        self.random_window, self.use_video = False, of_run.get("use_video", False)
        self.empty_caption = empty_caption
        self._keys = [shard.get("shape_key", 0) for _, shard in pairs]
        self._latent_shapes = [shard.get("latent_shape") for _, shard in pairs]

    def _tensors(self, row: int) -> dict[str, Tensor]:
        """Read a sample's tensors. Raises BadSample if they do not match the index."""
        try:
            tensors = self._read_tensors(row)
            shape = list(tensors["moments"].shape)
            wanted, own = [2 if self.index["flips"] else 1, *self.sample_shape], self._own_shape(row)
            if own is not None:
                wanted[2:] = own[1:]
            elif len(wanted) == len(shape) == 5 and shape[2] == 1:
                wanted[2] = 1  # pictures among clips have one frame
            if shape != wanted:
                raise ValueError(f"moments of shape {shape}, not {wanted}")
            if self.text_encoder and len(tensors["tokens"]) > self.max_tokens:
                raise ValueError(f"{len(tensors['tokens'])} tokens, not up to {self.max_tokens}")
            if self.features is not None:
                stored = tensors["features"].shape, tensors["features"].dtype
                right = torch.Size([wanted[0], math.prod(self.features.grid), self.features.width]), torch.half
                if stored != right:
                    raise ValueError(f"features of {list(stored[0])} {stored[1]}, not {list(right[0])} {right[1]}")
        except BadSample:
            raise
        except Exception as error:  # files of other programs may raise any type
            raise BadSample(self.source(row), f"{type(error).__name__}: {error}") from error
        return tensors

    def _own_shape(self, row: int) -> list[int] | None:
        """Return (C, [t,] h, w) of a row's latents if its tar's entry in the index has it."""
        return self._latent_shapes[self.find_record(row)[0]]

    def _read_tensors(self, row: int) -> dict[str, Tensor]:
        content, foreign = self.read_medium(row), self.index.get("foreign")
        if foreign is None:
            return load(content)
        number, _, record = self.find_record(row)
        suffix = self._index(number).header.suffixes[record.suffix]
        return {"moments": read_moments(content, suffix, foreign, self.sample_shape)}

    def read(self, row: int, view: View = PLAIN) -> Item:
        tensors, embedding = self._tensors(row), None
        if self.text_encoder is not None:
            embedding = padded(tensors["tokens"], tensors["pooled"], self.max_tokens)
        features = tensors["features"][int(view.flip)] if self.features else None
        moments = tensors["moments"][int(view.flip)].float()
        return self._labelled(row, Item(moments, embedding=embedding, features=features))

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return self._shown(self.read(row).x)

    def shapes(self) -> Shapes:
        return Shapes(keys=self._shape_keys(), latents=self._sizes, frame_rates=self._recorded_rates)

    def _shape_keys(self) -> np.ndarray | int:
        if len(set(self._keys)) < 2:
            return self._keys[0]
        if self._kinds is None:
            make = partial(np.repeat, np.array(self._keys, np.int16), [len(shard) for shard in self.shards])
            self._kinds = kept_array(len(self), lambda: hash_parts("keys of latents", self._identity()), make)
        return self._kinds

    def _sizes(self) -> list[tuple[int, Size]]:
        """Return, for each tar, (the end of its rows, (frames, height, width) of their latents)."""
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
        """Return the number of latent frames in tars with this shape key, if index.json does not record it; 1 for
        pictures in a data set of clips."""
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

    def _checksums(self) -> Checksums | None:
        if not isinstance(self.store, LocalTars):
            return None
        return Checksums(Path(self.shards[0].path).parent, self.checksums, self.shown)

    def describe(self) -> Description:
        of_tars = zip(self.shards, self._keys, self._latent_shapes, strict=True)
        clips = sum(len(tar) for tar, key, own in of_tars if (own[1] > 1 if own else key == max(self._keys)))
        about = self._description(self.shown.removeprefix("--data_path "), clips, self.empty_caption)
        counted = ((len(self), self.counted_captions),)
        return replace(about, counted_captions=counted, largest_label=self._find_largest_label)
