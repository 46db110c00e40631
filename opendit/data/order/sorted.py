"""The order of samples of runs that began before there were keyed permutations: a sort of every epoch, whose remainder
is left out. They go on with it.
"""

from collections.abc import Sequence

import numpy as np

from opendit.data.order.schedule import SORTED, BatchSchedule, check_parts, part_of


class SortedSchedule(BatchSchedule):
    """The rows of every global batch: a fresh seeded permutation each epoch, its remainder left out."""

    order = SORTED

    def __init__(self, dataset_size: int, global_batch: int, seed: int):
        super().__init__(dataset_size, global_batch, seed)
        self._epoch_steps = dataset_size // global_batch
        self._sorted: tuple[int, np.ndarray] | None = None  # the current epoch and its rows in order

    def steps(self, epochs: int) -> int:
        return epochs * self._epoch_steps

    def epoch(self, step: int) -> int:
        return step // self._epoch_steps

    def rows(self, step: int) -> list[int]:
        epoch, batch = divmod(step, self._epoch_steps)
        if self._sorted is None or self._sorted[0] != epoch:
            self._sorted = (epoch, self._epoch_rows(epoch))
        return self._sorted[1][batch * self.global_batch : (batch + 1) * self.global_batch].tolist()

    def ends(self, step: int) -> range:
        return range(1, self.global_batch + 1)

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        return np.argsort(self._words(epoch, self.dataset_size), kind="stable")

    def _words(self, epoch: int, count: int) -> np.ndarray:
        # Sorting raw Philox words: their values are frozen by numpy's policy, unlike Generator.permutation's and
        # torch.randperm's, so a run resumes exactly on other versions too.
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        return np.random.Philox(key=key).random_raw(count)


class SortedBucketSchedule(SortedSchedule):
    """A schedule for rows of several shapes: the rows of a micro-batch, over all ranks, are of one shape.

    keys: the shape key of every row. micro_batches: parts of a global batch; position p belongs to part
    p // (global_batch / micro_batches). An epoch deals every shape's rows, freshly shuffled, out to parts, leaves each
    shape's remainder out, and shuffles the parts. Raises ValueError if there are too few rows.
    """

    def __init__(self, keys: Sequence[int] | np.ndarray, global_batch: int, micro_batches: int, seed: int):
        super().__init__(len(keys), global_batch, seed)
        self._micro_batches, self._part = micro_batches, part_of(global_batch, micro_batches)
        keys = np.asarray(keys)
        self._buckets = [np.flatnonzero(keys == key) for key in np.unique(keys)]
        self._parts = sum(len(bucket) // self._part for bucket in self._buckets)
        self._epoch_steps = self._parts // micro_batches
        check_parts([len(bucket) for bucket in self._buckets], self._parts, [self._part], micro_batches)

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        words = self._words(epoch, self.dataset_size + self._parts)
        parts = []
        for bucket in self._buckets:
            order = bucket[np.argsort(words[bucket], kind="stable")]
            parts.append(order[: len(order) // self._part * self._part].reshape(-1, self._part))
        order = np.argsort(words[self.dataset_size :], kind="stable")
        return np.concatenate(parts)[order].reshape(-1)
