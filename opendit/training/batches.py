"""The batches of a run, step by step."""

import time
from collections.abc import Iterator

from opendit.data import Batch, BatchIterator, DataError
from opendit.training.diagnosis import Diagnosis
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.monitor import Monitor
from opendit.training.step_log import Pace


class Batches:
    """Takes batches from the loader.

    Args:
        count: batches in a step.
        monitor, pace: learn how long a step waited for each batch.
        diagnosis: keeps the batches of the step.
        interrupt: learns that data are missing.
        interchangeable: True if any batch can stand in for another one where ranks compute together.
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
        self._monitor, self._pace, self._diagnosis = monitor, pace, diagnosis
        self._interrupt, self._interchangeable = interrupt, interchangeable
        self._last: Batch | None = None

    def of_next_step(self) -> Iterator[Batch]:
        """Yield the batches of the next step. Each is read when it is asked for, so that reading overlaps with
        computing.

        If the data can't be read any more, the other ranks still wait for this one's part of the step: where it can,
        the last batch stands in for what is missing, and ``Interrupt.ask`` leaves the step out on all ranks.

        Raises:
            NoData: the data can't be read, and there are no other ranks.
            DataError: the data can't be read, and no batch can stand in.
        """
        for _ in range(self._count):
            asked = time.perf_counter()
            batch = self._last = self._next()
            waited = time.perf_counter() - asked
            self._monitor.loader_wait(waited)
            self._pace.begin(waited)
            self._diagnosis.keep(batch)
            yield batch

    def _next(self) -> Batch:
        if self._last is not None and self._interrupt.lost is not None:
            return self._last
        try:
            return next(self._loader)
        except DataError as error:
            if self._last is None:  # nothing is lost: no step of this start has been made
                raise
            if self._interrupt.alone:
                raise NoData(str(error)) from error
            if not self._interchangeable:
                raise
            self._interrupt.lost = error
            return self._last
