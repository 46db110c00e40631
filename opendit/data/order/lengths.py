"""The tokens of every row's sample, known by its shape: no list of them is kept."""

from typing import Any, NamedTuple

import numpy as np

_CHUNK = 2**20  # rows looked at together


class Lengths:
    """Indexed as an array of the tokens of every row is.

    keys: (rows,) the number of each row's shape; may be mapped from a file. tokens: (shapes,) of a sample of each.
    """

    def __init__(self, keys: np.ndarray, tokens: np.ndarray):
        self.keys, self.tokens = keys, tokens

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Any) -> Any:
        return self.tokens[self.keys[rows]]


class Summary(NamedTuple):
    """rows: how many. least, most, total: of their tokens."""

    rows: int
    least: int
    most: int
    total: int

    @property
    def mean(self) -> float:
        return self.total / self.rows


def summary_of(lengths: np.ndarray | Lengths, start: int, stop: int) -> Summary:
    """Summarise rows [start, stop), at least one, in memory that does not grow with them."""
    parts = (lengths[first : min(stop, first + _CHUNK)] for first in range(start, stop, _CHUNK))
    found = [(int(part.min()), int(part.max()), int(part.sum(dtype=np.int64))) for part in parts]
    least, most, total = zip(*found, strict=True)
    return Summary(stop - start, min(least), max(most), sum(total))
