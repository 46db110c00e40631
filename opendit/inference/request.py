"""What a client of the sampling server holds: a request, and the errors that it may end with."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from opendit.inference.slot_loop import SampleKind, SlotSample

_numbers = itertools.count()


class QueueFullError(RuntimeError):
    """The server has as many samples waiting as it takes; ask again when some are done."""


class ServerClosedError(RuntimeError):
    """The server was closed, or its worker died, before the request was done."""


class SampleRequest:
    """Samples that were asked for together, made by ``SamplingServer.submit``; any thread may use it.

    Attributes:
        count: of its samples.
        steps: of the sampler, for each.
    """

    def __init__(
        self, kind: SampleKind, samples: list[SlotSample], steps: int, callback: Callable[[float], None] | None
    ):
        self.count, self.steps = len(samples), steps
        self.kind, self.callback, self.arrival = kind, callback, next(_numbers)
        self.pending, self.drawn = deque(samples), 0  # samples without a row so far; steps done of all
        self.records_all = False  # whether the steps of all batch sizes are to be recorded before its first one
        self.in_rows, self.served = 0, self.arrival  # samples in rows; when one got a row last
        for sample in samples:
            sample.owner = self
        self._results: list[Any] = [None] * self.count
        self._missing, self._lock = self.count, threading.Lock()
        self._future: Future[Any] = Future()

    def __repr__(self) -> str:
        if self.cancelled:
            state = "cancelled"
        else:
            state = "done" if self.done else f"{self.progress:.0%}"
        return f"SampleRequest({self.count} samples, {self.steps} steps, {state})"

    # -------------------------------------------------------------------------------------------------- for the client

    def result(self, timeout: float | None = None) -> list[Any]:
        """The samples in their order, as ``Pipeline`` returns them; waits ``timeout`` seconds at most (None: no end).

        Raises:
            TimeoutError: it takes longer.
            concurrent.futures.CancelledError: it was cancelled.
            ServerClosedError: the server was closed before, or its worker died.
            RuntimeError: drawing or decoding failed; the message is one line.
            Exception: what ``callback`` raised.
        """
        return self._future.result(timeout)

    def cancel(self) -> bool:
        """Ends it; its rows are free from the next step on. False if it has ended already."""
        return self._future.cancel()

    @property
    def done(self) -> bool:
        """Whether it has ended: with samples, an error or by ``cancel``."""
        return self._future.done()

    @property
    def cancelled(self) -> bool:
        return self._future.cancelled()

    @property
    def progress(self) -> float:
        """The share of its steps that are done, 0 to 1; decoding comes after the last one."""
        return min(1.0, self.drawn / (self.count * self.steps))

    def add_done_callback(self, function: Callable[["SampleRequest"], None]) -> None:
        """``function(request)`` is called when it ends, at once if it has; in the thread that ends it."""
        self._future.add_done_callback(lambda _: function(self))

    # -------------------------------------------------------------------------------------------------- for the server

    def deliver(self, numbers: list[int], samples: list[Any]) -> None:
        """Takes finished samples by their numbers; the last ones end it."""
        with self._lock:
            for number, sample in zip(numbers, samples, strict=True):
                self._results[number] = sample
            self._missing -= len(numbers)
            whole = not self._missing
        if whole:
            try:
                self._future.set_result(self._results)
            except InvalidStateError:
                pass  # cancelled, or failed elsewhere

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, unless it has ended."""
        try:
            self._future.set_exception(error)
        except InvalidStateError:
            pass

    def take_row(self) -> None:
        """One of its samples gets a row."""
        self.in_rows += 1
        self.served = next(_numbers)

    def advanced(self, samples: int) -> None:
        """So many of its samples have taken a step; an error of its callback ends it."""
        self.drawn += samples
        if self.callback is None or self.done:
            return
        try:
            self.callback(self.progress)
        except Exception as error:
            self.fail(error)
