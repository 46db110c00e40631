"""Classifier-free guidance: its formulas, intervals of noise levels, and public families' scales."""

import math

import numpy as np
import pytest
import torch

from opendit.diffusion.guidance import GuidedWithin, cfg_model, scale_of_family
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.ddpm import DDPM, DDPMTrajectory
from opendit.diffusion.random import initial_noise, keyed_noise
from opendit.diffusion.samplers import sample
from opendit.models.families.base import Guidance
from tests.models.families.oracles import packed


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class CountingModel:
    """Returns eps and v that depend on the condition, position and timestep, and records its calls."""

    def __init__(self, dtype=torch.float32):
        self.calls, self.dtype = [], dtype

    def __call__(self, x, t, y):
        self.calls.append((x, t, y))
        level = y.double().reshape(len(y), -1).mean(1).reshape(-1, 1, 1, 1).float()
        return torch.cat((x * 0.5 + level, x + 10 * level + t.reshape(-1, 1, 1, 1)), 1).to(self.dtype)


X = randn(3, 4, 2, 2)
T = torch.tensor([5, 6, 7])
Y = torch.tensor([1, 2, 3])
NULL = torch.tensor([1000, 1000, 1000])


def test_scale_1_is_the_conditional_model_without_a_second_half():
    model = CountingModel()
    got = cfg_model(model, Y, NULL, 1.0)(X, T)
    assert torch.equal(got, CountingModel()(X, T, Y))
    assert [len(x) for x, _, _ in model.calls] == [3]


@pytest.mark.parametrize("scale", [0.0, 1.5, 4.0])
def test_guidance_formula(scale):
    model = CountingModel()
    got = cfg_model(model, Y, NULL, scale)(X, T)
    ((x, t, y),) = model.calls  # one call with the conditional half first
    for both, halves in ((x, (X, X)), (t, (T, T)), (y, (Y, NULL))):
        assert torch.equal(both, torch.cat(halves))
    cond, uncond = CountingModel()(X, T, Y), CountingModel()(X, T, NULL)
    torch.testing.assert_close(got[:, :4], uncond[:, :4] + scale * (cond - uncond)[:, :4])
    assert torch.equal(got[:, 4:], cond[:, 4:])  # v is unchanged


def test_a_scale_for_every_sample():
    """Each sample is guided as with its scale alone; a scale of 1 gives the conditional prediction."""
    x, t, y, null = torch.randn(3, 4, 2, 2), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5])

    def model(x, t, y):
        return x * y.view(-1, 1, 1, 1) + t.view(-1, 1, 1, 1)

    scales = [1.0, 4.0, 0.5]
    got = cfg_model(model, y, null, torch.tensor(scales).view(3, 1, 1, 1), 3)(x, t)
    for row, scale in enumerate(scales):
        one = slice(row, row + 1)
        assert torch.allclose(got[one], cfg_model(model, y[one], null, scale, 3)(x[one], t[one]), rtol=1e-6, atol=1e-6)


def test_guided_channels_as_meta_samples():
    cond, uncond = CountingModel()(X, T, Y), CountingModel()(X, T, NULL)
    got = cfg_model(CountingModel(), Y, NULL, 4.0, guided_channels=3)(X, T)
    torch.testing.assert_close(got[:, :3], uncond[:, :3] + 4 * (cond - uncond)[:, :3])
    assert torch.equal(got[:, 3:], cond[:, 3:])


def test_guidance_without_learned_variance():
    def model(x, t, y):
        return CountingModel()(x, t, y)[:, :4]

    cond, uncond = model(X, T, Y), model(X, T, NULL)
    torch.testing.assert_close(cfg_model(model, Y, NULL, 2.0)(X, T), uncond + 2 * (cond - uncond))


def test_guidance_is_independent_of_the_batch():
    whole = cfg_model(CountingModel(), Y, NULL, 3.0)(X, T)
    for i in range(3):
        alone = cfg_model(CountingModel(), Y[i : i + 1], NULL[i : i + 1], 3.0)(X[i : i + 1], T[i : i + 1])
        assert torch.equal(alone[0], whole[i])


def test_any_condition_and_an_expandable_null():
    text, empty = randn(3, 7, 5), randn(7, 5, seed=1)
    model = CountingModel()
    got = cfg_model(model, text, empty, 2.0)(X, T)
    assert torch.equal(model.calls[0][2], torch.cat((text, empty.expand(3, 7, 5))))
    torch.testing.assert_close(got, cfg_model(CountingModel(), text, empty.expand(3, 7, 5), 2.0)(X, T))
    one_label = cfg_model(CountingModel(), Y, torch.tensor(1000), 2.0)(X, T)
    assert torch.equal(one_label, cfg_model(CountingModel(), Y, NULL, 2.0)(X, T))


def test_guidance_arithmetic_is_float32():
    for scale in (1.0, 7.5):
        got = cfg_model(CountingModel(torch.bfloat16), Y, NULL, scale)(X, T)
        assert got.dtype == torch.float32
    cond, uncond = (CountingModel(torch.bfloat16)(X, T, y).float() for y in (Y, NULL))
    torch.testing.assert_close(got[:, :4], (uncond + 7.5 * (cond - uncond))[:, :4], rtol=1e-6, atol=1e-6)


def test_guidance_refuses():
    with pytest.raises(ValueError, match="expand"):
        cfg_model(CountingModel(), Y, torch.tensor([1, 2]), 2.0)
    for channels in (0, 5):
        with pytest.raises(ValueError, match="guided_channels"):
            cfg_model(CountingModel(), Y, NULL, 2.0, guided_channels=channels)(X, T)
    with pytest.raises(ValueError, match="3 conditions for 2"):
        cfg_model(CountingModel(), Y, NULL, 2.0)(X[:2], T[:2])
    with pytest.raises(ValueError, match="channels"):
        cfg_model(lambda x, t, y: x[:, :3], Y, NULL, 2.0)(X, T)


@pytest.mark.parametrize("name", DDPMObjective().samplers)
def test_guided_sampling_of_gaussians_lands_where_it_must(name):
    """For data N(y, 0.3^2) eps is affine in y, so guidance gives the exact eps of the extrapolated mean."""
    schedule = DDPM.linear()

    def model(x, t, y):
        ac = schedule.alphas_cumprod[t].reshape(-1, 1)
        return (1 - ac).sqrt() * (x - ac.sqrt() * y[:, None]) / (ac * 0.3**2 + 1 - ac)

    y, null, index = torch.tensor([1.0, -0.5, 0.0]), torch.tensor(0.2), torch.arange(3)
    mean = schedule.alphas_cumprod[-1].sqrt() * (null + 4 * (y - null))  # of x_T
    guided, path = cfg_model(model, y, null, 4.0), DDPMTrajectory(schedule.respaced(50))
    got = sample(name, guided, mean[:, None].expand(3, 2), path, noise_fn=lambda k: torch.zeros(3, 2))
    torch.testing.assert_close(got, (null + 4 * (y - null))[:, None].expand(3, 2), rtol=1e-4, atol=1e-4)
    noise, noise_fn = initial_noise(0, index, (2000,)), keyed_noise(0, index, (2000,))
    drawn = sample(name, guided, noise, path, noise_fn=noise_fn)
    torch.testing.assert_close(drawn.mean(1), null + 4 * (y - null), rtol=0.01, atol=4 * 0.3 / 2000**0.5)


# In an interval of noise levels


def within(interval, objective):
    """Return a model guided within the interval, and the list of its network's calls."""
    model = CountingModel()
    parts = (cfg_model(model, Y, NULL, 3.0), cfg_model(model, Y, NULL, 1.0))
    return GuidedWithin(interval, objective.noise_level, *parts), model.calls


SIGMAS = (1 / np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)) - 1) ** 0.5
LEVELS = {  # timesteps for sigma = 0.1, 1 and 10; for DDPM those of the nearest levels
    "ddpm": (DDPMObjective(), [int(np.abs(np.log(SIGMAS / sigma)).argmin()) for sigma in (0.1, 1, 10)]),
    "flow": (FlowObjective(shift=3.0), [1000 * 0.1 / 1.1, 500.0, 1000 * 10 / 11]),
    "edm": (EDMObjective(), [250 * math.log(0.1), 0.0, 250 * math.log(10)]),
}


@pytest.mark.parametrize(("objective", "timesteps"), LEVELS.values(), ids=LEVELS)
def test_the_unit_of_the_interval_is_sigma_for_every_objective(objective, timesteps):
    t = torch.tensor(timesteps)
    torch.testing.assert_close(
        objective.noise_level(t).double(), torch.tensor([0.1, 1, 10]).double(), rtol=0.02, atol=0
    )
    model, calls = within((0.3, 3.0), objective)
    for level in t:
        model(X, level.expand(3))
    assert [len(x) for x, _, _ in calls] == [3, 6, 3]  # no second half outside the interval


def test_inside_it_is_guidance_and_outside_the_conditional_model():
    model, _ = within((0.3, 3.0), EDMObjective())
    for sigma, scale in ((0.1, 1.0), (1.0, 3.0), (10.0, 1.0)):
        t = torch.full((3,), 250 * math.log(sigma))
        assert torch.equal(model(X, t), cfg_model(CountingModel(), Y, NULL, scale)(X, t))


def test_the_interval_has_both_its_ends_and_takes_0_and_infinity():
    level = {"noise_level": lambda t: t, "guided": lambda x, t: 1, "conditional": lambda x, t: 0}
    got = [GuidedWithin((1.0, 2.0), **level)(X, torch.tensor([t, t, t])) for t in (0.5, 1.0, 1.5, 2.0, 2.5)]
    assert got == [0, 1, 1, 1, 0]
    whole = GuidedWithin((0.0, math.inf), FlowObjective().noise_level, level["guided"], level["conditional"])
    assert whole(X, torch.tensor([1000.0])) == 1  # where sigma is infinite
    assert whole(X, torch.tensor([0.0])) == 1
    for low, high in ((2.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="0 <= LOW < HIGH"):
            GuidedWithin((low, high), **level)


@pytest.mark.parametrize("objective", [DDPMObjective(), DDPMObjective("v"), FlowObjective(), EDMObjective()])
def test_every_sampler_of_every_objective_takes_an_interval(objective):
    """An interval of all levels is plain guidance, an empty one is the conditional model, and a part is neither."""

    def draw(sampler, interval, scale=3.0):
        def model(x, t, y):
            return torch.tanh(x + y.view(-1, 1, 1, 1))

        guided = cfg_model(model, Y, torch.tensor(0), scale)
        if interval:
            guided = GuidedWithin(interval, objective.noise_level, guided, cfg_model(model, Y, NULL, 1.0))
        return objective.sample(guided, torch.arange(3), (1, 2, 2), seed=0, steps=8, sampler=sampler, progress=None)

    for sampler in objective.samplers:
        assert torch.equal(draw(sampler, (0.0, math.inf)), draw(sampler, None))
        assert torch.equal(draw(sampler, (1e6, 1e7)), draw(sampler, None, scale=1.0))
        part = draw(sampler, (0.3, 3.0))
        assert not torch.equal(part, draw(sampler, None)) and not torch.equal(part, draw(sampler, None, scale=1.0))


@pytest.mark.parametrize(
    ("guidance", "scale", "expected"),
    [
        (Guidance(5.0), None, 5.0),
        (Guidance(5.0), 3.0, 3.0),
        (Guidance(5.0), 1.0, 1.0),
        (Guidance(5.0), 0.0, 1.0),  # the pipeline only guides above 1
        (Guidance(5.0, "cond"), None, 6.0),
        (Guidance(5.0, "cond"), 0.5, 1.5),
        (Guidance(0.0, "cond"), None, 1.0),
        (Guidance(0.0, "cond"), 1.0, 2.0),
        (Guidance(3.5, "embedded"), None, 1.0),
        (Guidance(3.5, "embedded"), 7.0, 1.0),
    ],
)
def test_scales_of_families_are_converted(guidance, scale, expected):
    assert scale_of_family(guidance, scale) == expected


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan])
def test_scales_of_families_are_checked(scale):
    with pytest.raises(ValueError, match="^--cfg_scale .*: out of range"):
        scale_of_family(Guidance(5.0), scale)


@pytest.mark.parametrize("formula", ["uncond", "cond"])
@pytest.mark.parametrize("scale", [0.0, 0.7, 1.0, 5.0])
def test_families_are_guided_by_their_formula(formula, scale):
    """The references are the formulas of Wan's and Z-Image's pipelines."""
    cond, uncond = (CountingModel()(X, T, y)[:, :4] for y in (Y, NULL))
    if formula == "uncond":
        expected = uncond + scale * (cond - uncond) if scale > 1 else cond
    else:
        expected = cond + scale * (cond - uncond) if scale > 0 else cond
    got = cfg_model(CountingModel(), Y, NULL, scale_of_family(Guidance(5.0, formula), scale))(X, T)[:, :4]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4)  # conditions go up to 1000


@pytest.mark.parametrize("parts", ["row", "patch"])
def test_guided_predictions_get_back_the_norms_of_conditional_ones(parts):
    """The references are the formulas of Lumina 2's and Qwen-Image's pipelines, the latter with tokens of 2 x 2."""
    (x, t), generator = (torch.zeros(2, 4, 2, 6), torch.zeros(2)), torch.Generator().manual_seed(0)
    both = torch.randn(4, 4, 2, 6, generator=generator)
    got = cfg_model(lambda *_: both, torch.zeros(2), torch.zeros(2), 3.0, rescaled=parts)(x, t)
    if parts == "patch":
        both, got = packed(both), packed(got)
    cond, uncond = both.chunk(2)
    guided = uncond + 3 * (cond - uncond)
    wanted = guided * (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True))
    torch.testing.assert_close(got, wanted)


# The noise levels of every sampler's steps, computed independently for 8 steps, highest first
RAMP = np.linspace(0, 1, 8)
EVEN = SIGMAS[[999, 856, 714, 571, 428, 285, 143, 0]]
KARRAS = (80 ** (1 / 7) + RAMP * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
FLOW_TIMES = 3 * (1 - np.arange(8) / 8) / (1 + 2 * (1 - np.arange(8) / 8))  # shifted by 3
FLOW = np.array([math.inf, *(FLOW_TIMES[1:] / (1 - FLOW_TIMES[1:]))])
STEPS = {  # objective, levels, evaluations of each step, the first and last level rounded
    ("ddpm", "ddpm"): (DDPMObjective(), EVEN, [1] * 8, 157, 0.01),
    ("ddpm", "ddim"): (DDPMObjective(), EVEN, [1] * 8, 157, 0.01),
    ("ddpm", "dpmpp"): (DDPMObjective(), None, [1] * 8, 157, 0.01),
    ("v", "ddpm"): (DDPMObjective("v"), EVEN, [1] * 8, 157, 0.01),
    ("v", "ddim"): (DDPMObjective("v"), EVEN, [1] * 8, 157, 0.01),
    ("v", "dpmpp"): (DDPMObjective("v"), None, [1] * 8, 157, 0.01),
    ("shifted", "ddim"): (DDPMObjective("v", shift=6.0), 6 * EVEN, [1] * 8, 944, 0.06),
    ("flow", "euler"): (FlowObjective(shift=3.0), FLOW, [1] * 8, math.inf, 0.429),  # 3 / 7
    ("flow", "heun"): (FlowObjective(shift=3.0), FLOW, [2] * 8, math.inf, 0.429),
    ("flow", "unipc"): (FlowObjective(shift=3.0), FLOW, [1] * 8, math.inf, 0.429),
    ("edm", "heun"): (EDMObjective(), KARRAS, [2] * 7 + [1], 80, 0.002),
    ("edm", "euler"): (EDMObjective(), KARRAS, [1] * 8, 80, 0.002),
    ("edm", "dpmpp"): (EDMObjective(), KARRAS, [1] * 8, 80, 0.002),
    ("edm", "unipc"): (EDMObjective(), KARRAS, [1] * 8, 80, 0.002),
}
STEPS_OF = pytest.mark.parametrize("which", STEPS, ids=", ".join)


def evaluations(objective, sampler: str, interval, steps: int = 8) -> tuple[list[bool], list[float]]:
    """Return whether each network evaluation was guided, and its timestep."""
    guided, told = [], []

    def model(x, t, y):
        guided.append(len(y) == 6)  # two halves
        told.append(float(t[0]))
        return torch.tanh(x + y.view(-1, 1, 1, 1))

    parts = (cfg_model(model, Y, torch.tensor(0), scale) for scale in (3.0, 1.0))
    chosen = GuidedWithin(interval, objective.noise_level, *parts)
    objective.sample(chosen, torch.arange(3), (1, 2, 2), seed=0, steps=steps, sampler=sampler, progress=None)
    return guided, told


def levels_of(which) -> np.ndarray:
    objective, levels, _, _, _ = STEPS[which]
    if levels is None:  # even in log, rounded to timesteps: take what the network got
        levels = SIGMAS[np.array(evaluations(objective, which[1], (0, math.inf))[1]).astype(int)]
    return levels


def test_the_table_has_every_sampler_of_every_objective():
    for objective, *_ in STEPS.values():
        asked = {sampler for (_, sampler), (o, *_) in STEPS.items() if o.name == objective.name}
        assert asked == set(objective.samplers)


@STEPS_OF
def test_guidance_is_decided_once_a_step_by_the_level_it_starts_from(which):
    objective, _, counts, _, _ = STEPS[which]
    levels = levels_of(which)
    between = np.sqrt(np.minimum(levels[:-1], 1e6) * levels[1:])  # a bound between neighbouring levels
    for first in range(8):
        for last in range(first, 8):
            high = math.inf if first == 0 else between[first - 1]
            low = 0.0 if last == 7 else between[last]
            expected = [first <= step <= last for step, count in enumerate(counts) for _ in range(count)]
            assert evaluations(objective, which[1], (low, high))[0] == expected, (low, high)


@STEPS_OF
def test_bounds_include_the_first_and_the_last_level(which):
    objective, _, counts, high, low = STEPS[which]
    levels = levels_of(which)
    assert levels[0] == pytest.approx(high, rel=0.003) and levels[-1] == pytest.approx(low, rel=0.003)
    every = [True] * sum(counts)
    for interval in ((0, high), (low, math.inf), (low, high), (levels[-1], levels[0]), (0, levels[0])):
        assert evaluations(objective, which[1], interval)[0] == every, interval
    if high < math.inf:
        assert evaluations(objective, which[1], (0, 0.98 * high))[0] == [False] * counts[0] + every[counts[0] :]
    assert evaluations(objective, which[1], (1.02 * low, high))[0] == every[: -counts[-1]] + [False] * counts[-1]
    inside = levels[3]  # a level may itself be a bound
    three = [step == 3 for step, count in enumerate(counts) for _ in range(count)]
    assert evaluations(objective, which[1], (inside, inside * 1.002))[0] == three
    assert evaluations(objective, which[1], (inside * 0.998, inside))[0] == three
