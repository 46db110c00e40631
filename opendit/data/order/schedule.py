"""Which samples a step trains on: a pure function of (seed, step).

So a run that starts at any step draws the samples that an uninterrupted one draws there, and any number of ranks,
workers and micro-batches cuts the same global batches into parts. Nothing is carried from one step to the next:
whatever stands at a place of the run is computed from the place.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from opendit.data.order.mixture import Mixture
from opendit.data.order.pool import Pool, RowsByKey

SORTED, KEYED = "sorted", "keyed"  # what a checkpoint says of the order of its samples
POOLS, PARTS, SOURCES = (number << 24 for number in (1, 2, 3))  # domains of permutations, apart from those of Stream
_WINDOW = 1024  # samples whose rows are computed at once
_BLOCK = 128  # samples, of several sources, within which the sources' order is drawn


class BatchSchedule:
    """The rows of every global batch: permutation after permutation of the data set, without a gap.

    A batch may lie across the end of an epoch, so every row is drawn once an epoch, whatever the batch.

    global_batch: samples of one optimizer step = batch_size x data-parallel ranks x grad_accumulation.
    Raises ValueError if the data set is smaller than that.
    """

    order = KEYED

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
        self._computed = range(0), np.empty((0, global_batch), dtype=np.int64)  # steps, and their rows

    @property
    def micro_batches(self) -> int | None:
        """How many parts a global batch must be cut into; None: any number."""
        return None

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in the first pass over the data."""
        return self.steps(1)

    def steps(self, epochs: int) -> int:
        """Whole steps in so many passes over the data."""
        return epochs * self.dataset_size // self.global_batch

    def epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        return step * self.global_batch // self.dataset_size

    def rows(self, step: int) -> list[int]:
        """Data set rows of the global batch of ``step``, in order of position."""
        if step not in self._computed[0]:
            count = max(1, _WINDOW // self.global_batch)
            steps = range(step // count * count, (step // count + 1) * count)
            self._computed = steps, self._rows(steps).reshape(count, self.global_batch)
        steps, rows = self._computed
        return rows[step - steps.start].tolist()

    def log(self, step: int) -> dict:
        """What a line of the log after ``step`` steps says of the sources; nothing where there is one."""
        return {}

    def _rows(self, steps: range) -> np.ndarray:
        """The rows of all positions of some steps, (steps * global_batch,) int64."""
        return self._pool.rows(np.arange(steps.start * self.global_batch, steps.stop * self.global_batch))

    @property
    def _pool(self) -> Pool:
        return Pool(self.dataset_size, self.seed, POOLS, lambda numbers: numbers)


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes: the rows of a micro-batch, over all ranks, are of one shape.

    keys: the shape key of every row. micro_batches: parts of a global batch; position p belongs to part
    p // (global_batch / micro_batches). Each shape's rows come in permutation after permutation, cut into parts: rows
    that fill none begin the shape's first part of the next epoch. An epoch has the parts that its rows complete, in
    keyed order. Over E epochs every row is drawn E times but for what is left over at the very end, less than a part
    of each shape and a step's parts. Raises ValueError if there are too few rows for a step an epoch.

    So a step's samples depend on (seed, global batch, micro_batches) alone: any number of ranks that keeps these two
    sees the same ones, while another --grad_accumulation of the same global batch makes other parts, and another run.
    """

    def __init__(self, keys: Sequence[int] | np.ndarray | RowsByKey, global_batch: int, micro_batches: int, seed: int):
        shapes = keys if isinstance(keys, RowsByKey) else RowsByKey(np.asarray(keys))
        super().__init__(len(shapes.keys), global_batch, seed)
        self._micro_batches, self._part = micro_batches, part_of(global_batch, micro_batches)
        self._pools = [Pool(total, seed, POOLS + i, shapes.selector(i)) for i, total in enumerate(shapes.totals)]
        self._parts = Mixture(
            [(0, [Fraction(total, self._part) for total in shapes.totals])], seed, PARTS, in_order=False
        )
        check_parts(shapes.totals, self._parts.length(1), self._part, micro_batches)

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    def steps(self, epochs: int) -> int:
        return self._parts.length(epochs) // self._micro_batches

    def epoch(self, step: int) -> int:
        return self._parts.block(step * self._micro_batches)

    def _rows(self, steps: range) -> np.ndarray:
        shapes, ranks = self._parts.locate(steps.start * self._micro_batches, steps.stop * self._micro_batches)
        rows = np.empty((len(shapes), self._part), dtype=np.int64)
        for shape in np.unique(shapes).tolist():
            here = shapes == shape
            places = ranks[here][:, None] * self._part + np.arange(self._part)
            rows[here] = self._pools[shape].rows(places.ravel()).reshape(places.shape)
        return rows


def part_of(global_batch: int, micro_batches: int) -> int:
    """Samples of a micro-batch over all ranks; raises ValueError if the global batch does not divide."""
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
    return global_batch // micro_batches


def check_parts(totals: Sequence[int], parts: int, part: int, micro_batches: int) -> None:
    """Raises ValueError if an epoch's ``parts`` of one shape each fill no step. totals: the rows of every shape."""
    if parts < micro_batches:
        sizes = ", ".join(f"{total:,}" for total in totals)
        raise ValueError(
            f"a micro-batch of {part:,} samples = batch_size x ranks holds one shape; the data set's shapes "
            f"have {sizes} samples, which fill {parts} of the {micro_batches} micro-batches of a step; lower "
            "--batch_size or --grad_accumulation"
        )
