"""Guidance whose unconditional half is evaluated in some steps only."""

from collections.abc import Callable

import torch
from torch import Tensor

from opendit.diffusion.ddpm import at_least_float32


class ReusedGuidance:
    """``model(x, t, y)`` as guidance calls it, on the conditional half of a batch and then the other. In steps that
    don't evaluate the unconditional half, it is the conditional one less the difference of the two that was found last:
    guidance, which adds a multiple of that difference, knows nothing of it.

    (Reusing guidance's direction between neighbouring steps: Lv et al., "FasterCache", 2024, sec. 3.3, without its
    weights in frequency.) The differences lie in memory that stays where it is, one for each evaluation of a step.

    Args:
        model: of (x, t, y); its first half of the rows is evaluated alone.
        samples: B. Batches of B rows have no unconditional half, and go through.
    """

    def __init__(self, model: Callable[[Tensor, Tensor, Tensor], Tensor], samples: int):
        self._model, self._samples = model, samples
        self._differences: list[Tensor] = []
        self._fresh, self._evaluation = True, 0
        self.rows = 0  # that guidance has asked for

    def begin(self, fresh: bool) -> None:
        """Begins a step; fresh: it evaluates the unconditional half."""
        self._fresh, self._evaluation = fresh, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        out = self._model(x, t, y) if len(x) == self._samples else self._both(x, t, y)
        self.rows += len(x)
        return out

    def _both(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        number, self._evaluation = self._evaluation, self._evaluation + 1
        if self._fresh:
            both = at_least_float32(self._model(x, t, y))
            cond, uncond = both.chunk(2)
            if number == len(self._differences):
                self._differences.append(torch.empty_like(cond))
            torch.sub(cond, uncond, out=self._differences[number])
            return both
        rows = slice(self._samples)
        cond = at_least_float32(self._model(x[rows], t[rows], y[rows]))
        return torch.cat((cond, cond - self._differences[number]))
