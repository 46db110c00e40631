"""Micro-batches run kernel by kernel, as Python comes to them."""

from collections.abc import Callable

from torch import Tensor

from opendit.diffusion import Objective
from opendit.parallel.engines import Engine
from opendit.training.runners.base import Runner
from opendit.training.runners.micro_batch import MicroBatch, PackedMicroBatch


class EagerRunner(Runner):
    """Runs every micro-batch by itself. Arguments as of :func:`opendit.training.runners.build_runner`."""

    def __init__(
        self,
        engine: Engine,
        objective: Objective,
        micro_batches: int = 1,
        after_forward: Callable[[], None] = lambda: None,
    ):
        super().__init__(engine, micro_batches)
        self.objective, self.after_forward = objective, after_forward

    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        return micro_batch.losses(self.objective, self.engine.forward)

    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        with self.engine.micro_batch(last=last):
            loss = micro_batch.mean(self.losses(micro_batch)) / self.micro_batches
            self.after_forward()
            self.engine.backward(loss)
        return loss.detach()

    def micro_step(self, micro_batch: MicroBatch | PackedMicroBatch, *, first: bool, last: bool) -> Tensor:
        return self.forward_backward(micro_batch, last=last)
