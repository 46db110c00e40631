"""Who draws what the browsers ask for: a sampling server of one model, the only one in memory, and a bounded line of
those who wait for it."""

import gc
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import torch

from opendit.inference.page.catalog import WeightsChoice
from opendit.inference.request import SampleRequest
from opendit.inference.server import SamplingServer
from opendit.inference.settings import DrawSettings

MOST_WAITING, MOST_DRAWN = 16, 8  # requests


class TooManyRequests(Exception):
    """As many requests as may wait are waiting."""


@dataclass(frozen=True)
class DrawingRequest:
    """What is to be drawn, and how."""

    weights: WeightsChoice
    what: int | tuple[int | str, ...]
    settings: DrawSettings


class PendingDrawing:
    """A request on its way; any thread may ask it how far it is, or cancel it.

    Attributes:
        stage: "waiting", "loading", "drawing" or "done".
        notes: what should be known of the weights, once they are loaded.
        samples: pictures or clips as ``Pipeline`` returns them, when it is done.
        error: what went wrong: CancelledError, ValueError or OSError (the message is for people), or something else.
    """

    def __init__(self, request: DrawingRequest, ended: Callable[["PendingDrawing"], None]):
        self.request, self.stage = request, "waiting"
        self.notes: list[str] = []
        self.samples: list[Any] = []
        self.error: BaseException | None = None
        self._ended, self._drawn = ended, None
        self._lock, self._done = threading.Lock(), threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def progress(self) -> float:
        """Of the drawing, 0 to 1."""
        drawn = self._drawn
        return float(self.done) if drawn is None else drawn.progress

    def cancel(self) -> None:
        """Ends it; what is being computed of it goes on to the end of a step at most."""
        drawn = self._drawn
        self.end(error=CancelledError())
        if drawn is not None:
            drawn.cancel()

    def drawn_by(self, drawn: SampleRequest) -> None:
        """Ends with what a sampling server makes of it."""
        with self._lock:
            if not self.done:
                self._drawn, self.stage = drawn, "drawing"
        if self._drawn is drawn:
            drawn.add_done_callback(self._take)
        else:
            drawn.cancel()

    def _take(self, drawn: SampleRequest) -> None:
        try:
            self.end(drawn.result(0))
        except (Exception, CancelledError) as error:
            self.end(error=error)

    def end(self, samples: list[Any] | None = None, error: BaseException | None = None) -> None:
        """Ends it, unless it has ended."""
        with self._lock:
            if self.done:
                return
            self.samples, self.error, self.stage = samples or [], None if error is None else plain(error), "done"
            self._drawn = None  # whose tensors would keep a model's memory
            self._done.set()
        self._ended(self)

    def result(self, timeout: float | None = None) -> list[Any]:
        """The samples. Raises ``error``, or TimeoutError if it takes longer."""
        if not self._done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.samples


class DrawingQueue:
    """Gives requests to the sampling server of their model, in the order in which they come; a context manager.

    Requests of one model are drawn together. One of another model waits until they are done, and those that come after
    it wait for it; then the server is closed, its model freed, and the other one loaded.

    Args:
        start: ``start(choice)`` is a sampling server of these weights.
    """

    def __init__(self, start: Callable[[WeightsChoice], SamplingServer], most_waiting: int = MOST_WAITING):
        self._start, self._most = start, most_waiting
        self._server: SamplingServer | None = None
        self._choice: WeightsChoice | None = None  # of the server; None if it is not to be used again
        self._waiting: deque[PendingDrawing] = deque()
        self._drawn: set[PendingDrawing] = set()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="drawing-queue", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DrawingQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: DrawingRequest) -> PendingDrawing:
        """Raises TooManyRequests."""
        pending = PendingDrawing(request, self._ended)
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                raise TooManyRequests
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending

    def before(self, pending: PendingDrawing) -> int:
        """How many wait before a request that waits."""
        with self._changed:
            return self._waiting.index(pending) if pending in self._waiting else 0

    def close(self) -> None:
        """Cancels what is under way and what waits, and frees the model."""
        with self._changed:
            self._closed = True
            left = [*self._waiting, *self._drawn]
            self._changed.notify_all()
        for pending in left:
            pending.cancel()
        self._thread.join()

    def _ended(self, pending: PendingDrawing) -> None:
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)
            self._drawn.discard(pending)
            if pending.error is not None and not is_plain(pending.error):
                self._choice = None  # out of memory, say: the next request gets a server of its own
            self._changed.notify_all()

    def _work(self) -> None:
        while (pending := self._next()) is not None:
            try:
                pending.drawn_by(self._server_of(pending).submit(**self._asked(pending)))
            except Exception as error:
                if not is_plain(error):
                    traceback.print_exc(file=sys.stderr)
                pending.end(error=error)
        self._free()

    def _next(self) -> PendingDrawing | None:
        """The request that has waited longest, when it can be drawn; None when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._fits(self._waiting[0])))
            if self._closed:
                return None
            pending = self._waiting.popleft()
            self._drawn.add(pending)
            pending.stage = "loading"
            return pending

    def _fits(self, pending: PendingDrawing) -> bool:
        return not self._drawn or (pending.request.weights == self._choice and len(self._drawn) < MOST_DRAWN)

    def _server_of(self, pending: PendingDrawing) -> SamplingServer:
        choice = pending.request.weights
        if self._server is None or self._choice != choice:
            self._free()
            self._server = self._start(choice)
            self._choice = choice
        pending.notes = [note for note in self._server.notes if not note.startswith(("kernels: ", "attention: "))]
        return self._server

    def _asked(self, pending: PendingDrawing) -> dict[str, Any]:
        what = pending.request.what
        return {"what": what if isinstance(what, int) else list(what), **vars(pending.request.settings)}

    def _free(self) -> None:
        """The model before goes before the next one comes: both may not fit."""
        if self._server is not None:
            self._server.close()
        self._server = self._choice = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_plain(error: BaseException) -> bool:
    """Whether an error says what people need to know: nothing is wrong with the program or its model."""
    return isinstance(error, CancelledError | ValueError | OSError)


def plain(error: BaseException) -> BaseException:
    """An error without the frames that it went through, which would keep the model and its activations."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
    return error
