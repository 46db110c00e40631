"""Choose the samples that a step trains on: a pure function of (seed, step).

A run that starts at any step draws the samples that an uninterrupted one draws there, and any number of ranks, workers
and micro-batches divides the same global batches. Nothing is carried from one step to the next: what is at a place of
the run is computed from the place. (Packs are planned window after window: see opendit/data/order/packs.py.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from opendit.data.order.sequences import Mixture, Pool, RowsByKey, rows_of

KEYED = "keyed"  # the order that checkpoints name; those of old releases name "sorted", or none
POOLS, PARTS, SOURCES = (number << 24 for number in (1, 2, 3))  # domains of permutations, disjoint from Stream's
MANY_EPOCHS = 10_000  # over which a mean is taken
WINDOW = 1024  # rows that are computed at once, or a step's if it has more
_SAMPLES, _PARTS = 128, 16  # mean size of a block in which the order of sources, or of shapes, is drawn
_MOST, _MOST_SHAPES = 256, 4096  # sources and shapes of a blend: domains of permutations must not overlap


Key = TypeVar("Key", bound=tuple)


class StepRows(NamedTuple):
    """rows: of all samples of a step, in order of position. ends: where each of its units ends among them."""

    rows: list[int]
    ends: Sequence[int]


class BatchSchedule:
    """The rows of every global batch: permutation after permutation of the data set, without a gap.

    A batch may span the end of an epoch, so every row is drawn once an epoch, whatever the batch.

    global_batch: units of one optimizer step = batch_size x data-parallel ranks x grad_accumulation. A unit is a
    sample; in other schedules it may be several. Raises ValueError if the data set has fewer samples than that.
    """

    packed = False  # whether a micro-batch's samples may have any sizes
    passes: str | None = None  # what an epoch contains, if the start of a run should say so

    def __init__(self, dataset_size: int, global_batch: int, seed: int):
        if global_batch < 1:
            raise ValueError(f"a global batch needs at least one sample, not {global_batch}")
        if dataset_size < global_batch:
            raise ValueError(
                f"the data set of {dataset_size:,} samples is smaller than one global batch of {global_batch:,} "
                "= batch_size x ranks x grad_accumulation; lower --batch_size, --grad_accumulation or "
                "--global_batch_size"
            )
        self.dataset_size, self.global_batch, self.seed = dataset_size, global_batch, seed
        self._computed: tuple[range, list[StepRows]] = range(0), []

    @property
    def micro_batches(self) -> int | None:
        """The number of parts of a global batch that have one shape each and contain the ranks' micro-batches.

        None where all samples have one shape, or may have any."""
        return None

    @property
    def rows_of_step(self) -> int:
        """The largest number of rows in a step."""
        return self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in the first pass over the data."""
        return self.steps(1)

    @property
    def mean_steps_per_epoch(self) -> float:
        """Steps in a pass over the data, where a step may hold the end of one pass and the beginning of the next."""
        return self.steps(MANY_EPOCHS) / MANY_EPOCHS

    def steps(self, epochs: int) -> int:
        """Return the number of whole steps in ``epochs`` passes over the data."""
        return epochs * self.dataset_size // self.global_batch

    @property
    def samples_of_a_pass(self) -> int:
        return self.dataset_size

    def drawn(self, step: int) -> int:
        """Return the number of samples in the steps before ``step``."""
        return step * self.global_batch

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return step * self.global_batch // self.dataset_size

    def rows(self, step: int) -> list[int]:
        """Return the data set's rows in the global batch of ``step``, in order of position."""
        return self._of_step(step).rows

    def ends(self, step: int) -> Sequence[int]:
        """Return the end of each of the ``global_batch`` units of ``step`` among its :meth:`rows`."""
        return self._of_step(step).ends

    def share(self, step: int, micro: int, rank: int, ranks: int, units: int) -> range:
        """Return the positions among :meth:`rows` that one of ``ranks`` ranks reads for micro-batch ``micro`` of
        ``units`` units a rank."""
        first, ends = (micro * ranks + rank) * units, self.ends(step)
        return range(ends[first - 1] if first else 0, ends[first + units - 1])

    def arranged(self, keys: list[Key]) -> list[Key]:
        """Return the samples (row first) of a rank's micro-batch in the order in which they are read."""
        return keys

    def log(self, step: int) -> dict[str, Any]:
        """Return the samples' fields for the log line after ``step`` steps; none for a single plain source."""
        return {}

    def seen(self, step: int) -> dict[int, int] | None:
        """Return {times: number of samples that the steps before ``step`` drew that often}; None if not counted."""
        return None

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state that a checkpoint after ``step`` steps needs to resume; None if it needs none."""
        return None

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        """Return the rows at places [start, stop) of the run, counted over its steps, if units are samples; int64."""
        pool = Pool(self.dataset_size, self.seed, POOLS, lambda numbers: numbers)
        return pool.rows(np.arange(start, stop))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (:meth:`rows_between`, the source of each row, the pass over that source that it belongs to, from 0),
        each (stop - start,) int64."""
        places = np.arange(start, stop)
        return self.rows_between(start, stop), np.zeros_like(places), places // self.dataset_size

    def _of_step(self, step: int) -> StepRows:
        if step not in self._computed[0]:
            count = max(1, WINDOW // self.rows_of_step)
            steps = range(step // count * count, (step // count + 1) * count)
            self._computed = steps, self._steps(steps)
        steps, found = self._computed
        return found[step - steps.start]

    def _steps(self, steps: range) -> list[StepRows]:
        """Return the rows that some steps draw."""
        rows = self.rows_between(steps.start * self.global_batch, steps.stop * self.global_batch)
        ends = range(1, self.global_batch + 1)
        return [StepRows(of_step, ends) for of_step in rows.reshape(-1, self.global_batch).tolist()]


# ------------------------------------------------------------------------------------------ several shapes


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes: all rows of a micro-batch, over all ranks, have one shape.

    A global batch is cut into ``micro_batches`` parts; unit u belongs to part u // (global_batch / micro_batches). Each
    shape's rows come in permutation after permutation, cut into parts: rows that fill none begin the shape's first part
    of the next epoch. An epoch has the parts that its rows complete, in keyed order. Over E epochs every row is drawn E
    times except for what is left over at the very end, less than a part of each shape and a step's parts.

    A step's samples depend on (seed, global batch, micro_batches) alone: any number of ranks and of accumulated
    micro-batches that cuts the parts into equal pieces sees the same ones.

    Args:
        keys: the shape key of every row.
        samples: samples in a unit, for every shape in order of its key; None: one each.

    Raises:
        ValueError: there are too few rows for a step an epoch.
    """

    def __init__(
        self,
        keys: Sequence[int] | np.ndarray | RowsByKey,
        global_batch: int,
        micro_batches: int,
        seed: int,
        samples: Sequence[int] | None = None,
    ):
        shapes = keys if isinstance(keys, RowsByKey) else RowsByKey(np.asarray(keys))
        super().__init__(len(shapes.keys), global_batch, seed)
        self._micro_batches, units = micro_batches, units_of_part(global_batch, micro_batches)
        self._samples = [1] * len(shapes.totals) if samples is None else list(samples)
        self._part = [units * count for count in self._samples]  # samples of a micro-batch over all ranks
        self._pools = [Pool(total, seed, POOLS + i, shapes.selector(i)) for i, total in enumerate(shapes.totals)]
        rates = [Fraction(total, part) for total, part in zip(shapes.totals, self._part, strict=True)]
        self._parts = Mixture([(0, rates)], seed, PARTS, in_order=False)
        if (parts := self._parts.length(1)) < micro_batches:
            sizes = ", ".join(f"{total:,}" for total in shapes.totals[:20])
            few = sorted({min(self._part), max(self._part)})
            raise ValueError(
                f"a micro-batch of {' to '.join(f'{size:,}' for size in few)} samples = batch_size x ranks holds one "
                f"shape; the data set's shapes have {sizes} samples, which fill {parts} of the {micro_batches} "
                "micro-batches of a step; lower --batch_size or --grad_accumulation"
            )

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    @property
    def rows_of_step(self) -> int:
        return self._micro_batches * max(self._part)

    def steps(self, epochs: int) -> int:
        return self._parts.length(epochs) // self._micro_batches

    def drawn(self, step: int) -> int:
        return int((self._parts.counts(step * self._micro_batches) * self._part).sum())

    def epoch(self, step: int) -> int:
        return self._parts.block(step * self._micro_batches)

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        raise TypeError("a bucket's samples come by its parts")

    def _steps(self, steps: range) -> list[StepRows]:
        shapes, ranks = self._parts.locate(steps.start * self._micro_batches, steps.stop * self._micro_batches)
        sizes = np.array(self._part)[shapes]
        ends = np.cumsum(sizes)
        places = np.repeat(ranks * sizes - (ends - sizes), sizes) + np.arange(ends[-1])
        rows = rows_of(self._pools, np.repeat(shapes, sizes), places).tolist()
        parts = [rows[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
        return steps_of_parts(parts, [self._samples[shape] for shape in shapes.tolist()], self._micro_batches)


def steps_of_parts(parts: list[list[int]], samples: list[int], micro_batches: int) -> list[StepRows]:
    """Join ``micro_batches`` parts to a step. parts: the rows of each; samples: the number in a unit of each."""
    found = []
    for first in range(0, len(parts), micro_batches):
        rows: list[int] = []
        ends: list[int] = []
        here = slice(first, first + micro_batches)
        for part, count in zip(parts[here], samples[here], strict=True):
            ends += range(len(rows) + count, len(rows) + len(part) + 1, count)
            rows += part
        found.append(StepRows(rows, ends))
    return found


def units_of_part(global_batch: int, micro_batches: int) -> int:
    """Return the units of a micro-batch over all ranks. Raises ValueError if the global batch does not divide."""
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
    return global_batch // micro_batches


# ------------------------------------------------------------------------------------------ several sources


@dataclass(frozen=True)
class SourceRows:
    """The sources of a data set's rows, and the proportions in which they are drawn.

    names: of the sources. ends: (sources,) where each source's rows end; they begin where the previous ones end.
    stages: (first step, the weight of every source) in order of step, the first at 0; weights may have any sum, and a
    source of weight 0 is not drawn in this stage. epoch: samples of a pass over the data. epochs: how often a pass
    draws each source, if that, and not weights, was asked for: the first stage's weights are these times the sizes.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    stages: tuple[tuple[int, tuple[Fraction, ...]], ...]
    epoch: int
    epochs: tuple[Fraction, ...] | None = None

    def of_rows(self, ends: Sequence[int]) -> "SourceRows":
        """Return the same sources for a part of the rows, renumbered. ends: where those of each source end."""
        left = replace(self, ends=tuple(ends))
        if self.epochs is None:
            return replace(left, epoch=round(self.epoch * ends[-1] / self.ends[-1]))
        weights = tuple(epochs * size for epochs, size in zip(self.epochs, left.sizes, strict=True))
        return replace(left, stages=((0, weights), *self.stages[1:]), epoch=max(1, int(sum(weights))))

    @property
    def sizes(self) -> list[int]:
        return np.diff([0, *self.ends]).tolist()

    def check(self) -> None:
        """Raise ValueError for a source without samples."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if size == 0:
                raise ValueError(f"the source {name} has no samples")

    def count(self, rows: np.ndarray) -> np.ndarray:
        """Count the rows of each source among ``rows``; (sources,) int64."""
        return np.bincount(np.searchsorted(self.ends, rows, side="right"), minlength=len(self.ends))

    def log(self, counts: np.ndarray) -> dict[str, Any]:
        """Return fields for the log, {"sources": {name: {"share": of all samples so far, "epoch": passes over it}}}.

        A share is None if nothing was drawn. counts: samples drawn of each source."""
        seen, found = int(counts.sum()), {}
        for name, count, size in zip(self.names, counts.tolist(), self.sizes, strict=True):
            found[name] = {"share": count / seen if seen else None, "epoch": count / size}
        return {"sources": found}


class BlendSchedule(BatchSchedule):
    """Several sources in the proportions of their weights, each in its own permutation after permutation.

    With shapes, a micro-batch has one shape and mixes the sources that have it; every shape of a source has its own
    permutations.

    Args:
        keys: the shape key of every row; None where all rows have one shape.
        samples: samples in a unit, for every shape in order of its key; None: one each.

    Raises:
        ValueError: there are fewer rows than a global batch, or a source has none.
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
        units = units_of_part(global_batch, self._cut)
        self._part = [units * count for count in self._samples]  # samples of a micro-batch over all ranks
        # For every source the share of each shape among its rows, and a pool of the rows of each.
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
        """Return the frequency of micro-batches of each shape: lower for shapes with more samples in a micro-batch."""
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
        while low < high:  # bisect for the last step before which at most ``samples`` are drawn
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
        """Count the samples of each source in the steps before ``step``; (sources,) int64."""
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
        found, begins, total = [], np.empty(len(shapes), dtype=np.int64), 0  # begins: of each part among ``found``
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
        return steps_of_parts(parts, [self._samples[shape] for shape in shapes.tolist()], self._cut)

    def _of_shape(self, shape: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pool, and the place in it, at places [start, stop) of all samples of a shape."""
        sources, numbers = self._mixtures[shape].locate(start, stop)
        places = [self._place.get((shape, source), -1) for source in range(len(self.sources.names))]
        return np.array(places, dtype=np.int64)[sources], numbers


def _select(start: int, select, numbers: np.ndarray) -> np.ndarray:
    return start + (numbers if select is None else select(numbers))


def _rates(weights: list[Fraction], block: Fraction) -> list[Fraction]:
    """Return weights as shares of a block; all 0 if none of them is drawn."""
    total = sum(weights)
    return [weight / total * block for weight in weights] if total else weights
