"""Choose the samples of each training step, as a pure function of (seed, step).

A run that resumes at any step draws the same samples as an uninterrupted run. The global batches do not depend on the
number of ranks, workers and micro-batches. A schedule keeps no state between steps: it computes each sample from its
position in the run. Only packs are planned one window after the other, see opendit/data/order/packs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from opendit.data.order.sequences import Mixture, Pool, RowsByKey, rows_of

KEYED = "keyed"  # name of this order in checkpoints; old checkpoints have "sorted" or no name
POOLS, PARTS, SOURCES = (number << 24 for number in (1, 2, 3))  # domains of permutations; ``Stream`` has others
MANY_EPOCHS = 10_000  # epochs over which the mean number of steps per epoch is computed
WINDOW = 1024  # number of rows computed at once, or the number of rows in a step if that is larger
_SAMPLES, _PARTS = 128, 16  # mean size of the blocks in which sources are shuffled (samples), and shapes (parts)
_MOST, _MOST_SHAPES = 256, 4096  # maximum sources and shapes of a blend; more would make domains overlap


Key = TypeVar("Key", bound=tuple)


class StepRows(NamedTuple):
    """The samples of a step.

    rows: rows of all samples, in order of position. ends: end of each unit of the step among these rows."""

    rows: list[int]
    ends: Sequence[int]


class BatchSchedule:
    """The rows of every global batch. They are consecutive permutations of the data set, one for each epoch.

    A batch may contain the end of one epoch and the beginning of the next, so every row is drawn once in each epoch for
    any batch size.

    Args:
        global_batch: units of one optimizer step = batch_size x data-parallel ranks x grad_accumulation. A unit is one
            sample; in subclasses a unit may have several samples.

    Raises:
        ValueError: the data set has fewer than ``global_batch`` samples.
    """

    packed = False  # True if the samples of a micro-batch may have different sizes
    passes: str | None = None  # describes an epoch in the log at the start of a run; None logs nothing

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
        """Number of parts of a global batch, if all samples of a part have the same shape. A part consists of one
        micro-batch of every rank.

        None if all samples have one shape, or if a micro-batch may mix shapes."""
        return None

    @property
    def rows_of_step(self) -> int:
        """Maximum number of rows in a step."""
        return self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole steps in the first pass over the data."""
        return self.steps(1)

    @property
    def mean_steps_per_epoch(self) -> float:
        """Mean number of steps in a pass over the data. A step may contain the end of one pass and the beginning of the
        next."""
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
        """Return the positions among :meth:`rows` that ``rank`` reads for micro-batch ``micro``.

        ranks: number of data-parallel ranks. units: units of a micro-batch on one rank."""
        first, ends = (micro * ranks + rank) * units, self.ends(step)
        return range(ends[first - 1] if first else 0, ends[first + units - 1])

    def arranged(self, keys: list[Key]) -> list[Key]:
        """Return the samples of a rank's micro-batch in the order of reading. A key's first field is its row."""
        return keys

    def log(self, step: int) -> dict[str, Any]:
        """Return fields about the samples for the log line after ``step`` steps; an empty dict for a single source."""
        return {}

    def seen(self, step: int) -> dict[int, int] | None:
        """Return {n: number of samples that the steps before ``step`` drew n times}, or None if this is not counted."""
        return None

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state that a checkpoint after ``step`` steps needs to resume, or None if it needs none."""
        return None

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        """Return the rows at positions [start, stop) of the run, int64. Only for schedules whose units are samples.

        Positions count the samples of all steps."""
        pool = Pool(self.dataset_size, self.seed, POOLS, lambda numbers: numbers)
        return pool.rows(np.arange(start, stop))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (:meth:`rows_between`, source of each row, index of the pass over that source), each (stop - start,)
        int64."""
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
        """Return the rows of each of ``steps``."""
        rows = self.rows_between(steps.start * self.global_batch, steps.stop * self.global_batch)
        ends = range(1, self.global_batch + 1)
        return [StepRows(of_step, ends) for of_step in rows.reshape(-1, self.global_batch).tolist()]


# ------------------------------------------------------------------------------------------ several shapes


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes. All rows of a micro-batch, over all ranks, have the same shape.

    A global batch is cut into ``micro_batches`` parts; unit u belongs to part u // (global_batch / micro_batches). The
    rows of each shape come in consecutive permutations, which are cut into parts. At the end of an epoch, the rows of a
    shape that do not fill a part become the beginning of the shape's first part in the next epoch. An epoch consists of
    all complete parts, in keyed order. Over E epochs every row is drawn E times, except the rows left over at the end
    of the run. These are fewer than one part of each shape plus the parts of one step.

    The samples of a step depend only on (seed, global batch, micro_batches). They are the same for any number of ranks
    and of accumulated micro-batches that divides the parts equally.

    Args:
        keys: the shape key of every row.
        samples: number of samples in a unit, for each shape in order of its key; None means one.

    Raises:
        ValueError: an epoch has too few rows for a step.
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
        self._part = [units * count for count in self._samples]  # samples of a part, for each shape
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
    """Join every ``micro_batches`` consecutive parts into a step.

    parts: the rows of each part. samples: number of samples in a unit of each part."""
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
    """Return the number of units of a micro-batch over all ranks. Raises ValueError if ``micro_batches`` does not
    divide ``global_batch``."""
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
    return global_batch // micro_batches


# ------------------------------------------------------------------------------------------ several sources


@dataclass(frozen=True)
class SourceRows:
    """The sources of a data set's rows, and the proportions in which they are drawn.

    Attributes:
        names: names of the sources.
        ends: (sources,) end of each source's rows. A source's rows begin at the end of the previous source.
        stages: (first step, weight of each source) in order of step; the first stage begins at step 0. Weights may have
            any sum. A source of weight 0 is not drawn in that stage.
        epoch: number of samples of a pass over the data.
        epochs: how often a pass draws each source, if the user specified epochs instead of weights. The weights of the
            first stage are then epochs x sizes.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    stages: tuple[tuple[int, tuple[Fraction, ...]], ...]
    epoch: int
    epochs: tuple[Fraction, ...] | None = None

    def of_rows(self, ends: Sequence[int]) -> "SourceRows":
        """Return the same sources for a subset of the rows, renumbered. ends: end of each source's remaining rows."""
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
        """Return {"sources": {name: {"share": fraction of all samples so far, "epoch": passes over the source}}}.

        counts: number of samples drawn from each source. "share" is None if no sample was drawn."""
        seen, found = int(counts.sum()), {}
        for name, count, size in zip(self.names, counts.tolist(), self.sizes, strict=True):
            found[name] = {"share": count / seen if seen else None, "epoch": count / size}
        return {"sources": found}


class BlendSchedule(BatchSchedule):
    """A schedule that mixes several sources in proportion to their weights. The rows of each source come in consecutive
    permutations.

    If rows have several shapes, all samples of a micro-batch have the same shape, and come from all sources with this
    shape. Each shape of a source then has separate permutations.

    Args:
        keys: the shape key of every row; None if all rows have one shape.
        samples: number of samples in a unit, for each shape in order of its key; None means one.

    Raises:
        ValueError: there are fewer rows than a global batch, or a source has no rows.
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
        # For each source: the fraction of its rows that each shape has, and a ``Pool`` of rows for each of its shapes.
        self._shares, self._pools = [], []
        self._place: dict[tuple[int, int], int] = {}  # (shape, source) -> index of the pool
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
        # A pass over the data is a whole number of blocks, so that at its end the sources' counts match the weights.
        block = Fraction(sources.epoch, max(1, round(sources.epoch / _SAMPLES)))
        self._mixtures = []
        for shape in range(len(values)):
            of_shape = [[row[shape] for row in table] for _, table in cells]
            stages = [(int(at[shape]), _rates(each, block)) for at, each in zip(begins, of_shape, strict=True)]
            self._mixtures.append(Mixture(stages, seed, SOURCES + shape * _MOST))

    def _of_cells(self, weights: tuple[Fraction, ...]) -> list[list[Fraction]]:
        """Return the weight of each shape of each source, as a table (sources, shapes)."""
        return [[weight * share for share in shares] for weight, shares in zip(weights, self._shares, strict=True)]

    def _of_parts(self, table: list[list[Fraction]]) -> list[Fraction]:
        """Return the frequency of micro-batches of each shape. A shape with more samples in a unit needs fewer
        micro-batches."""
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
        while low < high:  # bisect for the largest number of steps that draw at most ``samples`` samples
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
        """Return the fields of :meth:`SourceRows.log` for the samples before ``step``."""
        return self.sources.log(self.consumed(step))

    def consumed(self, step: int) -> np.ndarray:
        """Count the samples of each source in the steps before ``step``; (sources,) int64."""
        parts = self._parts.counts(step * self._cut)
        of_shapes = zip(self._mixtures, parts.tolist(), self._part, strict=True)
        return cast(np.ndarray, sum(mixture.counts(count * part) for mixture, count, part in of_shapes))

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        return rows_of(self._pools, *self._of_shape(0, start, stop))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Implement ``BatchSchedule.passes_between``; only for samples of one shape."""
        sources, numbers = self._of_shape(0, start, stop)
        sizes = np.array(self.sources.sizes, dtype=np.int64)
        return rows_of(self._pools, sources, numbers), sources, numbers // sizes[sources]

    def _steps(self, steps: range) -> list[StepRows]:
        if not self._shaped:
            return super()._steps(steps)
        shapes, ranks = self._parts.locate(steps.start * self._cut, steps.stop * self._cut)
        found, begins, total = [], np.empty(len(shapes), dtype=np.int64), 0  # begins: start of each part
        sizes = np.array(self._part)[shapes]
        for shape in np.unique(shapes).tolist():
            here, part = shapes == shape, self._part[shape]
            first, last = int(ranks[here].min()), int(ranks[here].max())  # nearly all parts in between are needed
            found.append(self._of_shape(shape, first * part, (last + 1) * part))
            begins[here] = total + (ranks[here] - first) * part
            total += (last + 1 - first) * part
        pools, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
        rows = rows_of(self._pools, pools, numbers).tolist()
        parts = [rows[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
        return steps_of_parts(parts, [self._samples[shape] for shape in shapes.tolist()], self._cut)

    def _of_shape(self, shape: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pools of samples ``start`` to ``stop`` - 1 of a shape, and the samples' positions in these pools.
        A pool has the samples of one shape and one source."""
        sources, numbers = self._mixtures[shape].locate(start, stop)
        places = [self._place.get((shape, source), -1) for source in range(len(self.sources.names))]
        return np.array(places, dtype=np.int64)[sources], numbers


def _select(start: int, select, numbers: np.ndarray) -> np.ndarray:
    return start + (numbers if select is None else select(numbers))


def _rates(weights: list[Fraction], block: Fraction) -> list[Fraction]:
    """Scale the weights to the sum ``block``. Return them unchanged if all are 0."""
    total = sum(weights)
    return [weight / total * block for weight in weights] if total else weights
