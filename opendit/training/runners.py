"""Forward, loss and backward of a micro-batch: kernel by kernel, or replayed as one CUDA graph.

A step of DiT-XL/2 is some 3,900 kernels, which the host needs about 160 ms to enqueue. Below some 27,000 tokens a GPU
the device is done sooner and waits; above, it still idles for a moment between any two kernels. A recorded graph is one
call for the host, and its kernels follow each other at once.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.models import Condition, TextCondition
from opendit.parallel.engines import Engine

_FAILED: list[torch.cuda.CUDAGraph] = []  # recordings that torch must go on finding, see _clear_up
EAGER = 3  # micro-batches before a recording: kernels get compiled, libraries set up, communicators connected


@dataclass
class Recording:
    """A recorded micro-batch: what it reads, what it leaves, and how to run it again."""

    inputs: list[Tensor]
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], None]

    def fits(self, tensors: list[Tensor]) -> bool:
        return [(a.shape, a.dtype) for a in self.inputs] == [(b.shape, b.dtype) for b in tensors]


class ForwardBackward:
    """Calls compute the loss of a micro-batch and add its gradients to the engine's.

    With ``graph``, the first few calls run kernel by kernel; then one is recorded, and further ones of its shapes are
    replayed. The first micro-batch of a step, which sets the gradients, and the others, which add to them, are two
    graphs. Whatever can't be recorded or replayed runs kernel by kernel, to the same result.

    Args:
        engine: whose gradients are meant.
        loss: ``loss(x, t, noise, y)``, 0-dim. It must not wait for the device, and whatever it depends on besides its
            arguments stays as it was when it was recorded.
        graph: whether graphs are asked for (``--enable_cuda_graph``).
        say: is told if recording fails.

    Attributes:
        note: whether graphs are used, and if not, why.
    """

    def __init__(self, engine: Engine, loss: Callable[..., Tensor], *, graph: bool, say: Callable[[str], None] = print):
        self.engine, self.loss, self.say = engine, loss, say
        why_not = "--enable_cuda_graph is off"
        if graph:
            why_not = engine.no_graph if engine.mesh.device.type == "cuda" else "it needs a CUDA GPU"
        self.graph = not why_not
        self.note = f"off: {why_not}" if why_not else f"forward and backward, from micro-batch {EAGER + 1} on"
        self._first = True  # whether the next micro-batch is a step's first
        self._in_graph = False  # whether the step's gradients are a recording's
        self._eager_left: dict[bool, float] = {True: EAGER, False: EAGER}  # of first and of further micro-batches
        self._recordings: dict[bool, Recording] = {}
        # Autograd goes back to the stream of a weight's first use, and what is recorded must not touch the default one.
        self._stream = torch.cuda.Stream() if self.graph else None
        self._pool = torch.cuda.graph_pool_handle() if self.graph else None  # memory that both recordings share

    def __call__(self, x: Tensor, t: Tensor, noise: Tensor, y: Condition, *, last: bool) -> Tensor:
        """The loss, 0-dim and detached; the next call may overwrite it. ``last``: the step follows."""
        first, self._first = self._first, last
        if not self.graph:
            return self._run(x, t, noise, y, last)
        recording = self._recordings.get(first)
        if recording is None and self._eager_left[first] <= 0 and (first or self._in_graph):
            recording = self._record(first, x, t, noise, y, last)
        tensors = [x, t, noise, *_tensors(y)]
        if recording is not None and (first or self._in_graph) and recording.fits(tensors):
            torch._foreach_copy_(recording.inputs, tensors)
            recording.replay()
            self.engine.gradients = recording.gradients
            self._in_graph = True
            return recording.loss
        self._eager_left[first] -= 1
        self._in_graph &= not first
        with self._beside():
            return self._run(x, t, noise, y, last)

    def eager(self, x: Tensor, t: Tensor, noise: Tensor, y: Condition, *, last: bool) -> Tensor:
        """The same kernel by kernel, outside the count of micro-batches."""
        with self._beside():
            return self._run(x, t, noise, y, last)

    def _run(self, x: Tensor, t: Tensor, noise: Tensor, y: Condition, last: bool) -> Tensor:
        with self.engine.micro_batch(last=last):
            loss = self.loss(x, t, noise, y)
            self.engine.backward(loss)
        return loss.detach()

    def _record(self, first: bool, x: Tensor, t: Tensor, noise: Tensor, y: Condition, last: bool) -> Recording | None:
        """Records such a micro-batch; nothing is computed. None if that fails: it is not tried again."""
        x, t, noise, y = x.clone(), t.clone(), noise.clone(), _clone(y)
        before = self.engine.gradients
        try:
            loss, replay = record(lambda: self._run(x, t, noise, y, last), self._stream, self._pool)
        except RuntimeError as error:
            self.engine.gradients = before
            self._eager_left[first] = math.inf
            self.note = f"recording failed, training goes on kernel by kernel: {str(error).splitlines()[0]}"
            self.say(f"CUDA graph: {self.note}")
            return None
        recording = Recording([x, t, noise, *_tensors(y)], loss, self.engine.gradients, replay)
        self._recordings[first] = recording
        return recording

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """What is enqueued inside goes to the stream of the recordings, in order with the current one."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def record(work: Callable[[], Tensor], stream: torch.cuda.Stream, pool) -> tuple[Tensor, Callable[[], None]]:
    """Records what ``work`` enqueues without running it: (its result's memory, a function that runs it).

    Raises RuntimeError if something in it can't be recorded; the pool is good for no other recording then.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    try:
        # thread_local: other threads, which pin batches and watch communicators, may go on calling CUDA.
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream()), recording:
            try:
                result = work()
            except RuntimeError as error:
                failure = error  # of a recording that failed halfway the end fails, too, and says less
                raise
    except RuntimeError as error:
        _clear_up(graph, pool)
        raise failure or error from None
    return result, graph.replay


def _clear_up(graph: torch.cuda.CUDAGraph, pool) -> None:
    """After a recording whose end failed, torch takes it to go on: freed memory that another stream has used would not
    be used again, and no random numbers could be drawn."""
    _FAILED.append(graph)  # the allocator of pinned memory goes on asking it whether a stream belongs to it
    with contextlib.suppress(RuntimeError):  # its end did not fail
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def _tensors(y: Condition) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else [y.tokens, y.mask, y.pooled]


def _clone(y: Condition) -> Condition:
    return y.clone() if isinstance(y, Tensor) else TextCondition(*(part.clone() for part in _tensors(y)))
