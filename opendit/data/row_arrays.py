"""Arrays with an entry for every row of a data set, too long to copy or to make twice: one process of a machine makes
them and keeps them in files, the others map these."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from opendit.common.safe_files import creating, open_to_write, remove_tree, rename, write_whole
from opendit.common.utils import HashedStream

_ROWS = 2**20  # hashed, or chosen, at once
_LOOKED_AT = 2**16  # rows in which the next one of a key is looked for


def stream_of(array: Any, as_hashed: Callable[[np.ndarray], np.ndarray] = np.asarray) -> HashedStream:
    """Return the bytes of ``as_hashed(array)``, which is called for one part of the array after another."""
    parts = (as_hashed(array[first : first + _ROWS]).tobytes() for first in range(0, len(array), _ROWS))
    return HashedStream(len(array) * as_hashed(array[:1]).nbytes, parts)


def chosen(values: np.ndarray, rows: Any) -> np.ndarray:
    """Return ``values[rows]`` for rows that need not be a list in memory."""
    found = np.empty((len(rows), *values.shape[1:]), dtype=values.dtype)
    for first in range(0, len(rows), _ROWS):
        found[first : first + _ROWS] = values[rows[first : first + _ROWS]]
    return found


def spread(size: int, most: int) -> list[int]:
    """Return up to ``most`` of the numbers below ``size``, spread evenly, in rising order."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64)).tolist()


def next_of_key(keys: np.ndarray, row: int) -> int:
    """Return the next row whose key is that of ``row``, in a circle."""
    for start in (*range(row + 1, len(keys), _LOOKED_AT), *range(0, row + 1, _LOOKED_AT)):
        later = np.flatnonzero(keys[start : start + _LOOKED_AT] == keys[row])
        if len(later):
            return start + int(later[0])
    raise AssertionError("unreachable: this row has this key")


class Complement:
    """The numbers below ``size`` that are not among ``without``, indexed as a rising array of them would be.

    without: rising, of any integer type. It takes twice its memory, however large ``size`` is.
    """

    def __init__(self, size: int, without: np.ndarray):
        self.size, self.without = size, without
        # The numbers before each gap: as many gaps precede the n-th number as have at most n numbers before them.
        self._before = without - np.arange(len(without), dtype=without.dtype)

    def __len__(self) -> int:
        return self.size - len(self.without)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, place: Any) -> Any:
        """Return the numbers at a slice or at an array of places int64."""
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1 or stop <= start:
                return self[np.arange(start, stop, step)]
            first, last = self[start], self[stop - 1]
            low, high = self._count([first, last], self.without)
            return np.delete(np.arange(first, last + 1), self.without[low:high].astype(np.int64) - first)
        if isinstance(place, np.ndarray):
            return place.astype(np.int64) + self._count(place, self._before, "right")
        if not -len(self) <= place < len(self):
            raise IndexError(f"{place} of {len(self)} numbers")
        place = int(place) % len(self)
        return place + int(self._count(place, self._before, "right"))

    def searchsorted(self, numbers: Any) -> np.ndarray:
        """Count how many of these numbers lie below each one of ``numbers``, from 0 to ``size``."""
        return np.asarray(numbers) - np.searchsorted(self.without, numbers)

    def _count(self, numbers: Any, among: np.ndarray, side: Any = "left") -> np.ndarray:
        # With another dtype ``searchsorted`` would copy all of them first.
        return among.searchsorted(np.asarray(numbers, dtype=among.dtype), side=side)


FOLDER = "OPENDIT_SIZE_CACHE"  # of the environment
DEFAULT_FOLDER = "~/.cache/opendit/sizes"
LARGE = 2**20  # rows from which on what is known of each is kept in a file
_ABOUT = "about.json"


@contextmanager
def locked(name: str) -> Iterator[Path | None]:
    """Hold the lock ``name`` among the processes of this machine, and return the cache's folder; None if it can't be
    written. A lock ends with its process, however that ends."""
    folder, lock = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER).expanduser(), None
    try:
        path = folder / f"{name}.lock"
        lock = open(open_to_write(path, os.O_WRONLY | os.O_CREAT, make=True), "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        folder = None
    try:
        yield folder
    finally:
        if lock is not None:
            lock.close()


class KeptArrays(NamedTuple):
    """Arrays by name, mapped from files where they were kept; about: what JSON can hold."""

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


def kept(name: str, make: Callable[[], KeptArrays]) -> KeptArrays:
    """Return ``make()``, which one process of this machine calls once, and whose result all map.

    name: a hash of everything that decides the result. If nothing can be written, or what was written is damaged, it is
    made anew.
    """
    with locked(name) as cache:
        folder = None if cache is None else cache / f"{name}.arrays"
        if folder is not None and (found := _read(folder)) is not None:
            return found
        made = make()
        if folder is None:
            return made
        try:
            _write(folder, made)
        except OSError:
            return made
        again = _read(folder)
        return made if again is None else again


def kept_array(rows: int, name: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return ``make()``, (rows,); with ``LARGE`` rows or more :func:`kept` under ``name()``."""
    if rows < LARGE:
        return make()
    return kept(name(), lambda: KeptArrays({"array": make()}, {})).arrays["array"]


def _write(folder: Path, made: KeptArrays) -> None:
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, array in made.arrays.items():
            with creating(work / f"{name}.npy") as file:
                np.save(file, array)
        shapes = {name: [str(array.dtype), len(array)] for name, array in made.arrays.items()}
        write_whole(work / _ABOUT, json.dumps({"arrays": shapes, "about": made.about}).encode())
        remove_tree(folder)  # one that is damaged
        rename(work, folder)
    finally:
        remove_tree(work)


def _read(folder: Path) -> KeptArrays | None:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in about["arrays"]}
        fits = all([str(a.dtype), len(a)] == about["arrays"][name] for name, a in arrays.items())
        return KeptArrays(arrays, about["about"]) if fits else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
