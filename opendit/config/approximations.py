"""Settings of the approximations that speed up sampling: --guidance_every and --cache.

[T] Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025
[F] Cheng, "ParaAttention: First Block Cache", 2024, a simpler form of Liu et al., "Timestep Embedding Tells: It's Time
    to Cache for Video Diffusion Model" (TeaCache), 2024
"""

import re
from dataclasses import dataclass

MOST_ORDER = 4  # highest order of extrapolation; each order needs one more copy of the blocks' output in memory
THRESHOLD = 0.1  # default of the first-block cache
FORMS = "first_block[:THRESHOLD] or taylor:K[:ORDER]"


@dataclass(frozen=True)
class TaylorCache:
    """TaylorSeers [T]: evaluate the blocks only in every ``every``-th step.

    In the other steps, extrapolate the blocks' addition to the residual stream from the last ``order`` + 1 evaluations.
    """

    every: int
    order: int = 2

    def __str__(self) -> str:
        return f"taylor:{self.every}:{self.order}"

    @property
    def note(self) -> str:
        said = f"extrapolated with order {self.order}" if self.order else "reused"
        return f"blocks evaluated in one of {self.every} steps, their output {said} in the others"

    def check(self, steps: int) -> None:
        """Raise ValueError if a sampler with this number of steps would evaluate the blocks less than twice."""
        if 2 * self.every > steps:
            raise ValueError(f"--cache {self}: K is too large; at most half the {steps} sampling steps")


@dataclass(frozen=True)
class FirstBlockCache:
    """First-block cache [F]: evaluate the first block in every step, and the other blocks only if necessary.

    Compare the first block's addition to the residual stream with that of the last step that evaluated all blocks. If
    the relative change is less than ``threshold``, reuse what the other blocks added to the residual stream in that
    step.
    """

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        return f"first_block:{self.threshold:g}"

    @property
    def note(self) -> str:
        return f"blocks reused where the first one's output changes by less than {self.threshold:g}, decided per batch"

    def check(self, steps: int) -> None:
        """Do nothing, because every number of steps is valid for this cache."""


Cache = TaylorCache | FirstBlockCache


def parse_cache(text: str) -> Cache:
    """Parse a value of --cache. Raises ValueError for an invalid value."""
    text = str(text)
    name, _, rest = text.partition(":")
    if name == "first_block" and (rest or text == name):
        threshold = _number(rest or str(THRESHOLD))
        if threshold is None or not 0 <= threshold <= 10:
            raise ValueError(
                f"--cache {text}: THRESHOLD is out of range; give a relative change from 0 (exact) to 10, "
                f"as {THRESHOLD}"
            )
        return FirstBlockCache(threshold)
    found = re.fullmatch(r"taylor:([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if found is None:
        raise ValueError(f"--cache {text}: no such form; give {FORMS}, as taylor:3")
    every, order = int(found[1]), int(found[2] or TaylorCache.order)
    if not 2 <= every <= 1000:
        raise ValueError(f"--cache {text}: K is out of range; give 2 to 1,000 steps to one evaluation of the blocks")
    if order > MOST_ORDER:
        raise ValueError(f"--cache {text}: ORDER is out of range; give 0 to {MOST_ORDER} for the extrapolation")
    return TaylorCache(every, order)


def _number(text: str) -> float | None:
    try:
        return float(text) if re.fullmatch(r"[0-9.eE+-]+", text) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Approximations:
    """All approximations of a sampling run; none by default.

    guidance_every: N evaluates the unconditional half of guidance only in every N-th step. The other steps reuse the
    last difference between the conditional and the unconditional half.
    """

    guidance_every: int = 1
    cache: Cache | None = None

    @classmethod
    def of(cls, guidance_every: int, cache: str | None, steps: int) -> "Approximations":
        """Return the approximations for values of --guidance_every and --cache, and a sampler with ``steps`` steps.

        Raises ValueError for an invalid cache, for settings that do not suit the number of steps, and for two
        approximations that can't be combined.
        """
        found = cls(guidance_every, None if cache is None else parse_cache(cache))
        if guidance_every > max(1, steps - 1):
            raise ValueError(f"--guidance_every {guidance_every}: too many; give less than the {steps} sampling steps")
        if found.cache is not None:
            found.cache.check(steps)
        return found

    @property
    def by_batch(self) -> bool:
        """True if the result for a sample depends on the other samples of its batch."""
        return isinstance(self.cache, FirstBlockCache)

    def __post_init__(self) -> None:
        if self.guidance_every < 1:
            raise ValueError(f"--guidance_every {self.guidance_every}: out of range; give 1 or more")
        if self.guidance_every > 1 and self.cache is not None:
            raise ValueError(
                f"--guidance_every {self.guidance_every}: --cache {self.cache} saves work in both halves of guidance; "
                "leave one of them out"
            )

    @property
    def note(self) -> str:
        """Description of the approximation and its settings; "" without an approximation."""
        if self.cache is not None:
            return f"{self.cache}: {self.cache.note}"
        every = self.guidance_every
        return f"guidance_every {every}: its unconditional half evaluated every {every} steps" if every > 1 else ""
