"""The schedule of a data set of several sources."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from opendit.data.order.mixture import Mixture
from opendit.data.order.pool import Pool, RowsByKey
from opendit.data.order.schedule import PARTS, POOLS, SOURCES, BatchSchedule, part_of

_SAMPLES, _PARTS = 128, 16  # of a block, about, in which the order of sources, or of shapes, is drawn
_MOST = 256  # shapes, and sources: domains of permutations do not run into each other


@dataclass(frozen=True)
class SourceRows:
    """Which rows of a data set are whose, and in which proportions they are drawn.

    names: of the sources. ends: (sources,) where each source's rows end; they begin where the one before ends.
    stages: (first step, the weight of every source) in order of step, the first at 0; weights may have any sum, and 0
    is a source that is not drawn in this stage. epoch: samples of a pass over the data.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    stages: tuple[tuple[int, tuple[Fraction, ...]], ...]
    epoch: int

    @property
    def sizes(self) -> list[int]:
        return np.diff([0, *self.ends]).tolist()


class BlendSchedule(BatchSchedule):
    """Several sources in the proportions of their weights, each in permutation after permutation of its own.

    keys: the shape key of every row, None where all are alike. With shapes, a micro-batch is of one shape and mixes the
    sources that have it; every shape of a source has permutations of its own. Raises ValueError if there are fewer rows
    than a global batch, or a source has none.
    """

    def __init__(
        self, sources: SourceRows, global_batch: int, micro_batches: int, seed: int, keys: np.ndarray | None = None
    ):
        super().__init__(sources.ends[-1], global_batch, seed)
        self.sources, starts = sources, [0, *sources.ends[:-1]]
        for name, size in zip(sources.names, sources.sizes, strict=True):
            if size == 0:
                raise ValueError(f"the source {name} has no samples")
        of_source = [None if keys is None else RowsByKey(keys[a:b]) for a, b in zip(starts, sources.ends, strict=True)]
        values = [0] if keys is None else sorted({value for each in of_source for value in each.values.tolist()})
        self._shaped = len(values) > 1
        if max(len(values), len(starts)) > _MOST:
            raise ValueError(f"{len(starts)} sources of {len(values)} shapes: at most {_MOST} of each can be blended")
        self._cut = micro_batches if self._shaped else 1
        self._part = part_of(global_batch, self._cut)
        # Of a source's rows the share of each shape, and the rows of it.
        self._shares, self._pools = [], []
        for number, (start, size, shapes) in enumerate(zip(starts, sources.sizes, of_source, strict=True)):
            found = {0: size} if shapes is None else dict(zip(shapes.values.tolist(), shapes.totals, strict=True))
            self._shares.append([Fraction(found.get(value, 0), size) for value in values])
            pools = {}
            for place, value in enumerate(found):
                select = partial(_select, start, None if shapes is None else shapes.selector(place))
                shape = values.index(value)
                pools[shape] = Pool(found[value], seed, POOLS + shape * _MOST + number, select)
            self._pools.append(pools)
        cells = [(step, self._of_cells(weights)) for step, weights in sources.stages]
        rates = [(step * self._cut, _rates(_columns(table), Fraction(_PARTS))) for step, table in cells]
        self._parts = Mixture(rates, seed, PARTS)
        begins = [self._parts.counts(start) * self._part for start, _ in rates]
        # A pass over the data is a whole number of blocks: at its end the sources' counts are what weights ask for.
        samples = Fraction(sources.epoch, max(1, round(sources.epoch / _SAMPLES)))
        self._mixtures = []
        for shape in range(len(values)):
            of_shape = [[row[shape] for row in table] for _, table in cells]
            stages = [(int(at[shape]), _rates(each, samples)) for at, each in zip(begins, of_shape, strict=True)]
            self._mixtures.append(Mixture(stages, seed, SOURCES + shape * _MOST))

    def _of_cells(self, weights: tuple[Fraction, ...]) -> list[list[Fraction]]:
        """What every shape of every source weighs."""
        return [[weight * share for share in shares] for weight, shares in zip(weights, self._shares, strict=True)]

    @property
    def micro_batches(self) -> int | None:
        return self._cut if self._shaped else None

    def steps(self, epochs: int) -> int:
        return epochs * self.sources.epoch // self.global_batch

    def epoch(self, step: int) -> int:
        return step * self.global_batch // self.sources.epoch

    def log(self, step: int) -> dict:
        """{"sources": {name: {"share": of all samples so far, "epoch": passes over the source}}}."""
        counts = zip(self.sources.names, self.consumed(step).tolist(), self.sources.sizes, strict=True)
        seen = max(1, step * self.global_batch)
        return {"sources": {name: {"share": count / seen, "epoch": count / size} for name, count, size in counts}}

    def consumed(self, step: int) -> np.ndarray:
        """(sources,) int64: the samples that the steps before ``step`` have taken of each."""
        parts = self._parts.counts(step * self._cut)
        return sum(mixture.counts(int(n) * self._part) for mixture, n in zip(self._mixtures, parts, strict=True))

    def _rows(self, steps: range) -> np.ndarray:
        shapes, ranks = self._parts.locate(steps.start * self._cut, steps.stop * self._cut)
        rows = np.empty((len(shapes), self._part), dtype=np.int64)
        for shape in np.unique(shapes).tolist():
            here = np.flatnonzero(shapes == shape)
            first, last = int(ranks[here].min()), int(ranks[here].max())  # few of the parts between are elsewhere
            found = self._of_shape(shape, first * self._part, (last + 1) * self._part)
            rows[here] = found.reshape(-1, self._part)[ranks[here] - first]
        return rows

    def _of_shape(self, shape: int, start: int, stop: int) -> np.ndarray:
        """The rows at the places from ``start`` to before ``stop`` of all samples of a shape."""
        sources, numbers = self._mixtures[shape].locate(start, stop)
        rows = np.empty(stop - start, dtype=np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            rows[here] = self._pools[source][shape].rows(numbers[here])
        return rows


def _select(start: int, select, numbers: np.ndarray) -> np.ndarray:
    return start + (numbers if select is None else select(numbers))


def _columns(table: list[list[Fraction]]) -> list[Fraction]:
    return [sum(column) for column in zip(*table, strict=True)]


def _rates(weights: list[Fraction], block: Fraction) -> list[Fraction]:
    """Weights as shares of a block; all 0 of what is not drawn."""
    total = sum(weights)
    return [weight / total * block for weight in weights] if total else weights
