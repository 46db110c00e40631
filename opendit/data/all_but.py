"""Numbers that are chosen, where that is nearly all of them."""

from typing import Any, overload

import numpy as np


class AllBut:
    """The numbers below ``size`` that are not among ``without``, indexed as the rising array of them would be.

    without: rising, of any integer type. It is what is in memory, and as much again.
    """

    def __init__(self, size: int, without: np.ndarray):
        self.size, self.without = size, without
        # How many are there before each gap: as many gaps come before the n-th number as have at most n.
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
        # Of another type than theirs ``searchsorted`` would copy all of them first.
        return among.searchsorted(np.asarray(numbers, dtype=among.dtype), side=side)
