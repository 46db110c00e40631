"""Pack media, or cached latents in safetensors files, into tars.

The contents of every tar are planned first, so that any process can write any of them, and a tar whose writing was
interrupted is written again with the same bytes.
"""

import builtins
import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import make_folder, refuse_links, replacing
from opendit.common.tensor_files import open_safetensors, write_file
from opendit.common.utils import DataError, hash_parts, sha256_of
from opendit.data.captioned_folder import find_captions
from opendit.data.files import printable, problem
from opendit.data.folders import CLIPS, suffix_of
from opendit.data.images import find_pictures
from opendit.data.latents import read_shard_header
from opendit.data.latents_index import INDEX, REPAIR, TARS_VERSION, ShardForm
from opendit.data.latents_index import write_index as write_latents_index
from opendit.data.picture_file import picture_suffixes
from opendit.data.processes import in_processes
from opendit.data.progress import Progress
from opendit.data.shards.index import TarIndex, index_of, write_index
from opendit.data.shards.latents import HEADERS, tars_of
from opendit.data.shards.scan import BLOCK, member_header, padded, scan
from opendit.data.tables import read_table
from opendit.data.text_cache import EMPTY

_READ = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A sample to be packed: its file, that file's size and modification time, and the member beside it."""

    key: str
    path: str
    bytes: int
    changed: int
    ending: str
    beside: str  # the ending: txt or cls
    text: builtins.bytes


@dataclass(frozen=True)
class TarPlan:
    """One tar of a plan."""

    tar: Path
    plan: str
    entries: list[Entry]


def find_entries(data_path: str) -> tuple[list[Entry], list[str], list[str]]:
    """Return the samples of a table or a folder, the names of its classes (none with captions), and "path: why" for
    files that can't be packed. Raises ValueError or FileNotFoundError, naming the flag."""
    captioned = find_captions(data_path) if os.path.isdir(data_path) else None
    if captioned is not None and not captioned.has_captions:
        found = find_pictures(data_path)
        class_names, beside = found.class_names, "cls"
        media = [(path, suffix_of(path), str(label)) for path, label in zip(found.paths, found.labels, strict=True)]
    else:
        class_names, beside, media = [], "txt", []
        for row in read_table(data_path) if captioned is None else captioned.rows:
            suffix = suffix_of(str(row.path))
            if suffix not in picture_suffixes() | CLIPS:
                suffix = ".jpg" if row.is_picture else ".mp4"  # decoders go by the bytes; this only tells the two apart
            media.append((str(row.path), suffix, row.text))
    with ThreadPoolExecutor(16) as pool:  # a network disk answers sixteen as quickly as one
        states = list(pool.map(lambda medium: _state(medium[0]), media))
    entries, left_out = [], []
    if captioned is not None and captioned.has_captions:
        left_out += [name for names in captioned.left_out.values() for name in names]
    for number, ((path, suffix, text), state) in enumerate(zip(media, states, strict=True)):
        if isinstance(state, str) or not text:
            left_out.append(f"{printable(path)}: {state if isinstance(state, str) else 'empty caption'}")
            continue
        content = text.encode("utf-8", "replace")
        entries.append(Entry(f"{number:09d}", path, *state, suffix[1:], beside, content))
    return entries, class_names, left_out


def _state(path: str) -> tuple[int, int] | str:
    if (why := problem(path)) is not None:
        return why
    state = os.stat(path)
    return (state.st_size, state.st_mtime_ns) if state.st_size else "the file is empty"


def plan_jobs(entries: list[Entry], folder: Path, shard_size: int) -> list[TarPlan]:
    """Divide the entries, in order, into tars of up to ``shard_size`` bytes, with at least one entry each."""
    cuts, used = [], 0
    for number, entry in enumerate(entries):
        size = 2 * BLOCK + padded(entry.bytes) + padded(len(entry.text))
        if not cuts or used + size > shard_size - 2 * BLOCK:
            cuts.append(number)
            used = 0
        used += size
    lines = [f"{entry.key} {entry.path} {entry.bytes} {entry.changed} {entry.ending}" for entry in entries]
    texts = hash_parts(*(entry.text for entry in entries))
    plan = hash_parts("1", str(shard_size), "\n".join(lines), texts)
    digits = max(5, len(str(len(cuts))))
    return [
        TarPlan(folder / f"shard-{number:0{digits}d}-of-{len(cuts):0{digits}d}.tar", plan, entries[first:last])
        for number, (first, last) in enumerate(zip(cuts, [*cuts[1:], len(entries)], strict=True))
    ]


def is_done(job: TarPlan) -> bool:
    """Return True if the tar and its index exist. Raises ValueError if they belong to another plan."""
    if not index_of(job.tar).exists():
        return False
    header = TarIndex(index_of(job.tar)).header
    if header.plan != job.plan:
        raise ValueError(
            f"--output {job.tar.parent}: {job.tar.name} was made of other files, captions or sizes; name another "
            "folder, or empty this one"
        )
    return job.tar.exists() and job.tar.stat().st_size == header.tar_bytes


def write_job(job: TarPlan) -> int:
    """Write a tar and then its index, each under another name first, and return the number of its samples.

    Raises ValueError if a file has changed since the tars were planned; OSError, for example for a full disk.
    """
    with replacing(job.tar, temporary=f"{job.tar.name}.{os.getpid()}.partial") as new:
        written = write_file(new, _blocks(job.entries))
        header, rows, keys = scan(Path(new.name), plan=job.plan, sha256=written["sha256"])
        if header.rows != len(job.entries):
            raise ValueError(f"{job.tar.name}: {header.left_out} samples can't be used: {header.examples[0]}")
    write_index(index_of(job.tar), header, rows, keys)
    return header.rows


def _blocks(entries: list[Entry]) -> Iterator[bytes]:
    """Yield the bytes of a tar, which depend on the files' contents alone."""
    total = 0
    for entry in entries:
        header = member_header(f"{entry.key}.{entry.ending}", entry.bytes)
        yield header
        left = entry.bytes
        with open(entry.path, "rb", buffering=0) as file:
            while left and (block := file.read(min(left, _READ))):
                left -= len(block)
                yield block
            if left or file.read(1):
                raise ValueError(f"{printable(entry.path)} has changed since the tars were planned; start again")
        beside = member_header(f"{entry.key}.{entry.beside}", len(entry.text)) + entry.text
        rest = bytes(-entry.bytes % BLOCK) + beside + bytes(-len(entry.text) % BLOCK)
        yield rest
        total += len(header) + entry.bytes + len(rest)
    yield bytes(2 * BLOCK + -(total + 2 * BLOCK) % tarfile.RECORDSIZE)


# ------------------------------------------------------------------------------------------ latents


@dataclass(frozen=True)
class Piece:
    """Samples [first, end) of a safetensors file. sha256: of the file, "" if the index has none."""

    file: Path
    first: int
    end: int
    sha256: str


@dataclass(frozen=True)
class PackedTar:
    """A tar to be written: its samples, all of one shape, and the contents of its first member."""

    path: Path
    pieces: tuple[Piece, ...]
    shape_key: int
    settings: dict[str, Any]
    skipped: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(piece.end - piece.first for piece in self.pieces)


def repack_latents(folder: Path, index: dict[str, Any], output: Path, *, shard_size: int, num_workers: int) -> None:
    """Pack the latents of a folder into tars of about ``shard_size`` bytes in ``output``; nothing is encoded.

    Existing tars are kept, so that the same command continues where it was stopped, with the same bytes. Raises
    ValueError for latents that are in tars already, and for an ``output`` with other tars; DataError for files that
    differ from the index."""
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
    write_latents_index(output, TARS_VERSION, [packed])
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
    """Return the bytes of a sample with a caption of the largest length."""
    with open_safetensors(file) as shard:
        numbers = int(np.prod(shard.get_slice("moments").get_shape()[1:]))
        if "text" in index:
            numbers += (index["text"]["max_tokens"] + 1) * shard.get_slice("pooled").get_shape()[1]
    return 2 * numbers + HEADERS


def _write(plan: PackedTar, form: ShardForm) -> int:
    """Write a tar of latents and return the number of its samples."""
    for piece in plan.pieces:
        if piece.sha256 and sha256_of(piece.file) != piece.sha256:
            raise DataError(f"{piece.file} is damaged: its checksum is not the index's; {REPAIR}")
    form.write(plan.path, _tensors(plan.pieces), plan.settings, list(plan.skipped))
    return plan.count


def _tensors(pieces: tuple[Piece, ...]) -> dict[str, Tensor]:
    """Return the pieces' concatenated tensors, as in one safetensors file of all of them."""
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
