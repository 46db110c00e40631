"""Record GPU work as CUDA graphs. Only this module uses torch's private functions for CUDA graphs."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch

from opendit.common.utils import collection_paused

_ALIVE: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
_FAILED: list[torch.cuda.CUDAGraph] = []  # graphs of failed recordings; see _clear_up


T = TypeVar("T")


class Recorder(Protocol):
    """Interface for recording CUDA graphs, for :class:`GraphRecorder` and wrappers around it."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...


class GraphRecorder:
    """Recorder with a side stream, and one memory pool for all its recordings.

    Work between recordings must run on the side stream, too. Autograd accumulates a weight's gradient on the stream of
    the weight's first use. When recording, this stream must not be the default stream.
    """

    def __init__(self):
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record on this recorder's stream and memory pool; see :func:`record`."""
        if not self._graphs:  # torch frees a memory pool with the pool's last graph, and later rejects the pool
            self._pool = torch.cuda.graph_pool_handle()
        result, replay = record(work, self._stream, self._pool)
        self._graphs.add(cast(Any, replay).__self__)
        return result, replay

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the body of the ``with`` statement on the side stream, in order with the current stream's work."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def record(work: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[T, Callable[[], None]]:
    """Record the kernels that ``work`` enqueues, without running them.

    Returns the result of ``work``, with tensors that have no values yet, and a function that runs the recorded kernels.
    Raises RuntimeError if ``work`` can't be recorded completely; the pool can't be used again then.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    try:
        # thread_local, because other threads may call CUDA meanwhile, to pin batches or watch communicators.
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # Pause garbage collection, because freeing an older recording would break the capture.
        with collection_paused(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            try:
                result = work()
            except RuntimeError as error:
                # keep this error: when the capture ends, torch raises another error with a less useful message
                failure = error
                raise
    except RuntimeError as error:
        _clear_up(graph, pool)
        raise failure or error from None
    _ALIVE.add(graph)
    return result, graph.replay


def end_recordings() -> None:
    """Free all recordings of this process. They can't be replayed after that.

    Call this before closing NCCL communicators: closing waits until no recording uses the communicator.
    """
    for graph in tuple(_ALIVE):
        graph.reset()
    _ALIVE.clear()


def _clear_up(graph: torch.cuda.CUDAGraph, pool) -> None:
    """Reset torch's state after a failed capture. Otherwise torch believes that the capture is still running: it never
    reuses other streams' memory, and random numbers fail."""
    _FAILED.append(graph)  # the pinned-memory allocator still queries the graph's streams
    with contextlib.suppress(RuntimeError):  # torch raises this error if the capture ended without failure
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
