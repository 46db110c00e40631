"""Write samples, or what is computed from them, in parts, so that a job that was killed can continue where it stopped.

A part is a fixed range of sample numbers, the same for any number of processes: one file, whole or not there, with a
checksum, written after the single files of its samples. Beside the parts a manifest holds all that decides a sample;
with other settings nothing of them is used.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opendit.common.json_file import MIB, SHA256, FileKind, read_file
from opendit.common.rules import mapping, record, string, whole
from opendit.common.safe_files import make_folder, remove, remove_folder, replacing, write_whole
from opendit.common.utils import hash_parts

FOLDER, MANIFEST = ".parts", "manifest.json"
PART_BYTES = 16 * MIB
FINE = 1024  # jobs of at most so many samples have a part for each: however many processes share them, none is idle
BLOCK = 4 * MIB  # bytes that are read at once
DIGEST = hashlib.sha256().digest_size
_FILES = re.compile(r"\d{8}\.npy|manifest\.json|\.\d{8}\.\d+\.npy|\.manifest\.\d+\.json")
_KIND = FileKind(
    record(
        {
            "version": whole(1, 1),
            "samples": whole(1),
            "part": whole(1),
            "settings": mapping(string(64), string(4096), 64),
            "sha256": SHA256,
        }
    ),
    MIB,
)


def samples_a_part(count: int, batch_size: int, sample_bytes: int) -> int:
    """One for small jobs; else whole batches, about PART_BYTES of them and at least 64 parts."""
    if count <= FINE:
        return 1
    return batch_size * max(1, min(PART_BYTES // (batch_size * sample_bytes), count // (64 * batch_size)))


@dataclass(frozen=True)
class Job:
    """The job that the parts in a folder belong to.

    settings: name -> value of everything that decides a sample or what is kept of it. count: of all samples. kept:
    samples, the first ones, whose pixels are in the parts. shape: of a sample's pixels. samples_a_part: how many
    samples a part has, but for the last one. dtype: of the pixels, as numpy writes it; features are "<f4".
    """

    settings: dict[str, str]
    count: int
    kept: int
    shape: tuple[int, ...]
    samples_a_part: int
    dtype: str = "|u1"

    @property
    def identity(self) -> str:
        """A hash of the settings and of the parts' size."""
        return hash_parts(str(self.count), str(self.samples_a_part), json.dumps(self.settings, sort_keys=True))


class DamagedPart(OSError):
    """A part that is not what was written; the message names its file."""


class Parts:
    """The parts of a job in the folder that it writes to.

    Args:
        root: the folder below which no link is followed (opendit/common/safe_files.py); ``output`` by default.

    Raises:
        ValueError: their folder is a symbolic link, and may be of anything.
    """

    def __init__(self, output: Path, job: Job, root: Path | None = None):
        self.folder, self.job, self._root = output / FOLDER, job, root or output
        self.size = job.samples_a_part
        self.count = -(-job.count // self.size)
        if self.folder.is_symlink():
            raise ValueError(f"{self.folder} is a symbolic link; remove it, or give another --output")

    def samples(self, part: int) -> range:
        """The numbers of a part's samples."""
        return range(part * self.size, min(self.job.count, (part + 1) * self.size))

    def rows(self, part: int) -> int:
        """Return how many of a part's first samples have their pixels in it."""
        samples = self.samples(part)
        return min(max(0, self.job.kept - samples.start), len(samples))

    def path(self, part: int) -> Path:
        return self.folder / f"{part:08d}.npy"

    # ------------------------------------------------------------------------------------------ one part

    def write(self, part: int, pixels: np.ndarray) -> None:
        """``pixels``: (rows, *shape) of the job's dtype. np.load reads the file, at whose end stands the checksum.
        Raises OSError naming the file."""
        header = self._header(part)
        data = np.ascontiguousarray(pixels).data.cast("B") if pixels.size else b""
        digest = self._digest(part)
        with replacing(self.path(part), root=self._root) as file:
            for piece in (header, data):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())

    def blocks(self, part: int) -> Iterator[np.ndarray]:
        """The bytes of a part's pixels, at most BLOCK at a time, (n,) uint8. Raises DamagedPart, at its end."""
        header, digest = self._header(part), self._digest(part)
        left = self.rows(part) * int(np.prod(self.job.shape)) * np.dtype(self.job.dtype).itemsize
        try:
            with open(self.path(part), "rb", buffering=0) as file:
                found = file.read(len(header))
                digest.update(found)
                while left and (block := file.read(min(left, BLOCK))):
                    left -= len(block)
                    digest.update(block)
                    yield np.frombuffer(block, np.uint8)
                intact = found == header and not left and file.read(DIGEST + 1) == digest.digest()
        except FileNotFoundError:
            intact = False
        if not intact:
            raise DamagedPart(errno.EIO, "a part of the samples is damaged", str(self.path(part)))

    def is_whole(self, part: int) -> bool:
        """Return True if a part exists, undamaged, from a job with the same settings. Raises OSError."""
        try:
            for _ in self.blocks(part):
                pass
        except DamagedPart:
            return False
        return True

    def all_blocks(self) -> Iterator[np.ndarray]:
        """:meth:`blocks` of all parts."""
        for part in range(self.count):
            yield from self.blocks(part)

    def first(self, count: int) -> np.ndarray:
        """The pixels (count, *shape) of the first samples; of all that are kept where that is fewer."""
        count, found = min(count, self.job.kept, self.job.count), []
        for part in range(self.count):
            if self.samples(part).start >= count:
                break
            pixels = np.concatenate(list(self.blocks(part)))
            found.append(pixels.view(self.job.dtype).reshape(-1, *self.job.shape)[: count - self.samples(part).start])
        return np.concatenate(found)

    def _header(self, part: int) -> bytes:
        return npy_header((self.rows(part), *self.job.shape), self.job.dtype)

    def _digest(self, part: int):
        return hashlib.sha256(f"{self.job.identity} {part} ".encode())

    # ------------------------------------------------------------------------------------------ all of them

    def begin(self) -> None:
        """Makes the folder and its manifest. Raises OSError."""
        make_folder(self.folder, root=self._root)
        job = self.job
        content = {"version": 1, "samples": job.count, "part": self.size, "settings": job.settings}
        text = json.dumps({**content, "sha256": _sha256_of(content)})
        write_whole(self.folder / MANIFEST, text.encode(), root=self._root)

    def missing(self, finished: Callable[[int], bool]) -> tuple[list[int], list[str]]:
        """The parts that have to be drawn, and a line for every one that is there and of no use: damaged, or with a
        sample whose own file isn't ``finished(number)``."""

        def problem(part: int) -> str | None:
            if not self.path(part).exists():
                return ""
            if not self.is_whole(part):
                return f"{self.path(part)} is damaged: its samples are drawn again"
            lost = next((number for number in self.samples(part) if not finished(number)), None)
            return None if lost is None else f"sample {lost:,} has lost its file: it is drawn again"

        with ThreadPoolExecutor(4) as pool:  # hashing and reading release the GIL
            problems = list(pool.map(problem, range(self.count)))
        return [part for part, line in enumerate(problems) if line is not None], [line for line in problems if line]

    def there(self) -> int:
        """Return the number of samples in parts that have a file."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sum(len(self.samples(int(name[:8]))) for name in names if re.fullmatch(r"\d{8}\.npy", name))

    def to_draw(self, missing: Collection[int], batch_size: int) -> list[list[range]]:
        """The missing samples in ranges of at most ``batch_size``, in groups that one replica draws.

        The borders do not depend on what is missing: a sample meets the same others in its batch in every start. (Of
        parts smaller than a batch some may be drawn without need, therefore; they are not written again.)
        """
        step = self.size * max(1, batch_size // self.size)
        groups = sorted({part * self.size // step * step for part in missing})
        ends = [min(self.job.count, first + step) for first in groups]
        return [
            [range(start, min(start + batch_size, end)) for start in range(first, end, batch_size)]
            for first, end in zip(groups, ends, strict=True)
        ]

    def remove(self) -> None:
        """Deletes what is there of these parts or of others. The manifest goes first: without it nobody goes on from
        the rest."""
        if not self.folder.is_dir():
            return
        names = sorted((name for name in os.listdir(self.folder) if _FILES.fullmatch(name)), key=lambda n: n[0] != "m")
        for name in names:
            remove(self.folder / name, root=self._root)
        with contextlib.suppress(OSError):  # somebody else has put something there
            remove_folder(self.folder, root=self._root)

    def remove_unfinished(self) -> None:
        """Deletes what a killed process was about to put in its place."""
        for name in os.listdir(self.folder):
            if _FILES.fullmatch(name) and name.startswith("."):
                remove(self.folder / name, root=self._root)


class PartAssembly:
    """Collects the samples of the parts to draw, in any order and from any thread, and writes a part when it has all
    of its samples."""

    def __init__(self, parts: Parts, missing: Collection[int]):
        self._parts, self._missing = parts, set(missing)
        self._open: dict[int, tuple[np.ndarray, list[int]]] = {}
        self._lock = threading.Lock()

    def wants(self, number: int) -> bool:
        return number // self._parts.size in self._missing

    def add(self, number: int, pixels: np.ndarray) -> None:
        """A sample whose own file, if it has one, is written. Raises OSError."""
        part, parts = number // self._parts.size, self._parts
        first = parts.samples(part).start
        with self._lock:
            if part not in self._open:
                empty = np.empty((parts.rows(part), *parts.job.shape), parts.job.dtype)
                self._open[part] = empty, [len(parts.samples(part))]
            rows, left = self._open[part]
        if number - first < len(rows):
            rows[number - first] = pixels
        with self._lock:
            left[0] -= 1
            if left[0]:
                return
            del self._open[part]
        parts.write(part, rows)


# ------------------------------------------------------------------------------------------ what is in a folder


@dataclass(frozen=True)
class Found:
    """The remains of an earlier job in a folder: how many of how many samples, and with which settings."""

    there: int
    count: int
    samples_a_part: int
    settings: dict[str, str]

    def differences(self, settings: dict[str, str]) -> list[str]:
        """Describe how these settings differ from the earlier job's, a text each."""
        names = [*self.settings, *(name for name in settings if name not in self.settings)]
        pairs = [(name, self.settings.get(name, "none"), settings.get(name, "none")) for name in names]
        return [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]


def find(output: Path) -> Found | None:
    """The job that did not end in a folder; None if there is none, or nothing of it.

    Raises:
        ValueError: its manifest is damaged; the message says what to do.
    """
    path = output / FOLDER / MANIFEST
    try:
        content = read_file(path, _KIND)
        if content.pop("sha256") != _sha256_of(content):
            raise ValueError(f"{path}: its own checksum is another")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        fix = "give another --output, or add --overwrite to drop what is there"
        raise ValueError(f"{error}: it says what the samples of a job that did not end are of; {fix}") from error
    job = Job(content["settings"], content["samples"], 0, (), content["part"])
    there = Parts(output, job).there()
    return Found(there, job.count, job.samples_a_part, job.settings) if there else None


def _sha256_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def npy_header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    """Return the header of a .npy file of rows in C order."""
    file = io.BytesIO()
    np.lib.format.write_array_header_2_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()
