"""Cached latents on disk: the format that ``preprocess.py latents`` writes, and the data set that reads it.

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
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opendit.common.hashing import hash_parts
from opendit.common.rules import read_json, shown
from opendit.common.strict_files import checked, parse_text
from opendit.common.tensor_files import open_safetensors, write_file, write_tensors
from opendit.data.base import Embedding, MediaDataset, flip_note
from opendit.data.contents import hash_files
from opendit.data.latents_check import REPAIR, check_index, layout_of, read_shard
from opendit.data.latents_schema import LATENTS_INDEX, SHARD
from opendit.data.medium import Medium, of_moments
from opendit.data.text_cache import CaptionTable, padded, read_empty_caption
from opendit.data.verification import Verification

INDEX = "index.json"
FORMAT, VERSION = "opendit-latents", 1
_KEY = "opendit"  # the shards' only metadata key: safetensors writes several in random order, so not the same bytes


def shard_name(shard: int, shards: int) -> str:
    return f"latents-{shard:05d}-of-{shards:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor], settings: dict, skipped: list[str]) -> str:
    """Writes a shard under another name and renames it, so that a shard that exists is complete; returns its SHA-256,
    made from what was in memory."""
    partial = path.with_name(path.name + ".partial")
    metadata = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True)
    aligned = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    written = write_tensors(partial, aligned, {_KEY: metadata})
    os.replace(partial, path)
    return written["sha256"]


def read_shard_header(path: Path) -> tuple[int, dict, list[str]] | None:
    """(pictures, settings, skipped files) of a shard; None if it isn't a whole shard of ours."""
    try:
        with open_safetensors(path) as shard:
            header = parse_text((shard.metadata() or {}).get(_KEY, ""), SHARD, path)
            return shard.get_slice("labels").get_shape()[0], header["settings"], header["skipped"]
    except (SafetensorError, OSError, IndexError, ValueError):
        return None


def write_index(folder: Path, index: dict) -> None:
    partial = folder / (INDEX + ".partial")
    content = json.dumps({"format": FORMAT, "version": VERSION, **index}, indent=1) + "\n"
    write_file(partial, iter([content.encode()]))  # synced: else the new name may survive a power cut that it doesn't
    os.replace(partial, folder / INDEX)


def read_index(folder: Path) -> dict | None:
    """The index of a latents folder, checked; None if there is none of ours. Raises ValueError for one that is damaged
    or can't be true, and for another version's."""
    path = folder / INDEX
    try:
        index = read_json(path, LATENTS_INDEX.most_bytes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if any(folder.glob("latents-*.safetensors")):
            raise ValueError(f"{path} can't be read ({error}); {REPAIR}") from error
        return None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    if index.get("version") != VERSION:
        raise ValueError(
            f"--data_path {folder}: its latents have format version {shown(index.get('version'))}, this program reads "
            f"{VERSION}; make them again with preprocess.py latents"
        )
    check_index(checked(index, LATENTS_INDEX, path), path)
    return index


class LatentDataset(MediaDataset):
    """Cached latents; ``x`` is a picture's means and standard deviations (2C, h, w) float32, or a clip's (2C, t, h, w).

    vae: the ``--vae`` they were made with. scaling_factor, shift_factor: for ``encoders.vae.sample_moments``.
    text_encoder: whose embeddings of the captions are there, None without any; max_tokens: their length.
    use_video, num_frames, frame_interval: of the run that reads them.
    Raises ValueError if they were made for another ``image_size`` or other clips, hold no mirror images though
    ``random_flip`` asks for them, or miss a shard, and if the index or a shard's header says what can't be.
    """

    kind = "latents"

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
    ):
        self.folder = Path(folder)
        index = read_index(self.folder)
        if index is None:
            raise FileNotFoundError(
                f"--data_path {folder}: holds no {INDEX} of cached latents; make them with preprocess.py latents"
            )
        if index["image_size"] != image_size:
            raise ValueError(
                f"--data_path {folder}: holds latents made at --image_size {index['image_size']}, but this run has "
                f"--image_size {image_size}; pass --image_size {index['image_size']} or make latents for {image_size}"
            )
        self._check_clips(index.get("video"), use_video, num_frames, frame_interval)
        if random_flip and not index["flips"]:
            raise ValueError(f"--data_path {folder}: holds no mirrored latents; make them again with --flip")
        self.index, self.seed, self.vae = index, seed, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        # One number, or one a channel, which JSON knows as a list only.
        scale_and_shift = index["scaling_factor"], index["shift_factor"]
        self.scaling_factor, self.shift_factor = (tuple(v) if isinstance(v, list) else v for v in scale_and_shift)
        channels, *sides = index["latent_shape"]
        self.sample_shape = (2 * channels, *sides)
        self.conditioning = index.get("conditioning", "label")
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
        self._open: dict[int, dict[str, object]] = {}  # shard -> its mapped tensors, opened where they are first read

    def _check_clips(self, made: dict | None, use_video: bool, num_frames: int, frame_interval: int) -> None:
        if use_video != (made is not None):
            raise ValueError(
                f"--data_path {self.folder}: holds latents of clips; add --use_video"
                if made
                else f"--data_path {self.folder}: holds latents of pictures; make them again with preprocess.py "
                "latents --use_video, or leave --use_video out"
            )
        for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval)):
            if made and made[flag] != value:
                raise ValueError(
                    f"--data_path {self.folder}: holds latents made at --{flag} {made[flag]}, but this run has "
                    f"--{flag} {value}; pass --{flag} {made[flag]} or make latents for {value}"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def _find(self, row: int) -> tuple[int, int, dict[str, object]]:
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
        return tensors["moments"][place, int(flip)].float()

    def look_at(self, row: int) -> tuple[Medium, np.ndarray]:
        """Latents in false colours; the medium is the picture or clip that they were made of."""
        moments = self.load(row, False)
        video = self.index.get("video")
        length = video["num_frames"] if video and moments.shape[1] == self.sample_shape[1] else 1
        return Medium(length, self.index["image_size"], self.index["image_size"]), of_moments(moments)[1]

    def latent_sizes(self) -> np.ndarray:
        """(rows, 3) int32, frames, height and width of every row's latents."""
        sizes = np.empty((len(self), 3), dtype=np.int32)
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            if first < end:
                moments = self._find(first)[2]["moments"].get_shape()
                sizes[first:end] = (1, *moments[3:])[-3:]
        return sizes

    def caption(self, row: int) -> str | None:
        return self.captions[row] if self.conditioning == "text" else None

    def embedding(self, row: int) -> Embedding | None:
        if self.text_encoder is None:
            return None
        shard, place, tensors = self._find(row)
        ends = self.token_ends[shard]
        tokens = tensors["tokens"][int(ends[place - 1]) if place else 0 : int(ends[place])]
        return padded(tokens, tensors["pooled"][place], self.max_tokens)

    def shape_keys(self) -> np.ndarray:
        return self.keys

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def identity(self) -> str:
        # Without checksums: a cache that an earlier version made has none, and is the same one when it gets them.
        shards = [{key: value for key, value in shard.items() if key != "sha256"} for shard in self.index["shards"]]
        index = {key: value for key, value in self.index.items() if key != "checksums"}
        return hash_parts(json.dumps({**index, "shards": shards}, sort_keys=True))

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each file that the index has one of."""
        of_shards = {shard["file"]: shard["sha256"] for shard in self.index["shards"] if "sha256" in shard}
        return of_shards | self.index.get("checksums", {})

    def verification(self, share: int, shares: int) -> Verification:
        mine = dict(sorted(self.checksums.items())[share::shares])
        return Verification(self.folder, mine, f"--data_path {self.folder}")

    def contents(self) -> str | None:
        if all("sha256" in shard for shard in self.index["shards"]):
            return hash_parts(*(f"{file} {sha256}" for file, sha256 in sorted(self.checksums.items())))
        return hash_files([str(self.folder / shard["file"]) for shard in self.index["shards"]])

    def describe(self) -> str:
        shape, size = "x".join(map(str, self.index["latent_shape"])), self.index["image_size"]
        what = f"{len(self):,} pictures"
        if self.index.get("video"):
            clips = int((self.keys == self.keys.max()).sum())
            what = f"{clips:,} clips" + (f" and {len(self) - clips:,} pictures" if clips < len(self) else "")
        text = f"with captions ({f'encoded by {self.text_encoder}' if self.text_encoder else 'not encoded'})"
        words = text if self.conditioning == "text" else f"of {self.num_classes:,} classes"
        unchecked = "" if self.checksums else ", without checksums (made by an earlier version)"
        return (
            f"{self.folder}: cached latents ({shape}, --vae {self.vae}) of {what} {words}, {size}x{size}, "
            f"{flip_note(self)}{unchecked}{self.note}"
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}  # a file mapping doesn't travel to a worker that isn't forked
