"""DDPM's schedule is compared with independent derivations in float64."""

import hashlib
import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.diffusion.objectives.ddpm import DDPM, linear_betas, space_timesteps, training_loss

SCHEDULE = DDPM.linear()


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bayes_posterior(betas: np.ndarray, t: int, x0, xt):
    """Return the mean and variance of q(x_{t-1} | x_t, x_0) by multiplying its two Gaussians, without [H] eq. 7."""
    previous = np.prod(1 - betas[:t])
    precision = (1 - betas[t]) / betas[t] + 1 / (1 - previous)
    mean = (np.sqrt(1 - betas[t]) / betas[t] * xt + np.sqrt(previous) / (1 - previous) * x0) / precision
    return mean, 1 / precision


# Schedule


def test_linear_betas():
    betas = linear_betas()
    assert betas.dtype == torch.float64 and betas.shape == (1000,)
    np.testing.assert_allclose(betas.numpy(), np.linspace(1e-4, 0.02, 1000), rtol=1e-14)
    # Every T ends at about the same noise level.
    ends = [float(torch.log(1 - linear_betas(T)).sum()) for T in (250, 1000, 4000)]
    np.testing.assert_allclose(ends, ends[1], rtol=0.03)


@pytest.mark.parametrize("T", [0, -5, 1, 20])
def test_linear_betas_refuses_a_T_whose_last_beta_is_1(T):
    with pytest.raises(ValueError, match="more than 20"):
        linear_betas(T)


def test_from_betas_refuses_what_is_no_schedule():
    for betas in ([], [0.0, 0.1], [0.1, 1.0], [0.1, math.nan], [[0.1]]):
        with pytest.raises(ValueError, match="betas"):
            DDPM.from_betas(torch.tensor(betas))
    with pytest.raises(ValueError, match="timestep_map"):
        DDPM.from_betas(torch.tensor([0.1, 0.2]), torch.arange(3))


@given(shift=st.floats(0.05, 50), T=st.integers(21, 1000))
def test_a_shift_multiplies_the_noise_of_every_timestep(shift, T):
    plain, shifted = DDPM.linear(T), DDPM.linear(T, shift)
    t = torch.arange(T)
    signal, noise = (plain.q_sample(x0, t, n)[:, 0].double() for x0, n in ((ones(T), zeros(T)), (zeros(T), ones(T))))
    x = shifted.q_sample(ones(T), t, zeros(T))[:, 0].double(), shifted.q_sample(zeros(T), t, ones(T))[:, 0].double()
    torch.testing.assert_close(x[0] ** 2 + x[1] ** 2, torch.ones(T, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(x[1] / x[0], shift * noise / signal, rtol=1e-5, atol=0)
    assert torch.equal(shifted.model_timesteps(t), t)


def ones(T):
    return torch.ones(T, 1)


def zeros(T):
    return torch.zeros(T, 1)


@pytest.mark.parametrize(
    "schedule",
    [SCHEDULE, SCHEDULE.respaced(37), DDPM.linear(shift=6.0).respaced(37)],
    ids=["linear", "respaced", "shifted"],
)
def test_posterior_is_bayes_rule(schedule):
    betas = schedule.betas.numpy()
    x0, xt = randn(7, 2, 3, 3, seed=1), randn(7, 2, 3, 3, seed=2)
    t = torch.tensor([1, 2, 5, 11, 20, 35, 36])
    mean, log_variance = schedule.posterior(x0, xt, t)
    assert log_variance.shape == (7, 1, 1, 1) and log_variance.dtype == torch.float32
    for i, ti in enumerate(t.tolist()):
        expected, variance = bayes_posterior(betas, ti, x0[i].numpy(), xt[i].numpy())
        np.testing.assert_allclose(mean[i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(log_variance[i].item(), np.log(variance), rtol=1e-6)


def test_posterior_at_0_is_x0_with_the_next_variance():
    x0, xt = randn(1, 1, 4, 4, seed=1), randn(1, 1, 4, 4, seed=2)
    mean, log_variance = SCHEDULE.posterior(x0, xt, torch.tensor([0]))
    np.testing.assert_allclose(mean, x0, rtol=1e-6)
    assert log_variance.item() == SCHEDULE.posterior(x0, xt, torch.tensor([1]))[1].item()


def variance_of(scheduler: DDPMScheduler, t: int) -> float:
    """Return the variance of the noise in a step of diffusers' scheduler, which is all that is left from zeros."""
    zeros, seed = torch.zeros(1, 4, dtype=torch.float64), torch.Generator().manual_seed(t)
    after = scheduler.step(zeros, t, zeros, generator=seed).prev_sample
    noise = torch.randn(1, 4, dtype=torch.float64, generator=seed.manual_seed(t))
    deviation = after / noise
    torch.testing.assert_close(deviation, deviation[:, :1].expand(1, 4))
    return deviation[0, 0].item() ** 2


def test_posterior_and_q_sample_match_diffusers():
    reference = DDPMScheduler(beta_start=1e-4, beta_end=0.02, variance_type="fixed_small", clip_sample=False)
    reference.alphas_cumprod = torch.from_numpy(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)))  # it keeps float32
    reference.one = torch.tensor(1.0, dtype=torch.float64)
    for t in (1, 2, 100, 500, 999):
        x0, noise, tt = randn(2, 3, 4, 4, seed=t), randn(2, 3, 4, 4, seed=t + 1), torch.tensor([t, t])
        xt = SCHEDULE.q_sample(x0, tt, noise)
        torch.testing.assert_close(xt, reference.add_noise(x0, noise, tt), rtol=1e-6, atol=1e-7)
        variance = variance_of(reference, t)
        assert SCHEDULE.posterior(x0, xt, tt)[1][0].item() == pytest.approx(math.log(variance), rel=1e-6)
        low, high = (SCHEDULE.learned_log_variance(torch.full_like(x0, v), tt)[0, 0, 0, 0].item() for v in (-1, 1))
        assert low == pytest.approx(math.log(variance), rel=1e-6)
        assert high == pytest.approx(math.log(float(SCHEDULE.betas[t])), rel=1e-6)


def test_q_sample_moments():
    t = torch.tensor([0, 300, 999])
    x0 = torch.tensor([-2.0, 0.5, 3.0])[:, None].expand(3, 200_000)
    xt = SCHEDULE.q_sample(x0, t, randn(3, 200_000, dtype=torch.float32)).double()
    ac = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[t.numpy()]
    std = np.sqrt(1 - ac)
    np.testing.assert_array_less(np.abs(xt.mean(1) - np.sqrt(ac) * x0[:, 0].numpy()), 4 * std / math.sqrt(200_000))
    np.testing.assert_allclose(xt.std(1), std, rtol=4 / math.sqrt(2 * 200_000))


@pytest.mark.parametrize("shape", [(3, 4, 8, 8), (3, 4, 2, 8, 8), (3, 5)])
def test_any_rank_and_inverses(shape):
    x0, noise, t = randn(*shape, seed=3), randn(*shape, seed=4), torch.tensor([0, 17, 999])
    xt = SCHEDULE.q_sample(x0, t, noise)
    for b in range(3):  # each sample with its own t
        torch.testing.assert_close(SCHEDULE.q_sample(x0[b : b + 1], t[b : b + 1], noise[b : b + 1])[0], xt[b])
    torch.testing.assert_close(SCHEDULE.predict_x0(xt, t, noise), x0, rtol=0, atol=1e-4)


def test_low_precision_is_promoted():
    x0, noise, t = (
        randn(2, 4, 4, 4, dtype=torch.bfloat16),
        randn(2, 4, 4, 4, dtype=torch.bfloat16),
        torch.tensor([3, 4]),
    )
    xt = SCHEDULE.q_sample(x0, t, noise)
    assert xt.dtype == torch.float32
    torch.testing.assert_close(xt, SCHEDULE.q_sample(x0.float(), t, noise.float()), rtol=0, atol=0)


def test_a_wrong_t_is_refused():
    x = randn(4, 2, 3, 3)
    for t in (torch.tensor([1]), torch.tensor(1), torch.ones(4), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="int64"):
            SCHEDULE.q_sample(x, t, x)


def test_tables_are_moved_once_and_survive_inference_mode():
    schedule, x, t = DDPM.linear(), randn(2, 1, 2, 2, dtype=torch.float32), torch.tensor([1, 2])
    with torch.inference_mode():
        schedule.q_sample(x, t, x)
    tables = schedule.tables(x.device)
    assert schedule.tables(torch.device("cpu")) is tables
    assert not any(v.is_inference() for v in tables.values())
    x.requires_grad_()
    schedule.q_sample(x, t, x).sum().backward()


def test_compiles_to_one_graph():
    """A read from the device in the loss would break the graph."""
    schedule, x0, noise = DDPM.linear(), randn(2, 2, 4, 4, dtype=torch.float32), randn(2, 2, 4, 4, dtype=torch.float32)
    output, t = randn(2, 4, 4, 4, seed=5, dtype=torch.float32), torch.tensor([0, 9])

    def loss(output, x0, t, noise):
        return training_loss(schedule, output, x0, schedule.q_sample(x0, t, noise), t, noise).loss

    expected = loss(output, x0, t, noise)  # also moves the tables, like the first training step
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(output, x0, t, noise), expected)


# Respacing


def test_space_timesteps_rounds_as_guided_diffusion():
    assert space_timesteps(1000, 8) == [0, 143, 285, 428, 571, 714, 856, 999]
    assert space_timesteps(1000, 1) == [0]
    # The digest is of guided-diffusion's sorted space_timesteps(1000, [n]) for every n. Its running float sum decides
    # ties, for example at n = 21.
    steps = [space_timesteps(1000, n) for n in range(1, 1001)]
    digest = hashlib.sha256(repr(steps).encode()).hexdigest()
    assert digest == "c6f7236b85606b3d65b8629cb3e34cd96d02669cc0e0a09a4eba87e76a6e56a9"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), T=st.integers(21, 1500))
def test_respaced_properties(data, T):
    n = data.draw(st.integers(1, T))
    full = DDPM.linear(T)
    short = full.respaced(n)
    steps = short.timestep_map
    assert short.num_steps == n == len(steps) and steps.dtype == torch.int64
    assert steps[0] == 0 and (n == 1 or steps[-1] == T - 1)
    assert bool((steps.diff() > 0).all())
    assert steps.diff().numel() == 0 or int(steps.diff().max() - steps.diff().min()) <= 1  # evenly
    torch.testing.assert_close(short.alphas_cumprod, full.alphas_cumprod[steps], rtol=1e-10, atol=0)
    t = torch.arange(n)
    assert torch.equal(short.model_timesteps(t), steps)
    assert bool(torch.isfinite(short.posterior_log_variance).all())
    # The x_t equals the full schedule's at the mapped timestep.
    x = torch.linspace(-1, 1, n)[:, None]
    torch.testing.assert_close(
        short.q_sample(x, t, x.flip(0)), full.q_sample(x, steps, x.flip(0)), rtol=1e-5, atol=1e-6
    )


def test_respacing_twice_keeps_the_original_timesteps():
    once = SCHEDULE.respaced(100)
    twice = once.respaced(10)
    assert twice.timestep_map.tolist() == [once.timestep_map[i] for i in space_timesteps(100, 10)]
    torch.testing.assert_close(twice.alphas_cumprod, SCHEDULE.alphas_cumprod[twice.timestep_map], rtol=1e-10, atol=0)


@pytest.mark.parametrize("n", [0, -1, 1001])
def test_respaced_refuses(n):
    with pytest.raises(ValueError, match="from 1 to 1000"):
        SCHEDULE.respaced(n)
