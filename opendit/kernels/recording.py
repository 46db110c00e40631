"""Record work as a CUDA graph. Only this file uses torch's private names for that."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch

from opendit.common.utils import collection_paused

_ALIVE: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
_FAILED: list[torch.cuda.CUDAGraph] = []  # recordings that torch still refers to, see _clear_up


T = TypeVar("T")


class Recorder(Protocol):
    """Interface of recorders: :class:`GraphRecorder`, or a wrapper around one."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...


class GraphRecorder:
    """Records on its own side stream, into one memory pool that all its recordings share.

    Autograd runs on the stream where a weight was first used, and a recording must not touch the default one. So work
    between recordings belongs on the side stream, too.
    """

    def __init__(self):
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record on this recorder's stream and in its memory pool; see :func:`record`."""
        if not self._graphs:  # torch gives a pool up with the last graph in it, and takes no graph after that
            self._pool = torch.cuda.graph_pool_handle()
        result, replay = record(work, self._stream, self._pool)
        self._graphs.add(cast(Any, replay).__self__)
        return result, replay

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Enqueue the block's work on the side stream, in order with the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def record(work: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[T, Callable[[], None]]:
    """Record what ``work`` enqueues without running it. Return its result's memory, and a function that runs it.

    Raises RuntimeError if something in it can't be recorded; the pool can't be used for other recordings then.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    try:
        # thread_local: other threads, which pin batches and watch communicators, may call CUDA meanwhile.
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # To free an older recording during a capture breaks the capture.
        with collection_paused(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            try:
                result = work()
            except RuntimeError as error:
                failure = error  # the end of a failed recording fails, too, with a less useful message
                raise
    except RuntimeError as error:
        _clear_up(graph, pool)
        raise failure or error from None
    _ALIVE.add(graph)
    return result, graph.replay


def end_recordings() -> None:
    """Free everything this process has recorded, which can't be replayed any more.

    A NCCL communicator waits to be closed until no recording uses it.
    """
    for graph in tuple(_ALIVE):
        graph.reset()
    _ALIVE.clear()


def _clear_up(graph: torch.cuda.CUDAGraph, pool) -> None:
    """Clear the state that torch keeps after a failed capture, which it regards as still running.

    Otherwise freed memory that another stream has used would never be reused, and no random numbers could be drawn.
    """
    _FAILED.append(graph)  # the pinned-memory allocator still queries the graph's streams
    with contextlib.suppress(RuntimeError):  # raised if the capture ended without failure
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
