"""Run the passes of a training step: kernel by kernel, replayed from CUDA graphs, or over the stages of a pipeline.

A step of DiT-XL/2 launches about 3,900 kernels, and the host needs about 160 ms to enqueue them. With fewer than about
27,000 tokens per GPU the device needs less time than the host and waits for the host. With more tokens the device still
idles briefly between two kernels. A recorded graph is launched by one call, and its kernels follow each other without
gaps.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from opendit.diffusion.objectives import Objective
from opendit.kernels.recording import GraphRecorder
from opendit.parallel.engines import Engine, StepResult
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch

GRAPH_WARMUP = 3  # number of micro-batches before a recording, in which kernels are compiled and communicators connect

logger = logging.getLogger(__name__)


class EagerPasses(Protocol):
    """Interface of ``train.EagerPasses``: the passes of one micro-batch, kernel by kernel.

    Attributes:
        micro_batches: number of micro-batches in a step. The loss of a step is the mean of their losses.
    """

    @property
    def engine(self) -> Engine: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def micro_batches(self) -> int: ...

    def losses(self, batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the loss of each sample, (B,)."""
        ...

    def forward_backward(self, batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch to the engine's gradients. Return the micro-batch's contribution to the
        step's loss, 0-dim, detached."""
        ...


class Runner(ABC):
    """Runs the passes of training steps. In training, only runners call the model.

    Attributes:
        note: states whether CUDA graphs are used and, if not, the reason.
    """

    engine: Engine
    note: str

    @abstractmethod
    def passes(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> Tensor:
        """Run the forward and backward passes of a step. The host does not wait for the device.

        Args:
            micro_batches: the micro-batches of the step. Each is requested only after the passes of the previous
                micro-batch have been enqueued.

        Returns:
            The step's mean loss on this rank, 0-dim. In a pipeline only the last stage has the loss, and other stages
            return 0.

        Raises:
            ValueError: the number of micro-batches is wrong.
        """

    def train_step(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> StepResult:
        """Run the passes of a step and the optimizer's update."""
        loss = self.passes(micro_batches)
        return replace(self.engine.step(), loss=self.engine.mesh.sum(loss, "pp"))

    @abstractmethod
    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the loss of each sample, (B,), without a CUDA graph."""

    @abstractmethod
    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Run the passes of one micro-batch without a CUDA graph, so that hooks on modules run."""

    def close(self) -> None:
        """Release objects that use the communicators of the mesh. No step may follow."""
        return None


class EagerRunner(Runner):
    """Runner that launches every micro-batch kernel by kernel."""

    def __init__(self, eager: EagerPasses, note: str = ""):
        self.eager, self.engine, self.note = eager, eager.engine, note

    def passes(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> Tensor:
        wanted = self.eager.micro_batches
        loss, number = torch.zeros((), device=self.engine.mesh.device), 0
        for number, micro_batch in enumerate(micro_batches, 1):
            loss += self.micro_step(micro_batch, first=number == 1, last=number == wanted)
        if number != wanted:
            raise ValueError(f"a step has {wanted} micro-batches, got {number}")
        return loss

    def micro_step(self, micro_batch: MicroBatch | PackedMicroBatch, *, first: bool, last: bool) -> Tensor:
        """Add the gradients of a micro-batch to the engine's gradients. Return the micro-batch's contribution to the
        step's loss.

        The result is 0-dim and detached; the next call may overwrite it.

        Args:
            first, last: True for the step's first or last micro-batch.
        """
        return self.forward_backward(micro_batch, last=last)

    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        return self.eager.losses(micro_batch)

    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        return self.eager.forward_backward(micro_batch, last=last)


@dataclass
class Recording:
    """A recorded micro-batch: the tensors that the graph reads, the loss and gradients that it writes, and its
    replay."""

    inputs: MicroBatch
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], None]

    def fits(self, micro_batch: MicroBatch) -> bool:
        own, others = ([(x.shape, x.dtype) for x in batch.tensors()] for batch in (self.inputs, micro_batch))
        return own == others and (micro_batch.full or not self.inputs.full)


class CUDAGraphRunner(EagerRunner):
    """Runner that records one micro-batch after a warm-up, and replays it for later micro-batches of the same shapes.

    There are two graphs: one for the first micro-batch of a step, which sets the gradients, and one for all later
    micro-batches, which add to the gradients. A micro-batch that can't be recorded or replayed runs kernel by kernel,
    with the same result.

    Args:
        eager: the passes to record, also used for micro-batches that run kernel by kernel. Its objective and model must
            not wait for the device. They must not depend on anything that changes after the recording, except for the
            micro-batch.
        recorder: records the graphs.
    """

    def __init__(self, eager: EagerPasses, recorder: GraphRecorder):
        super().__init__(eager, f"forward and backward, from micro-batch {GRAPH_WARMUP + 1} on")
        self.recorder = recorder
        self._in_graph = False  # True if the step's gradients are in memory that a recorded graph adds to
        # first micro-batch of a step or not -> number of micro-batches until the recording
        self._warmup_left: dict[bool, float] = {True: GRAPH_WARMUP, False: GRAPH_WARMUP}
        self._recordings: dict[bool, Recording] = {}
        self._routed = False  # True if blocks of the last micro-batch saw a part of the tokens

    def micro_step(self, micro_batch: MicroBatch, *, first: bool, last: bool) -> Tensor:
        if self._routed != (routed := micro_batch.kept is not None):  # --route_until: blocks now see all tokens
            self._routed, self._warmup_left = routed, dict.fromkeys((True, False), float(GRAPH_WARMUP))
            self._recordings.clear()
        recording = self._recordings.get(first)
        usable = first or self._in_graph  # later micro-batches of a step can only add to gradients of a recording
        if usable and recording is None and self._warmup_left[first] <= 0:
            recording = self._record(micro_batch, first, last)
        if usable and recording is not None and recording.fits(micro_batch):
            torch._foreach_copy_(recording.inputs.tensors(), micro_batch.tensors())
            recording.replay()
            self.engine.gradients = recording.gradients
            self._in_graph = True
            return recording.loss
        self._warmup_left[first] -= 1
        self._in_graph &= not first
        return self.forward_backward(micro_batch, last=last)

    def close(self) -> None:
        """Free the recordings. Otherwise NCCL would wait forever to close a communicator that a recorded graph uses."""
        self._recordings.clear()

    def forward_backward(self, micro_batch: MicroBatch, *, last: bool) -> Tensor:
        with self.recorder.side_stream():
            return self.eager.forward_backward(micro_batch, last=last)

    def _record(self, micro_batch: MicroBatch, first: bool, last: bool) -> Recording | None:
        """Record the passes of ``micro_batch`` without running them. If that fails, return None and never try again."""
        static, before = micro_batch.clone(), self.engine.gradients
        try:
            loss, replay = self.recorder.record(lambda: self.eager.forward_backward(static, last=last))
        except RuntimeError as error:
            self.engine.gradients = before
            self._warmup_left[first] = math.inf
            self.note = f"recording failed, training goes on kernel by kernel: {str(error).splitlines()[0]}"
            logger.warning("CUDA graph: %s", self.note)
            return None
        self._recordings[first] = Recording(static, loss, self.engine.gradients, replay)
        return self._recordings[first]


def build_runner(eager: EagerPasses, *, graph: bool = False, packs: bool = False) -> Runner:
    """Choose the runner of a training run.

    Args:
        graph: True for CUDA graphs (``--enable_cuda_graph``). If graphs can't be used, the runner's ``note`` states the
            reason.
        packs: True if micro-batches are packs (``--pack_tokens``).
    """
    engine = eager.engine
    if engine.mesh.pp_size > 1:
        from opendit.training.pipeline_runner import PipelineRunner

        return PipelineRunner(engine, eager.objective, eager.micro_batches)
    why_not = "--enable_cuda_graph is off"
    if graph and packs:
        why_not = "every pack has other segments (--pack_tokens), and a graph can replay but one"
    elif graph:
        why_not = (
            engine.no_graph or engine.module.no_graph if engine.mesh.device.type == "cuda" else "it needs a CUDA GPU"
        )
    return EagerRunner(eager, f"off: {why_not}") if why_not else CUDAGraphRunner(eager, GraphRecorder())
