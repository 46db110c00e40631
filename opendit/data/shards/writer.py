"""Packs media into tars. What is in which tar is planned first, so that any process can write any of them, and one that
was killed in the middle is written again with the same bytes."""

import builtins
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from opendit.common.safe_files import replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import hash_parts
from opendit.data.csv_table import read_csv
from opendit.data.files import printable, problem
from opendit.data.folders import CLIPS, suffix_of
from opendit.data.images import find_pictures
from opendit.data.picture_file import picture_suffixes
from opendit.data.shards.index import TarIndex, index_of, write_index
from opendit.data.shards.scan import scan
from opendit.data.shards.tar_headers import BLOCK

_READ = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A sample to be packed: its file, that file's bytes and time of change, and the member beside it."""

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
    """Return the samples of a CSV or a folder of pictures, the names of its classes (none for a CSV), and "path: why"
    for files that can't be packed. Raises ValueError or FileNotFoundError, naming the flag."""
    if os.path.isdir(data_path):
        found = find_pictures(data_path)
        class_names, beside = found.class_names, "cls"
        media = [(path, suffix_of(path), str(label)) for path, label in zip(found.paths, found.labels, strict=True)]
    else:
        class_names, beside, media = [], "txt", []
        for row in read_csv(data_path):
            suffix = suffix_of(str(row.path))
            if suffix not in picture_suffixes() | CLIPS:
                suffix = ".jpg" if row.is_picture else ".mp4"  # decoders look at the bytes; this tells the two apart
            media.append((str(row.path), suffix, row.text))
    with ThreadPoolExecutor(16) as pool:  # a network disk answers sixteen as fast as one
        states = list(pool.map(lambda medium: _state(medium[0]), media))
    entries, left_out = [], []
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
    """The tars: entries in their order, as many in each as ``shard_size`` bytes hold, and one at least."""
    cuts, used = [], 0
    for number, entry in enumerate(entries):
        size = 2 * BLOCK + _padded(entry.bytes) + _padded(len(entry.text))
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


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


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
    """Writes a tar and then its index, each under another name first; returns how many samples it has.

    Raises ValueError if a file is no longer what it was when the tars were planned; OSError, as of a full disk.
    """
    with replacing(job.tar, temporary=f"{job.tar.name}.{os.getpid()}.partial") as new:
        written = write_file(new, _blocks(job.entries))
        header, rows, keys = scan(Path(new.name), plan=job.plan, sha256=written["sha256"])
        if header.rows != len(job.entries):
            raise ValueError(f"{job.tar.name}: {header.left_out} samples can't be used: {header.examples[0]}")
    write_index(index_of(job.tar), header, rows, keys)
    return header.rows


def _blocks(entries: list[Entry]) -> Iterator[bytes]:
    """The bytes of a tar: members of one owner and time, so that they depend on the files' contents alone."""
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


def member_header(name: str, size: int) -> bytes:
    """Return a member's header, without owner and time, so that tars depend on their contents alone."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)
