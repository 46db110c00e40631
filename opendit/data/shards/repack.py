"""Packs cached latents in safetensors files into tars as ``preprocess.py latents`` writes them; encodes nothing."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import make_folder, refuse_links, replacing
from opendit.common.tensor_files import open_safetensors
from opendit.common.utils import DataError, sha256_of
from opendit.data.files import printable
from opendit.data.latents import read_shard_header
from opendit.data.latents_check import REPAIR
from opendit.data.latents_index import INDEX, TARS_VERSION, ShardForm, write_index
from opendit.data.processes import in_processes
from opendit.data.progress import Progress
from opendit.data.shards.latents import HEADERS, tars_of
from opendit.data.text_cache import EMPTY


@dataclass(frozen=True)
class Piece:
    """Samples ``first`` to before ``end`` of a safetensors file. sha256: of the file, "" where the index has none."""

    file: Path
    first: int
    end: int
    sha256: str


@dataclass(frozen=True)
class PackedTar:
    """A tar that is to be written: its samples, all of one shape, and what is told of it in its first member."""

    path: Path
    pieces: tuple[Piece, ...]
    shape_key: int
    settings: dict[str, Any]
    skipped: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(piece.end - piece.first for piece in self.pieces)


def repack_latents(folder: Path, index: dict[str, Any], output: Path, *, shard_size: int, num_workers: int) -> None:
    """Packs the latents of a folder into tars of about ``shard_size`` bytes in ``output``. Tars that are there are
    kept, so that the same command goes on where it was stopped; their bytes do not depend on that.

    Raises ValueError for latents that lie in tars already, and for an ``output`` with other tars; DataError for files
    that are not what the index says."""
    if index["version"] == TARS_VERSION:
        raise ValueError(f"--data_path {printable(folder)}: these latents lie in tars already; train with them")
    form = tars_of(index["image_size"])
    plans = list(_plan(folder, index, output, shard_size, form))
    make_folder(output)
    refuse_links(output, [INDEX, EMPTY, *(plan.path.name for plan in plans)], "--output")
    if others := sorted({tar.name for tar in output.glob("*.tar")} - {plan.path.name for plan in plans}):
        raise ValueError(f"--output {printable(output)}: holds other tars, such as {others[0]}; name another folder")
    done = [plan for plan in plans if (found := form.header(plan.path)) is not None and found[1] == plan.settings]
    todo = [plan for plan in plans if plan not in done]
    with Progress(index["count"], "samples", initial=sum(plan.count for plan in done), title="packing") as bar:
        for count in in_processes(partial(_write, form=form), todo, num_workers):
            bar.update(count)
    checksums: dict[str, str] = {}
    if "text" in index:
        with replacing(output / EMPTY) as new, open(folder / EMPTY, "rb") as old:
            shutil.copyfileobj(old, new)
        checksums = {EMPTY: sha256_of(output / EMPTY)}
    shards = [_entry(plan, "video" in index) for plan in plans]
    packed = {**index, "settings": plans[0].settings, "shards": shards} | (
        {"checksums": checksums} if checksums else {}
    )
    write_index(output, TARS_VERSION, [packed])
    print(f"{index['count']:,} latents in {len(plans):,} tars: train with --data_path {printable(output)}")


def _plan(folder: Path, index: dict[str, Any], output: Path, shard_size: int, form: ShardForm) -> Iterator[PackedTar]:
    headers = [read_shard_header(folder / shard["file"]) for shard in index["shards"]]
    if None in headers:
        name = index["shards"][headers.index(None)]["file"]
        raise DataError(f"{folder / name} is missing or damaged; {REPAIR}")
    settings = {**headers[0][1], "version": TARS_VERSION, "shard_size": shard_size}  # pyright: ignore[reportOptionalSubscript]
    skipped = [file for header in headers if header for file in header[2]]
    groups: list[tuple[int, list[Piece]]] = []
    for key in sorted({shard.get("shape_key", 0) for shard in index["shards"]}):
        left = 0
        for shard in (each for each in index["shards"] if each.get("shape_key", 0) == key):
            at, file = 0, folder / shard["file"]
            while at < shard["count"]:
                if not left:
                    groups.append((key, []))
                    left = max(1, shard_size // _bytes_of_a_sample(file, index))
                end = min(shard["count"], at + left)
                groups[-1][1].append(Piece(file, at, end, shard.get("sha256", "")))
                left, at = left - (end - at), end
    for number, (key, pieces) in enumerate(groups):
        path = output / form.name(number, len(groups))
        yield PackedTar(path, tuple(pieces), key, settings, () if number else tuple(skipped))


def _bytes_of_a_sample(file: Path, index: dict[str, Any]) -> int:
    """With a caption as long as they are cut to."""
    with open_safetensors(file) as shard:
        numbers = int(np.prod(shard.get_slice("moments").get_shape()[1:]))
        if "text" in index:
            numbers += (index["text"]["max_tokens"] + 1) * shard.get_slice("pooled").get_shape()[1]
    return 2 * numbers + HEADERS


def _write(plan: PackedTar, form: ShardForm) -> int:
    """Returns how many samples it has written."""
    for piece in plan.pieces:
        if piece.sha256 and sha256_of(piece.file) != piece.sha256:
            raise DataError(f"{piece.file} is damaged: its checksum is not the index's; {REPAIR}")
    form.write(plan.path, _tensors(plan.pieces), plan.settings, list(plan.skipped))
    return plan.count


def _tensors(pieces: tuple[Piece, ...]) -> dict[str, Tensor]:
    """The pieces' tensors, one behind the other, as a safetensors file of all of them has them."""
    parts: dict[str, list[Tensor]] = {}
    for piece in pieces:
        with open_safetensors(piece.file) as file:
            for name in ("moments", "labels", "rows", "pooled"):
                if name in file.keys():  # noqa: SIM118
                    parts.setdefault(name, []).append(file.get_slice(name)[piece.first : piece.end])
            for name, ends in (("captions", "caption_ends"), ("tokens", "token_ends")):
                if name in file.keys():  # noqa: SIM118
                    where = file.get_slice(ends)[max(0, piece.first - 1) : piece.end]
                    start = int(where[0]) if piece.first else 0
                    where = where[1:] if piece.first else where
                    before = sum(len(part) for part in parts.get(name, []))
                    parts.setdefault(name, []).append(file.get_slice(name)[start : int(where[-1])])
                    parts.setdefault(ends, []).append(where - start + before)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _entry(plan: PackedTar, of_clips: bool) -> dict[str, Any]:
    entry = {"file": plan.path.name, "count": plan.count, "bytes": plan.path.stat().st_size}
    entry["sha256"] = sha256_of(plan.path)
    return entry | ({"shape_key": plan.shape_key} if of_clips else {})
