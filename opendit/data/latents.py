"""Cached latents in safetensors files, and the data set that reads them; for tars see ``shards.latents``.

``preprocess.py latents --shard_size 4096`` writes them, and all caches from before tars have this form.

A folder holds ``latents-00000-of-00012.safetensors``, ... and ``index.json``. A shard has the tensors

    moments  (n, F, 2C, h, w) float16   mean and standard deviation of every picture; F = 2: also of its mirror image
    labels   (n,) int64
    rows     (n,) int64                 the picture's row in the data set it came from

and, in its metadata, the settings it was made with and the files that couldn't be read. A clip's moments have its
latent frames, too: (n, F, 2C, t, h, w); a shard holds pictures or clips. For captions see ``text_cache``. The index has
every shard's size and SHA-256 (none in caches from before there were checksums) and is written last: a folder without
one is unfinished.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opendit.common.json_file import parse_text
from opendit.common.safe_files import replacing
from opendit.common.tensor_files import open_safetensors, write_tensors
from opendit.common.utils import hash_parts
from opendit.data.base import Embedding, MediaDataset
from opendit.data.contents import hash_files
from opendit.data.latents_check import layout_of, read_shard
from opendit.data.latents_index import INDEX, CachedLatents, ShardForm, choose_index, read_indexes
from opendit.data.latents_schema import SHARD
from opendit.data.medium import Medium
from opendit.data.text_cache import CaptionTable, padded, read_empty_caption
from opendit.data.verification import Verification

_KEY = "opendit"  # the shards' only metadata key: safetensors writes several in random order, so not the same bytes


def shard_name(shard: int, shards: int) -> str:
    return f"latents-{shard:05d}-of-{shards:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], skipped: list[str]) -> str:
    """Writes a shard under another name and renames it, so that a shard that exists is complete; returns its SHA-256,
    made from what was in memory."""
    metadata = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True)
    aligned = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with replacing(path, temporary=path.name + ".partial") as new:
        return write_tensors(new, aligned, {_KEY: metadata})["sha256"]


def read_shard_header(path: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """(pictures, settings, skipped files) of a shard; None if it isn't a whole shard of ours."""
    try:
        with open_safetensors(path) as shard:
            header = parse_text((shard.metadata() or {}).get(_KEY, ""), SHARD, path)
            return shard.get_slice("labels").get_shape()[0], header["settings"], header["skipped"]
    except (SafetensorError, OSError, IndexError, ValueError):
        return None


FILES = ShardForm("latents-*.safetensors", shard_name, read_shard_header, write_shard)


class LatentDataset(CachedLatents, MediaDataset):
    """Cached latents; ``x`` is a picture's means and standard deviations (2C, h, w) float32, or a clip's (2C, t, h, w).

    vae: the ``--vae`` they were made with. scaling_factor, shift_factor: for ``encoders.vae.sample_moments``.
    text_encoder: whose embeddings of the captions are there, None without any; max_tokens: their length.
    use_video, num_frames, frame_interval, fps: of the run that reads them.
    Raises ValueError if they were made for another ``image_size`` or other clips, hold no mirror images though
    ``random_flip`` asks for them, or miss a shard, and if the index or a shard's header says what can't be.
    """

    counted_captions = 1_000_000  # they are in memory

    def __init__(
        self,
        folder: str | Path,
        image_size: int,
        *,
        seed: int = 0,
        random_flip: bool | None = None,
        use_video: bool = False,
        num_frames: int = 16,
        frame_interval: int = 1,
        fps: float | None = None,
    ):
        self.folder = Path(folder)
        indexes = read_indexes(self.folder)
        if indexes is None:
            raise FileNotFoundError(
                f"--data_path {folder}: holds no {INDEX} of cached latents; make them with preprocess.py latents"
            )
        index = choose_index(indexes, f"--data_path {folder}", image_size)
        self.seed = seed
        self._take(index, f"--data_path {folder}", random_flip, use_video, num_frames, frame_interval, fps)
        counts = [shard["count"] for shard in index["shards"]]
        self.starts = np.cumsum([0, *counts])
        self.keys = np.repeat([shard.get("shape_key", 0) for shard in index["shards"]], counts)
        arrays = [read_shard(self.folder, shard, layout_of(index)) for shard in index["shards"]]
        self.labels = np.concatenate([shard["labels"] for shard in arrays])
        if self.conditioning == "text":
            self.captions = CaptionTable([(shard["captions"], shard["caption_ends"]) for shard in arrays])
        text = index.get("text")
        self.text_encoder, self.max_tokens = (text["encoder"], text["max_tokens"]) if text else (None, 0)
        self.token_ends = [shard["token_ends"] for shard in arrays] if text else []
        self.empty_caption = read_empty_caption(self.folder, self.max_tokens) if text else None
        self._open: dict[int, dict[str, Any]] = {}  # shard -> its mapped tensors, opened where they are first read

    def __len__(self) -> int:
        return len(self.labels)

    def _find(self, row: int) -> tuple[int, int, dict[str, Any]]:
        """(shard, row in the shard, its mapped tensors)."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        if shard not in self._open:
            file = safe_open(self.folder / self.index["shards"][shard]["file"], "pt")
            names = ("moments", "tokens", "pooled") if self.text_encoder else ("moments",)
            self._open[shard] = {name: file.get_slice(name) for name in names}
        return shard, row - int(self.starts[shard]), self._open[shard]

    def source(self, row: int) -> str:
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.folder / self.index['shards'][shard]['file']} (row {row - int(self.starts[shard])})"

    def load(self, row: int, flip: bool) -> Tensor:
        _, place, tensors = self._find(row)
        moments = tensors["moments"][place, int(flip)]
        self.bytes_read += moments.nbytes
        return moments.float()

    def look_at(self, row: int) -> tuple[Medium, np.ndarray]:
        return self._looked(self.load(row, False))

    def latent_sizes(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Return, for each shard, (the end of its rows, (frames, height, width) of their latents)."""
        sizes = []
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            if first < end:
                frames, height, width = (1, *self._find(first)[2]["moments"].get_shape()[3:])[-3:]
                sizes.append((end, (frames, height, width)))
        return sizes

    def caption(self, row: int) -> str | None:
        return self.captions[row] if self.conditioning == "text" else None

    def embedding(self, row: int) -> Embedding | None:
        if self.text_encoder is None:
            return None
        shard, place, tensors = self._find(row)
        ends = self.token_ends[shard]
        tokens = tensors["tokens"][int(ends[place - 1]) if place else 0 : int(ends[place])]
        pooled = tensors["pooled"][place]
        self.bytes_read += tokens.nbytes + pooled.nbytes
        return padded(tokens, pooled, self.max_tokens)

    def shape_keys(self) -> np.ndarray:
        return self.keys

    def largest_label(self) -> tuple[int, str] | None:
        row = int(self.labels.argmax())
        return int(self.labels[row]), self.source(row)

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def verification(self, share: int, shares: int) -> Verification:
        mine = dict(sorted(self.checksums.items())[share::shares])
        return Verification(self.folder, mine, f"--data_path {self.folder}")

    def contents(self) -> str | None:
        if all("sha256" in shard for shard in self.index["shards"]):
            return hash_parts(*(f"{file} {sha256}" for file, sha256 in sorted(self.checksums.items())))
        return hash_files([str(self.folder / shard["file"]) for shard in self.index["shards"]])

    def describe(self) -> str:
        return self._described(str(self.folder), int((self.keys == self.keys.max()).sum()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a file mapping doesn't travel to a worker that isn't forked
