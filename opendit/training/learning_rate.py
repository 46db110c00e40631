"""The learning rate of every step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to ``peak``, then constant, or a cosine to zero at the last step.

    Args:
        schedule: constant or cosine.
    """

    peak: float
    warmup_steps: int
    schedule: str
    last_step: int

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.last_step - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
