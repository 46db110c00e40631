"""Samplers are compared with diffusers step by step, and with exact results for Gaussian data."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.objectives.ddpm import DDPM, DDPMTrajectory
from opendit.diffusion.objectives.edm import EDMTrajectory
from opendit.diffusion.random import Stream, initial_noise, keyed_noise, normal
from opendit.diffusion.samplers import sample
from tests.diffusion.states import sample_with_states

SCHEDULE = DDPM.linear()
NAMES = DDPMObjective().samplers


def along(schedule: DDPM, name: str, model, x, **how):
    """Run a sampler along a DDPM schedule."""
    return sample(name, model, x, DDPMTrajectory(schedule), **how)


def along_with_states(schedule: DDPM, name: str, model, x, **how):
    return sample_with_states(name, model, x, DDPMTrajectory(schedule), **how)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth_model(learned: bool):
    """Return a deterministic stand-in for a network: eps, and optionally v, depend on x and the timestep."""

    def model(x, t):
        assert t.dtype == torch.int64 and t.shape == x.shape[:1]
        time = t.reshape(-1, *(1,) * (x.ndim - 1)) / 1000
        eps = x * time + 0.3 * torch.sin(2 * x + 5 * time)
        return torch.cat((eps, torch.cos(3 * x + time)), 1) if learned else eps

    return model


def recorded_noise(shape, dtype=torch.float64):
    """Return a generator for diffusers, and a noise_fn with the same numbers."""
    ours = torch.Generator().manual_seed(7)
    return torch.Generator().manual_seed(7), lambda k: torch.randn(shape, generator=ours, dtype=dtype)


def in_float64(scheduler):
    """Replace diffusers' float32 schedule, in which 1 - beta loses three digits of a beta of 1e-4."""
    scheduler.alphas_cumprod = torch.from_numpy(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)))
    scheduler.one = scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    return scheduler


# Compared with diffusers


@pytest.mark.parametrize("num_steps", [1000, 250, 10, 2])
@pytest.mark.parametrize("variance_type", ["fixed_small", "learned_range"])
def test_ddpm_matches_diffusers(variance_type, num_steps):
    schedule = SCHEDULE.respaced(num_steps)
    reference = in_float64(
        DDPMScheduler(beta_start=1e-4, beta_end=0.02, variance_type=variance_type, clip_sample=False)
    )
    reference.set_timesteps(timesteps=schedule.timestep_map.flip(0).tolist())
    model, x = smooth_model(variance_type == "learned_range"), randn(2, 3, 4, 4)
    generator, noise_fn = recorded_noise(x.shape)
    got, states = along_with_states(schedule, "ddpm", model, x, noise_fn=noise_fn)
    for k, t in enumerate(reference.timesteps):
        # each step starts from the same state, so that errors can't add up
        expected = reference.step(model(states[k], t.expand(2)), t, states[k], generator).prev_sample
        after = states[k + 1] if k + 1 < num_steps else got
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5, msg=lambda m, t=t: f"t = {t}: {m}")


@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_steps, stride", [(1000, 1), (28, 37), (38, 27)])
def test_ddim_matches_diffusers(num_steps, stride, eta):
    """diffusers takes the previous timestep to be ``stride`` earlier, which is true for these spacings."""
    schedule = SCHEDULE.respaced(num_steps)
    assert schedule.timestep_map.diff().unique().tolist() == [stride]
    reference = in_float64(
        DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=False, set_alpha_to_one=True, steps_offset=0)
    )
    reference.num_inference_steps = 1000 // stride
    model, x = smooth_model(False), randn(2, 3, 4, 4)
    noises = [randn(2, 3, 4, 4, seed=k) for k in range(num_steps)]
    got, states = along_with_states(
        schedule,
        "ddim",
        smooth_model(True),  # the v channels change nothing
        x,
        eta=eta,
        noise_fn=noises.__getitem__,
    )
    for k, t in enumerate(schedule.timestep_map.flip(0).tolist()):
        expected = reference.step(
            model(states[k], torch.tensor([t, t])),
            t,
            states[k],
            eta=eta,
            use_clipped_model_output=False,
            variance_noise=noises[k],
        ).prev_sample
        after = states[k + 1] if k + 1 < num_steps else got
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5, msg=lambda m, t=t: f"t = {t}: {m}")


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("num_steps", [1000, 20, 10, 2, 1])
def test_dpmpp_matches_diffusers(num_steps, learned):
    schedule = SCHEDULE.respaced(num_steps)
    reference = in_float64(DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, final_sigmas_type="zero"))
    reference.set_timesteps(timesteps=schedule.timestep_map.flip(0).tolist())
    model, x = smooth_model(False), randn(2, 3, 4, 4).float()
    got, states = along_with_states(schedule, "dpmpp", smooth_model(learned), x)
    for k, t in enumerate(reference.timesteps):
        expected = reference.step(model(states[k], t.expand(2)), t, states[k]).prev_sample
        after = states[k + 1] if k + 1 < num_steps else got
        # In float32 at t = 999, x_0 is 157 times the difference of two terms. With 1000 steps, the extrapolation then
        # divides by a small step length.
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4, msg=lambda m, t=t: f"t = {t}: {m}")


# For Gaussian data N(MU, STD^2) the exact eps is affine in x, so a sampler is affine in its noises. The result's mean
# and variance follow exactly from a few probes.

MU, STD = 1.5, 0.4


def gaussian_model(schedule: DDPM, learned: bool):
    full = SCHEDULE.alphas_cumprod
    index_of = {int(t): i for i, t in enumerate(schedule.timestep_map)}

    def model(x, t):
        ac = full[t].reshape(-1, 1)
        total = ac * STD**2 + 1 - ac  # variance of x_t
        eps = (1 - ac).sqrt() * (x - ac.sqrt() * MU) / total
        if not learned:
            return eps
        # The exact reverse step has the posterior variance plus the uncertainty about x_0 through its mean.
        i = index_of[int(t[0])]
        weight = schedule.posterior_mean_x0[i]
        variance = schedule.posterior_log_variance[i].exp() + weight**2 * STD**2 * (1 - ac) / total
        low, high = schedule.posterior_log_variance[i], schedule.betas[i].log()
        return torch.cat((eps, (2 * (variance.log() - low) / (high - low) - 1).expand_as(x)), 1)

    return model


def result_moments(sampler, schedule, learned, **options):
    """Return the mean and standard deviation of the sampler's result from the exact marginal q(x_T)."""
    n, ac = schedule.num_steps, float(schedule.alphas_cumprod[-1])
    start_mean, start_std = math.sqrt(ac) * MU, math.sqrt(ac * STD**2 + 1 - ac)
    # Row 0 has no noise, row 1 one standard deviation of x_T, and row 2 + k one of step k's noise.
    x = torch.full((n + 2, 1), start_mean, dtype=torch.float64)
    x[1] += start_std

    def noise_fn(k):
        noise = torch.zeros_like(x)
        noise[2 + k] = 1
        return noise

    out = along(schedule, sampler, gaussian_model(schedule, learned), x, noise_fn=noise_fn, **options)[:, 0]
    return float(out[0]), float((out[1:] - out[0]).square().sum().sqrt())


@pytest.mark.parametrize("num_steps", [2, 10, 100, 1000])
def test_ddpm_with_the_exact_variance_is_exact_in_any_number_of_steps(num_steps):
    schedule = SCHEDULE.respaced(num_steps)
    mean, std = result_moments("ddpm", schedule, learned=True)
    # The last step returns the mean of x_0 given x at t = 0, so that conditional variance of 1e-4 is lost.
    ac = 1 - 1e-4
    lost = STD**2 * (1 - ac) / (ac * STD**2 + 1 - ac)
    assert mean == pytest.approx(MU, rel=1e-4)
    assert std == pytest.approx(math.sqrt(STD**2 - lost), rel=1e-4)


def test_ddpm_with_the_fixed_variance_converges():
    errors = []
    for num_steps in (10, 100, 1000):
        mean, std = result_moments("ddpm", SCHEDULE.respaced(num_steps), learned=False)
        assert mean == pytest.approx(MU, rel=1e-4)  # the mean is exact, because eps is
        errors.append(abs(std / STD - 1))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_converges(eta):
    errors = []
    for num_steps in (10, 100, 1000):
        mean, std = result_moments("ddim", SCHEDULE.respaced(num_steps), learned=False, eta=eta)
        assert mean == pytest.approx(MU, rel=1e-4)
        errors.append(abs(std / STD - 1))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@given(num_steps=st.integers(1, 1000))
@settings(deadline=None, max_examples=40)
def test_timesteps_even_in_noise_are_distinct_and_reach_both_ends(num_steps):
    schedule = SCHEDULE.respaced_by_noise(num_steps)
    steps = schedule.timestep_map
    assert schedule.num_steps == num_steps and steps[0] == 0 and (steps.diff() > 0).all()
    assert num_steps == 1 or steps[-1] == 999
    torch.testing.assert_close(schedule.alphas_cumprod, SCHEDULE.alphas_cumprod[steps])
    if 2 <= num_steps <= 20:  # with few steps, the timesteps are even to within the schedule's spacing
        logs = -0.5 * torch.logit(schedule.alphas_cumprod)
        even = torch.linspace(float(logs[0]), float(logs[-1]), num_steps, dtype=torch.float64)
        assert (logs - even).abs().max() < 0.2


def test_steps_even_in_noise_need_to_exist():
    for num_steps in (0, 1001):
        with pytest.raises(ValueError, match="from 1 to 1000"):
            SCHEDULE.respaced_by_noise(num_steps)


def test_dpmpp_is_of_second_order():
    """Steps have equal lengths in log sigma, because ``respaced`` rounds to integer timesteps."""

    def model(scaled, timestep):  # EDM's F with an exact denoiser
        sigma = torch.exp(timestep / 250).view(-1, 1)
        x, total = scaled * (sigma**2 + STD**2).sqrt(), sigma**2 + STD**2
        return (MU + STD**2 / total * (x - MU) - STD**2 / total * x) * total.sqrt() / (sigma * STD)

    errors, x = [], torch.linspace(-2, 2, 9, dtype=torch.float64).view(9, 1)
    for num_steps in (20, 40, 80):
        sigmas = torch.logspace(2, -2, num_steps + 1, dtype=torch.float64)
        got = sample("dpmpp", model, MU + x * sigmas[0], EDMTrajectory(sigmas, STD))
        exact = MU + x * sigmas[0] * ((STD**2 + sigmas[-1] ** 2) / (STD**2 + sigmas[0] ** 2)).sqrt()
        errors.append((got - exact).abs().max().item())
    assert all(1.8 < math.log2(a / b) < 2.3 for a, b in zip(errors, errors[1:], strict=False)), errors


def test_dpmpp_of_20_steps_is_closer_than_ddim_of_20():
    schedules = {"ddim": SCHEDULE.respaced(20), "dpmpp": SCHEDULE.respaced_by_noise(20)}
    errors = [abs(result_moments(s, schedule, learned=False)[1] / STD - 1) for s, schedule in schedules.items()]
    assert errors[1] < errors[0] / 5 and errors[1] < 0.02, errors


def test_from_standard_normal_noise_the_data_come_out():
    """The mean and deviation of 4,096 samples from real noise are within 4 standard errors and 1 %."""
    schedule, index = SCHEDULE.respaced(100), torch.arange(4096)
    model, start, noise_fn = gaussian_model(schedule, True), initial_noise(3, index, (1,)), keyed_noise(3, index, (1,))
    for name in NAMES:
        x = along(schedule, name, model, start, noise_fn=noise_fn)
        assert x.mean().item() == pytest.approx(MU, abs=4 * STD / 64 + 0.01 * MU), name
        assert x.std().item() == pytest.approx(STD, rel=4 / math.sqrt(2 * 4096) + 0.01), name


# Conventions


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 3, 8, 8)], ids=["image", "video"])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_dtypes_and_timesteps(name, shape):
    index, seen = torch.arange(2), []

    def model(x, t):
        assert x.dtype == torch.float32
        seen.append(t.tolist())
        return smooth_model(True)(x, t).bfloat16()

    x = initial_noise(0, index, shape)
    got = along(SCHEDULE.respaced(5), name, model, x, noise_fn=keyed_noise(0, index, shape))
    assert got.shape == (2, *shape) and got.dtype == torch.float32
    assert seen == [[t, t] for t in (999, 749, 500, 250, 0)]
    # Arithmetic is float32, whatever the dtypes of the model and x are.
    lower = along(SCHEDULE.respaced(5), name, model, x.bfloat16(), noise_fn=keyed_noise(0, index, shape))
    assert lower.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_progress_and_no_grad(name):
    index, schedule, lengths = torch.arange(2), SCHEDULE.respaced(4), []
    weight = torch.ones((), requires_grad=True)

    def progress(steps):
        lengths.append(len(steps))
        return iter(steps)

    got = along(
        schedule,
        name,
        lambda x, t: weight * x,
        initial_noise(0, index, (1, 2, 2)),
        noise_fn=keyed_noise(0, index, (1, 2, 2)),
        progress=progress,
    )
    assert lengths == [4] and not got.requires_grad


def test_noise_is_asked_for_at_every_step_but_the_last():
    asked = []

    def noise_fn(k):
        asked.append(k)
        return torch.zeros(1, 1)

    x, schedule, model = torch.ones(1, 1), SCHEDULE.respaced(4), smooth_model(False)
    along(schedule, "ddpm", model, x, noise_fn=noise_fn)
    assert asked == [0, 1, 2]
    along(schedule, "ddim", model, x, eta=0.5, noise_fn=noise_fn)
    assert asked == [0, 1, 2] * 2
    along(schedule, "ddim", model, x, noise_fn=noise_fn)
    assert asked == [0, 1, 2] * 2


def test_mistakes_are_refused():
    x, schedule, model = torch.ones(1, 2, 3, 3), SCHEDULE.respaced(2), smooth_model(False)
    for eta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="eta"):
            along(schedule, "ddim", model, x, eta=eta, noise_fn=lambda k: x)
    with pytest.raises(ValueError, match="noise_fn"):
        along(schedule, "ddim", model, x, eta=0.5)
    with pytest.raises(ValueError, match="ancestral sampling needs noise_fn"):
        along(schedule, "ddpm", model, x)
    for name in NAMES:
        with pytest.raises(ValueError, match="2 or 4 channels"):
            along(schedule, name, lambda x, t: x[:, :1], x, noise_fn=lambda k: x)


@pytest.mark.parametrize("name, options", [("ddpm", {}), ("ddim", {}), ("ddim", {"eta": 1.0})])
def test_a_sample_comes_out_the_same_in_any_batch(name, options):
    schedule, shape, whole = SCHEDULE.respaced(6), (2, 3, 5), torch.arange(20, 27)

    def draw(index):
        noise_fn = keyed_noise(9, index, shape)
        return along(schedule, name, smooth_model(True), initial_noise(9, index, shape), noise_fn=noise_fn, **options)

    expected = draw(whole)
    torch.testing.assert_close(torch.cat((draw(whole[:2]), draw(whole[2:]))), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(draw(whole.flip(0)), expected.flip(0), rtol=1e-5, atol=1e-6)
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_noise_is_keyed_by_the_sample():
    shape, whole = (4, 3, 5), torch.arange(10)
    for k in (0, 1, 249):
        noise = keyed_noise(5, whole, shape)(k)
        assert noise.shape == (10, *shape) and noise.dtype == torch.float32
        assert torch.equal(noise, normal(5, k, whole, Stream.SAMPLE_STEP, shape))
        for i in (0, 3, 9):  # bit for bit, alone or in another batch
            assert torch.equal(keyed_noise(5, torch.tensor([i]), shape)(k)[0], noise[i])
            assert torch.equal(keyed_noise(5, torch.tensor([77, i]), shape)(k)[1], noise[i])
            assert torch.equal(initial_noise(5, torch.tensor([77, i]), shape)[1], initial_noise(5, whole, shape)[i])
    first = keyed_noise(5, whole, shape)
    draws = torch.stack((first(0), first(1), keyed_noise(6, whole, shape)(0), initial_noise(5, whole, shape)))
    assert torch.unique(draws).numel() > 0.999 * draws.numel()  # no stream, step or seed repeats another
