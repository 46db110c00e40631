"""The samples of a tar that a data set has, if it doesn't have all of them."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class KeptRows:
    """The rows of an index in [first, last) that are not among ``without`` (rising, of that range): a data set's own
    numbers of a tar's samples, 0, 1, ..., are given to these."""

    first: int
    last: int
    without: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self.last - self.first - len(self.without)

    def row(self, place: int) -> int:
        """The row of the ``place``-th of them."""
        if not len(self.without):
            return self.first + place
        before = self.without - self.first - np.arange(len(self.without))  # how many are kept before each gap
        return self.first + place + int(np.searchsorted(before, place, side="right"))

    def rows(self) -> np.ndarray:
        """All of them, rising."""
        return np.setdiff1d(np.arange(self.first, self.last), self.without, assume_unique=True)

    def identity(self) -> str:
        return f"{self.first}-{self.last} without {self.without.tolist()}"
