"""The objective of the DiT paper: predict the noise, and learn the variance of the reverse step.

    [H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
    [N] Nichol, Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021
    [S] Salimans, Ho, "Progressive Distillation for Fast Sampling of Diffusion Models", 2022
    [M] Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023

The network predicts the noise eps and, in C additional channels, v. v interpolates the log variance of the reverse step
between its two bounds. Optionally, the network predicts the velocity of [S] instead of eps. The schedule is in
opendit/diffusion/ddpm.py.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.ddpm import DDPM, DDPMTrajectory, eps_model
from opendit.diffusion.objectives.base import Objective, Prepared, above_0, one_of
from opendit.diffusion.random import Stream, integers
from opendit.diffusion.trajectory import LinearForm, Model, Trajectory, at_least_float32, split_output

SETTINGS = DESCRIPTIONS["ddpm"].settings


PREDICTIONS = ("eps", "v")  # targets of the network: the noise, or the velocity


class DiffusionLoss(NamedTuple):
    """The loss and its terms, one value per sample, each (B,) float32: ``loss = mse + vb``."""

    loss: Tensor
    mse: Tensor  # weighted if min_snr is set
    vb: Tensor  # variational bound in bits per dimension; zero for a model without learned variance


def training_loss(
    schedule: DDPM,
    model_output: Tensor,
    x0: Tensor,
    xt: Tensor,
    t: Tensor,
    noise: Tensor,
    *,
    prediction: str = "eps",
    min_snr: float | None = None,
) -> DiffusionLoss:
    """Return the loss of each sample for the model's output at ``xt = q_sample(x0, t, noise)``.

    Args:
        model_output: (B, C, ...) eps, for the simple loss ([H] eq. 14); or (B, 2C, ...) eps and v, for the hybrid loss
            ([N] eq. 16).
        prediction: one of PREDICTIONS; with "v" the output is the velocity instead of eps.
        min_snr: gamma of ``min_snr_weight``, which weights the squared error but not the variational bound.

    In the hybrid loss, the variational bound trains only the variance, because its mean is detached. As in Meta's DiT,
    the bound is in bits and averaged over dimensions. Its weight is 1: the bound is a sum of 1000 terms, estimated as
    1000 times one random term, and the paper weights the sum by 0.001. The loss is computed in float32.

    Raises:
        ValueError: the shapes don't match, or ``prediction`` is unknown.
    """
    if prediction not in PREDICTIONS:
        raise ValueError(f"prediction must be one of {', '.join(PREDICTIONS)}, got {prediction}")
    if not x0.shape == xt.shape == noise.shape:
        raise ValueError(f"x0, xt and noise differ in shape: {[tuple(a.shape) for a in (x0, xt, noise)]}")
    model_output, x0, xt, noise = (at_least_float32(a) for a in (model_output, x0, xt, noise))
    predicted, v = split_output(model_output, x0)
    mse = _mean_per_sample(((schedule.velocity(x0, t, noise) if prediction == "v" else noise) - predicted) ** 2)
    if min_snr is not None:
        mse = min_snr_weight(schedule, t, min_snr, prediction) * mse
    if v is None:
        return DiffusionLoss(mse, mse, torch.zeros_like(mse))
    eps = predicted.detach()
    if prediction == "v":
        eps = schedule.eps_of_velocity(xt, t, eps)
    vb = _variational_bound(schedule, eps, v, x0, xt, t)
    return DiffusionLoss(mse + vb, mse, vb)


def min_snr_weight(schedule: DDPM, t: Tensor, gamma: float, prediction: str) -> Tensor:
    """Return weights (B,) float32. The weighted squared error of the prediction is min(SNR, gamma) times the squared
    error of x_0, [M] sec. 3.4.

    SNR is alpha^2 / sigma^2. The squared error of eps is SNR times that of x_0, and the squared error of the velocity
    is SNR + 1 times that of x_0.
    """
    snr = schedule.tables(t.device)["snr"][t]
    return snr.clamp(max=gamma) / (snr + 1 if prediction == "v" else snr)


class DDPMContext(NamedTuple):
    """Inputs of the loss in addition to x_t and the network's time.

    x0 and noise are (B, C, ...). t, (B,) int64, indexes the schedule; the network gets timesteps of the full schedule.
    """

    x0: Tensor
    t: Tensor
    noise: Tensor


def prepare(schedule: DDPM, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
    """Return x_t = ``q_sample(x0, t, noise)``, float32 at least, ``model_timesteps(t)``, and the inputs of the loss."""
    return Prepared(schedule.q_sample(x0, t, noise), schedule.model_timesteps(t), DDPMContext(x0, t, noise))


def _variational_bound(schedule: DDPM, eps: Tensor, v: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
    """Return the term of the variational bound at t in bits per dimension, (B,), [N] eq. 4 to 6.

    The term is KL(q || p), or -log p(x_0 | x_1) at t = 0.
    """
    true_mean, true_log_variance = schedule.posterior(x0, xt, t)
    mean, _ = schedule.posterior(schedule.predict_x0(xt, t, eps), xt, t)
    log_variance = schedule.learned_log_variance(v, t)
    kl = _normal_kl(true_mean, true_log_variance, mean, log_variance)
    nll = discretized_nll(x0, mean, log_variance)
    return torch.where(t == 0, _mean_per_sample(nll), _mean_per_sample(kl)) / math.log(2)


def _normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """Return KL(N1 || N2) of each element, in nats."""
    difference = log_variance2 - log_variance1
    return 0.5 * (-1 + difference + torch.exp(-difference) + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def discretized_nll(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return -log of the normal distribution's mass on the bin x +- 1/255, in nats ([H] eq. 13).

    x lies in [-1, 1]. x, mean, log_variance and the result have the same shape. The outermost bins reach to infinity.
    The bins are those of 8-bit pixels. Like Meta's DiT, we use them for latents too.
    """
    centered = x - mean
    first, last = x < -0.999, x > 0.999
    # By symmetry, every bin can be evaluated left of the mean, where the two CDFs do not cancel when subtracted. Right
    # of the mean, float32 would lose all mass beyond 5.5 sigma.
    left = torch.where(first, centered, torch.where(last, -centered, -centered.abs()))
    inv_std = torch.exp(-0.5 * log_variance)
    below = torch.where(first | last, 0.0, _normal_cdf(inv_std * (left - 1 / 255)))
    return -torch.log((_normal_cdf(inv_std * (left + 1 / 255)) - below).clamp(min=1e-12))


def _normal_cdf(z: Tensor) -> Tensor:
    """Approximate the normal CDF as guided-diffusion does (error < 2e-4), so that losses match those of Meta's DiT.

    The formula (1 + tanh(u)) / 2 is written as sigmoid(2u), which keeps precision in the lower tail.
    """
    return torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))


def _mean_per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


@functools.cache
def _shifted(shift: float) -> DDPM:
    """Return the noise schedule with this shift, cached so that its tables are copied to each device only once."""
    return DDPM.linear(shift=shift)


@dataclass(frozen=True)
class DDPMObjective(Objective):
    """Noise prediction with learned variance over 1,000 steps, as in the DiT paper.

    prediction: "v" predicts the velocity instead of the noise. min_snr: gamma of the min-SNR weights; None for weights
    of 1. shift: factor on the noise level of every timestep, in training and sampling.
    """

    name: ClassVar[str] = "ddpm"
    preview_sampler: ClassVar[str] = "ddim"
    learn_sigma: ClassVar[bool] = True

    prediction: str = SETTINGS["prediction"].default
    min_snr: float | None = SETTINGS["min_snr"].default
    shift: float = SETTINGS["shift"].default

    def __post_init__(self) -> None:
        one_of("--prediction", self.prediction, PREDICTIONS)
        if self.min_snr is not None:
            above_0("--min_snr", self.min_snr)
        above_0("--ddpm_shift", self.shift)

    @property
    def schedule(self) -> DDPM:
        return _shifted(self.shift)

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        return integers(seed, step, index, Stream.TIMESTEP, self.schedule.num_steps)

    def times_at(self, u: Tensor) -> Tensor:
        return (u * self.schedule.num_steps).long()

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        return prepare(self.schedule, x0, t, noise)

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        x0, t, noise = prepared.context
        how = {"prediction": self.prediction, "min_snr": self.min_snr}
        return training_loss(self.schedule, output, x0, prepared.x_t, t, noise, **how).loss

    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        full = self.schedule
        return DDPMTrajectory(full.respaced_by_noise(steps) if even_in_noise else full.respaced(steps))

    def network(self, model: Model) -> Model:
        return eps_model(model, self.schedule) if self.prediction == "v" else model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """Return the weights of x and of the model's output in eps: (0, 1), or (sigma, alpha) if the model predicts
        velocity."""
        if self.prediction != "v":
            return LinearForm(0.0, 1.0)
        alpha = trajectory.alphas[k]
        return LinearForm(math.sqrt(1 - alpha**2), alpha)

    def noise_level(self, timestep: Tensor) -> Tensor:
        return self.schedule.noise_level(timestep)

    @property
    def predicts(self) -> dict[str, Any]:
        # A shift changes the noise level of each timestep, and so the meaning of the network's input.
        shifted = {} if self.shift == 1 else {"ddpm_shift": self.shift}
        return {**super().predicts, "prediction": self.prediction, **shifted}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings. Those that older checkpoints do not contain are left out at their defaults."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **{k: v for k, v in chosen.items() if v != getattr(DDPMObjective, k)}}


OBJECTIVE = DDPMObjective
