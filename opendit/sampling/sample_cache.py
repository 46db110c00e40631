"""Cache samples, or their features, on disk, so that a killed job can resume.

The cache has one file, called a part, for each range of samples. A part has a checksum. It is written atomically after
the samples' picture or clip files. A job resumes only if its settings equal those in the manifest."""

import contextlib
import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import MaxLen
from pydantic import FailFast, Field

from opendit.common.json_file import MIB
from opendit.common.json_models import FileKind, JsonObject, Name, Positive, Sha256, Word, read_file
from opendit.common.safe_files import make_folder, remove, remove_folder, replacing, write_whole
from opendit.common.utils import hash_parts
from opendit.sampling.output_files import npy_header

FOLDER, MANIFEST = ".parts", "manifest.json"
PART_BYTES = 16 * MIB
FINE = 1024  # smaller jobs have one sample per file of the cache, so that no process is idle
BLOCK = 4 * MIB  # bytes to read at a time
DIGEST = hashlib.sha256().digest_size
_FILES = re.compile(r"\d{8}\.npy|manifest\.json|\.\d{8}\.\d+\.npy|\.manifest\.\d+\.json")


class _Manifest(JsonObject):
    version: int = Field(ge=1, le=1)
    samples: Positive
    part: Positive
    settings: Annotated[dict[Word, Name], FailFast(), MaxLen(64)]
    sha256: Sha256


_KIND = FileKind(_Manifest, MIB)


def samples_a_part(count: int, batch_size: int, sample_bytes: int) -> int:
    """Return the number of samples per file of the cache: 1 in jobs of up to ``FINE`` samples. In larger jobs, a file
    holds complete batches: at most ``PART_BYTES`` of pixels and 1/64 of the job, but at least one batch."""
    if count <= FINE:
        return 1
    return batch_size * max(1, min(PART_BYTES // (batch_size * sample_bytes), count // (64 * batch_size)))


@dataclass(frozen=True)
class SamplingJob:
    """The job that a cache belongs to.

    Attributes:
        settings: name -> value, for all values that determine a sample or its files.
        kept: number of samples with stored pixels, the first of ``count``.
        shape: shape of one sample's pixels.
        samples_a_part: number of samples in every file of the cache except the last.
        dtype: dtype of the pixels in numpy's notation; "<f4" for features.
    """

    settings: dict[str, str]
    count: int
    kept: int
    shape: tuple[int, ...]
    samples_a_part: int
    dtype: str = "|u1"

    @property
    def identity(self) -> str:
        return hash_parts(str(self.count), str(self.samples_a_part), json.dumps(self.settings, sort_keys=True))


class DamagedPart(OSError):
    """A file of the cache is missing or damaged. The message names the file."""


class SampleCache:
    """The cached samples of a job, in a subfolder of its output folder. root: folder below which symbolic links are not
    followed; ``output`` by default. Raises ValueError if the cache's folder is a symbolic link."""

    def __init__(self, output: Path, job: SamplingJob, root: Path | None = None):
        self.folder, self.job, self._root = output / FOLDER, job, root or output
        self.size = job.samples_a_part
        self.count = -(-job.count // self.size)
        if self.folder.is_symlink():
            raise ValueError(f"{self.folder} is a symbolic link; remove it, or give another --output")

    def samples(self, part: int) -> range:
        return range(part * self.size, min(self.job.count, (part + 1) * self.size))

    def rows(self, part: int) -> int:
        """Return the number of samples with pixels in a part. They are the part's first samples."""
        samples = self.samples(part)
        return min(max(0, self.job.kept - samples.start), len(samples))

    def path(self, part: int) -> Path:
        return self.folder / f"{part:08d}.npy"

    def write(self, part: int, pixels: np.ndarray) -> None:
        """Write pixels (rows, *shape) as a .npy file, followed by a checksum that np.load ignores. Raises OSError."""
        header = self._header(part)
        data = np.ascontiguousarray(pixels).data.cast("B") if pixels.size else b""
        digest = self._digest(part)
        with replacing(self.path(part), root=self._root) as file:
            for piece in (header, data):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())

    def blocks(self, part: int) -> Iterator[np.ndarray]:
        """Yield a file's pixels as bytes, (n,) uint8. Raises DamagedPart at the end if the file is damaged."""
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

    def is_intact(self, part: int) -> bool:
        """Return True if a file of the cache exists, belongs to this job and is undamaged. Raises OSError."""
        try:
            for _ in self.blocks(part):
                pass
        except DamagedPart:
            return False
        return True

    def all_blocks(self) -> Iterator[np.ndarray]:
        for part in range(self.count):
            yield from self.blocks(part)

    def first(self, count: int) -> np.ndarray:
        """Return the first ``count`` samples' pixels (count, *shape), or all if there are fewer."""
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

    def begin(self) -> None:
        """Create the folder and its manifest. Raises OSError."""
        make_folder(self.folder, root=self._root)
        job = self.job
        content = {"version": 1, "samples": job.count, "part": self.size, "settings": job.settings}
        text = json.dumps({**content, "sha256": _sha256_of(content)})
        write_whole(self.folder / MANIFEST, text.encode(), root=self._root)

    def missing(self, finished: Callable[[int], bool]) -> tuple[list[int], list[str]]:
        """Return (indices of missing, damaged or unfinished parts, messages about existing parts). ``finished(number)``
        is False if a sample has lost its picture or clip file."""

        def problem(part: int) -> str | None:
            if not self.path(part).exists():
                return ""
            if not self.is_intact(part):
                return f"{self.path(part)} is damaged: its samples are drawn again"
            lost = next((number for number in self.samples(part) if not finished(number)), None)
            return None if lost is None else f"sample {lost:,} has lost its file: it is drawn again"

        with ThreadPoolExecutor(4) as pool:  # hashing and reading release the GIL
            problems = list(pool.map(problem, range(self.count)))
        return [part for part, line in enumerate(problems) if line is not None], [line for line in problems if line]

    def count_cached(self) -> int:
        """Return the number of cached samples, by the names of the files."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sum(len(self.samples(int(name[:8]))) for name in names if re.fullmatch(r"\d{8}\.npy", name))

    def count_outside(self, missing: Collection[int]) -> int:
        """Return the number of samples outside the missing files."""
        return self.job.count - sum(len(self.samples(part)) for part in missing)

    def batches_to_draw(self, missing: Collection[int], batch_size: int) -> list[list[range]]:
        """Return the batches for the missing parts, in groups. One replica must draw all batches of a group. A sample
        has the same batch in every start, so batches may contain finished samples, see :meth:`CacheWriter.wants`."""
        step = self.size * max(1, batch_size // self.size)
        groups = sorted({part * self.size // step * step for part in missing})
        ends = [min(self.job.count, first + step) for first in groups]
        return [
            [range(start, min(start + batch_size, end)) for start in range(first, end, batch_size)]
            for first, end in zip(groups, ends, strict=True)
        ]

    def remove(self) -> None:
        """Delete the cache's files, even another job's. The manifest is deleted first, so that no job resumes."""
        if not self.folder.is_dir():
            return
        names = sorted((name for name in os.listdir(self.folder) if _FILES.fullmatch(name)), key=lambda n: n[0] != "m")
        for name in names:
            remove(self.folder / name, root=self._root)
        with contextlib.suppress(OSError):  # the folder may contain files that OpenDiT did not write
            remove_folder(self.folder, root=self._root)

    def remove_unfinished(self) -> None:
        """Delete the temporary files of a killed process."""
        for name in os.listdir(self.folder):
            if _FILES.fullmatch(name) and name.startswith("."):
                remove(self.folder / name, root=self._root)


class CacheWriter:
    """Collects samples, in any order and from any thread, and writes each missing file once it is complete."""

    def __init__(self, cache: SampleCache, missing: Collection[int]):
        self._cache, self._missing = cache, set(missing)
        self._open: dict[int, tuple[np.ndarray, list[int]]] = {}
        self._lock = threading.Lock()

    def wants(self, number: int) -> bool:
        """Return True if the cache lacks the sample ``number``."""
        return number // self._cache.size in self._missing

    def add(self, number: int, pixels: np.ndarray) -> None:
        """Add a missing sample, once, after its picture or clip file has been written. Raises OSError."""
        part, cache = number // self._cache.size, self._cache
        first = cache.samples(part).start
        with self._lock:
            if part not in self._open:
                empty = np.empty((cache.rows(part), *cache.job.shape), cache.job.dtype)
                self._open[part] = empty, [len(cache.samples(part))]
            rows, left = self._open[part]
        if number - first < len(rows):
            rows[number - first] = pixels
        with self._lock:
            left[0] -= 1
            if left[0]:
                return
            del self._open[part]
        cache.write(part, rows)


@dataclass(frozen=True)
class UnfinishedJob:
    """An earlier job that left its cache in a folder. ``cached`` of ``count`` samples are in the cache."""

    cached: int
    count: int
    samples_a_part: int
    settings: dict[str, str]

    def differences(self, settings: dict[str, str]) -> list[str]:
        """Describe each setting that differs between the earlier job and ``settings``."""
        names = [*self.settings, *(name for name in settings if name not in self.settings)]
        pairs = [(name, self.settings.get(name, "none"), settings.get(name, "none")) for name in names]
        return [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]


def find_unfinished_job(output: Path) -> UnfinishedJob | None:
    """Return the unfinished job in an output folder; None if there is none or it has no cached samples. Raises
    ValueError, with advice, if the manifest is damaged."""
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
    job = SamplingJob(content["settings"], content["samples"], 0, (), content["part"])
    cached = SampleCache(output, job).count_cached()
    return UnfinishedJob(cached, job.count, job.samples_a_part, job.settings) if cached else None


def _sha256_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
