"""Who draws what the browsers ask for: one thread, one model in memory, a bounded line of those who wait."""

import gc
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opendit.inference.page.catalog import WeightsChoice
from opendit.inference.pipeline import Pipeline

MOST_WAITING = 16


class QueueFull(Exception):
    """As many requests as may wait are waiting."""


class Cancelled(Exception):
    """The request was cancelled before it was done."""


@dataclass(frozen=True)
class DrawingRequest:
    """What is to be drawn: the arguments of a ``Pipeline``'s call, but for its progress."""

    weights: WeightsChoice
    what: int | tuple[int | str, ...]
    steps: int
    guidance: float
    seed: int
    sampler: str | None = None
    interval: tuple[float, float] | None = None
    negative: str | None = None

    def arguments(self) -> dict[str, Any]:
        names = ("steps", "guidance", "seed", "sampler", "interval", "negative")
        return {name: getattr(self, name) for name in names}


class PendingDrawing:
    """A request on its way; any thread may ask it how far it is, or cancel it.

    Attributes:
        stage: "waiting", "loading", "drawing" or "done".
        progress: of the drawing, 0 to 1.
        notes: what should be known of the weights, once they are loaded.
        samples: what the ``Pipeline`` has returned, when it is done.
        error: what went wrong: Cancelled, ValueError or OSError (the message is for people), or something else.
    """

    def __init__(self, request: DrawingRequest, forget: Callable[["PendingDrawing"], None]):
        self._forget = forget
        self.request, self.stage, self.progress, self.notes = request, "waiting", 0.0, []
        self._cancelled, self._done = threading.Event(), threading.Event()
        self.samples: list[Any] = []
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends it: at once if it waits, else after the step that is being computed."""
        self._cancelled.set()
        self._forget(self)

    def result(self, timeout: float | None = None) -> list[Any]:
        """The samples. Raises ``error``, or TimeoutError if it takes longer."""
        if not self._done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.samples

    def _end(self, samples: list[Any], error: Exception | None) -> None:
        self.samples, self.error, self.stage = samples, error, "done"
        self._done.set()


class DrawingQueue:
    """Draws requests in the order in which they come, with one model in memory; a context manager.

    Another model is loaded when a request asks for it, after the one before it was freed.

    Args:
        load: ``load(choice)`` is the ``Pipeline`` of these weights.
        batch_size: samples at a time.
    """

    def __init__(self, load: Callable[[WeightsChoice], Pipeline], batch_size: int, most_waiting: int = MOST_WAITING):
        self._load, self._batch_size, self._most = load, batch_size, most_waiting
        self._pipe: Pipeline | None = None
        self._choice: WeightsChoice | None = None
        self._waiting: deque[PendingDrawing] = deque()
        self._current: PendingDrawing | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="drawing", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DrawingQueue":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, request: DrawingRequest) -> PendingDrawing:
        """Raises QueueFull."""
        pending = PendingDrawing(request, self._forget)
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                raise QueueFull
            self._waiting.append(pending)
            self._changed.notify()
        return pending

    def before(self, pending: PendingDrawing) -> int:
        """How many wait before a request that waits."""
        with self._changed:
            return self._waiting.index(pending) if pending in self._waiting else 0

    def close(self) -> None:
        """Cancels what is under way and what waits."""
        with self._changed:
            self._closed = True
            pending = [*self._waiting, *filter(None, [self._current])]
            self._changed.notify()
        for one in pending:
            one.cancel()
        self._thread.join(timeout=60)

    def _forget(self, pending: PendingDrawing) -> None:
        """Ends a request that waits."""
        with self._changed:
            if pending not in self._waiting:
                return
            self._waiting.remove(pending)
        pending._end([], Cancelled())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                pending = self._current = self._waiting.popleft()
            samples, failed = [], None
            try:
                samples = self._draw(pending)
            except Exception as error:
                if not isinstance(error, Cancelled | ValueError | OSError):  # those say what is to be known
                    traceback.print_exc(file=sys.stderr)
                failed = error.with_traceback(None)  # whose frames would keep the model and its activations
                failed.__context__ = failed.__cause__ = None
            if failed is not None and not isinstance(failed, Cancelled | ValueError | OSError):
                self._free()  # out of memory, say: what is left of it is not to be relied on
            pending._end(samples, failed)

    def _draw(self, pending: PendingDrawing) -> list[Any]:
        request = pending.request

        def check() -> None:
            if pending.cancelled:
                raise Cancelled

        check()
        pending.stage = "loading"
        pipe = self._model(request.weights)
        pending.notes = [note for note in pipe.notes if not note.startswith(("kernels: ", "attention: "))]
        pending.stage = "drawing"
        what = request.what if isinstance(request.what, int) else list(request.what)
        count = what if isinstance(what, int) else len(what)
        total = -(-count // self._batch_size) * request.steps
        done = 0

        def after_step(step: int, latents: torch.Tensor) -> None:
            nonlocal done
            check()
            if latents.device.type == "cuda" and step % 8 == 0:
                torch.cuda.synchronize(latents.device)  # or the steps would all be queued, and none could be cancelled
            done += 1
            pending.progress = done / total

        return pipe(what, **request.arguments(), batch_size=self._batch_size, progress=False, callback=after_step)

    def _model(self, choice: WeightsChoice) -> Pipeline:
        if self._pipe is None or self._choice != choice:
            self._free()
            self._pipe = self._load(choice)
            self._choice = choice
        return self._pipe

    def _free(self) -> None:
        """The model before goes before the next one comes: both may not fit."""
        self._pipe = self._choice = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
