"""The data set of cached latents. For their tars see ``shards.latents``, for their index ``latents_index``."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from opendit.common.utils import hash_parts
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
    flip_note,
    of_moments,
)
from opendit.data.files import Checksums, Ignored, files_below
from opendit.data.latents_index import INDEX, OLD_FILES, REPAIR, VERSION, choose_index, read_indexes
from opendit.data.picture_file import picture_suffixes
from opendit.data.row_arrays import kept_array
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.latents import open_tars, read_moments
from opendit.data.shards.store import LocalTars, RemoteTars
from opendit.data.sources import Request
from opendit.data.text_cache import open_empty_caption, padded


class LatentDataset(ShardDataset):
    """Data set of cached latents in tars.

    A sample ``x`` holds the means and standard deviations of a picture (2C, h, w) or of a clip (2C, t, h, w), float32.

    Args:
        index: index of one picture size.
        tars: the tars that ``index`` lists.
        empty_caption: embedding of the empty string; None without an encoder.
        of_run: random_flip, use_video, num_frames, frame_interval and fps of the run that reads the latents.

    Attributes:
        vae: the ``--vae`` that made the latents.
        scaling_factor, shift_factor: arguments of ``encoders.vae.sample_moments``.
        text_encoder: the encoder whose caption embeddings are cached; None if there are no embeddings.
        max_tokens: length of the padded embeddings.

    Raises:
        ValueError: the latents were made with other settings for clips, or lack the mirror images that ``random_flip``
            requests. The message begins with ``name``.
    """

    empty_captions = True  # the table that the latents were made from may have empty captions
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

    def _take(
        self,
        index: dict[str, Any],
        name: str,
        *,
        random_flip: bool | None = None,
        use_video: bool = False,
        num_frames: int = 16,
        frame_interval: int = 1,
        fps: float | None = None,
    ) -> None:
        """Set the fields that follow from the index, after comparing it with the settings of the run.

        Raises ValueError, which begins with ``name``, if the latents don't fit the run's settings."""
        made = index.get("video")
        if use_video != (made is not None):
            what = (
                "clips; add --use_video"
                if made
                else ("pictures; make them again with preprocess.py latents --use_video, or leave --use_video out")
            )
            raise ValueError(f"{name}: holds latents of {what}")
        for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval), ("fps", fps)):
            if not made or (of_made := made.get(flag)) == value:
                continue
            if of_made is None or value is None:  # only the index or only the run has the flag
                there, here, fix = (
                    ("without", f"has --{flag} {value:g}", "leave it out")
                    if of_made is None
                    else (f"at --{flag} {of_made:g}", "does not have it", f"pass --{flag} {of_made:g}")
                )
                raise ValueError(
                    f"{name}: holds latents made {there}, but this run {here}; {fix} or make latents for it"
                )
            raise ValueError(
                f"{name}: holds latents made at --{flag} {of_made:g}, but this run has --{flag} {value:g}; pass "
                f"--{flag} {of_made:g} or make latents for {value:g}"
            )
        if random_flip and not index["flips"]:
            raise ValueError(f"{name}: holds no mirrored latents; make them again with --flip")
        self.index, self.vae = index, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        # The scale and the shift are numbers, or lists of one number per channel.
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
            first, channels = self.index.get("first_frames"), shape[1] // 2
            if first is not None and list(tensors["first_latents"].shape) != [shape[0], channels, *shape[2:]]:
                raise ValueError(f"first_latents of shape {list(tensors['first_latents'].shape)}")
            if first and list(tensors["first_tokens"].shape[::2]) != [shape[0], first]:
                raise ValueError(f"first_tokens of shape {list(tensors['first_tokens'].shape)}")
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
        which, width, first = int(view.flip), self.index.get("first_frames"), None
        if width is not None:
            tokens = tensors["first_tokens"][which] if width else torch.empty(0, 0)
            first = FirstFrames(tensors["first_latents"][which], tokens)
        features = tensors["features"][which] if self.features else None
        moments = tensors["moments"][which].float()
        return self._labelled(row, Item(moments, embedding=embedding, features=features, first=first))

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
        """Return the number of latent frames in tars with this shape key, read from a sample because index.json does
        not record it. It is 1 for pictures in a data set of clips."""
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

    def _recorded_rates(self) -> list[float]:
        return [self.index["data_fps"]] if "data_fps" in self.index else []

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 by file name, for the tars and the empty caption."""
        return {shard["file"]: shard["sha256"] for shard in self.index["shards"]} | self.index.get("checksums", {})

    def _identity(self) -> str:
        # Checksums and counts are left out, so that adding them to a cache of an earlier version keeps its identity.
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

    def _shown(self, moments: Tensor) -> tuple[Medium, np.ndarray]:
        """Return the picture or clip that the latents were made from, as a Medium, and the latents in false colours."""
        video, size, along = self.index.get("video"), self.index["image_size"], 1
        if video and (latent_frames := self.sample_shape[1]) > 1:  # the first latent frame has one frame
            along = 1 + (moments.shape[1] - 1) * (video["num_frames"] - 1) // (latent_frames - 1)
        height, width = (side * size // self.sample_shape[-1] for side in moments.shape[-2:])
        return Medium(along, height, width), of_moments(moments)[1]

    def describe(self) -> Description:
        of_tars = zip(self.shards, self._keys, self._latent_shapes, strict=True)
        clips = sum(len(tar) for tar, key, own in of_tars if (own[1] > 1 if own else key == max(self._keys)))
        return Description(
            text=self._text_of(clips),
            kind="latents",
            conditioning=self.conditioning,
            class_names=self.class_names,
            sample_shape=self.sample_shape,
            random_flip=self.random_flip,
            seed=self.seed,
            max_bad=self.max_bad,
            vae=self.vae,
            scaling_factor=self.scaling_factor,
            shift_factor=self.shift_factor,
            text_encoder=self.text_encoder,
            max_tokens=self.max_tokens,
            empty_caption=self.empty_caption,
            features=self.features,
            first_frames=self.index.get("first_frames"),
            cut_captions=self._cut_captions(),
            counted_captions=((len(self), self.counted_captions),),
            largest_label=self._find_largest_label,
        )

    def _text_of(self, clips: int) -> str:
        shape, size = "x".join(map(str, self.index["latent_shape"])), self.index["image_size"]
        what = f"{len(self):,} pictures"
        if self.index.get("video"):
            what = f"{clips:,} clips" + (f" and {len(self) - clips:,} pictures" if clips < len(self) else "")
        text = f"with captions ({f'encoded by {self.text_encoder}' if self.text_encoder else 'not encoded'})"
        words = text if self.conditioning == "text" else f"of {len(self.class_names):,} classes"
        tokens = self.index.get("settings", {}).get("bucket_tokens")
        size = f"{size}x{size}" if tokens is None else f"of shapes near {size}x{size}, --bucket_tokens {tokens}"
        features = f", features by {self.features.encoder}" if self.features else ""
        return (
            f"{self.shown.removeprefix('--data_path ')}: cached latents ({shape}, --vae {self.vae}) of {what} {words}, "
            f"{size}, {flip_note(self.random_flip)}{features}{self.note}"
        )


def open_source(asked: Request) -> LatentDataset | None:
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
    empty = open_empty_caption(folder, text) if text else None
    latents = LatentDataset(asked.shown, index, tars, empty_caption=empty, max_bad=asked.max_bad, **asked.of_latents())
    if next(files_below(str(folder), picture_suffixes(), Ignored(), visits=1), None) is not None:
        latents.note = "; the pictures that are in the folder as well are not read"
    return latents
