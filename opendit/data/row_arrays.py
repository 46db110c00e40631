"""Arrays with an entry for every row of a data set, and lists of nearly all rows: too long to copy."""

from collections.abc import Callable
from typing import Any, overload

import numpy as np

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
