"""Work that runs beside a program's own, in a thread."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """``work()`` in a thread of its own, begun at once. A program that ends does not wait for it.

    Attributes:
        seconds: that it took; set when it is done.
    """

    def __init__(self, work: Callable[[], T], name: str = "background"):
        self._work, self._error = work, None
        self._result: T  # once it is done without an error
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:  # the thread has nobody to tell
            self._error = error
        self.seconds = time.perf_counter() - began

    def result(self) -> T:
        """Waits for the work; returns what it has returned, or raises what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
