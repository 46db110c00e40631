"""The indexes of a prepared set's tars: beside them, if ``preprocess.py index`` made them for these fields, else in a
folder of this machine, where they are made when the set is first opened."""

import fcntl
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opendit.common.safe_files import open_to_write
from opendit.common.utils import hash_parts
from opendit.data.energon.prepared import PreparedSet
from opendit.data.files import printable
from opendit.data.processes import in_processes
from opendit.data.progress import Progress
from opendit.data.shards.cache import FOLDER, FileCache
from opendit.data.shards.fields import Fields
from opendit.data.shards.index import TarIndex, index_of, write_index
from opendit.data.shards.scan import scan

SMALL = 64 << 20  # bytes of tars that are read faster than processes are started


def open_indexes(prepared: PreparedSet, shown: str) -> list[TarIndex]:
    """The index of every tar, in order; those that are missing are made, with a bar, by one process of this machine.

    Raises ValueError, which begins with ``shown`` and names the tar, for one that is gone, damaged or has other samples
    than Energon counted, and for a folder that can't be written to; DataError of a process that was killed."""
    folder = FileCache.of_environment().folder / "energon"
    places = {}
    for name, _ in prepared.tars:
        path = prepared.folder / name
        try:
            places[path] = _place(path, prepared.plan, folder)
        except OSError as error:
            raise ValueError(f"{shown}: {printable(path)} can't be read ({error.strerror}); allow it") from error
    if any(not place.exists() for place in places.values()):
        try:
            with _alone(folder):  # of all ranks that start here
                _make({tar: place for tar, place in places.items() if not place.exists()}, prepared)
        except OSError as error:
            what = f"the indexes can't be written to {printable(folder)} ({error.strerror or error})"
            fix = f"set {FOLDER} to another folder, or run: python preprocess.py index {printable(prepared.folder)}"
            raise ValueError(f"{shown}: {what}; {fix}") from error
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
    indexes = []
    for (name, count), place in zip(prepared.tars, places.values(), strict=True):
        try:
            index = TarIndex(place)
        except (ValueError, OSError) as error:
            raise ValueError(f"{shown}: {error}") from error
        check_count(prepared.folder / name, index, count, shown)
        indexes.append(index)
    return indexes


def check_count(tar: Path, index: TarIndex, count: int, shown: str) -> None:
    """Raises ValueError for a tar that is no longer the one that Energon prepared."""
    if (found := index.header.rows + index.header.left_out) != count:
        raise ValueError(
            f"{shown}: {printable(tar)} has {found:,} samples, and {count:,} when Energon prepared it; prepare it again"
        )


def _place(tar: Path, plan: str, folder: Path) -> Path:
    """Return the path of a tar's index, whether or not it exists yet."""
    beside, state = index_of(tar), os.stat(tar)
    if beside.exists():
        try:
            header = TarIndex(beside).header
            if (header.plan, header.tar_bytes) == (plan, state.st_size):
                return beside
        except ValueError:
            pass
    return folder / f"{hash_parts(plan, str(tar.absolute()), f'{state.st_size} {state.st_mtime_ns}')[:40]}.index"


def _make(todo: dict[Path, Path], prepared: PreparedSet) -> None:
    size = sum(tar.stat().st_size for tar in todo)
    count = 1 if size < SMALL else min(8, os.cpu_count() or 1)
    work = partial(_make_one, fields=prepared.fields, plan=prepared.plan)
    with Progress(len(todo), "tars", title="indexing, once") as bar:
        for _ in in_processes(work, list(todo.items()), count):
            bar.update()


def _make_one(job: tuple[Path, Path], *, fields: Fields, plan: str) -> None:
    tar, place = job
    write_index(place, *scan(tar, fields, checksums=False, plan=plan))


@contextmanager
def _alone(folder: Path):
    """Nobody else on this machine is in here with this folder. Raises OSError."""
    with open(open_to_write(folder / "lock", os.O_WRONLY | os.O_CREAT, root=folder.parent, make=True), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process, however that ends
        yield
