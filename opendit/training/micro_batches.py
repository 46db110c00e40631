"""The micro-batches of a run, step by step."""

import time
from collections.abc import Iterator

from opendit.data import Batch, BatchIterator, DataError
from opendit.training.diagnosis import Diagnosis
from opendit.training.flops import TrainingFlops
from opendit.training.inputs import Inputs
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.monitor import Monitor
from opendit.training.pace import Pace
from opendit.training.runners import MicroBatch, PackedMicroBatch


class MicroBatches:
    """Takes batches from the loader and makes them micro-batches.

    Args:
        count: of a step.
        flops: of a micro-batch.
        monitor, pace: are told how long a step stood waiting for each, the first what it holds as well.
        diagnosis: keeps the batches of the step.
        interrupt: is told when there are no more data, though there should be.
        alike: whether any batch can stand in for another one, where ranks must compute together.
    """

    def __init__(
        self,
        loader: BatchIterator,
        inputs: Inputs,
        count: int,
        flops: TrainingFlops,
        monitor: Monitor,
        pace: Pace,
        diagnosis: Diagnosis,
        interrupt: Interrupt,
        alike: bool,
    ):
        self._loader, self._inputs, self._count, self._flops = loader, inputs, count, flops
        self._monitor, self._pace, self._diagnosis = monitor, pace, diagnosis
        self._interrupt, self._alike = interrupt, alike
        self._last: Batch | None = None

    def of_next_step(self) -> Iterator[MicroBatch | PackedMicroBatch]:
        """Each is loaded when it is asked for, so that reading overlaps with computing.

        Raises DataError if the data can't be read any more. Of several ranks the others wait for this one's part of the
        step: where it can, the last batch stands in for what is missing, and ``Interrupt.ask`` leaves the step out on
        all ranks. A single process, for which nobody waits, raises NoData at once."""
        for _ in range(self._count):
            asked = time.perf_counter()
            batch = self._last = self._next()
            waited = time.perf_counter() - asked
            self._monitor.loader_wait(waited)
            self._pace.begin(waited)
            self._diagnosis.keep(batch)
            micro_batch = self._inputs.of(batch)
            self._monitor.count(batch.segments_in_step if batch.micro == 0 else 0, self._flops.of(micro_batch))
            yield micro_batch

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
            if not self._alike:
                raise
            self._interrupt.lost = error
            return self._last
