"""Cached latents on disk: the format that ``preprocess.py latents`` writes, and the data set that reads it.

A folder holds ``latents-00000-of-00012.safetensors``, ... and ``index.json``. A shard has the tensors

    moments  (n, F, 2C, h, w) float16   mean and standard deviation of every picture; F = 2: also of its mirror image
    labels   (n,) int64
    rows     (n,) int64                 the picture's row in the data set it came from

and, in its metadata, the settings it was made with and the files that couldn't be read. The index is written
last: a folder without one is unfinished.
"""

import json
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opendit.data.base import MediaDataset, flip_note, hash_parts

INDEX = "index.json"
FORMAT, VERSION = "opendit-latents", 1
_KEY = "opendit"  # the shards' only metadata key: safetensors writes several in random order, so not the same bytes


def shard_name(shard: int, shards: int) -> str:
    return f"latents-{shard:05d}-of-{shards:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor], settings: dict, skipped: list[str]) -> None:
    """Writes a shard under another name and renames it, so that a shard that exists is complete."""
    partial = path.with_name(path.name + ".partial")
    metadata = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True)
    save_file(tensors, partial, metadata={_KEY: metadata})
    _replace(partial, path)


def read_shard_header(path: Path) -> tuple[int, dict, list[str]] | None:
    """(pictures, settings, skipped files) of a shard; None if it isn't a whole shard of ours."""
    try:
        with safe_open(path, "pt") as shard:
            header = json.loads(shard.metadata()[_KEY])
            return shard.get_slice("labels").get_shape()[0], header["settings"], header["skipped"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def write_index(folder: Path, index: dict) -> None:
    partial = folder / (INDEX + ".partial")
    partial.write_text(json.dumps({"format": FORMAT, "version": VERSION, **index}, indent=1) + "\n")
    _replace(partial, folder / INDEX)


def _replace(partial: Path, path: Path) -> None:
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())  # else the new name may survive a power cut that its contents don't
    os.replace(partial, path)


def read_index(folder: Path) -> dict | None:
    """The index of a latents folder, None if there is none of ours; raises ValueError for another version's."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    if index.get("version") != VERSION:
        raise ValueError(
            f"--data_path {folder}: its latents have format version {index.get('version')}, this program reads "
            f"{VERSION}; make them again with preprocess.py latents"
        )
    return index


class LatentDataset(MediaDataset):
    """Cached latents; ``x`` is (2C, h, w) float32, a picture's means and standard deviations.

    vae: the ``--vae`` they were made with. scaling_factor, shift_factor: for ``encoders.vae.sample_moments``.
    Raises ValueError if they were made for another ``image_size``, hold no mirror images though ``random_flip``
    asks for them, or miss a shard.
    """

    kind = "latents"

    def __init__(self, folder: str | Path, image_size: int, *, seed: int = 0, random_flip: bool | None = None):
        self.folder = Path(folder)
        index = read_index(self.folder)
        if index is None:
            raise FileNotFoundError(f"--data_path {folder} holds no {INDEX} of cached latents")
        if index["image_size"] != image_size:
            raise ValueError(
                f"--data_path {folder} holds latents made at --image_size {index['image_size']}, but this run has "
                f"--image_size {image_size}: pass --image_size {index['image_size']} or make latents for {image_size}"
            )
        if random_flip and not index["flips"]:
            raise ValueError(f"--data_path {folder} holds no mirrored latents: make them again without --no_flip")
        self.index, self.seed, self.vae = index, seed, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        self.scaling_factor, self.shift_factor = index["scaling_factor"], index["shift_factor"]
        channels, height, width = index["latent_shape"]
        self.sample_shape = (2 * channels, height, width)
        self.starts = np.cumsum([0] + [shard["count"] for shard in index["shards"]])
        self.labels = np.concatenate([self._labels(shard) for shard in index["shards"]])
        self._open: dict[int, object] = {}  # shard -> its mapped moments, opened where they are first read

    def _labels(self, shard: dict) -> np.ndarray:
        path = self.folder / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise ValueError(f"--data_path {self.folder}: {path.name} {found}; copy it or run preprocess.py again")
        with safe_open(path, "np") as file:
            return file.get_tensor("labels")

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, row: int, flip: bool) -> Tensor:
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        if shard not in self._open:
            file = safe_open(self.folder / self.index["shards"][shard]["file"], "pt")
            self._open[shard] = file.get_slice("moments")
        return self._open[shard][row - int(self.starts[shard]), int(flip)].float()

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def identity(self) -> str:
        return hash_parts(json.dumps(self.index, sort_keys=True))

    def describe(self) -> str:
        c, h, w = self.index["latent_shape"]
        size = self.index["image_size"]
        return (
            f"{self.folder}: cached latents ({c}x{h}x{w}, --vae {self.vae}) of {len(self):,} pictures of "
            f"{self.num_classes:,} classes, {size}x{size}, {flip_note(self)}"
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}  # a file mapping doesn't travel to a worker that isn't forked
