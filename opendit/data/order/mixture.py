"""A sequence that takes its elements from several components in given proportions, known at any position without what
is before it."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from opendit.data.order.permutation import permuted


class Mixture:
    """Assign a component to every position of an endless sequence, and count those of that component before it.

    The sequence is made of blocks. Up to the end of block b component c has been taken floor(b * rate_c) times,
    whatever the rates, so its share is off by less than one there; within a block the order is a keyed permutation.

    stages: (first position, the rate of every component: how many a block takes on average) in order of position, the
    first at 0; a component's count goes on from one stage to the next. domain: see ``permuted``; the stages take
    successive ones. in_order: a component's elements come in order; else, within a block, in any, and blocks may be of
    any length.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[Fraction]]], seed: int, domain: int, in_order: bool = True):
        self._starts = [start for start, _ in stages]
        self._stages = [_Stage(rates, seed, domain + number, in_order) for number, (_, rates) in enumerate(stages)]
        self._counts = [np.zeros(len(stages[0][1]), dtype=np.int64)]  # of the components, where each stage begins
        for number, start in enumerate(self._starts[1:]):
            self._counts.append(self._counts[-1] + self._stages[number].counts(start - self._starts[number]))

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(component, how many of it are before) for the positions from ``start`` to before ``stop``; int64."""
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
        """Count the positions of every component before ``position``; int64."""
        number = self._stage(position)
        return self._counts[number] + self._stages[number].counts(position - self._starts[number])

    def block(self, position: int) -> int:
        """The block that a position is in, counted from the beginning of its stage."""
        number = self._stage(position)
        return self._stages[number].block(position - self._starts[number])

    def length(self, blocks: int) -> int:
        """Positions in the first blocks of the first stage."""
        return sum(self._stages[0].before(blocks))

    def _stage(self, position: int) -> int:
        return max(number for number, start in enumerate(self._starts) if start <= position)


class _Stage:
    """A mixture whose rates stay."""

    def __init__(self, rates: Sequence[Fraction], seed: int, domain: int, in_order: bool):
        self.denominator = lcm(*(rate.denominator for rate in rates))
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
