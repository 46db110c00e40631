"""Measure the wall-clock time of a program's stages, from the start of the process on."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_IMPORTED = time.time()
T = TypeVar("T")


class Stages:
    """Divide the time since the process began into named stages.

    Calling the object with a name returns a context manager for a stage. Time in an inner stage does not count for the
    outer stage, so all stages add up to the age of the process. Only one thread may enter stages. Other threads call
    :meth:`beside`.

    Attributes:
        wait: function called at the end of every stage, to wait for an accelerator to finish its work.
        marks: event -> seconds from the start of the process.
    """

    def __init__(self, first: str):
        self.wait: Callable[[], None] = lambda: None
        self.marks: dict[str, float] = {}
        self._now, self._began = first, time.perf_counter()
        self._start = self._began - process_seconds()
        self._seconds = {first: self._began - self._start}
        self._beside: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter a stage, perhaps again."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self.wait()
            self._switch(outer)

    def _switch(self, name: str) -> str:
        """Continue with the stage ``name``. Return the name of the interrupted stage."""
        now, before = time.perf_counter(), self._now
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._began
        self._now, self._began = name, now
        self._seconds.setdefault(name, 0.0)
        return before

    def beside(self, name: str, seconds: float) -> None:
        """Add the working time of another thread. May be called from any thread."""
        with self._lock:
            self._beside[name] = self._beside.get(name, 0.0) + seconds

    def mark(self, event: str) -> None:
        """Record the time of an event when it happens for the first time. May be called from any thread."""
        with self._lock:
            self.marks.setdefault(event, time.perf_counter() - self._start)

    def seconds(self) -> dict[str, float]:
        """Return stage -> seconds, in the order in which the stages began."""
        self._switch(self._now)
        return dict(self._seconds)

    def to_dict(self) -> dict[str, dict[str, float]]:
        parts = {"stages": self.seconds(), "beside": self._beside, "marks": self.marks}
        return {part: {name: round(value, 3) for name, value in values.items()} for part, values in parts.items()}

    def table(self) -> str:
        seconds = self.seconds()
        total = sum(seconds.values())
        lines = [f"{'seconds':>10} {'share':>7}  stage"]
        lines += [f"{value:10.2f} {value / total:7.1%}  {name}" for name, value in seconds.items()]
        lines += [f"{total:10.2f} {1:7.1%}  from the start of the process", ""]
        lines += [f"{value:10.2f} {'':>7}  beside them: {name}" for name, value in self._beside.items()]
        lines += [f"{value:10.2f} {'':>7}  {event}, counted from the start" for event, value in self.marks.items()]
        return "\n".join(lines).rstrip()


class Background(Generic[T]):
    """Runs ``work()`` in a daemon thread. The thread starts immediately and does not delay the end of the program."""

    def __init__(self, work: Callable[[], T], name: str = "background"):
        self._work, self._error = work, None
        self._result: T  # set when the work is done without an error
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:  # raised again by result()
            self._error = error
        self.seconds = time.perf_counter() - began

    def result(self, seconds: float | None = None) -> T:
        """Return the result of ``work()`` or raise its exception. Raises TimeoutError after ``seconds``."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer in {seconds:g} seconds")
        if self._error is not None:
            raise self._error
        return self._result


def process_seconds() -> float:
    """Return this process's age in seconds; if unknown, the time since this module was imported."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            began = float(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, IndexError, ValueError):
        return time.time() - _IMPORTED
