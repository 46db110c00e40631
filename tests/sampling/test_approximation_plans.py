"""Plans of approximations: which steps are evaluated, extrapolation weights, and refusals."""

import math
import re
from fractions import Fraction

import pytest
import torch

from opendit.config.sample import Approximations, FirstBlockCache, TaylorCache, parse_cache
from opendit.diffusion.samplers import SAMPLERS
from opendit.sampling.approximate_steps import ALL, FIRST, evaluated_steps, plan_steps, weighted_sum
from opendit.sampling.sampling_engine import SamplingEngine
from tests.sampling.test_sampling_engine import LABELS, OBJECTIVES, fresh


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize("every", [2, 3, 7])
def test_a_polynomial_of_the_steps_number_is_extrapolated_exactly(order, every):
    """With order + 1 evaluations, the plan's slots and weights are exact for that degree, and not for the next one."""
    levels = [math.exp(3 - i / 8) for i in range(60)]
    plan = plan_steps(Approximations(cache=TaylorCache(every, order)), [True] + [False] * 59, levels)

    def run(degree: int) -> list[Fraction]:
        slots, found = {}, []
        for i, step in enumerate(plan):
            value = Fraction(sum((k + 2) * (i - 11) ** k for k in range(degree + 1)))
            if step.mode.blocks == "all":
                slots[step.slot] = value
            elif step.mode.blocks == order + 1:
                weights = [Fraction(weight).limit_denominator(10**6) for weight in step.weights]
                found.append(value - sum(weight * slots[slot] for slot, weight in enumerate(weights)))
        return found

    assert len(run(order)) >= 10 and not any(run(order)) and all(run(order + 1))


def test_every_run_of_one_model_begins_with_a_whole_step():
    """Steps are counted from the last change of model, not from the first step."""
    starts = [True, False, False, True, False, False, False, True]
    nulls = [step.mode.null for step in plan_steps(Approximations(guidance_every=2), starts, [1.0] * 8)]
    assert nulls == [True, False, True, True, False, True, False, True]
    nulls = [step.mode.null for step in plan_steps(Approximations(guidance_every=3), starts, [1.0] * 8)]
    assert nulls == [True, False, False, True, False, False, True, True]
    blocks = [step.mode.blocks for step in plan_steps(Approximations(cache=FirstBlockCache()), starts, [1.0] * 8)]
    assert blocks == [ALL if start else FIRST for start in starts]


@pytest.mark.parametrize("every", [2, 3, 4])
def test_an_interval_of_guidance_adds_at_most_two_evaluations(every):
    levels = [math.exp(3 - i / 8) for i in range(50)]
    cache = Approximations(cache=TaylorCache(every, 2))
    for first, last in ((1, 49), (10, 30), (17, 34), (25, 26)):
        plan = plan_steps(cache, [i in (0, first, last) for i in range(50)], levels)
        evaluated = [i for i, step in enumerate(plan) if step.mode.blocks == ALL]
        assert {0, first, last, last - 1 if last - first > every else first} <= {*evaluated}
        assert len(evaluated) <= math.ceil(50 / every) + 2
        for i, step in enumerate(plan):  # no step uses an evaluation from across an interval's bound
            begin = max(start for start in (0, first, last) if start <= i)
            assert step.mode.blocks == ALL or step.mode.blocks <= sum(begin <= k < i for k in evaluated)


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("sampler", ["ddim", "dpmpp"])
def test_evaluations_are_even_in_the_steps_number_and_the_log_level(every, sampler):
    for steps in (10, 50, 250):
        trajectory = OBJECTIVES["ddpm"].trajectory(steps, SAMPLERS[sampler].even_in_noise)
        levels = trajectory.levels[:-1]
        chosen = evaluated_steps(levels, every)
        assert len(chosen) == math.ceil(steps / every) and chosen[0] == 0 and chosen[-1] == steps - 1
        assert chosen == sorted(set(chosen))
        logs = torch.tensor(levels, dtype=torch.float64).clamp(1e-2, 1e2).log()
        places = torch.linspace(0, 1, steps, dtype=torch.float64) + (logs[0] - logs) / (logs[0] - logs[-1])
        gaps = places[chosen].diff()
        assert gaps.max() <= gaps.mean() + places.diff().max() + 1e-9
    # For constant levels, including 0 and infinity, steps are evenly numbered.
    for level in (1.0, 0.0, float("inf")):
        assert evaluated_steps([level] * 7, 3) == [0, 3, 6]
    assert evaluated_steps([5.0], 3) == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weighted_sum(dtype):
    torch.manual_seed(0)
    x, kept = torch.randn(2, 3, 5).to(dtype), torch.randn(3, 2, 3, 5).to(dtype)
    weights = torch.tensor([10.0, -15.0, 6.0, float("nan")], dtype=torch.float64)
    got = weighted_sum(x, weights, kept)
    want = x.double() + (weights[:3].view(-1, 1, 1, 1) * kept.double()).sum(0)
    assert got.dtype == dtype
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]  # only the last rounding
    assert (got.double() - want).abs().max() < bound * want.abs().max()


# ------------------------------------------------------------------------------------------------ what may be asked for


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("taylor:3", TaylorCache(3, 2)),
        ("taylor:2:0", TaylorCache(2, 0)),
        ("first_block", FirstBlockCache(0.1)),
        ("first_block:0.25", FirstBlockCache(0.25)),
        ("first_block:0", FirstBlockCache(0.0)),
    ],
)
def test_caches_by_name(text, cache):
    assert parse_cache(text) == cache == parse_cache(str(cache))


@pytest.mark.parametrize(
    "text",
    "taylor taylor: taylor:1 taylor:3:9 taylor:3: taylor:-3 taylor:3.5 taylor:3:1:1 taylor:1001 first_block: "
    "first_block:-1 first_block:nan first_block:1e9 first_block:x first teacache taylor:٣".split(),
)
def test_other_caches_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"--cache {text}: ")):
        parse_cache(text)


def test_what_does_nothing_or_can_not_be_combined_is_refused():
    with pytest.raises(ValueError, match="--guidance_every 2: .* leave one of them out"):
        Approximations.of(2, "taylor:3", 50)
    with pytest.raises(ValueError, match="at most half the 5 sampling steps"):
        Approximations.of(1, "taylor:3", 5)
    with pytest.raises(ValueError, match="less than the 4 sampling steps"):
        Approximations.of(4, None, 4)
    with pytest.raises(ValueError, match="1 or more"):
        Approximations.of(0, None, 4)
    assert Approximations.of(1, None, 1).note == ""
    model = fresh(LABELS)
    with pytest.raises(ValueError, match="ranks share samples"):
        SamplingEngine(model, OBJECTIVES["ddpm"], steps=5, cache="first_block", around=lambda model: model)
