"""Read the batches of a run, step by step."""

import time
from collections.abc import Iterator

from opendit.data import Batch, BatchIterator, DataError
from opendit.training.diagnosis import Diagnosis
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.monitor import Monitor
from opendit.training.step_log import Pace


class Batches:
    """Source of the batches of each step.

    Args:
        count: number of batches in a step.
        monitor, pace: record how long the step waited for each batch.
        diagnosis: keeps the batches of the step.
        interrupt: is informed when data are missing.
        interchangeable: True if any batch of the run can replace any other batch.
    """

    def __init__(
        self,
        loader: BatchIterator,
        count: int,
        monitor: Monitor,
        pace: Pace,
        diagnosis: Diagnosis,
        interrupt: Interrupt,
        interchangeable: bool,
    ):
        self._loader, self._count = loader, count
        self._monitor, self._pace, self.diagnosis = monitor, pace, diagnosis
        self._interrupt, self._interchangeable = interrupt, interchangeable
        self._last: Batch | None = None

    def of_next_step(self) -> Iterator[Batch]:
        """Yield the batches of the next step. Each batch is read when it is requested, so that reading overlaps with
        computing.

        If this rank can't read its data any more, the other ranks still wait for this rank in the current step. If
        batches are interchangeable, the last batch therefore replaces the missing ones, and ``Interrupt.ask`` then
        drops the step on all ranks.

        Raises:
            NoData: the data can't be read, and there are no other ranks.
            DataError: the data can't be read, and no batch can replace them.
        """
        for _ in range(self._count):
            asked = time.perf_counter()
            batch = self._last = self._next()
            waited = time.perf_counter() - asked
            self._monitor.loader_wait(waited)
            self._pace.begin(waited)
            self.diagnosis.keep(batch)
            yield batch

    def _next(self) -> Batch:
        if self._last is not None and self._interrupt.lost is not None:
            return self._last
        try:
            return next(self._loader)
        except DataError as error:
            if self._last is None:  # there is nothing to save, because no step was made since this start
                raise
            if self._interrupt.alone:
                raise NoData(str(error)) from error
            if not self._interchangeable:
                raise
            self._interrupt.lost = error
            return self._last
