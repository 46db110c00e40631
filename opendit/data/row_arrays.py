"""Share arrays with one entry per row of a data set among a machine's processes.

One process computes a large array and stores it in a file. The other processes map the file.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from opendit.common.safe_files import creating, remove_tree, rename, write_whole
from opendit.common.utils import HashedStream
from opendit.data.files import file_locked

_ROWS = 2**20  # rows to hash or select at once
_LOOKED_AT = 2**16  # rows to search at once


def stream_of(array: Any, as_hashed: Callable[[np.ndarray], np.ndarray] = np.asarray) -> HashedStream:
    """Return the bytes of ``as_hashed(array)`` as a stream. ``as_hashed`` gets a limited number of rows per call."""
    parts = (as_hashed(array[first : first + _ROWS]).tobytes() for first in range(0, len(array), _ROWS))
    return HashedStream(len(array) * as_hashed(array[:1]).nbytes, parts)


def chosen(values: np.ndarray, rows: Any) -> np.ndarray:
    """Return ``values[rows]``, in chunks of ``rows``."""
    found = np.empty((len(rows), *values.shape[1:]), dtype=values.dtype)
    for first in range(0, len(rows), _ROWS):
        found[first : first + _ROWS] = values[rows[first : first + _ROWS]]
    return found


def next_of_key(keys: np.ndarray, row: int) -> int:
    """Return the next row with the key of ``row``, cyclically."""
    for start in (*range(row + 1, len(keys), _LOOKED_AT), *range(0, row + 1, _LOOKED_AT)):
        later = np.flatnonzero(keys[start : start + _LOOKED_AT] == keys[row])
        if len(later):
            return start + int(later[0])
    raise AssertionError("unreachable: this row has this key")


class TextTable(Sequence[str]):
    """An immutable list of strings in two arrays: the UTF-8 bytes (uint8) and each string's end (int64). Forked workers
    share arrays, but would copy Python strings page by page, because reference counts change."""

    def __init__(self, text: np.ndarray, ends: np.ndarray):
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> "TextTable":
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(len(self))[row]]
        row = range(len(self))[row]
        return self.text[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes().decode("utf-8", "surrogateescape")

    def encoded(self) -> Iterator[bytes]:
        text, start = self.text.tobytes(), 0
        for end in self.ends.tolist():
            yield text[start:end]
            start = end


class Complement:
    """The numbers below ``size`` that are not in ``without`` (ascending integers), indexed like an ascending array."""

    def __init__(self, size: int, without: np.ndarray):
        self.size, self.without = size, without
        # For each excluded number, how many remaining numbers are smaller. The n-th remaining number is n plus the
        # number of these counts up to n.
        self._before = without - np.arange(len(without), dtype=without.dtype)

    def __len__(self) -> int:
        return self.size - len(self.without)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, place: Any) -> Any:
        """Return the numbers at ``place``: int, slice or int64 array."""
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
        """Return how many numbers in this object are smaller, for each number in ``numbers`` (0 to ``size``)."""
        return np.asarray(numbers) - np.searchsorted(self.without, numbers)

    def _count(self, numbers: Any, among: np.ndarray, side: Any = "left") -> np.ndarray:
        # A number of another dtype would make ``searchsorted`` copy the array.
        return among.searchsorted(np.asarray(numbers, dtype=among.dtype), side=side)


FOLDER = "OPENDIT_SIZE_CACHE"  # environment variable that names the cache folder
DEFAULT_FOLDER = "~/.cache/opendit/sizes"
LARGE = 2**20  # minimum number of rows for storing arrays in a file
_ABOUT = "about.json"


class KeptArrays(NamedTuple):
    """Arrays by name, mapped from files if they are cached. about: further JSON-serialisable values."""

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


def kept(rows: int, name: Callable[[], str], make: Callable[[], KeptArrays], least: int | None = None) -> KeptArrays:
    """Return ``make()``. For at least ``least`` rows (default: ``LARGE``), one process per machine caches the result in
    files, and all processes map these files. Without a writable cache, return ``make()`` directly. name: returns a hash
    of everything that determines the result."""
    if rows < (LARGE if least is None else least):
        return make()
    identity = name()
    folder = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER).expanduser()
    file = folder / f"{identity}.arrays"
    with ExitStack() as stack:
        try:
            stack.enter_context(file_locked(folder / f"{identity}.lock", make=True))
        except OSError:
            return make()
        if (found := _read(file)) is not None:
            return found
        made = make()
        with suppress(OSError):
            _write(file, made)
        return _read(file) or made


def kept_array(
    rows: int, name: Callable[[], str], make: Callable[[], np.ndarray], least: int | None = None
) -> np.ndarray:
    """Return the array ``make()`` with ``rows`` rows, cached as in :func:`kept`."""
    return kept(rows, name, lambda: KeptArrays({"array": make()}, {}), least).arrays["array"]


def _write(folder: Path, made: KeptArrays) -> None:
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, array in made.arrays.items():
            with creating(work / f"{name}.npy") as file:
                np.save(file, array)
        shapes = {name: [str(array.dtype), len(array)] for name, array in made.arrays.items()}
        write_whole(work / _ABOUT, json.dumps({"arrays": shapes, "about": made.about}).encode())
        remove_tree(folder)  # a damaged folder from an earlier run
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
