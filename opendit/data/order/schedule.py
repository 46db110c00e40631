"""Choose the samples that a step trains on: a pure function of (seed, step).

So a run that starts at any step draws the samples that an uninterrupted one draws there, and any number of ranks,
workers and micro-batches cuts the same global batches into parts. Nothing is carried from one step to the next:
whatever stands at a place of the run is computed from the place. (Packs are planned window after window: see
opendit/data/order/packs.py.)
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import numpy as np

from opendit.data.order.mixture import Mixture
from opendit.data.order.pool import Pool, RowsByKey, rows_of

KEYED = "keyed"  # the order of samples that a checkpoint names; those of old releases named "sorted", or none
POOLS, PARTS, SOURCES = (number << 24 for number in (1, 2, 3))  # domains of permutations, apart from those of Stream
MANY_EPOCHS = 10_000  # over which a mean is taken
WINDOW = 1024  # rows that are computed at once, or a step's if it has more
_BLOCK = 128  # samples, of several sources, within which the sources' order is drawn


Key = TypeVar("Key", bound=tuple)


class StepRows(NamedTuple):
    """rows: of all samples of a step, in order of position. ends: where each of its units ends among them."""

    rows: list[int]
    ends: Sequence[int]


class BatchSchedule:
    """The rows of every global batch: permutation after permutation of the data set, without a gap.

    A batch may lie across the end of an epoch, so every row is drawn once an epoch, whatever the batch.

    global_batch: units of one optimizer step = batch_size x data-parallel ranks x grad_accumulation. A unit is a
    sample; in other schedules it may be several. Raises ValueError if the data set has fewer samples than that.
    """

    packed = False  # whether a micro-batch's samples are of any sizes
    passes: str | None = None  # what an epoch has, where the start of a run says so

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
        """The number of parts of a global batch that have one shape each and hold the ranks' micro-batches; None: all
        samples have one shape, or may have any."""
        return None

    @property
    def rows_of_step(self) -> int:
        """At most."""
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
        """Whole steps in so many passes over the data."""
        return epochs * self.dataset_size // self.global_batch

    @property
    def samples_of_a_pass(self) -> int:
        return self.dataset_size

    def drawn(self, step: int) -> int:
        """Samples of the steps before ``step``."""
        return step * self.global_batch

    def epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        return step * self.global_batch // self.dataset_size

    def rows(self, step: int) -> list[int]:
        """Data set rows of the global batch of ``step``, in order of position."""
        return self._of_step(step).rows

    def ends(self, step: int) -> Sequence[int]:
        """Return the end of each of the ``global_batch`` units of ``step`` among its :meth:`rows`."""
        return self._of_step(step).ends

    def share(self, step: int, micro: int, rank: int, ranks: int, units: int) -> range:
        """The positions among :meth:`rows` that one of ``ranks`` ranks reads for a micro-batch of ``units`` units a
        rank."""
        first, ends = (micro * ranks + rank) * units, self.ends(step)
        return range(ends[first - 1] if first else 0, ends[first + units - 1])

    def arranged(self, keys: list[Key]) -> list[Key]:
        """The samples (row first) of a rank's micro-batch in the order in which they are read."""
        return keys

    def log(self, step: int) -> dict[str, Any]:
        """Return the samples' fields for the line of the log after ``step`` steps; none for one plain source."""
        return {}

    def seen(self, step: int) -> dict[int, int] | None:
        """{how often: how many samples the steps before ``step`` have taken so often}; None where it is not counted."""
        return None

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state that a checkpoint after ``step`` steps must keep to resume; None: none is needed."""
        return None

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        """Return the rows at places [start, stop) of the run, counted over its steps, if units are samples; int64."""
        pool = Pool(self.dataset_size, self.seed, POOLS, lambda numbers: numbers)
        return pool.rows(np.arange(start, stop))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (:meth:`rows_between`, the source of each, the pass over that source which it is of, from 0), each
        (stop - start,) int64."""
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


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes: the rows of a micro-batch, over all ranks, are of one shape.

    keys: the shape key of every row. micro_batches: parts of a global batch; unit u belongs to part
    u // (global_batch / micro_batches). samples: of a unit, for every shape in order of its key; None: one each. Each
    shape's rows come in permutation after permutation, cut into parts: rows that fill none begin the shape's first part
    of the next epoch. An epoch has the parts that its rows complete, in keyed order. Over E epochs every row is drawn E
    times but for what is left over at the very end, less than a part of each shape and a step's parts. Raises
    ValueError if there are too few rows for a step an epoch.

    So a step's samples depend on (seed, global batch, micro_batches) alone: any number of ranks and of accumulated
    micro-batches that cuts the parts into equal pieces sees the same ones.
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
        self._micro_batches, units = micro_batches, part_of(global_batch, micro_batches)
        self._samples = [1] * len(shapes.totals) if samples is None else list(samples)
        self._part = [units * count for count in self._samples]  # samples of a micro-batch over all ranks
        self._pools = [Pool(total, seed, POOLS + i, shapes.selector(i)) for i, total in enumerate(shapes.totals)]
        rates = [Fraction(total, part) for total, part in zip(shapes.totals, self._part, strict=True)]
        self._parts = Mixture([(0, rates)], seed, PARTS, in_order=False)
        check_parts(shapes.totals, self._parts.length(1), self._part, micro_batches)

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
        return steps_of(parts, [self._samples[shape] for shape in shapes.tolist()], self._micro_batches)


def steps_of(parts: list[list[int]], samples: list[int], micro_batches: int) -> list[StepRows]:
    """Steps of so many parts each. parts: the rows of each; samples: of a unit of each."""
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


def part_of(global_batch: int, micro_batches: int) -> int:
    """Units of a micro-batch over all ranks; raises ValueError if the global batch does not divide."""
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
    return global_batch // micro_batches


def check_parts(totals: Sequence[int], parts: int, part: Sequence[int], micro_batches: int) -> None:
    """Raises ValueError if an epoch's ``parts`` of one shape each fill no step. totals: the rows of every shape; part:
    the samples of one of its parts."""
    if parts < micro_batches:
        sizes, few = ", ".join(f"{total:,}" for total in totals[:20]), sorted({min(part), max(part)})
        raise ValueError(
            f"a micro-batch of {' to '.join(f'{size:,}' for size in few)} samples = batch_size x ranks holds one "
            f"shape; the data set's shapes have {sizes} samples, which fill {parts} of the {micro_batches} "
            "micro-batches of a step; lower --batch_size or --grad_accumulation"
        )
