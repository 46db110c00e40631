"""The state that the page's tabs share: the catalog, the queue, the store, and who is waiting for what."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path

from opendit.sampling.page import views
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice
from opendit.sampling.page.drawing_queue import DrawingQueue, PendingDrawing, TooManyRequests
from opendit.sampling.page.forms import Asked
from opendit.sampling.page.sample_store import SampleStore

LOOK_S = 0.1  # between two looks at how far a drawing is


@dataclass
class Page:
    """One server's state.

    Args:
        cards: of checkpoints that do not say themselves what they hold, by name.
        most_samples: of one request.
        evaluations: the folder of ``opendit evaluate``'s results.jsonl.
    """

    catalog: Catalog
    queue: DrawingQueue
    store: SampleStore
    cards: dict[str, ModelCard] = field(default_factory=dict)
    most_samples: int = 64
    evaluations: Path | None = None
    _pending: dict[str, set[PendingDrawing]] = field(default_factory=lambda: defaultdict(set))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def card(self, choice: WeightsChoice) -> ModelCard:
        """Raises ValueError or OSError, with one line for people, for weights that can't be read."""
        card = self.cards.get(choice.name) or self.catalog.card(choice)
        if card is None:
            raise ValueError(f"{choice.name} does not say which model it holds; see python -m opendit.export")
        return card

    async def draw(self, session: str, asked: list[Asked]) -> AsyncIterator[str | list[PendingDrawing]]:
        """Yield the progress as HTML, and at last all requests with their samples, or only a message if one fails.

        session: the browser's, by which :meth:`cancel` finds what it waits for.
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
                await asyncio.sleep(LOOK_S)
            error = next((pending.error for pending in waiting if pending.error is not None), None)
            if error is None:
                yield waiting
            else:
                yield views.message("cancelled") if isinstance(error, CancelledError) else views.error(said(error))
        finally:  # also of a browser that has gone
            for pending in waiting:
                pending.cancel()
            with self._lock:
                self._pending[session] -= set(waiting)
                if not self._pending[session]:
                    del self._pending[session]

    def cancel(self, session: str) -> int:
        """Cancels all that a browser waits for; says how many requests that were."""
        with self._lock:
            waiting = list(self._pending.get(session, ()))
        for pending in waiting:
            pending.cancel()
        return len(waiting)

    def _submit(self, session: str, asked: Asked) -> PendingDrawing:
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


def said(error: BaseException) -> str:
    """An error as one line for people."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    first = str(error).strip().split("\n")[0][:300]
    return f"drawing failed ({type(error).__name__}: {first}); the page's own output has more"
