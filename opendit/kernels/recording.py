"""Work recorded as a CUDA graph. Only this file touches what torch keeps to itself for that."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

_ALIVE: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
_FAILED: list[torch.cuda.CUDAGraph] = []  # recordings that torch must go on finding, see _clear_up


T = TypeVar("T")


class Recorder(Protocol):
    """The interface of recorders: :class:`GraphRecorder`, or a wrapper around one."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...


class GraphRecorder:
    """Records on a side stream of its own, into one pool of memory that all its recordings share.

    Autograd goes back to the stream of a weight's first use, and what is recorded must not touch the default one: so
    what runs between recordings belongs on the side stream, too.
    """

    def __init__(self):
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record on this recorder's stream and in its memory pool; see :func:`record`."""
        return record(work, self._stream, self._pool)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Enqueue the block's work on the side stream, in order with the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def record(work: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[T, Callable[[], None]]:
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
    _ALIVE.add(graph)
    return result, graph.replay


def end_recordings() -> None:
    """Frees what this process has recorded, which can't be replayed any more. A NCCL communicator can only be closed
    when nothing recorded uses it: until then its end waits."""
    for graph in tuple(_ALIVE):
        graph.reset()
    _ALIVE.clear()


def _clear_up(graph: torch.cuda.CUDAGraph, pool) -> None:
    """After a recording whose end failed, torch takes it to go on: freed memory that another stream has used would not
    be used again, and no random numbers could be drawn."""
    _FAILED.append(graph)  # the allocator of pinned memory goes on asking it whether a stream belongs to it
    with contextlib.suppress(RuntimeError):  # its end did not fail
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
