"""Arrays with an entry for every row of a data set: too long to copy, mapped from files, or computed part by part."""

from collections.abc import Callable
from typing import Any

import numpy as np

from opendit.common.utils import HashedStream

_ROWS = 2**20  # hashed, or chosen, at once
_LOOKED_AT = 2**16  # rows in which the next one of a key is looked for


def stream_of(array: Any, as_hashed: Callable[[np.ndarray], np.ndarray] = np.asarray) -> HashedStream:
    """The bytes of ``as_hashed(array)``, which works on parts of it as well."""
    parts = (as_hashed(array[first : first + _ROWS]).tobytes() for first in range(0, len(array), _ROWS))
    return HashedStream(len(array) * as_hashed(array[:1]).nbytes, parts)


def chosen(values: np.ndarray, rows: Any) -> np.ndarray:
    """``values[rows]`` of rows that no list need hold."""
    found = np.empty((len(rows), *values.shape[1:]), dtype=values.dtype)
    for first in range(0, len(rows), _ROWS):
        found[first : first + _ROWS] = values[rows[first : first + _ROWS]]
    return found


def next_of_key(keys: np.ndarray, row: int) -> int:
    """The next row whose key is that of ``row``, in a circle."""
    for start in (*range(row + 1, len(keys), _LOOKED_AT), *range(0, row + 1, _LOOKED_AT)):
        later = np.flatnonzero(keys[start : start + _LOOKED_AT] == keys[row])
        if len(later):
            return start + int(later[0])
    raise AssertionError("unreachable: this row has this key")
