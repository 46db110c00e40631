"""The schedule of a data set of several sources."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np

from opendit.data.order.mixture import Mixture
from opendit.data.order.pool import Pool, RowsByKey, rows_of
from opendit.data.order.schedule import PARTS, POOLS, SOURCES, BatchSchedule, StepRows, part_of, steps_of

_SAMPLES, _PARTS = 128, 16  # of a block, about, in which the order of sources, or of shapes, is drawn
_MOST, _MOST_SHAPES = 256, 4096  # sources, and shapes: domains of permutations do not run into each other


@dataclass(frozen=True)
class SourceRows:
    """The sources of a data set's rows, and the proportions in which they are drawn.

    names: of the sources. ends: (sources,) where each source's rows end; they begin where the one before ends.
    stages: (first step, the weight of every source) in order of step, the first at 0; weights may have any sum, and 0
    is a source that is not drawn in this stage. epoch: samples of a pass over the data. epochs: how often a pass draws
    each source, where that, and not weights, was asked for: the first stage's weights are those times the sizes.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    stages: tuple[tuple[int, tuple[Fraction, ...]], ...]
    epoch: int
    epochs: tuple[Fraction, ...] | None = None

    def of_rows(self, ends: Sequence[int]) -> "SourceRows":
        """The same of a part of the rows, which are numbered anew. ends: where those of each source end."""
        left = replace(self, ends=tuple(ends))
        if self.epochs is None:
            return replace(left, epoch=round(self.epoch * ends[-1] / self.ends[-1]))
        weights = tuple(epochs * size for epochs, size in zip(self.epochs, left.sizes, strict=True))
        return replace(left, stages=((0, weights), *self.stages[1:]), epoch=max(1, int(sum(weights))))

    @property
    def sizes(self) -> list[int]:
        return np.diff([0, *self.ends]).tolist()

    def check(self) -> None:
        """Raises ValueError for a source without samples."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if size == 0:
                raise ValueError(f"the source {name} has no samples")

    def count(self, rows: np.ndarray) -> np.ndarray:
        """(sources,) int64: how many of some rows are each source's."""
        return np.bincount(np.searchsorted(self.ends, rows, side="right"), minlength=len(self.ends))

    def log(self, counts: np.ndarray) -> dict[str, Any]:
        """Return fields for the log, {"sources": {name: {"share": of all samples so far, "epoch": passes over it}}}; a
        share is None if none was drawn. counts: samples drawn of each source."""
        seen, found = int(counts.sum()), {}
        for name, count, size in zip(self.names, counts.tolist(), self.sizes, strict=True):
            found[name] = {"share": count / seen if seen else None, "epoch": count / size}
        return {"sources": found}


class BlendSchedule(BatchSchedule):
    """Several sources in the proportions of their weights, each in permutation after permutation of its own.

    keys: the shape key of every row, None where all are alike. samples: of a unit, for every shape in order of its key;
    None: one each. With shapes, a micro-batch is of one shape and mixes the
    sources that have it; every shape of a source has permutations of its own. Raises ValueError if there are fewer rows
    than a global batch, or a source has none.
    """

    def __init__(
        self,
        sources: SourceRows,
        global_batch: int,
        micro_batches: int,
        seed: int,
        keys: np.ndarray | None = None,
        samples: Sequence[int] | None = None,
    ):
        super().__init__(sources.ends[-1], global_batch, seed)
        self.sources, starts = sources, [0, *sources.ends[:-1]]
        sources.check()
        of_source = [None if keys is None else RowsByKey(keys[a:b]) for a, b in zip(starts, sources.ends, strict=True)]
        values = (
            [0]
            if keys is None
            else sorted({value for each in of_source if each is not None for value in each.values.tolist()})
        )
        self._samples = [1] * len(values) if samples is None else list(samples)
        self._shaped = len(values) > 1 or self._samples != [1]
        if len(starts) > _MOST or len(values) > _MOST_SHAPES:
            raise ValueError(
                f"{len(starts)} sources of {len(values)} shapes: at most {_MOST} of {_MOST_SHAPES} can be blended"
            )
        self._cut = micro_batches if self._shaped else 1
        units = part_of(global_batch, self._cut)
        self._part = [units * count for count in self._samples]  # samples of a micro-batch over all ranks
        # Of a source's rows the share of each shape, and the rows of it.
        self._shares, self._pools = [], []
        self._place: dict[tuple[int, int], int] = {}  # of (shape, source) among the pools
        for number, (start, size, shapes) in enumerate(zip(starts, sources.sizes, of_source, strict=True)):
            found = {0: size} if shapes is None else dict(zip(shapes.values.tolist(), shapes.totals, strict=True))
            self._shares.append([Fraction(found.get(value, 0), size) for value in values])
            for place, value in enumerate(found):
                select = partial(_select, start, None if shapes is None else shapes.selector(place))
                shape = values.index(value)
                self._place[shape, number] = len(self._pools)
                self._pools.append(Pool(found[value], seed, POOLS + shape * _MOST + number, select))
        cells = [(step, self._of_cells(weights)) for step, weights in sources.stages]
        rates = [(step * self._cut, _rates(self._of_parts(table), Fraction(_PARTS))) for step, table in cells]
        self._parts = Mixture(rates, seed, PARTS)
        begins = [self._parts.counts(start) * self._part for start, _ in rates]
        # A pass over the data is a whole number of blocks: at its end the sources' counts are what weights ask for.
        block = Fraction(sources.epoch, max(1, round(sources.epoch / _SAMPLES)))
        self._mixtures = []
        for shape in range(len(values)):
            of_shape = [[row[shape] for row in table] for _, table in cells]
            stages = [(int(at[shape]), _rates(each, block)) for at, each in zip(begins, of_shape, strict=True)]
            self._mixtures.append(Mixture(stages, seed, SOURCES + shape * _MOST))

    def _of_cells(self, weights: tuple[Fraction, ...]) -> list[list[Fraction]]:
        """Return the weight of every shape of every source."""
        return [[weight * share for share in shares] for weight, shares in zip(weights, self._shares, strict=True)]

    def _of_parts(self, table: list[list[Fraction]]) -> list[Fraction]:
        """Return the frequency of micro-batches of each shape, lower for shapes of which one takes more samples."""
        of_shapes = [sum(column, Fraction(0)) for column in zip(*table, strict=True)]
        return [weight / count for weight, count in zip(of_shapes, self._samples, strict=True)]

    @property
    def micro_batches(self) -> int | None:
        return self._cut if self._shaped else None

    @property
    def rows_of_step(self) -> int:
        return self._cut * max(self._part)

    def steps(self, epochs: int) -> int:
        samples, low, high = epochs * self.sources.epoch, 0, epochs * self.sources.epoch // min(self._part) + 1
        while low < high:  # the last step up to which no more are drawn
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.drawn(middle) <= samples else (low, middle - 1)
        return low

    @property
    def samples_of_a_pass(self) -> int:
        return self.sources.epoch

    def epoch(self, step: int) -> int:
        return self.drawn(step) // self.sources.epoch

    def drawn(self, step: int) -> int:
        return int((self._parts.counts(step * self._cut) * self._part).sum())

    def log(self, step: int) -> dict[str, Any]:
        """Return the fields of :meth:`SourceRows.log` for the samples so far."""
        return self.sources.log(self.consumed(step))

    def consumed(self, step: int) -> np.ndarray:
        """(sources,) int64: the samples that the steps before ``step`` have taken of each."""
        parts = self._parts.counts(step * self._cut)
        of_shapes = zip(self._mixtures, parts.tolist(), self._part, strict=True)
        return cast(np.ndarray, sum(mixture.counts(count * part) for mixture, count, part in of_shapes))

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        return rows_of(self._pools, *self._of_shape(0, start, stop))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Implement ``BatchSchedule.passes_between`` for samples that all have one shape."""
        sources, numbers = self._of_shape(0, start, stop)
        sizes = np.array(self.sources.sizes, dtype=np.int64)
        return rows_of(self._pools, sources, numbers), sources, numbers // sizes[sources]

    def _steps(self, steps: range) -> list[StepRows]:
        if not self._shaped:
            return super()._steps(steps)
        shapes, ranks = self._parts.locate(steps.start * self._cut, steps.stop * self._cut)
        found, begins, total = [], np.empty(len(shapes), dtype=np.int64), 0  # where each part begins in what is found
        sizes = np.array(self._part)[shapes]
        for shape in np.unique(shapes).tolist():
            here, part = shapes == shape, self._part[shape]
            first, last = int(ranks[here].min()), int(ranks[here].max())  # few of the parts between are elsewhere
            found.append(self._of_shape(shape, first * part, (last + 1) * part))
            begins[here] = total + (ranks[here] - first) * part
            total += (last + 1 - first) * part
        pools, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
        rows = rows_of(self._pools, pools, numbers).tolist()
        parts = [rows[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
        return steps_of(parts, [self._samples[shape] for shape in shapes.tolist()], self._cut)

    def _of_shape(self, shape: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pool, and the place in it, of places [start, stop) of all samples of a shape."""
        sources, numbers = self._mixtures[shape].locate(start, stop)
        places = [self._place.get((shape, source), -1) for source in range(len(self.sources.names))]
        return np.array(places, dtype=np.int64)[sources], numbers


def _select(start: int, select, numbers: np.ndarray) -> np.ndarray:
    return start + (numbers if select is None else select(numbers))


def _rates(weights: list[Fraction], block: Fraction) -> list[Fraction]:
    """Weights as shares of a block; all 0 of what is not drawn."""
    total = sum(weights)
    return [weight / total * block for weight in weights] if total else weights
