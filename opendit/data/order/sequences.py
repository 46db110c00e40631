"""Random sequences whose entry at any place is known without the entries before it.

``permuted`` is a keyed permutation that is computed where it is needed, in memory that does not grow with its size. A
``Pool`` is permutation after permutation of some rows. A ``Mixture`` takes its elements from several components in
fixed proportions.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
import torch

from opendit.diffusion.random import philox4x32

SORTED = 2**16  # numbers up to which a permutation is sorted, not computed
ROUNDS = 8
FEW = 32  # keys that are compared one by one
CHUNK = 1024 * 1024  # keys looked at together
_BLOCK = 1024  # keys that are counted together


# ------------------------------------------------------------------------------------------ permutations


def permuted(positions: np.ndarray, size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    """Return the entries at ``positions`` of the permutation of the numbers below ``size`` for (seed, domain, epoch).

    Large permutations are a Feistel network over the two digits of a number in mixed radix, with cycle walking for
    what falls past the end (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3);
    its round function is Philox. Such networks are poor on very small domains: up to ``SORTED`` numbers are sorted by
    words of Philox, which makes all their orders equally likely.

    Args:
        positions: (n,) int64 below ``size``.
        size: up to 2^61.
        domain: below 2^32; other domains have independent permutations.

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
    """Return entries of a different permutation at every position, as :func:`permuted` does; all arrays (n,) int64.

    Every distinct short permutation costs a call of :func:`permuted`."""
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
    # The values of raw Philox words are frozen by numpy's policy, unlike Generator.permutation's.
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, domain, 1], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.uint16)


def _walk(positions: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Apply the network, again and again to what falls past the end of its permutation."""
    out, outside = positions.copy(), np.arange(len(positions))
    while len(outside):
        out[outside] = _feistel(out[outside], sizes[outside], domains[outside], epochs[outside], seed)
        outside = outside[out[outside] >= sizes[outside]]
    return out


def _feistel(numbers: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Permute the numbers below ``high * low``, the product of two bases that is their size or slightly more."""
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
    """An endless sequence over ``size`` rows: a new keyed permutation of all of them in every epoch.

    domain: see :func:`permuted`. select: maps numbers (n,) below ``size`` to rows (n,) of the data set.
    """

    def __init__(self, size: int, seed: int, domain: int, select: Callable[[np.ndarray], np.ndarray]):
        self.size, self.seed, self.domain, self.select = size, seed, domain, select

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the data set's rows at ``positions`` (n,) int64 of the sequence; (n,) int64."""
        return rows_of([self], np.zeros(len(positions), dtype=np.int64), positions)


def rows_of(pools: Sequence[Pool], of: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the data set's rows at ``positions`` of the sequences ``pools[of]``; all arrays (n,) int64.

    All pools have the same seed."""
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
    """Index that finds the n-th row of a key among ``keys`` (rows,) without a list of the rows.

    ``keys`` may be mapped from a file. values: the distinct keys, sorted. totals: the number of rows of each.
    """

    def __init__(self, keys: np.ndarray):
        self.keys = keys = np.asarray(keys)  # a view without the mapping's class, which is slow to slice
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
        self._ends = np.cumsum(table, axis=1)  # (values, blocks): rows of each key up to the end of each block
        self.totals = [int(ends[-1]) for ends in self._ends]

    def selector(self, value: int) -> Callable[[np.ndarray], np.ndarray]:
        return partial(self.select, value)

    def select(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """Return the rows at ``numbers`` (n,) among the rows of the ``value``-th key in ascending order; (n,) int64."""
        ends, rows = self._ends[value], np.empty(len(numbers), dtype=np.int64)
        blocks = np.searchsorted(ends, numbers, side="right")
        for block in np.unique(blocks).tolist():
            start, here = block * _BLOCK, blocks == block
            found = np.flatnonzero(self.keys[start : start + _BLOCK] == self.values[value])
            rows[here] = start + found[numbers[here] - (int(ends[block - 1]) if block else 0)]
        return rows


def _others(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the keys, with repetitions, that are not among ``values``; all keys where there are many values, because
    sorting them is then quicker."""
    if len(values) > FEW:
        return keys
    other = np.ones(len(keys), dtype=bool)
    for value in values:  # comparing takes a hundredth of the time of sorting
        other &= keys != value
    return keys[other]


# ------------------------------------------------------------------------------------------ mixtures


class Mixture:
    """An endless sequence that assigns a component to every position, in fixed proportions.

    The sequence is made of blocks. Up to the end of block b component c has been taken floor(b * rate_c) times,
    whatever the rates, so its share is off by less than one there. Within a block the order is a keyed permutation.

    Args:
        stages: (first position, the rate of every component: its mean number of elements in a block), in order of
            position, the first at 0. A component's count continues from one stage to the next.
        domain: see :func:`permuted`; the stages take successive ones.
        in_order: a component's elements come in order; otherwise in any order within a block, and blocks may have any
            length.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[Fraction]]], seed: int, domain: int, in_order: bool = True):
        self._starts = [start for start, _ in stages]
        self._stages = [_Stage(rates, seed, domain + number, in_order) for number, (_, rates) in enumerate(stages)]
        self._counts = [np.zeros(len(stages[0][1]), dtype=np.int64)]  # of the components, where each stage begins
        for number, start in enumerate(self._starts[1:]):
            self._counts.append(self._counts[-1] + self._stages[number].counts(start - self._starts[number]))

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the component at each position of [start, stop), and how many of its elements come before; int64."""
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
        """Count the positions of every component before ``position``; (components,) int64."""
        number = self._stage(position)
        return self._counts[number] + self._stages[number].counts(position - self._starts[number])

    def block(self, position: int) -> int:
        """Return the block that contains a position, counted from the beginning of its stage."""
        number = self._stage(position)
        return self._stages[number].block(position - self._starts[number])

    def length(self, blocks: int) -> int:
        """Return the number of positions in the first ``blocks`` blocks of the first stage."""
        return sum(self._stages[0].before(blocks))

    def _stage(self, position: int) -> int:
        return max(number for number, start in enumerate(self._starts) if start <= position)


class _Stage:
    """A mixture of constant rates."""

    def __init__(self, rates: Sequence[Fraction], seed: int, domain: int, in_order: bool):
        self.denominator = math.lcm(*(rate.denominator for rate in rates))
        self.rates = [rate.numerator * (self.denominator // rate.denominator) for rate in rates]
        self.seed, self.domain, self.in_order = seed, domain, in_order

    def before(self, block: int) -> list[int]:
        """Count the positions of every component before a block."""
        return [block * rate // self.denominator for rate in self.rates]

    def block(self, position: int) -> int:
        # Before block b are between b * rate - components and b * rate positions, which leaves few blocks to look at.
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
