"""EDM is compared with diffusers, the paper's formulas, and exact results for Gaussian data."""

import math

import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from opendit.diffusion.objectives import EDMObjective, edm
from opendit.diffusion.objectives.edm import EDMTrajectory
from opendit.diffusion.samplers import sample
from tests.diffusion.states import sample_with_states
from tests.objectives import losses_of

MU, S = 0.3, 0.6  # the Gaussian data; S differs from sigma_data, so that the network is not trivial


def rows(a: Tensor, x: Tensor) -> Tensor:
    return a.view(-1, *(1,) * (x.dim() - 1))


def paper(sigma, sigma_data):
    """Return [K] table 1's c_skip, c_out, c_in and lambda."""
    total = sigma**2 + sigma_data**2
    return (
        sigma_data**2 / total,
        sigma * sigma_data / total**0.5,
        1 / total**0.5,
        total / (sigma * sigma_data) ** 2,
    )


def gaussian_network(sigma_data: float):
    """Return the F whose D is E[x_0 | x] for x_0 ~ N(MU, S^2): MU + S^2 / (S^2 + sigma^2) (x - MU)."""

    def network(scaled: Tensor, timestep: Tensor) -> Tensor:
        sigma = rows(torch.exp(4 * timestep / 1000), scaled)
        skip, out, scale, _ = paper(sigma, sigma_data)
        x = scaled / scale
        return (MU + S**2 / (S**2 + sigma**2) * (x - MU) - skip * x) / out

    return network


def network(x: Tensor, timestep: Tensor) -> Tensor:
    """Return the output of a smooth stand-in for a network."""
    time = rows(timestep, x) / 1000
    return torch.sin(2 * x + time) + 0.3 * x * time


# The solvers


def exact_end(x: Tensor, sigma: float) -> Tensor:
    """Return x(0) on the exact ODE path through x at sigma. Paths keep quantiles of N(MU, S^2 + sigma^2)."""
    return MU + (x - MU) * S / math.sqrt(S**2 + sigma**2)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp", 2)])
def test_samplers_converge_at_their_order(name, order):
    x = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64).view(1, 1, 101) * 80
    errors = []
    for steps in (40, 80, 160):
        sigmas = edm.karras_sigmas(steps)[
            :-1
        ]  # end at SIGMA_MIN, because the first-order step to 0 would hide the order
        got = sample(name, gaussian_network(0.5), x, EDMTrajectory(sigmas, 0.5))
        expected = MU + (x - MU) * math.sqrt((S**2 + 0.002**2) / (S**2 + 80**2))
        errors.append((got - expected).abs().max().item())
    observed = [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]
    assert all(abs(seen - order) < 0.2 for seen in observed), (errors, observed)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_heun_of_18_steps_is_closer_than_euler_of_35(sigma_data):
    """As in the paper, both use 35 network evaluations, including the step to 0."""
    x = torch.linspace(-2, 2, 11, dtype=torch.float64).view(1, 1, 11) * 80
    errors = {}
    for name, steps in (("heun", 18), ("euler", 35)):
        got = sample(name, gaussian_network(sigma_data), x, EDMTrajectory(edm.karras_sigmas(steps), sigma_data))
        errors[name] = (got - exact_end(x, 80)).abs().max().item()
    assert errors["heun"] < 0.7 * errors["euler"]


def test_heun_evaluates_at_the_new_point_and_not_at_0():
    seen = []

    def model(scaled, timestep):
        sigma = torch.exp(timestep / 250).item()
        x = scaled.item() * math.sqrt(sigma**2 + 0.25)
        seen.append((round(sigma, 6), x))
        return torch.full_like(scaled, 0.7)

    def slope(x, sigma):
        skip, out, _, _ = paper(sigma, 0.5)
        return (x - skip * x - out * 0.7) / sigma

    start = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    got = sample("heun", model, start, EDMTrajectory(torch.tensor([4.0, 1.0, 0.0]), 0.5))
    predicted = 3 - 3 * slope(3.0, 4.0)
    middle = 3 - 3 * (slope(3.0, 4.0) + slope(predicted, 1.0)) / 2
    assert [sigma for sigma, _ in seen] == [4.0, 1.0, 1.0]
    assert [x for _, x in seen] == pytest.approx([3.0, predicted, middle])
    assert got.item() == pytest.approx(middle - slope(middle, 1.0))


def states_of(name: str, steps: int, shape=(2, 3, 5, 4)):
    """Return all states x of a float32 run from noise, including the final one, and the sigmas."""
    sigmas = edm.karras_sigmas(steps)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 80
    got, states = sample_with_states(name, network, x, EDMTrajectory(sigmas, 0.5))
    return [*states, got], sigmas


@pytest.mark.parametrize("steps", [2, 18, 100])
@pytest.mark.parametrize(
    ("name", "scheduler"), [("euler", EDMEulerScheduler), ("dpmpp", EDMDPMSolverMultistepScheduler)]
)
def test_each_step_matches_diffusers(name, scheduler, steps):
    states, sigmas = states_of(name, steps)
    reference = scheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5)
    reference.set_timesteps(steps)
    torch.testing.assert_close(reference.sigmas.double(), sigmas, rtol=2e-6, atol=0)
    torch.testing.assert_close(1000 * reference.timesteps, edm.network_times(sigmas[:-1]).float(), rtol=1e-5, atol=1e-3)
    for k, timestep in enumerate(reference.timesteps):
        x = states[k]
        output = network(reference.scale_model_input(x, timestep), 1000 * timestep.expand(2))
        expected = reference.step(output, timestep, x).prev_sample
        torch.testing.assert_close(states[k + 1], expected, rtol=2e-5, atol=2e-5, msg=lambda m, k=k: f"step {k}: {m}")


@given(steps=st.integers(1, 1000))
@settings(deadline=None, max_examples=30)
def test_the_schedule_falls_from_80_to_0(steps):
    sigmas = edm.karras_sigmas(steps)
    assert len(sigmas) == steps + 1 and sigmas.dtype == torch.float64 and sigmas[-1] == 0
    assert sigmas[0].item() == pytest.approx(80) and (sigmas.diff() < 0).all()
    assert steps == 1 or sigmas[-2].item() == pytest.approx(0.002)


@pytest.mark.parametrize("name", EDMObjective().samplers)
def test_progress_dtypes_and_no_grad(name):
    weight, lengths = torch.ones((), requires_grad=True), []

    def model(x, timestep):
        assert x.dtype == timestep.dtype == torch.float32 and timestep.shape == x.shape[:1]
        return (weight * x).bfloat16()

    def progress(steps):
        lengths.append(len(steps))
        return steps

    sigmas = torch.tensor([9.0, 3.0, 0.5, 0.0])
    x = 9 * torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = sample(name, model, x, EDMTrajectory(sigmas, 0.5), progress=progress)
    assert got.dtype == torch.float32 and not got.requires_grad and lengths == [3]


# The objective


@given(sigma=st.floats(1e-3, 100), sigma_data=st.floats(0.1, 3))
@settings(deadline=None, max_examples=50)
def test_the_denoiser_is_preconditioned_as_in_the_paper(sigma, sigma_data):
    x, level = torch.linspace(-3, 3, 12, dtype=torch.float64).view(2, 1, 6), torch.full((2,), sigma).double()
    skip, out, scale, _ = paper(level[0].item(), sigma_data)
    expected = skip * x + out * network(scale * x, 1000 * level.log() / 4)
    torch.testing.assert_close(edm.denoise(network, x, level, sigma_data), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(edm.sigmas_of(edm.network_times(level)), level)


def test_the_loss_is_the_weighted_error_of_the_denoiser_and_so_is_its_gradient():
    """The reference is [K] eq. 2: lambda(sigma) |D(x_0 + sigma n; sigma) - x_0|^2."""
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(5, 2, 3, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    sigma = torch.tensor([0.01, 0.2, 1.0, 7.0, 90.0], dtype=torch.float64)
    weights = [torch.tensor(0.7, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def model(weight):
        # times are float32 in training
        return lambda x, timestep: weight * network(x, timestep.double())

    got = losses_of(EDMObjective(sigma_data=0.8), model(weights[0]), x0, sigma, noise)
    denoised = edm.denoise(model(weights[1]), x0 + rows(sigma, x0) * noise, sigma, 0.8)
    expected = paper(sigma, 0.8)[3] * (denoised - x0).square().flatten(1).mean(1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    for loss in (got, expected):
        loss.sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-5, atol=0)


def test_inputs_and_targets_have_unit_variance_at_every_level():
    """[K] appendix B.6 chooses the coefficients for this, with data of mean 0 and variance sigma_data^2."""
    generator = torch.Generator().manual_seed(0)
    sigma = torch.logspace(-2, 2, 5, dtype=torch.float64)
    x0, noise = (torch.randn(5, 1, 200, 200, dtype=torch.float64, generator=generator) for _ in range(2))
    inputs = []

    def zero(x, timestep):
        inputs.append(x)
        return torch.zeros_like(x)

    # with a zero output, the loss is the target's variance
    loss = losses_of(EDMObjective(sigma_data=0.3), zero, 0.3 * x0, sigma, noise)
    torch.testing.assert_close(loss, torch.ones(5, dtype=torch.float64), rtol=0.03, atol=0)
    torch.testing.assert_close(inputs[0].flatten(1).var(1), torch.ones(5, dtype=torch.float64), rtol=0.03, atol=0)


def test_the_loss_of_the_true_denoiser_is_that_of_chance():
    """The expected loss is lambda(sigma) times x_0's variance given x, S^2 sigma^2 / (S^2 + sigma^2)."""
    noise = torch.randn(50_000, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x0 = MU + S * torch.randn(noise.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sigma = torch.full((50_000,), 0.4, dtype=torch.float64)
    true = gaussian_network(0.5)
    loss = losses_of(EDMObjective(sigma_data=0.5), lambda x, t: true(x, t.double()), x0, sigma, noise)
    expected = paper(0.4, 0.5)[3] * S**2 * 0.4**2 / (S**2 + 0.4**2)
    assert abs(loss.mean().item() / expected - 1) < 0.01


def test_the_loss_is_float32_for_half_precision_networks():
    x0, sigma = torch.randn(3, 1, 4, 4).bfloat16(), torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)

    def model(x, timestep):
        assert x.dtype == timestep.dtype == torch.float32
        return x.bfloat16()

    assert losses_of(EDMObjective(), model, x0, sigma, x0).dtype == torch.float32


def test_sigmas_are_log_normal_and_depend_on_the_sample_alone():
    objective, index = EDMObjective(mean=-0.4, std=1.4), torch.arange(20_000)
    logs = objective.times(1, 2, index).log()
    assert stats.kstest(logs.numpy(), stats.norm(-0.4, 1.4).cdf).pvalue > 0.01
    few = torch.tensor([700, 3])
    assert torch.equal(objective.times(1, 2, few).log(), logs[few])
    assert not torch.equal(objective.times(1, 3, index).log(), logs)


@pytest.mark.parametrize("sampler", [None, "euler", "dpmpp"])
def test_samples_depend_on_seed_and_index_alone_and_follow_the_data(sampler):
    objective = EDMObjective(sigma_data=0.7)
    how = dict(seed=3, steps=150, sampler=sampler, progress=None)
    whole = objective.sample(gaussian_network(0.7), torch.arange(2000), (1, 2, 2), **how)
    part = objective.sample(gaussian_network(0.7), torch.tensor([5, 1]), (1, 2, 2), **how)
    torch.testing.assert_close(part, whole[[5, 1]], atol=1e-5, rtol=1e-5)
    assert whole.mean().item() == pytest.approx(MU, abs=0.03) and whole.std().item() == pytest.approx(S, rel=0.05)


def test_shapes_that_do_not_fit_are_refused():
    x, sigma = torch.zeros(3, 2, 4, 4), torch.ones(3)
    with pytest.raises(ValueError, match="shape of its input"):
        losses_of(EDMObjective(), lambda x, t: torch.cat((x, x), 1), x, sigma, x)
    with pytest.raises(ValueError, match="shape of its input"):
        edm.denoise(lambda x, t: x[:, :1], x, sigma, 0.5)
    with pytest.raises(ValueError, match="don't fit"):
        EDMObjective().prepare(x, sigma[:2], x)
