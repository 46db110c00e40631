"""Objectives' ``prepare`` and ``loss`` are compared with the papers' formulas in float64."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

from opendit.diffusion.objectives import OBJECTIVES, DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.base import Prepared
from tests.diffusion.test_ddpm_loss import reference_vb, tanh_cdf

SHAPES = [(3, 2, 5, 7), (1, 1, 3), (5, 3, 2, 3, 5)]
EVERY = [
    DDPMObjective(),
    DDPMObjective("v"),
    DDPMObjective("eps", 5.0),
    DDPMObjective("v", 1.5, 3.0),
    FlowObjective(),
    FlowObjective(3.0, "mode"),
    EDMObjective(),
    EDMObjective(-0.4, 1.0, 0.75),
]


def batch(objective, shape, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x0, times, noise and a random network output."""
    generator = torch.Generator().manual_seed(3)
    x0, noise = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    t = objective.times(5, 2, torch.arange(shape[0]))
    channels = 2 * shape[1] if objective.learn_sigma else shape[1]
    output = torch.randn((shape[0], channels, *shape[2:]), generator=generator).tanh().to(dtype)
    return x0, t, noise, output


def by_the_papers(objective, x0: np.ndarray, t: float, noise: np.ndarray, output: np.ndarray):
    """Return one sample's network input, time and loss in float64."""
    if objective.name == "flow":  # Esser et al. eq. 13
        x_t, velocity = (1 - t) * x0 + t * noise, noise - x0
        return x_t, 1000 * t, ((output - velocity) ** 2).mean()
    if objective.name == "edm":  # Karras et al. eq. 2 and 7, table 1
        data = objective.sigma_data
        total = t**2 + data**2
        x = x0 + t * noise
        denoised = data**2 / total * x + t * data / total**0.5 * output
        return x / total**0.5, 1000 * np.log(t) / 4, total / (t * data) ** 2 * ((denoised - x0) ** 2).mean()
    # Ho et al. eq. 4 and 14; Nichol and Dhariwal eq. 16; Salimans and Ho appendix D; Hang et al. section 3.4
    schedule, t = objective.schedule, int(t)
    kept = np.prod(1 - schedule.betas.numpy()[: t + 1])
    alpha, sigma, snr = np.sqrt(kept), np.sqrt(1 - kept), kept / (1 - kept)
    x_t, (predicted, v) = alpha * x0 + sigma * noise, np.split(output, 2)
    if objective.prediction == "v":
        error, weighs, eps = alpha * noise - sigma * x0 - predicted, snr + 1, sigma * x_t + alpha * predicted
    else:
        error, weighs, eps = noise - predicted, snr, predicted
    weight = 1 if objective.min_snr is None else min(snr, objective.min_snr) / weighs
    return x_t, t, weight * (error**2).mean() + reference_vb(schedule, eps, v, x0, x_t, t, tanh_cdf)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_both_halves_are_those_of_the_papers(objective, shape):
    x0, t, noise, output = batch(objective, shape)
    prepared = objective.prepare(x0, t, noise)
    losses = objective.loss(output, prepared)
    assert prepared.x_t.shape == shape and prepared.x_t.dtype == losses.dtype == torch.float32
    assert prepared.timestep.shape == losses.shape == shape[:1]
    for i in range(shape[0]):
        sample = (a[i].double().numpy() for a in (x0, t, noise, output))
        x_t, timestep, loss = by_the_papers(objective, *sample)
        np.testing.assert_allclose(prepared.x_t[i], x_t, rtol=1e-5, atol=1e-5)
        assert prepared.timestep[i].item() == pytest.approx(timestep, rel=1e-5)
        assert losses[i].item() == pytest.approx(loss, rel=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_samples_can_be_taken_out_of_what_is_prepared(objective, dtype):
    """Each part of a batch has the same losses, to the bit."""
    x0, t, noise, output = batch(objective, (5, 2, 3, 3), dtype)
    prepared = objective.prepare(x0, t, noise)
    x_t, timestep, context = prepared
    assert all(isinstance(tensor, Tensor) and tensor.shape[:1] == (5,) for tensor in (x_t, timestep, *context))
    whole = objective.loss(output, prepared)
    for rows in (slice(0, 2), slice(2, 5), slice(4, 5)):
        part = Prepared(x_t[rows], timestep[rows], context._make(tensor[rows] for tensor in context))
        assert torch.equal(objective.loss(output[rows], part), whole[rows])


@pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_loss_gets_an_output_and_what_was_prepared_and_no_model(kind):
    assert list(inspect.signature(kind.loss).parameters) == ["self", "output", "prepared"]
    assert list(inspect.signature(kind.prepare).parameters) == ["self", "x0", "t", "noise"]


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_only_the_output_is_learned_from(objective):
    x0, t, noise, output = batch(objective, (2, 3, 4))
    prepared = objective.prepare(x0, t, noise)
    assert not any(tensor.requires_grad for tensor in (prepared.x_t, prepared.timestep, *prepared.context))
    output.requires_grad_()
    objective.loss(output, prepared).sum().backward()
    assert output.grad.isfinite().all() and output.grad.flatten(1).any(1).all()


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_shapes_that_do_not_fit_are_refused(objective):
    x0, t, noise, output = batch(objective, (3, 2, 4, 4))
    with pytest.raises(ValueError):
        objective.prepare(x0, t[:2], noise)
    with pytest.raises(ValueError):
        objective.loss(output[:, :1], objective.prepare(x0, t, noise))
