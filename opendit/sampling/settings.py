"""Settings of a drawing, as a call of ``Pipeline`` and a request to the page give them."""

from dataclasses import dataclass
from typing import Any

from opendit.config.approximations import Approximations
from opendit.diffusion.objectives.base import Objective
from opendit.models.dit import DiT
from opendit.sampling.arguments import (
    MOST_GUIDANCE,
    MOST_SEED,
    MOST_STEPS,
    arguments_named,
    check_number,
)
from opendit.sampling.engine import SamplingEngine


@dataclass(frozen=True)
class DrawSettings:
    """The arguments of a call of :class:`opendit.sampling.pipeline.Pipeline`, which says what each of them is."""

    steps: int = 50
    guidance: float = 4.0
    seed: int = 0
    sampler: str | None = None
    interval: tuple[float, float] | None = None
    negative: str | None = None
    guided_channels: int | None = None
    guidance_every: int = 1
    cache: str | None = None
    size: int | tuple[int, int] | None = None
    frames: int | None = None

    def check(self, channels: int) -> None:
        """Raises ValueError for what no model could draw with. channels: of the model's latents."""
        check_number("steps", self.steps, 1, MOST_STEPS, int)
        check_number("seed", self.seed, 0, MOST_SEED, int)
        check_number("guidance", self.guidance, 0, MOST_GUIDANCE)
        check_number("guidance_every", self.guidance_every, 1, MOST_STEPS, int)
        without = {"interval": self.interval, "negative": self.negative, "guidance_every": self.guidance_every}
        for name, value in without.items():
            if self.guidance == 1 and value not in (None, 1):
                raise ValueError(f"{name} does nothing with guidance 1, which is none; leave one of them out")
        if self.guided_channels is not None:
            check_number("guided_channels", self.guided_channels, 1, channels, int)
        with arguments_named():
            Approximations.of(self.guidance_every, self.cache, self.steps)
        if self.interval is not None:
            low, high = self.interval
            if not 0 <= low < high:
                raise ValueError(f"interval {low:g} {high:g}: two noise levels with 0 <= LOW < HIGH")


@dataclass(frozen=True)
class EnginePlan:
    """The arguments of an engine, resolved for a model; names and meanings are those of :class:`SamplingEngine`."""

    steps: int
    sampler: str
    cfg_scale: float
    cfg_channels: int | None
    cfg_interval: tuple[float, float] | None
    guidance_every: int
    cache: str | None
    size: tuple[int, ...]

    @property
    def approximates(self) -> bool:
        """True if steps leave something out."""
        return self.guidance_every > 1 or self.cache is not None

    @property
    def by_batch(self) -> bool:
        """True if a sample depends on the others in its batch."""
        return Approximations.of(self.guidance_every, self.cache, self.steps).by_batch

    def engine(self, model: DiT, objective: Objective, **others: Any) -> SamplingEngine:
        return SamplingEngine(model, objective, **vars(self), **others)
