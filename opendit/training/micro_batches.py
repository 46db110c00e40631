"""The micro-batches of a run, step by step."""

import time
from collections.abc import Iterator

from opendit.data import BatchIterator
from opendit.training.diagnosis import Diagnosis
from opendit.training.flops import TrainingFlops
from opendit.training.inputs import Inputs
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
    ):
        self._loader, self._inputs, self._count, self._flops = loader, inputs, count, flops
        self._monitor, self._pace, self._diagnosis = monitor, pace, diagnosis

    def of_next_step(self) -> Iterator[MicroBatch | PackedMicroBatch]:
        """Each is loaded when it is asked for, so that reading overlaps with computing."""
        for _ in range(self._count):
            asked = time.perf_counter()
            batch = next(self._loader)
            waited = time.perf_counter() - asked
            self._monitor.loader_wait(waited)
            self._pace.begin(waited)
            self._diagnosis.keep(batch)
            micro_batch = self._inputs.of(batch)
            self._monitor.count(batch.segments_in_step if batch.micro == 0 else 0, self._flops.of(micro_batch))
            yield micro_batch
