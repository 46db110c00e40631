"""Approximations of sampling, as they are asked for, and which steps do less than all because of them. Needs no torch.

[T] Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025
[F] Cheng, "ParaAttention: First Block Cache", 2024, a simpler form of Liu et al., "Timestep Embedding Tells: It's Time
    to Cache for Video Diffusion Model" (TeaCache), 2024
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_ORDER = 4  # of an extrapolation; each one more is one more copy of the blocks' output in memory
THRESHOLD = 0.1  # of the first-block cache, unless it is given
FORMS = "first_block[:THRESHOLD] or taylor:K[:ORDER]"


@dataclass(frozen=True)
class TaylorCache:
    """The blocks are evaluated in every ``every``-th step. In the others, what they add to the residual stream is
    extrapolated from the last ``order`` + 1 evaluations, see :class:`opendit.inference.block_stacks.TaylorStack`."""

    every: int
    order: int = 2

    def __str__(self) -> str:
        return f"taylor:{self.every}:{self.order}"

    @property
    def note(self) -> str:
        said = f"extrapolated with order {self.order}" if self.order else "reused"
        return f"blocks evaluated every {self.every} steps, their output {said} between"

    def check(self, steps: int) -> None:
        """Raises ValueError if a sampler of so many steps has no use for it."""
        if self.every >= steps:
            raise ValueError(f"--cache {self}: K must be below the {steps} sampling steps")


@dataclass(frozen=True)
class FirstBlockCache:
    """The first block is evaluated in every step. Where what it adds to the residual stream has changed by less than
    ``threshold``, relative to what it was when all blocks were evaluated last, what the others added then is added
    again; see :class:`opendit.inference.block_stacks.FirstBlockStack`."""

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        return f"first_block:{self.threshold:g}"

    @property
    def note(self) -> str:
        return f"blocks reused where the first one's output changes by less than {self.threshold:g}, decided per batch"

    def check(self, steps: int) -> None:
        """As :meth:`TaylorCache.check`: any number of steps has a use for it."""


Cache = TaylorCache | FirstBlockCache


def parse_cache(text: str) -> Cache:
    """The cache that --cache asks for. Raises ValueError for anything else."""
    name, _, rest = text.partition(":")
    if name == "first_block" and (rest or text == name):
        threshold = _number(rest or str(THRESHOLD))
        if threshold is None or not 0 <= threshold <= 10:
            raise ValueError(f"--cache {text}: THRESHOLD is a relative change from 0 (exact) to 10, as {THRESHOLD}")
        return FirstBlockCache(threshold)
    found = re.fullmatch(r"taylor:([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if found is None:
        raise ValueError(f"--cache {text}: must be {FORMS}, as taylor:3")
    every, order = int(found[1]), int(found[2] or TaylorCache.order)
    if not 2 <= every <= 1000:
        raise ValueError(f"--cache {text}: K, the steps from one evaluation of the blocks to the next, is 2 to 1,000")
    if order > MOST_ORDER:
        raise ValueError(f"--cache {text}: ORDER, of the extrapolation, is 0 to {MOST_ORDER}")
    return TaylorCache(every, order)


def _number(text: str) -> float | None:
    try:
        return float(text) if re.fullmatch(r"[0-9.eE+-]+", text) else None
    except ValueError:
        return None


class Mode(NamedTuple):
    """How a step is taken. Steps that differ in it are recorded apart.

    null: whether guidance's unconditional half is evaluated, if the step has one. blocks: ALL of them are evaluated,
    FIRST, what is done about the REST after it, REUSED; or the number n >= 1 of evaluations to extrapolate from.
    """

    null: bool = True
    blocks: int | str = "all"


ALL, FIRST, REST, REUSED = "all", "first", "rest", "reused"


class Step(NamedTuple):
    """A step's place in the plan. slot: where its evaluation of the blocks is kept. weights: of the slots, for its
    extrapolation."""

    mode: Mode
    slot: int = 0
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Approximations:
    """All that is approximated: nothing by default.

    guidance_every: the unconditional half of guidance is evaluated in every so manieth step; the others add the
    difference of the two halves that was found last.
    """

    guidance_every: int = 1
    cache: Cache | None = None

    @classmethod
    def of(cls, guidance_every: int, cache: str | None, steps: int) -> "Approximations":
        """Those that these flags ask for, in so many steps of a sampler. Raises ValueError for a cache that is none,
        for settings that leave nothing out, and for two that can't be combined."""
        found = cls(guidance_every, None if cache is None else parse_cache(cache))
        if guidance_every > max(1, steps - 1):
            raise ValueError(f"--guidance_every {guidance_every}: must be below the {steps} sampling steps")
        if found.cache is not None:
            found.cache.check(steps)
        return found

    @property
    def by_batch(self) -> bool:
        """Whether a sample depends on those that it is drawn with."""
        return isinstance(self.cache, FirstBlockCache)

    def __post_init__(self):
        if self.guidance_every < 1:
            raise ValueError(f"--guidance_every {self.guidance_every}: must be 1 or more")
        if self.guidance_every > 1 and self.cache is not None:
            raise ValueError(
                f"--guidance_every {self.guidance_every}: --cache {self.cache} saves work in both halves of guidance; "
                "leave one of them out"
            )

    @property
    def notes(self) -> list[str]:
        """What there is to say of them, a line each; none if all is exact."""
        said = [] if self.cache is None else [f"--cache {self.cache}: {self.cache.note}"]
        if self.guidance_every > 1:
            said += [
                f"--guidance_every {self.guidance_every}: the unconditional half evaluated every "
                f"{self.guidance_every} steps, its difference to the conditional one reused between"
            ]
        return said

    def plan(self, starts: Sequence[bool]) -> list[Step]:
        """How every step is taken. starts: whether a step calls another model than the one before, guided or not, so
        that nothing of earlier steps can be used; of the first one, True."""
        steps, since, known = [], 0, []
        for i, start in enumerate(starts):
            since, known = (0, []) if start else (since + 1, known)
            step = Step(Mode(null=since % self.guidance_every == 0))
            if isinstance(self.cache, TaylorCache):
                step = self._extrapolated(step, i, since, known)
            elif isinstance(self.cache, FirstBlockCache) and not start:
                step = Step(step.mode._replace(blocks=FIRST))
            steps.append(step)
        return steps

    def _extrapolated(self, step: Step, i: int, since: int, known: list[int]) -> Step:
        """``known``: the steps that were evaluated since the start, which this one is added to if it is evaluated."""
        slots = self.cache.order + 1
        if since % self.cache.every == 0:
            known.append(i)
            return step._replace(slot=(len(known) - 1) % slots)
        used = known[-slots:]
        weights = dict.fromkeys(range(len(used)), 0.0)
        first = len(known) - len(used)
        for number, weight in enumerate(extrapolation_weights(used, i)):
            weights[(first + number) % slots] = weight
        return Step(step.mode._replace(blocks=len(used)), weights=tuple(weights[slot] for slot in sorted(weights)))


def extrapolation_weights(known: Sequence[float], at: float) -> list[float]:
    """The weights w of values at ``known`` positions for which sum(w f) is f(``at``), for all polynomials f of a degree
    below the number of positions: Newton's series of divided differences (Lagrange's form of it)."""
    return [math.prod((at - other) / (own - other) for other in known if other != own) for own in known]
