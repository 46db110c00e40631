"""Rows that are drawn in full permutations, one after the other, and the rows of one shape among many."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from opendit.data.order.permutation import permuted_each

_BLOCK, CHUNK = 1024, 1024 * 1024
FEW = 32  # keys


class Pool:
    """An endless sequence of ``size`` rows: a fresh keyed permutation of them every epoch, all of each.

    select: the data set's rows (n,) of numbers (n,) below ``size``. domain: see ``permuted``.
    """

    def __init__(self, size: int, seed: int, domain: int, select: Callable[[np.ndarray], np.ndarray]):
        self.size, self.seed, self.domain, self.select = size, seed, domain, select

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The data set's rows at ``positions`` (n,) int64 of the sequence; int64."""
        return rows_of([self], np.zeros(len(positions), dtype=np.int64), positions)


def rows_of(pools: Sequence[Pool], of: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The data set's rows at ``positions`` (n,) int64, each of the sequence of ``pools[of]``, of (n,) int64; int64. All
    pools have one seed."""
    rows = np.empty(len(positions), dtype=np.int64)
    used, number = np.unique(of, return_inverse=True)
    chosen = [pools[each] for each in used.tolist()]
    sizes, domains = np.array([(pool.size, pool.domain) for pool in chosen], dtype=np.int64).reshape(-1, 2)[number].T
    epochs, places = np.divmod(positions, sizes)
    places = permuted_each(places, sizes, pools[0].seed, domains, epochs)
    for each, pool in enumerate(chosen):
        here = number == each
        rows[here] = pool.select(places[here])
    return rows


class RowsByKey:
    """Finds the n-th row of a key among ``keys`` (rows,), without a list of the rows: keys may be mapped from a file.

    values: the keys there are, sorted. totals: rows of each.
    """

    def __init__(self, keys: np.ndarray):
        self.keys = keys = np.asarray(keys)  # a view without the mapping's class, whose parts take long to make
        chunks = [slice(start, start + CHUNK) for start in range(0, len(keys), CHUNK)]
        self.values = keys[:0]
        for chunk in chunks:
            self.values = np.union1d(self.values, _others(keys[chunk], self.values))
        counts = [
            np.add.reduceat(keys[chunk] == value, range(0, len(keys[chunk]), _BLOCK), dtype=np.int64)
            for value in self.values
            for chunk in chunks
        ]
        blocks = -(-len(keys) // _BLOCK)
        table = np.concatenate(counts).reshape(len(self.values), blocks) if counts else np.zeros((0, 0), np.int64)
        self._ends = np.cumsum(table, axis=1)  # of every key: its rows up to the end of each block
        self.totals = [int(ends[-1]) for ends in self._ends]

    def selector(self, value: int) -> Callable[[np.ndarray], np.ndarray]:
        return partial(self.select, value)

    def select(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """The rows of the ``value``-th key at ``numbers`` (n,) among its rows in ascending order; int64."""
        ends, rows = self._ends[value], np.empty(len(numbers), dtype=np.int64)
        blocks = np.searchsorted(ends, numbers, side="right")
        for block in np.unique(blocks).tolist():
            start, here = block * _BLOCK, blocks == block
            found = np.flatnonzero(self.keys[start : start + _BLOCK] == self.values[value])
            rows[here] = start + found[numbers[here] - (int(ends[block - 1]) if block else 0)]
        return rows


def _others(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The keys, in any number, that are not among ``values``; of many values perhaps all, which to sort is quicker."""
    if len(values) > FEW:
        return keys
    other = np.ones(len(keys), dtype=bool)
    for value in values:  # comparing takes a hundredth of the time of sorting
        other &= keys != value
    return keys[other]
