"""Read and write cached latents in safetensors files. For latents in tars see ``shards.latents``.

``preprocess.py latents --shard_size 4096`` writes this format. Caches from before tars were added have it too.

A folder holds ``latents-00000-of-00012.safetensors``, ... and ``index.json``. A shard has the tensors

    moments  (n, F, 2C, h, w) float16   mean and standard deviation of every picture and, if F = 2, of its mirror image
    labels   (n,) int64
    rows     (n,) int64                 the picture's row in the source data set
    features (n, F, N, W) float16       with --repa: a vision encoder's features of the picture's N tokens

A shard's metadata holds the settings and the files that couldn't be read. A shard holds either pictures or clips.
Moments of clips have an axis of latent frames: (n, F, 2C, t, h, w). For captions see ``text_cache``. The index has the
size and SHA-256 of every shard (caches of early versions have no checksums). It is written last, so a folder without an
index is unfinished.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opendit.common.json_models import parse_text
from opendit.common.safe_files import replacing
from opendit.common.tensor_files import open_safetensors, write_tensors
from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Description, Embedding, Fingerprint, Item, Shapes, Size, View
from opendit.data.contents import Checksums, hash_files
from opendit.data.folders import Ignored, files_below
from opendit.data.latents_index import (
    FILES_VERSION,
    INDEX,
    SHARD,
    CachedLatents,
    ShardForm,
    choose_index,
    layout_of,
    read_indexes,
    read_shard,
)
from opendit.data.medium import Medium
from opendit.data.picture_file import picture_suffixes
from opendit.data.row_arrays import TextTable
from opendit.data.shards.latents import TarLatents, open_tars
from opendit.data.sources import Request
from opendit.data.text_cache import open_empty_caption, padded

_KEY = "opendit"  # the only metadata key of a shard, because safetensors writes several keys in random order


def shard_name(shard: int, shards: int) -> str:
    return f"latents-{shard:05d}-of-{shards:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], skipped: list[str]) -> str:
    """Write a shard under a temporary name and rename it, so that an existing shard is always complete.

    Return its SHA-256, computed from the bytes in memory."""
    metadata = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True)
    aligned = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with replacing(path, temporary=path.name + ".partial") as new:
        return write_tensors(new, aligned, {_KEY: metadata})["sha256"]


def read_shard_header(path: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """Return (pictures, settings, skipped files) of a shard, or None for any other or incomplete file."""
    try:
        with open_safetensors(path) as shard:
            header = parse_text((shard.metadata() or {}).get(_KEY, ""), SHARD, path)
            return shard.get_slice("labels").get_shape()[0], header["settings"], header["skipped"]
    except (SafetensorError, OSError, IndexError, ValueError):
        return None


FILES = ShardForm("latents-*.safetensors", shard_name, read_shard_header, write_shard)


class LatentDataset(CachedLatents):
    """Data set of cached latents in safetensors files.

    A sample ``x`` holds the means and standard deviations of a picture (2C, h, w) or of a clip (2C, t, h, w), float32.

    Args:
        of_run: random_flip, use_video, num_frames, frame_interval and fps of the run that reads the latents.

    Attributes:
        vae: the ``--vae`` that made the latents.
        scaling_factor, shift_factor: arguments of ``encoders.vae.sample_moments``.
        text_encoder: the encoder whose caption embeddings are cached; None if there are no embeddings.
        max_tokens: length of the padded embeddings.

    Raises:
        ValueError: the latents were made for another ``image_size`` or other clips, lack the mirror images that
            ``random_flip`` requests, or lack a shard; or the index or a shard's header is inconsistent.
    """

    def __init__(self, folder: str | Path, image_size: int, *, seed: int = 0, **of_run: Any):
        self.folder = Path(folder)
        indexes = read_indexes(self.folder)
        if indexes is None:
            raise FileNotFoundError(
                f"--data_path {folder}: holds no {INDEX} of cached latents; make them with preprocess.py latents"
            )
        index = choose_index(indexes, f"--data_path {folder}", image_size)
        self.seed = seed
        self._take(index, f"--data_path {folder}", **of_run)
        counts = [shard["count"] for shard in index["shards"]]
        self.starts = np.cumsum([0, *counts])
        self.keys = np.repeat([shard.get("shape_key", 0) for shard in index["shards"]], counts)
        arrays = [read_shard(self.folder, shard, layout_of(index)) for shard in index["shards"]]
        self.labels = np.concatenate([shard["labels"] for shard in arrays])
        if self.conditioning == "text":
            pairs = [(shard["captions"], shard["caption_ends"]) for shard in arrays]
            self.captions = TextTable.joined(pairs, "surrogatepass")
        self.token_ends = [shard["token_ends"] for shard in arrays] if self.text_encoder else []
        self.empty_caption = open_empty_caption(self.folder, index["text"]) if self.text_encoder else None
        self._open: dict[int, dict[str, Any]] = {}  # shard -> its mapped tensors, opened at the first read

    def __len__(self) -> int:
        return len(self.labels)

    def _find(self, row: int) -> tuple[int, int, dict[str, Any]]:
        """Return (shard, row in the shard, mapped tensors of the shard)."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        if shard not in self._open:
            file = safe_open(self.folder / self.index["shards"][shard]["file"], "pt")
            names = ("moments", "tokens", "pooled") if self.text_encoder else ("moments",)
            names += ("features",) if self.features else ()
            self._open[shard] = {name: file.get_slice(name) for name in names}
        return shard, row - int(self.starts[shard]), self._open[shard]

    def source(self, row: int) -> str:
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.folder / self.index['shards'][shard]['file']} (row {row - int(self.starts[shard])})"

    def read(self, row: int, view: View = PLAIN) -> Item:
        shard, place, tensors = self._find(row)
        moments = tensors["moments"][place, int(view.flip)]
        embedding, size = self._embedding(shard, place, tensors)
        features = tensors["features"][place, int(view.flip)] if self.features else None
        return Item(
            moments.float(),
            int(self.labels[row]),
            self.caption(row),
            embedding=embedding,
            features=features,
            bytes_read=moments.nbytes + size + (0 if features is None else features.nbytes),
        )

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return self._shown(self.read(row).x)

    def shapes(self) -> Shapes:
        return Shapes(keys=self.keys, latents=self._sizes, frame_rates=self._recorded_rates)

    def _sizes(self) -> list[tuple[int, Size]]:
        """Return (end of the rows, (frames, height, width) of the latents) for each shard."""
        sizes = []
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            if first < end:
                frames, height, width = (1, *self._find(first)[2]["moments"].get_shape()[3:])[-3:]
                sizes.append((end, (frames, height, width)))
        return sizes

    def caption(self, row: int) -> str | None:
        return self.captions[row] if self.conditioning == "text" else None

    def _embedding(self, shard: int, place: int, tensors: dict[str, Any]) -> tuple[Embedding | None, int]:
        """Return (a row's embedding or None, bytes read)."""
        if self.text_encoder is None:
            return None, 0
        ends = self.token_ends[shard]
        tokens = tensors["tokens"][int(ends[place - 1]) if place else 0 : int(ends[place])]
        pooled = tensors["pooled"][place]
        return padded(tokens, pooled, self.max_tokens), tokens.nbytes + pooled.nbytes

    def _largest_label(self) -> tuple[int, str] | None:
        row = int(self.labels.argmax())
        return int(self.labels[row]), self.source(row)

    def fingerprint(self) -> Fingerprint:
        checksums = Checksums(self.folder, self.checksums, f"--data_path {self.folder}")
        return Fingerprint(self._identity, self._contents, checksums)

    def _contents(self) -> str:
        if all("sha256" in shard for shard in self.index["shards"]):
            return hash_parts(*(f"{file} {sha256}" for file, sha256 in sorted(self.checksums.items())))
        return hash_files([str(self.folder / shard["file"]) for shard in self.index["shards"]])

    def describe(self) -> Description:
        clips = int((self.keys == self.keys.max()).sum())
        about = self._description(str(self.folder), clips, self.empty_caption)
        # All captions can be counted, because they are in memory.
        return replace(about, counted_captions=((len(self), 1_000_000),), largest_label=self._largest_label)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # mapped files can't be pickled for a worker that isn't forked


def open_source(asked: Request) -> LatentDataset | TarLatents | None:
    if not asked.located.is_dir():
        return None
    indexes = read_indexes(asked.located)
    if indexes is None:
        if any(asked.located.glob("latents-*.safetensors")) or any(asked.located.glob("latents-*-of-*.tar")):
            raise ValueError(
                f"{asked.shown}: holds unfinished latents; run the preprocess.py command that made them again"
            )
        return None
    asked.check_split()
    if indexes[0]["version"] == FILES_VERSION:
        latents = LatentDataset(asked.located, asked.image_size, **asked.of_latents())
    else:
        index = choose_index(indexes, asked.shown, asked.image_size)
        text, tars = index.get("text"), open_tars(asked.located, index)
        empty = open_empty_caption(asked.located, text) if text else None
        latents = TarLatents(asked.shown, index, tars, empty_caption=empty, max_bad=asked.max_bad, **asked.of_latents())
    if next(files_below(str(asked.located), picture_suffixes(), Ignored(), visits=1), None) is not None:
        latents.note = "; the pictures that are in the folder as well are not read"
    return latents
