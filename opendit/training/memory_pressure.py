"""Notice when a GPU's memory is so full that training waits for the allocator."""

from collections.abc import Callable

import torch


def allocation_retries() -> int:
    """Count how often torch's allocator found no memory, freed what it kept for reuse, and tried again. Each time the
    host waits for the device. 0 without a GPU."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


class MemoryPressure:
    """Says once that every few steps wait for memory, when that goes on after a run's beginning.

    retries: how often an allocation was tried again in this process, so far.
    """

    LINES = 2  # one after the other; in the first steps, or when a grid is drawn, it is what has to happen

    def __init__(self, retries: Callable[[], int] = allocation_retries):
        self._retries, self._before, self._lines, self._said = retries, None, 0, False

    def note(self, steps: int) -> str | None:
        """Return a note if memory is nearly full, or None. Call it after every ``steps`` steps."""
        now, before = self._retries(), self._before
        self._before = now
        if self._said or before is None:
            return None
        self._lines = self._lines + 1 if now > before else 0
        if self._lines < self.LINES:
            return None
        self._said = True
        return (
            f"note: the GPU's memory is nearly full: in the last {steps} steps torch had to free memory kept for "
            f"reuse {now - before} times, and training waited for it; a smaller --batch_size, --recompute cheap or, "
            "with --plugin fsdp, --offload average is likely to be faster"
        )
