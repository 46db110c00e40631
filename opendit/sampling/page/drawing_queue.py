"""Draw the requests of browsers one after another, with one model in memory.

:class:`Page` is the state that all tabs of the page share. It submits requests to the :class:`DrawingQueue` and reports
their progress.
"""

import asyncio
import gc
import math
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from opendit.sampling.conditioning_frames import note_on_missing_frames
from opendit.sampling.page import views
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice
from opendit.sampling.page.sample_store import SampleStore
from opendit.sampling.page.training_queue import TrainingQueue
from opendit.sampling.pipeline import DrawSettings, Pipeline

MOST_WAITING = 16  # maximum number of waiting requests
POLL_S = 0.1  # seconds between two checks of a drawing's progress


class TooManyRequests(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class DrawingRequest:
    """A request to draw samples.

    Attributes:
        weights: the checkpoint or model to draw with.
        what: one class or caption per sample, or the number of unconditional samples.
        settings: the sampling settings.
        image: the picture that clips begin with.
    """

    weights: WeightsChoice
    what: int | tuple[int | str, ...]
    settings: DrawSettings
    image: Image.Image | None = None

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.what if isinstance(self.what, int) else len(self.what)


@dataclass(frozen=True)
class LabelledRequest:
    """A request to draw, with a label for every sample, and with the settings to write into the samples' files."""

    request: DrawingRequest
    labels: list[str]
    settings: dict[str, Any]


class PendingDrawing:
    """A request in the queue. Any thread may read its progress or cancel it.

    Attributes:
        stage: "waiting", "loading", "drawing" or "done".
        progress: fraction of the sampling steps that are done, from 0 to 1.
        notes: remarks about the weights; empty until the weights are loaded.
        samples: pictures or clips, as ``Pipeline`` returns them; empty until the request is done.
        error: the error if the request failed. CancelledError, ValueError and OSError have a message for the user.
    """

    def __init__(self, request: DrawingRequest, ended: Callable[["PendingDrawing"], None]):
        self.request, self.stage, self.progress = request, "waiting", 0.0
        self.notes: list[str] = []
        self.samples: list[Any] = []
        self.error: BaseException | None = None
        self._ended = ended
        self._lock, self._done = threading.Lock(), threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """End the request now. A step that has begun is still computed."""
        self.end(error=CancelledError())

    def end(self, samples: list[Any] | None = None, error: BaseException | None = None) -> None:
        """End the request with samples or with an error, unless it has ended already."""
        with self._lock:
            if self.done:
                return
            self.samples, self.error = samples or [], None if error is None else without_traceback(error)
            self.stage, self.progress = "done", 1.0
            self._done.set()
        self._ended(self)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the samples. Raises ``error``, or TimeoutError after ``timeout`` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.samples


class DrawingQueue:
    """Draws requests in the order in which they arrive. As a context manager, the queue closes on exit.

    Only one model is in memory. Before a request loads other weights, the queue frees the current model, because both
    models may not fit.

    Args:
        load: ``load(choice)`` returns the pipeline for the chosen weights.
        batch_size: number of samples to draw at a time.
        most_waiting: maximum number of waiting requests.
    """

    def __init__(
        self, load: Callable[[WeightsChoice], Pipeline], batch_size: int = 32, most_waiting: int = MOST_WAITING
    ):
        self._load, self._batch_size, self._most = load, batch_size, most_waiting
        self._pipe: Pipeline | None = None
        # weights of the pipeline ``_pipe``; None if the pipeline must not be reused
        self._choice: WeightsChoice | None = None
        self._waiting: deque[PendingDrawing] = deque()
        self._drawn: PendingDrawing | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="drawing-queue", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DrawingQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: DrawingRequest) -> PendingDrawing:
        """Add a request. Raises TooManyRequests if the queue is full or closed."""
        pending = PendingDrawing(request, self._forget)
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                raise TooManyRequests
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending

    def before(self, pending: PendingDrawing) -> int:
        """Return how many requests will be drawn before ``pending``."""
        with self._changed:
            return self._waiting.index(pending) if pending in self._waiting else 0

    def close(self) -> None:
        """Cancel all requests, free the model and end the thread."""
        with self._changed:
            self._closed = True
            left = [*self._waiting, *([] if self._drawn is None else [self._drawn])]
            self._changed.notify_all()
        for pending in left:
            pending.cancel()
        self._thread.join()

    def _forget(self, pending: PendingDrawing) -> None:
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)

    def _work(self) -> None:
        while (pending := self._next()) is not None:
            try:
                pending.end(self._draw(pending))
            except Exception as error:
                if not is_for_people(error):
                    traceback.print_exc(file=sys.stderr)
                    # forget the model, because the GPU may be out of memory; the next request loads it again
                    self._choice = None
                pending.end(error=error)
            # drop references, because the samples would stay in memory until the next request
            self._drawn = pending = None
        self._free()

    def _next(self) -> PendingDrawing | None:
        """Wait for a request and return it; return None when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            self._drawn = self._waiting.popleft()
            self._drawn.stage = "loading"
            return self._drawn

    def _draw(self, pending: PendingDrawing) -> list[Any]:
        request, pipe = pending.request, self._pipeline(pending.request.weights)
        pending.notes = [note for note in pipe.notes if not note.startswith(("kernels: ", "attention: "))]
        if request.image is None and not pipe.config.given_beside:
            pending.notes += note_on_missing_frames(pipe.config)
        batches, done = math.ceil(request.count / self._batch_size), 0

        def after_step(_: int, latents: Tensor) -> None:
            nonlocal done
            if pending.done:
                raise CancelledError
            done += 1
            pending.progress = done / (batches * request.settings.steps)

        if pending.done:  # the request was cancelled while the model was loaded
            raise CancelledError
        pending.stage = "drawing"
        what = request.what if isinstance(request.what, int) else list(request.what)
        how = {**vars(request.settings), "batch_size": self._batch_size, "progress": False, "callback": after_step}
        return pipe(what, image=request.image, **how)

    def _pipeline(self, choice: WeightsChoice) -> Pipeline:
        if self._pipe is None or self._choice != choice:
            self._free()
            self._pipe = self._load(choice)
            self._choice = choice
        return self._pipe

    def _free(self) -> None:
        self._pipe = self._choice = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_for_people(error: BaseException) -> bool:
    """Return True if the error's message is meant for users. Any other error is a bug in the program."""
    return isinstance(error, CancelledError | ValueError | OSError)


def without_traceback(error: BaseException) -> BaseException:
    """Remove an error's traceback, which would keep the model and its activations in memory."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
    return error


@dataclass
class Page:
    """The state of a server, shared by all tabs.

    Args:
        catalog: lists the runs and checkpoints.
        queue: draws the requests.
        store: keeps the drawn samples.
        cards: name -> card of a checkpoint without metadata.
        most_samples: maximum number of samples of one request.
        evaluations: folder with the results.jsonl of ``opendit evaluate``.
        training: queue of the runs that users start from the page; None if the page must not start runs.
    """

    catalog: Catalog
    queue: DrawingQueue
    store: SampleStore
    cards: dict[str, ModelCard] = field(default_factory=dict)
    most_samples: int = 64
    evaluations: Path | None = None
    training: TrainingQueue | None = None
    _pending: dict[str, set[PendingDrawing]] = field(default_factory=lambda: defaultdict(set))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def card(self, choice: WeightsChoice) -> ModelCard:
        """Return the card of the chosen weights. Raises ValueError or OSError, with a line for the user, on failure."""
        card = self.cards.get(choice.name) or self.catalog.card(choice)
        if card is None:
            raise ValueError(f"{choice.name} does not say which model it holds; see python -m opendit.export")
        return card

    async def draw(self, session: str, asked: list[LabelledRequest]) -> AsyncIterator[str | list[PendingDrawing]]:
        """Draw requests. Yield the progress as HTML, and in the end the finished requests, or a message on failure.

        session: identifies the browser, so that :meth:`cancel` can find its requests.
        """
        waiting: list[PendingDrawing] = []
        try:
            try:
                for one in asked:
                    waiting.append(self._submit(session, one))
            except TooManyRequests:
                yield views.error("too many requests are waiting: try again in a moment")
                return
            shown = None
            while not all(pending.done for pending in waiting):
                if (status := self._status(waiting)) != shown:
                    yield (shown := status)
                await asyncio.sleep(POLL_S)
            error = next((pending.error for pending in waiting if pending.error is not None), None)
            if error is None:
                yield waiting
            else:
                yield (
                    views.message("cancelled")
                    if isinstance(error, CancelledError)
                    else views.error(views.error_line(error))
                )
        finally:  # this also runs if the browser has disconnected
            for pending in waiting:
                pending.cancel()
            with self._lock:
                self._pending[session] -= set(waiting)
                if not self._pending[session]:
                    del self._pending[session]

    def cancel(self, session: str) -> int:
        """Cancel all requests of a browser. Return the number of requests."""
        with self._lock:
            waiting = list(self._pending.get(session, ()))
        for pending in waiting:
            pending.cancel()
        return len(waiting)

    def _submit(self, session: str, asked: LabelledRequest) -> PendingDrawing:
        pending = self.queue.submit(asked.request)
        with self._lock:
            self._pending[session].add(pending)
        return pending

    def _status(self, waiting: list[PendingDrawing]) -> str:
        number, now = next((i, pending) for i, pending in enumerate(waiting) if not pending.done)
        share = sum(1.0 if pending.done else pending.progress for pending in waiting) / len(waiting)
        name = f"{'AB'[number]}: " if len(waiting) > 1 else ""
        if now.stage == "waiting":
            before = self.queue.before(now)
            text = f"waiting: {before} before this one" if before else "waiting for what is being drawn"
        elif now.stage == "loading":
            text = f"{name}loading {now.request.weights.name}"
        else:
            text = f"{name}drawing, {100 * now.progress:.0f} %"
        return views.progress(text, share)
