"""Random sequences whose entry at any position is computed without the entries before it.

``permuted`` computes entries of a keyed permutation, in memory that does not grow with the permutation's size. A
``Pool`` is an endless sequence of permutations of some rows. A ``Mixture`` takes its elements from several components
in fixed proportions.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
import torch

from opendit.diffusion.random import philox4x32

SORTED = 2**16  # maximum size of a permutation that is made by sorting random words
ROUNDS = 8  # rounds of the Feistel network
FEW = 32  # maximum number of values for which keys are compared with each value
CHUNK = 1024 * 1024  # keys compared at once
_BLOCK = 1024  # keys per block of RowsByKey's table of counts


# ------------------------------------------------------------------------------------------ permutations


def permuted(positions: np.ndarray, size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    """Return the entries at ``positions`` of the permutation of the numbers below ``size`` for (seed, domain, epoch).

    A large permutation is a Feistel network over the two digits of a number in mixed radix, with cycle walking for
    results that are not below ``size`` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
    methods 2 and 3). The round function is Philox. Such networks are poor on very small domains. Therefore up to
    ``SORTED`` numbers are sorted by random Philox words instead, so that all orders are equally likely.

    Args:
        positions: (n,) int64 below ``size``.
        size: at most 2^61.
        domain: below 2^32; different domains have independent permutations.

    Returns:
        (n,) int64.
    """
    if size <= SORTED:
        return _sorted(size, seed % 2**64, domain, epoch)[positions].astype(np.int64)
    sizes, domains, epochs = (np.full(len(positions), of) for of in (size, domain, epoch))
    return _walk(positions, sizes, domains, epochs, seed)


def permuted_each(
    positions: np.ndarray, sizes: np.ndarray, seed: int, domains: np.ndarray, epochs: np.ndarray
) -> np.ndarray:
    """Return the result of :func:`permuted` with a separate size, domain and epoch for every position; all arrays are
    (n,) int64.

    Each distinct permutation of up to ``SORTED`` numbers needs a call of :func:`permuted`."""
    out, large = np.zeros_like(positions), sizes > SORTED
    out[large] = _walk(positions[large], sizes[large], domains[large], epochs[large], seed)
    if not large.all():
        which = np.stack([sizes, domains, epochs], axis=1)
        for size, domain, epoch in np.unique(which[~large], axis=0).tolist():
            here = (sizes == size) & (domains == domain) & (epochs == epoch)
            out[here] = permuted(positions[here], size, seed, domain, epoch)
    return out


@lru_cache(maxsize=64)
def _sorted(size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    # numpy guarantees that raw Philox words never change; it does not guarantee this for Generator.permutation.
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, domain, 1], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.uint16)


def _walk(positions: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Apply the Feistel network. Apply it again to results that are not below their size, until all are."""
    out, outside = positions.copy(), np.arange(len(positions))
    while len(outside):
        out[outside] = _feistel(out[outside], sizes[outside], domains[outside], epochs[outside], seed)
        outside = outside[out[outside] >= sizes[outside]]
    return out


def _feistel(numbers: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Permute the numbers below the product of two bases. The product equals the size or is slightly larger."""
    different, of = np.unique(sizes, return_inverse=True)
    roots = np.array([math.isqrt(size - 1) + 1 for size in different.tolist()], dtype=np.int64)
    bases = tuple(torch.from_numpy(base[of]) for base in (roots, -(-different // roots)))
    left, right = (torch.from_numpy(digit) for digit in np.divmod(numbers, bases[1].numpy()))
    constants = torch.from_numpy(epochs % 2**32), torch.from_numpy(domains)
    for number in range(ROUNDS):
        base = bases[number % 2]
        word = philox4x32((right, torch.tensor(number), *constants), seed)[0]
        left, right = right, (left + word * base // 2**32) % base
    return (left * bases[1] + right).numpy()


# ------------------------------------------------------------------------------------------ pools of rows


class Pool:
    """An endless sequence of ``size`` rows, with a new keyed permutation of all the rows in every epoch.

    domain: see :func:`permuted`. select: maps numbers (n,) below ``size`` to rows (n,) of the data set."""

    def __init__(self, size: int, seed: int, domain: int, select: Callable[[np.ndarray], np.ndarray]):
        self.size, self.seed, self.domain, self.select = size, seed, domain, select

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the data set's rows at ``positions`` (n,) int64 of the sequence; (n,) int64."""
        return rows_of([self], np.zeros(len(positions), dtype=np.int64), positions)


def rows_of(pools: Sequence[Pool], of: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the data set's rows at ``positions[i]`` of the sequence ``pools[of[i]]``; all arrays are (n,) int64.

    All pools must have the same seed."""
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
    """Index that finds the n-th row with a given key without a list of all rows.

    Attributes:
        keys: (rows,) key of each row; may be memory-mapped.
        values: the distinct keys, sorted.
        totals: number of rows of each distinct key.
    """

    def __init__(self, keys: np.ndarray):
        self.keys = keys = np.asarray(keys)  # a plain array view, because slicing np.memmap is slow
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
        self._ends = np.cumsum(table, axis=1)  # (values, blocks): number of rows of each key up to each block's end
        self.totals = [int(ends[-1]) for ends in self._ends]

    def selector(self, value: int) -> Callable[[np.ndarray], np.ndarray]:
        return partial(self.select, value)

    def select(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """Return rows of the ``value``-th distinct key, (n,) int64. ``numbers`` (n,) are ranks among the rows of this
        key."""
        ends, rows = self._ends[value], np.empty(len(numbers), dtype=np.int64)
        blocks = np.searchsorted(ends, numbers, side="right")
        for block in np.unique(blocks).tolist():
            start, here = block * _BLOCK, blocks == block
            found = np.flatnonzero(self.keys[start : start + _BLOCK] == self.values[value])
            rows[here] = start + found[numbers[here] - (int(ends[block - 1]) if block else 0)]
        return rows


def _others(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the keys, with repetitions, that are not among ``values``.

    If there are more than ``FEW`` values, return all keys, because sorting them is then faster than comparing."""
    if len(values) > FEW:
        return keys
    other = np.ones(len(keys), dtype=bool)
    for value in values:  # a comparison takes a hundredth of the time of sorting
        other &= keys != value
    return keys[other]


# ------------------------------------------------------------------------------------------ mixtures


class Mixture:
    """An endless sequence that assigns a component to every position, in fixed proportions.

    The sequence consists of blocks. ``rate_c`` is the mean number of elements of component c in a block. Component c
    occurs floor(b * rate_c) times in the first b blocks, so at the end of a block its count is less than one below the
    exact proportion. The order within a block is a keyed permutation.

    Args:
        stages: (first position, rates) in order of position; the first stage begins at position 0. Counts of components
            continue from one stage to the next.
        domain: see :func:`permuted`; stage i uses ``domain + i``.
        in_order: True returns the elements of a component in order. False returns them in any order within a block,
            which makes very long blocks possible.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[Fraction]]], seed: int, domain: int, in_order: bool = True):
        self._starts = [start for start, _ in stages]
        self._stages = [_Stage(rates, seed, domain + number, in_order) for number, (_, rates) in enumerate(stages)]
        self._counts = [np.zeros(len(stages[0][1]), dtype=np.int64)]  # elements of each component before each stage
        for number, start in enumerate(self._starts[1:]):
            self._counts.append(self._counts[-1] + self._stages[number].counts(start - self._starts[number]))

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each position in [start, stop), the component and the number of that component's earlier
        elements; int64."""
        components, ranks = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for stage, first, end, counts in zip(
            self._stages, self._starts, [*self._starts[1:], stop], self._counts, strict=True
        ):
            begin, until = max(start, first), min(stop, end)
            if begin < until:
                component, rank = stage.locate(begin - first, until - first)
                components.append(component)
                ranks.append(rank + counts[component])
        return np.concatenate(components), np.concatenate(ranks)

    def counts(self, position: int) -> np.ndarray:
        """Return how many positions before ``position`` belong to each component; (components,) int64."""
        number = self._stage(position)
        return self._counts[number] + self._stages[number].counts(position - self._starts[number])

    def block(self, position: int) -> int:
        """Return the index of the block that contains a position, counted from the beginning of the stage."""
        number = self._stage(position)
        return self._stages[number].block(position - self._starts[number])

    def length(self, blocks: int) -> int:
        """Return the number of positions in the first ``blocks`` blocks of the first stage."""
        return sum(self._stages[0].before(blocks))

    def _stage(self, position: int) -> int:
        return max(number for number, start in enumerate(self._starts) if start <= position)


class _Stage:
    """A mixture with constant rates."""

    def __init__(self, rates: Sequence[Fraction], seed: int, domain: int, in_order: bool):
        self.denominator = math.lcm(*(rate.denominator for rate in rates))
        self.rates = [rate.numerator * (self.denominator // rate.denominator) for rate in rates]
        self.seed, self.domain, self.in_order = seed, domain, in_order

    def before(self, block: int) -> list[int]:
        """Return the number of positions of each component before a block."""
        return [block * rate // self.denominator for rate in self.rates]

    def block(self, position: int) -> int:
        # Block b begins at b * sum of rates, or earlier by less than one position per component.
        total = sum(self.rates)
        low = position * self.denominator // total
        high = low + len(self.rates) * self.denominator // total + 1
        while low < high:
            middle = (low + high) // 2
            if sum(self.before(middle + 1)) > position:
                high = middle
            else:
                low = middle + 1
        return low

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        components, ranks = [], []
        block = self.block(start)
        while start < stop:
            before, after = np.array(self.before(block)), np.array(self.before(block + 1))
            first, end = int(before.sum()), min(stop, int(after.sum()))
            if start < end:
                ends = np.cumsum(after - before)
                begin = 0 if self.in_order else start - first
                places = np.arange(begin, end - first)
                slots = permuted(places, int(ends[-1]), self.seed, self.domain, block)
                component = np.searchsorted(ends, slots, side="right")
                rank = after[component] - (ends[component] - slots)
                if self.in_order:
                    for each in np.unique(component).tolist():
                        here = np.flatnonzero(component == each)
                        rank[here] = before[each] + np.arange(len(here))
                components.append(component[start - first - begin :])
                ranks.append(rank[start - first - begin :])
                start = end
            block += 1
        return np.concatenate(components), np.concatenate(ranks)

    def counts(self, position: int) -> np.ndarray:
        if position == 0:
            return np.zeros(len(self.rates), dtype=np.int64)
        before = np.array(self.before(self.block(position - 1)))
        component, _ = self.locate(int(before.sum()), position)
        return before + np.bincount(component, minlength=len(self.rates))
