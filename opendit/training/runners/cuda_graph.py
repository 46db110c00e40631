"""Micro-batches replayed as one CUDA graph each.

A step of DiT-XL/2 is some 3,900 kernels, which the host needs about 160 ms to enqueue. Below some 27,000 tokens a GPU
the device is done sooner and waits; above, it still idles for a moment between any two kernels. A recorded graph is one
call for the host, and its kernels follow each other at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.kernels.recording import GraphRecorder
from opendit.training.runners.base import Runner
from opendit.training.runners.eager import EagerRunner
from opendit.training.runners.micro_batch import MicroBatch

GRAPH_WARMUP = 3  # micro-batches before a recording: kernels get compiled, libraries set up, communicators connected


@dataclass
class Recording:
    """A recorded micro-batch: what it reads, what it leaves, and how to run it again."""

    inputs: list[Tensor]
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], None]

    def fits(self, tensors: list[Tensor]) -> bool:
        return [(a.shape, a.dtype) for a in self.inputs] == [(b.shape, b.dtype) for b in tensors]


class CUDAGraphRunner(Runner):
    """After a graph warm-up of a few micro-batches one is recorded, and further ones of its shapes are replayed.

    The first micro-batch of a step, which sets the gradients, and the others, which add to them, are two graphs.
    Whatever can't be recorded or replayed runs kernel by kernel, to the same result.

    Args:
        eager: runs those, and is what is recorded. Its objective and model must not wait for the device, and whatever
            they depend on besides the micro-batch stays as it was when it was recorded.
        recorder: of the graphs.
        say: is told if recording fails.
    """

    def __init__(self, eager: EagerRunner, recorder: GraphRecorder, say: Callable[[str], None] = print):
        note = f"forward and backward, from micro-batch {GRAPH_WARMUP + 1} on"
        super().__init__(eager.engine, eager.micro_batches, note)
        self.eager, self.recorder, self.say = eager, recorder, say
        self._in_graph = False  # whether the step's gradients are a recording's
        self._warmup_left: dict[bool, float] = {True: GRAPH_WARMUP, False: GRAPH_WARMUP}  # of first and of further ones
        self._recordings: dict[bool, Recording] = {}

    def micro_step(self, micro_batch: MicroBatch, *, first: bool, last: bool) -> Tensor:
        recording = self._recordings.get(first)
        usable = first or self._in_graph  # what adds to gradients must find them where it did when it was recorded
        if usable and recording is None and self._warmup_left[first] <= 0:
            recording = self._record(micro_batch, first, last)
        if usable and recording is not None and recording.fits(tensors := micro_batch.tensors()):
            torch._foreach_copy_(recording.inputs, tensors)
            recording.replay()
            self.engine.gradients = recording.gradients
            self._in_graph = True
            return recording.loss
        self._warmup_left[first] -= 1
        self._in_graph &= not first
        return self.forward_backward(micro_batch, last=last)

    def close(self) -> None:
        """Frees the recordings: NCCL waits for ever to end a communicator that a recorded graph still uses."""
        self._recordings.clear()

    def forward_backward(self, micro_batch: MicroBatch, *, last: bool) -> Tensor:
        with self.recorder.side_stream():
            return self.eager.forward_backward(micro_batch, last=last)

    def losses(self, micro_batch: MicroBatch) -> Tensor:
        return self.eager.losses(micro_batch)

    def _record(self, micro_batch: MicroBatch, first: bool, last: bool) -> Recording | None:
        """Records such a micro-batch; nothing is computed. None if that fails: it is not tried again."""
        static, before = micro_batch.clone(), self.engine.gradients
        try:
            loss, replay = self.recorder.record(lambda: self.eager.forward_backward(static, last=last))
        except RuntimeError as error:
            self.engine.gradients = before
            self._warmup_left[first] = math.inf
            self.note = f"recording failed, training goes on kernel by kernel: {str(error).splitlines()[0]}"
            self.say(f"CUDA graph: {self.note}")
            return None
        self._recordings[first] = Recording(static.tensors(), loss, self.engine.gradients, replay)
        return self._recordings[first]
