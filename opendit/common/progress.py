"""Show the progress of a long job: a bar on a terminal, otherwise a line every 30 seconds."""

import sys
import time

from tqdm import tqdm

EVERY_S = 30.0  # seconds between two lines if the output is not a terminal


class Progress:
    """Progress display on standard error, and a context manager.

    Args:
        total: number of units in the job.
        unit: name of the unit, in the plural.
        initial: number of units that are already done.
        title: beginning of the bar and of every line.
        disable: show nothing, for example on all ranks but one. :meth:`write` still prints.
    """

    def __init__(self, total: int, unit: str, *, initial: int = 0, title: str = "", disable: bool = False):
        self.total, self.unit, self.title, self.done = total, unit, title, initial
        self._figures: dict[str, str] = {}
        self._bar, terminal = None, sys.stderr.isatty()
        self._lines = not disable and not terminal
        if terminal and not disable:
            self._bar = tqdm(
                total=total, initial=initial, desc=title or None, unit=f" {unit}", dynamic_ncols=True, smoothing=0.05
            )
        self._line_at, self._line_done = time.monotonic(), initial

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._lines and time.monotonic() - self._line_at >= EVERY_S:
            self._line()

    def figures(self, figures: dict[str, str]) -> None:
        """Set values that are shown after the count, such as the loss."""
        self._figures = figures
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)

    @staticmethod
    def write(text: str) -> None:
        """Print a line on standard output, above the bar if there is one."""
        tqdm.write(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._lines and self.done != self._line_done:
            self._line()
        self._lines, self._bar = False, None

    def _line(self) -> None:
        now = time.monotonic()
        rate = (self.done - self._line_done) / max(now - self._line_at, 1e-9)
        parts = [f"{self.done:,}/{self.total:,} {self.unit} ({self.done / max(self.total, 1):.1%})"]
        parts.append(f"{rate:.2f} {self.unit}/s" if rate < 100 else f"{rate:,.0f} {self.unit}/s")
        if self.done < self.total and rate:
            parts.append(f"{tqdm.format_interval((self.total - self.done) / rate)} left")
        parts += [f"{name} {value}" for name, value in self._figures.items()]
        print(f"{self.title}: " * bool(self.title) + ", ".join(parts), file=sys.stderr, flush=True)
        self._line_at, self._line_done = now, self.done
