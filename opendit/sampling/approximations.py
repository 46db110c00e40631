"""Plan which blocks each sampling step evaluates (``opendit.config.approximations`` has the methods)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from opendit.config.approximations import Approximations, FirstBlockCache, TaylorCache

LOW, HIGH = 1e-2, 1e2  # sigma: what lies below or above is next to clean, or next to noise, for every network


class Mode(NamedTuple):
    """The work that a step does. Steps with different modes are recorded as different graphs.

    null: evaluate guidance's unconditional half, if the step has one. blocks: ALL, FIRST, then REST or REUSED after it;
    or the number n >= 1 of evaluations to extrapolate from.
    """

    null: bool = True
    blocks: int | str = "all"


ALL, FIRST, REST, REUSED = "all", "first", "rest", "reused"


class Step(NamedTuple):
    """A step of the plan. slot: where its evaluation of the blocks is kept. weights: of the slots, for its
    extrapolation."""

    mode: Mode
    slot: int = 0
    weights: tuple[float, ...] = ()


def plan_steps(approximations: Approximations, starts: Sequence[bool], levels: Sequence[float]) -> list[Step]:
    """Return how every step is taken.

    starts: True where a step calls another model than the one before (guided or not), so that nothing of earlier steps
    can be used; True for the first step. levels: the noise level where each step begins.
    """
    first = [i for i, start in enumerate(starts) if start]
    runs = [range(i, after) for i, after in zip(first, [*first[1:], len(starts)], strict=True)]
    return [step for run in runs for step in _plan_run(approximations, run, levels)]


def _plan_run(approximations: Approximations, run: range, levels: Sequence[float]) -> list[Step]:
    """Plan steps that may use each other's evaluations."""
    if isinstance(approximations.cache, TaylorCache):
        return _plan_taylor(approximations.cache, run, [levels[i] for i in run])
    if isinstance(approximations.cache, FirstBlockCache):
        return [Step(Mode(blocks=ALL if i == run[0] else FIRST)) for i in run]
    return [Step(Mode(null=(i - run[0]) % approximations.guidance_every == 0)) for i in run]


def _plan_taylor(cache: TaylorCache, run: range, levels: Sequence[float]) -> list[Step]:
    steps, known, slots = [], [], cache.order + 1
    chosen = {run[k] for k in evaluated_steps(levels, cache.every)}
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


def evaluated_steps(levels: Sequence[float], every: int) -> list[int]:
    """Choose one in ``every`` of the steps that begin at these noise ``levels``: the first, the last, and others that
    are about even in the mean of the step's number and the logarithm of its level.

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
    """Return the weights w of values at ``known`` positions for which sum(w f) is f(``at``) for all polynomials f of a
    degree below the number of positions: Newton's series of divided differences in Lagrange's form."""
    return [math.prod((at - other) / (own - other) for other in known if other != own) for own in known]
