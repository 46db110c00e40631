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
LOW, HIGH = 1e-2, 1e2  # sigma: what lies below or above is next to clean, or next to noise, for every network
FORMS = "first_block[:THRESHOLD] or taylor:K[:ORDER]"


@dataclass(frozen=True)
class TaylorCache:
    """The blocks are evaluated in one of ``every`` steps, see :func:`evaluated_steps`. In the others, what they add to
    the residual stream is extrapolated from the last ``order`` + 1 evaluations, see
    :class:`opendit.inference.block_stacks.TaylorStack`."""

    every: int
    order: int = 2

    def __str__(self) -> str:
        return f"taylor:{self.every}:{self.order}"

    @property
    def note(self) -> str:
        said = f"extrapolated with order {self.order}" if self.order else "reused"
        return f"blocks evaluated in one of {self.every} steps, their output {said} in the others"

    def check(self, steps: int) -> None:
        """Raises ValueError if a sampler of so many steps has no use for it."""
        if 2 * self.every > steps:
            raise ValueError(f"--cache {self}: K is too large; at most half the {steps} sampling steps")

    def plan(self, run: range, levels: Sequence[float]) -> list["Step"]:
        """Steps that may use each other's evaluations, and the noise level where each of them begins."""
        steps, known, slots = [], [], self.order + 1
        chosen = {run[k] for k in evaluated_steps(levels, self.every)}
        for i in run:
            if i in chosen:
                known.append(i)
                steps.append(Step(Mode(), slot=(len(known) - 1) % slots))
                continue
            used = known[-slots:]
            weights = [0.0] * len(used)
            for number, weight in enumerate(extrapolation_weights(used, i), start=len(known) - len(used)):
                weights[number % slots] = weight
            steps.append(Step(Mode(blocks=len(used)), weights=tuple(weights)))
        return steps


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
            raise ValueError(f"--guidance_every {guidance_every}: too many; give less than the {steps} sampling steps")
        if found.cache is not None:
            found.cache.check(steps)
        return found

    @property
    def by_batch(self) -> bool:
        """Whether a sample depends on those that it is drawn with."""
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
        """What is approximated, with its setting; "" if nothing is."""
        if self.cache is not None:
            return f"{self.cache}: {self.cache.note}"
        every = self.guidance_every
        return f"guidance_every {every}: its unconditional half evaluated every {every} steps" if every > 1 else ""

    def plan(self, starts: Sequence[bool], levels: Sequence[float]) -> list[Step]:
        """How every step is taken. starts: whether a step calls another model than the one before, guided or not, so
        that nothing of earlier steps can be used; of the first one, True. levels: of noise, where each step begins."""
        first = [i for i, start in enumerate(starts) if start]
        runs = [range(i, after) for i, after in zip(first, [*first[1:], len(starts)], strict=True)]
        return [step for run in runs for step in self._plan_run(run, levels)]

    def _plan_run(self, run: range, levels: Sequence[float]) -> list[Step]:
        if isinstance(self.cache, TaylorCache):
            return self.cache.plan(run, [levels[i] for i in run])
        if isinstance(self.cache, FirstBlockCache):
            return [Step(Mode(blocks=ALL if i == run[0] else FIRST)) for i in run]
        return [Step(Mode(null=(i - run[0]) % self.guidance_every == 0)) for i in run]


def evaluated_steps(levels: Sequence[float], every: int) -> list[int]:
    """Of steps that begin at these ``levels`` of noise one in ``every``, the first and the last among them, about even
    in the mean of the step's number and the logarithm of its level.

    Even in the number alone leaves samplers with long steps at the end (a shifted flow) few evaluations there, where
    the log level changes most; even in the log level alone leaves few to the noisy half of all others.
    """
    last, count = len(levels) - 1, -(-len(levels) // every)
    logs = [math.log(min(max(level, LOW), HIGH)) for level in levels]
    fall = (logs[0] - logs[last]) or 1.0
    places = [i / max(1, last) + (logs[0] - log) / fall for i, log in enumerate(logs)]
    chosen: list[int] = []
    for number in range(count):
        want = places[last] * number / max(1, count - 1)
        # Later than the one before, and early enough for those that follow.
        free = range(chosen[-1] + 1 if chosen else 0, last - (count - number) + 2)
        chosen.append(min(free, key=lambda i: abs(places[i] - want)))
    return chosen


def extrapolation_weights(known: Sequence[float], at: float) -> list[float]:
    """The weights w of values at ``known`` positions for which sum(w f) is f(``at``), for all polynomials f of a degree
    below the number of positions: Newton's series of divided differences (Lagrange's form of it)."""
    return [math.prod((at - other) / (own - other) for other in known if other != own) for own in known]
