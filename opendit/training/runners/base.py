"""The interface between the loop and every runner."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from opendit.parallel.engines import Engine, StepResult
from opendit.training.runners.micro_batch import MicroBatch, PackedMicroBatch


class Runner(ABC):
    """Runs training steps. Nothing else calls the model in training.

    A subclass says how one micro-batch is run. One that must have all of a step at once, as a pipeline's schedule
    does, brings a ``train_step`` of its own: it prepares the micro-batches, calls the stages of the model, and has
    the objective's loss on the last one.

    Attributes:
        note: whether CUDA graphs are used, and if not, why.
    """

    def __init__(self, engine: Engine, micro_batches: int, note: str = ""):
        self.engine, self.micro_batches, self.note = engine, micro_batches, note

    def train_step(
        self, micro_batches: Iterable[MicroBatch | PackedMicroBatch], before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """One step of the optimizer on the mean gradient of the micro-batches. Nothing waits for the device.

        Args:
            micro_batches: as many as the runner was made for; each is asked for when the one before is enqueued.
            before_update: called between the last backward pass and the optimizer's step.

        Raises ValueError for another number of micro-batches, before the optimizer's step.
        """
        loss, number = torch.zeros((), device=self.engine.mesh.device), 0
        for number, micro_batch in enumerate(micro_batches, 1):
            loss += self.micro_step(micro_batch, first=number == 1, last=number == self.micro_batches)
        if number != self.micro_batches:
            raise ValueError(f"a step has {self.micro_batches} micro-batches, got {number}")
        before_update()
        return replace(self.engine.step(), loss=loss)

    def close(self) -> None:
        """Lets go of what refers to the communicators of the mesh; no step after that."""
        return None

    @abstractmethod
    def micro_step(self, micro_batch: MicroBatch | PackedMicroBatch, *, first: bool, last: bool) -> Tensor:
        """Adds the gradients of a micro-batch, the step's first or last or neither, to the engine's. Returns its share
        of the step's loss, 0-dim and detached, which the next call may overwrite."""

    @abstractmethod
    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """The same kernel by kernel, module by module, outside any count: for looking at it."""

    @abstractmethod
    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """The loss of each sample, (B,), kernel by kernel."""
