"""The hybrid loss of DDPM's objective [N] is compared with float64: bins and gradients."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from opendit.diffusion.objectives.ddpm import discretized_nll, prepare, training_loss
from tests.diffusion.test_ddpm import SCHEDULE, bayes_posterior, randn


def tanh_cdf(z):
    return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def reference_vb(schedule, eps, v, x0, xt, t, cdf):
    """Return one sample's term of the bound in bits per dimension, in float64 numpy."""
    betas = schedule.betas.numpy()
    ac = np.prod(1 - betas[: t + 1])
    x0_hat = (xt - np.sqrt(1 - ac) * eps) / np.sqrt(ac)
    _, variance_1 = bayes_posterior(betas, 1, 0.0, 0.0)
    if t == 0:
        mean = x0_hat
        log_variance = (v + 1) / 2 * np.log(betas[0]) + (1 - v) / 2 * np.log(variance_1)
        std = np.exp(log_variance / 2)
        upper = np.where(x0 > 0.999, 1.0, cdf((x0 + 1 / 255 - mean) / std))
        lower = np.where(x0 < -0.999, 0.0, cdf((x0 - 1 / 255 - mean) / std))
        return -np.log(np.maximum(upper - lower, 1e-12)).mean() / np.log(2)
    true_mean, true_variance = bayes_posterior(betas, t, x0, xt)
    mean, _ = bayes_posterior(betas, t, x0_hat, xt)
    variance = np.exp((v + 1) / 2 * np.log(betas[t]) + (1 - v) / 2 * np.log(true_variance))
    kl = 0.5 * (np.log(variance / true_variance) + (true_variance + (true_mean - mean) ** 2) / variance - 1)
    return kl.mean() / np.log(2)


def loss_inputs(t, channels=2, dtype=torch.float32, eps_error=0.3):
    """Return a batch with a plausible output: eps near the noise, v in its range, and some pixels at -1 and 1."""
    shape = (len(t), channels, 4, 4)
    x0 = randn(*shape, seed=10).clamp(-1, 1).to(dtype)
    noise = randn(*shape, seed=11).to(dtype)
    output = torch.cat((noise.double() + eps_error * randn(*shape, seed=12), randn(*shape, seed=13).tanh()), 1)
    xt = SCHEDULE.q_sample(x0, t, noise)
    return output.to(dtype), x0, xt, t, noise


def test_hybrid_loss_matches_float64():
    t = torch.tensor([0, 0, 1, 2, 10, 250, 600, 999])
    output, x0, xt, t, noise = loss_inputs(t)
    assert bool((x0 == 1).any()) and bool((x0 == -1).any())  # the outer bins are used
    got = training_loss(SCHEDULE, output, x0, xt, t, noise)
    assert all(a.shape == (8,) and a.dtype == torch.float32 for a in got)
    torch.testing.assert_close(got.loss, got.mse + got.vb, rtol=0, atol=0)
    eps, v, x0, xt, noise = (a.double().numpy() for a in (*output.chunk(2, 1), x0, xt, noise))
    for i, ti in enumerate(t.tolist()):
        assert got.mse[i].item() == pytest.approx(((noise[i] - eps[i]) ** 2).mean(), rel=1e-5)
        expected = reference_vb(SCHEDULE, eps[i], v[i], x0[i], xt[i], ti, tanh_cdf)
        # t = 1: the difference of two nearly equal float32 means, divided by a standard deviation of 0.007
        assert got.vb[i].item() == pytest.approx(expected, rel=2e-4, abs=1e-6), f"t = {ti}"
        exact = reference_vb(SCHEDULE, eps[i], v[i], x0[i], xt[i], ti, stats.norm.cdf)
        assert got.vb[i].item() == pytest.approx(exact, rel=2e-3, abs=1e-6), f"t = {ti}, the exact cdf"


def test_hybrid_loss_on_a_respaced_schedule_and_a_video():
    schedule = SCHEDULE.respaced(13)
    x0, noise, t = randn(2, 1, 3, 2, 2, seed=1).clamp(-1, 1), randn(2, 1, 3, 2, 2, seed=2), torch.tensor([0, 7])
    output = torch.cat((noise * 0.8, randn(2, 1, 3, 2, 2, seed=3).tanh()), 1)
    xt = schedule.q_sample(x0, t, noise)
    got = training_loss(schedule, output, x0, xt, t, noise)
    for i, ti in enumerate(t.tolist()):
        args = (a[i].numpy() for a in (*output.chunk(2, 1), x0, xt))
        assert got.vb[i].item() == pytest.approx(reference_vb(schedule, *args, ti, tanh_cdf), rel=1e-4)


def test_the_masses_of_the_256_bins_sum_to_1():
    pixels = torch.linspace(-1, 1, 256)[:, None].expand(256, 40)
    mean, log_variance = torch.linspace(-1.3, 1.3, 40), torch.linspace(-9, 2, 40)
    mass = torch.exp(-discretized_nll(pixels, mean.expand(256, 40), log_variance.expand(256, 40)))
    torch.testing.assert_close(mass.sum(0), torch.ones(40), rtol=0, atol=1e-5)


def test_the_mass_far_from_the_mean_is_symmetric_and_not_lost():
    """At 6 sigma a bin holds 1e-9, which is 0 in float32 as a difference of numbers near 1."""
    x, log_variance = torch.tensor([0.06, -0.06]), torch.full((2,), 2 * math.log(0.01))
    nll = discretized_nll(x, torch.zeros(2), log_variance)
    assert nll[0] == nll[1]
    z = np.array([(0.06 - 1 / 255) / 0.01, (0.06 + 1 / 255) / 0.01])
    assert nll[0].item() == pytest.approx(-np.log(tanh_cdf(-z[0]) - tanh_cdf(-z[1])), rel=1e-4)


def test_a_perfect_model_has_no_loss():
    """With eps = noise and v = -1, p is the posterior."""
    x0, noise, t = randn(3, 2, 4, 4, seed=1), randn(3, 2, 4, 4, seed=2), torch.tensor([1, 400, 999])
    got = training_loss(
        SCHEDULE, torch.cat((noise, -torch.ones_like(noise)), 1), x0, SCHEDULE.q_sample(x0, t, noise), t, noise
    )
    assert got.mse.max() == 0
    torch.testing.assert_close(got.vb, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-7)


def test_gradient_of_eps_is_that_of_the_mse_alone_and_v_learns():
    t = torch.tensor([0, 0, 3, 20])
    output, x0, xt, t, noise = loss_inputs(t, dtype=torch.float64)
    output.requires_grad_()
    got = training_loss(SCHEDULE, output, x0, xt, t, noise)
    (gradient,) = torch.autograd.grad(got.loss.sum(), output, retain_graph=True)
    eps, v = output.detach().chunk(2, 1)
    torch.testing.assert_close(gradient[:, :2], 2 * (eps - noise) / eps[0].numel(), rtol=1e-12, atol=0)
    (vb_only,) = torch.autograd.grad(got.vb.sum(), output)
    assert vb_only[:, :2].abs().max() == 0
    # Where v's gradient is largest, compare it with central differences of the float64 derivation.
    h = 1e-4
    for i in range(4):
        at = np.unravel_index(int(vb_only[i, 2:].abs().argmax()), v[i].shape)
        ends = []
        for sign in (1, -1):
            moved = v[i].clone()
            moved[at] += sign * h
            args = (a.numpy() for a in (eps[i], moved, x0[i], xt[i]))
            ends.append(reference_vb(SCHEDULE, *args, int(t[i]), tanh_cdf))
        slope = (ends[0] - ends[1]) / (2 * h)
        assert abs(slope) > 1e-5
        assert vb_only[i, 2:][at].item() == pytest.approx(slope, rel=1e-3)


def test_the_best_v_is_the_one_that_explains_the_error():
    """In closed form, the bound is least at variance = true variance + squared error of the mean."""
    t = torch.tensor([1, 2, 5])
    output, x0, xt, t, noise = loss_inputs(t, dtype=torch.float64)
    eps = output[:, :2]
    true_mean, low = SCHEDULE.posterior(x0, xt, t)
    mean, _ = SCHEDULE.posterior(SCHEDULE.predict_x0(xt, t, eps), xt, t)
    high = SCHEDULE.betas[t].log().reshape(-1, 1, 1, 1)
    v = (2 * (torch.log(low.double().exp() + (mean - true_mean) ** 2) - low) / (high - low) - 1).requires_grad_()
    best = training_loss(SCHEDULE, torch.cat((eps, v), 1), x0, xt, t, noise).vb
    (gradient,) = torch.autograd.grad(best.sum(), v)
    torch.testing.assert_close(gradient, torch.zeros_like(v), rtol=0, atol=1e-6)
    for step in (-0.3, 0.3):
        worse = training_loss(SCHEDULE, torch.cat((eps, v + step), 1), x0, xt, t, noise).vb
        assert bool((worse > best + 1e-5).all())


def test_without_learned_variance_the_loss_is_the_mse():
    output, x0, xt, t, noise = loss_inputs(torch.tensor([0, 500]))
    eps = output[:, :2]
    got = training_loss(SCHEDULE, eps, x0, xt, t, noise)
    torch.testing.assert_close(got.loss, ((eps - noise) ** 2).mean((1, 2, 3)))
    assert got.vb.abs().max() == 0 and got.vb.shape == (2,) and torch.equal(got.loss, got.mse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_output_gives_a_float32_loss(dtype):
    output, x0, xt, t, noise = loss_inputs(torch.tensor([0, 1, 500]))
    output = output.to(dtype)
    got = training_loss(SCHEDULE, output, x0, xt, t, noise)
    assert all(a.dtype == torch.float32 for a in got)
    for a, b in zip(got, training_loss(SCHEDULE, output.float(), x0, xt, t, noise), strict=True):
        assert torch.equal(a, b)


def test_a_wild_model_gives_finite_gradients():
    """Both forms of the bound are evaluated for each sample, so the unused one must not spoil the gradient."""
    x0, noise, t = (
        randn(4, 1, 2, 2, dtype=torch.float32),
        randn(4, 1, 2, 2, dtype=torch.float32),
        torch.tensor([0, 1, 500, 999]),
    )
    output = torch.cat((torch.full_like(noise, 1e10), 30 * noise), 1).requires_grad_()
    got = training_loss(SCHEDULE, output, x0, SCHEDULE.q_sample(x0, t, noise), t, noise)
    got.loss.sum().backward()
    assert bool(torch.isfinite(got.loss).all()) and bool(torch.isfinite(output.grad).all())


def test_the_network_gets_xt_and_the_original_timesteps():
    schedule = SCHEDULE.respaced(10)
    x0, noise, t = randn(3, 2, 4, 4), randn(3, 2, 4, 4, seed=1), torch.tensor([0, 5, 9])
    prepared = prepare(schedule, x0, t, noise)
    assert torch.equal(prepared.x_t, schedule.q_sample(x0, t, noise))
    assert prepared.timestep.tolist() == [0, 555, 999] and prepared.timestep.dtype == torch.int64
    assert [kept is given for kept, given in zip(prepared.context, (x0, t, noise), strict=True)] == [True] * 3


def test_wrong_shapes_are_refused():
    output, x0, xt, t, noise = loss_inputs(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="2 or 4 channels"):
        training_loss(SCHEDULE, output[:, :3], x0, xt, t, noise)
    with pytest.raises(ValueError, match="2 or 4 channels"):
        training_loss(SCHEDULE, output[:1], x0, xt, t, noise)
    with pytest.raises(ValueError, match="differ in shape"):
        training_loss(SCHEDULE, output, x0, xt, t, noise[:1])
