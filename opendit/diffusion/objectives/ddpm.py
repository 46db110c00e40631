"""The DiT paper's objective and noise schedule: predict the noise, and learn the variance of the reverse step.

    [H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
    [N] Nichol, Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021
    [S] Salimans, Ho, "Progressive Distillation for Fast Sampling of Diffusion Models", 2022
    [B] Hoogeboom, Heek, Salimans, "simple diffusion", 2023
    [M] Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023

The network predicts the noise eps. In C additional channels it predicts v, to interpolate the reverse step's log
variance between two bounds ([N]). With v-prediction, the velocity of [S] replaces eps. ``alphas_cumprod`` is the
papers' bar-alpha. The schedule's tables are float64 on the CPU. Methods read float32 values.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective, Prepared, above_0, one_of
from opendit.diffusion.random import Stream, integers
from opendit.diffusion.samplers import LinearForm, Model, Trajectory, at_least_float32, for_step, split_output


def linear_betas(T: int = 1000) -> Tensor:
    """Return the betas of [H]'s linear schedule, (T,) float64. A factor of 1000 / T makes the noise at the end similar
    for every T. Raises ValueError if ``T`` is 20 or less, because the last beta would be 1 or more."""
    scale = 1000 / T if T > 0 else math.inf
    if 0.02 * scale >= 1:
        raise ValueError(f"the linear schedule needs more than 20 steps, got {T}")
    return torch.linspace(1e-4 * scale, 0.02 * scale, T, dtype=torch.float64, device="cpu")


def space_timesteps(T: int, num_steps: int) -> list[int]:
    """Return ``num_steps`` evenly spaced timesteps from 0 to T - 1, ascending, with both ends. They are rounded as in
    guided-diffusion and Meta's DiT. Raises ValueError unless 1 <= num_steps <= T."""
    if not 1 <= num_steps <= T:
        raise ValueError(f"the number of sampling steps must be from 1 to {T}, got {num_steps}")
    stride = (T - 1) / (num_steps - 1) if num_steps > 1 else 1.0
    steps, position = [], 0.0
    for _ in range(num_steps):
        steps.append(round(position))
        position += stride
    return steps


@dataclass(frozen=True, eq=False)
class DDPM:
    """A noise schedule of n steps. In all methods, ``t`` (B,) int64 holds indices in [0, n), and x is (B, ...). The
    network gets ``model_timesteps(t)``. Methods with x raise ValueError unless ``t`` has one int64 per sample."""

    betas: Tensor  # (n,) float64, like the next four tables
    alphas_cumprod: Tensor
    posterior_mean_x0: Tensor  # weight of x_0 in the posterior mean, of q(x_{t-1} | x_t, x_0), [H] eq. 7
    posterior_mean_xt: Tensor  # weight of x_t in the posterior mean
    posterior_log_variance: Tensor  # log of beta-tilde in [H] eq. 7; finite even at t = 0
    timestep_map: Tensor  # (n,) int64: each step's timestep in the training schedule
    _on_device: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def linear(cls, T: int = 1000, shift: float = 1.0) -> "DDPM":
        """Return DiT's schedule, with every timestep's sigma / alpha multiplied by ``shift``. Raises ValueError if
        ``T`` <= 20.

        [B] eq. 4 uses the shift d / 64 for pictures of d pixels per side."""
        linear = cls.from_betas(linear_betas(T))
        if shift == 1:
            return linear
        kept = linear.alphas_cumprod / (linear.alphas_cumprod + shift**2 * (1 - linear.alphas_cumprod))
        return linear._with(kept, linear.timestep_map)

    @classmethod
    def from_betas(cls, betas: Tensor, timestep_map: Tensor | None = None) -> "DDPM":
        """Return the schedule with ``betas`` (n,) and ``timestep_map``, (n,) int64, by default 0..n-1. Raises
        ValueError if a beta is outside (0, 1), or the two tensors differ in length."""
        betas = betas.to("cpu", torch.float64)
        if betas.ndim != 1 or len(betas) == 0 or not bool(((betas > 0) & (betas < 1)).all()):
            raise ValueError("betas must be a non-empty row of numbers between 0 and 1, both excluded")
        if timestep_map is None:
            timestep_map = torch.arange(len(betas), device="cpu")
        if timestep_map.shape != betas.shape:
            raise ValueError(f"timestep_map must have {len(betas)} entries, got {tuple(timestep_map.shape)}")
        alphas_cumprod = torch.cumprod(1 - betas, 0)
        previous = torch.cat((torch.ones_like(betas[:1]), alphas_cumprod[:-1]))
        variance = betas * (1 - previous) / (1 - alphas_cumprod)
        # At t = 0, the posterior variance is 0 and has no log. As in [N]'s code, use the value at t = 1. In a schedule
        # of one step, use beta, the upper bound.
        variance[0] = variance[1] if len(betas) > 1 else betas[0]
        return cls(
            betas=betas,
            alphas_cumprod=alphas_cumprod,
            posterior_mean_x0=betas * previous.sqrt() / (1 - alphas_cumprod),
            posterior_mean_xt=(1 - previous) * (1 - betas).sqrt() / (1 - alphas_cumprod),
            posterior_log_variance=variance.log(),
            timestep_map=timestep_map.to("cpu", torch.int64),
        )

    @property
    def num_steps(self) -> int:
        return len(self.betas)

    @property
    def noise_levels(self) -> list[float]:
        return ((1 - self.alphas_cumprod) / self.alphas_cumprod).sqrt().tolist()

    def respaced(self, num_steps: int) -> "DDPM":
        """Return this schedule at ``space_timesteps(n, num_steps)``. Raises ValueError unless 1 <= num_steps <= n."""
        return self._keeping(torch.tensor(space_timesteps(self.num_steps, num_steps), device="cpu"))

    def respaced_by_noise(self, num_steps: int) -> "DDPM":
        """Return this schedule at ``num_steps`` timesteps, with both ends, spaced as evenly as possible in log(sigma /
        alpha). DPM-Solver needs this spacing (Lu et al. 2022). Raises ValueError unless 1 <= num_steps <= n."""
        if not 1 <= num_steps <= self.num_steps:
            raise ValueError(f"the number of sampling steps must be from 1 to {self.num_steps}, got {num_steps}")
        logs = torch.logit(self.alphas_cumprod)
        even = torch.linspace(float(logs[0]), float(logs[-1]), num_steps, dtype=torch.float64, device="cpu")
        nearest = (even[:, None] - logs).abs().argmin(1)
        # Near the data, several values may round to one timestep, so move duplicates to the next timesteps.
        order = torch.arange(num_steps, device="cpu")
        distinct = (nearest - order).cummax(0).values + order
        return self._keeping(torch.minimum(distinct, self.num_steps - num_steps + order))

    def _keeping(self, keep: Tensor) -> "DDPM":
        return self._with(self.alphas_cumprod[keep], self.timestep_map[keep])

    @staticmethod
    def _with(alphas_cumprod: Tensor, timestep_map: Tensor) -> "DDPM":
        """Return the schedule with these ``alphas_cumprod``, and betas from [N] eq. 19."""
        previous = torch.cat((torch.ones_like(alphas_cumprod[:1]), alphas_cumprod[:-1]))
        return DDPM.from_betas(1 - alphas_cumprod / previous, timestep_map)

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Return name -> table on ``device``. Tables are copied only once."""
        if device not in self._on_device:
            ac = self.alphas_cumprod
            tables = {
                "sqrt_ac": ac.sqrt(),
                "sqrt_1m_ac": (1 - ac).sqrt(),
                "sqrt_recip_ac": (1 / ac).sqrt(),
                "sqrt_recip_ac_m1": (1 / ac - 1).sqrt(),
                "mean_x0": self.posterior_mean_x0,
                "mean_xt": self.posterior_mean_xt,
                "min_log_var": self.posterior_log_variance,
                "max_log_var": self.betas.log(),
                "snr": ac / (1 - ac),
            }
            # Autograd can't save inference tensors for backward.
            with torch.inference_mode(False):
                self._on_device[device] = {k: v.to(device, torch.float32) for k, v in tables.items()}
                self._on_device[device]["timestep_map"] = self.timestep_map.to(device)
        return self._on_device[device]

    def _at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        if t.dtype != torch.int64 or t.shape != x.shape[:1]:
            raise ValueError(f"t must be ({x.shape[0]},) int64, got {tuple(t.shape)} {t.dtype}")
        return self.tables(x.device)[name][t].reshape(-1, *(1,) * (x.ndim - 1))

    def model_timesteps(self, t: Tensor) -> Tensor:
        """Return the network's time (B,) int64 at ``t``: timesteps of the full schedule."""
        return self.tables(t.device)["timestep_map"][t]

    def q_sample(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return x_t from q(x_t | x_0), [H] eq. 4, with standard normal ``noise`` of x0's shape."""
        return self._at("sqrt_ac", t, x0) * x0 + self._at("sqrt_1m_ac", t, x0) * noise

    def predict_x0(self, xt: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """Return the x_0 for which x_t has the noise ``eps``."""
        return self._at("sqrt_recip_ac", t, xt) * xt - self._at("sqrt_recip_ac_m1", t, xt) * eps

    def velocity(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return alpha noise - sigma x_0, the derivative of x_t by the angle arctan(sigma / alpha), [S] appendix D."""
        return self._at("sqrt_ac", t, x0) * noise - self._at("sqrt_1m_ac", t, x0) * x0

    def eps_of_velocity(self, xt: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """Return the noise for which x_t has this velocity."""
        return self._at("sqrt_1m_ac", t, xt) * xt + self._at("sqrt_ac", t, xt) * velocity

    def noise_level(self, t: Tensor) -> Tensor:
        """Return the ratio of noise to signal in x_t, sigma / alpha: (B,) float32."""
        return self.tables(t.device)["sqrt_recip_ac_m1"][t]

    def posterior(self, x0: Tensor, xt: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (x's shape) and clipped log variance (B, 1, ..., 1) of q(x_{t-1} | x_t, x_0), [H] eq. 6, 7."""
        mean = self._at("mean_x0", t, xt) * x0 + self._at("mean_xt", t, xt) * xt
        return mean, self._at("min_log_var", t, xt)

    def learned_log_variance(self, v: Tensor, t: Tensor) -> Tensor:
        """Return the log variance for a variance output ``v``, with v's shape, by [N] eq. 15. It is log beta-tilde at v
        = -1 and log beta at v = 1."""
        frac = (v + 1) / 2
        return frac * self._at("max_log_var", t, v) + (1 - frac) * self._at("min_log_var", t, v)


# ------------------------------------------------------------------------------------------ sampling


class DDPMTrajectory(Trajectory):
    """The trajectory over the timesteps of ``schedule``. A ``point`` (B,) int64 is an index in the schedule.

    The model gets training timesteps, (B,) int64. It returns eps (B, C, ...), or eps and the variance output (B, 2C,
    ...)."""

    def __init__(self, schedule: DDPM):
        self.schedule = schedule
        self.times = schedule.timestep_map.flip(0).tolist()
        self.levels = [*reversed(schedule.noise_levels), 0.0]
        self.alphas = [*schedule.alphas_cumprod.sqrt().flip(0).tolist(), 1.0]
        self.alphas_cumprod: list[float] = [*schedule.alphas_cumprod.flip(0).tolist(), 1.0]

    def points(self, x: Tensor) -> Tensor:
        steps = torch.arange(len(self.times), device=x.device)
        return steps.flip(0)[:, None].repeat(1, len(x))

    def predict(self, model: Model, x: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the model's x_0, eps and variance output v at x (B, C, ...), each in x's shape; v may be None. Raises
        ValueError if the output doesn't fit x."""
        eps, v = split_output(model(x, self.schedule.model_timesteps(point)).to(x.dtype), x)
        return self.schedule.predict_x0(x, point, eps), eps, v

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        return self.predict(model, x, point)[0]

    def denoise_weights(self, k: int) -> LinearForm:
        """Return x_0 = (x - sigma eps) / alpha as a weighted sum of x and the output eps."""
        kept = self.alphas_cumprod[k]
        return LinearForm(math.sqrt(1 / kept), -math.sqrt(1 / kept - 1))


@dataclass(frozen=True)
class EpsModel:
    """Converts a velocity ``model`` to an eps model, float32 at least. A variance output is unchanged."""

    model: Model
    schedule: DDPM

    def at_level(self, level: float) -> "EpsModel":
        return EpsModel(for_step(self.model, level), self.schedule)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        velocity, v = split_output(at_least_float32(self.model(x, t)), x)
        eps = self.schedule.eps_of_velocity(x, t, velocity)
        return eps if v is None else torch.cat((eps, v), dim=1)


SETTINGS = DESCRIPTIONS["ddpm"].settings
PREDICTIONS = ("eps", "v")  # predictions of the network: the noise, or the velocity


class DiffusionLoss(NamedTuple):
    """The loss and its terms, (B,) float32 each: ``loss = mse + vb``."""

    loss: Tensor
    mse: Tensor  # weighted if min_snr is set
    vb: Tensor  # variational bound in bits per dimension; zero without learned variance


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
    """Return each sample's loss, in float32, for the model's output at ``xt = q_sample(x0, t, noise)``.

    model_output: (B, C, ...) eps, for the simple loss ([H] eq. 14). Or (B, 2C, ...) eps and the variance output, for
    the hybrid loss ([N] eq. 16). prediction: "v" if the model predicts the velocity instead of eps. min_snr: gamma of
    ``min_snr_weight``; None for weights of 1. Raises ValueError if the shapes don't match, or for an unknown
    ``prediction``.

    In the hybrid loss, the variational bound trains only the variance, because the mean is detached. As in Meta's DiT,
    the bound is in bits per dimension, and its term at t has weight 1."""
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
    """Return weights (B,) float32 for the prediction's squared error, so that x_0's squared error gets the weight
    min(SNR, gamma), [M] sec. 3.4. SNR is alpha^2 / sigma^2. The squared error of eps is SNR times x_0's, and the
    velocity's is SNR + 1 times x_0's."""
    snr = schedule.tables(t.device)["snr"][t]
    return snr.clamp(max=gamma) / (snr + 1 if prediction == "v" else snr)


class DDPMContext(NamedTuple):
    """Inputs of the loss besides x_t and the network's time: x0 and noise (B, C, ...), and schedule indices t (B,)."""

    x0: Tensor
    t: Tensor
    noise: Tensor


def prepare(schedule: DDPM, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
    """Return x_t = ``q_sample(x0, t, noise)``, float32 at least, ``model_timesteps(t)``, and the inputs of the loss."""
    return Prepared(schedule.q_sample(x0, t, noise), schedule.model_timesteps(t), DDPMContext(x0, t, noise))


def _variational_bound(schedule: DDPM, eps: Tensor, v: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
    """Return each sample's term of the variational bound, (B,), in bits per dimension: KL(q || p) for t > 0, and -log
    p(x_0 | x_1) for t = 0 ([N] eq. 4 to 6)."""
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
    """Return -log of the normal distribution's mass on each element's bin x +- 1/255, in nats ([H] eq. 13).

    All shapes are equal. The outermost bins reach to infinity. The bins are meant for 8-bit pixels in [-1, 1]. As in
    Meta's DiT, they also serve for latents."""
    centered = x - mean
    first, last = x < -0.999, x > 0.999
    # By symmetry, compute every bin left of the mean. Far right of the mean, the CDFs' difference would round to 0.
    left = torch.where(first, centered, torch.where(last, -centered, -centered.abs()))
    inv_std = torch.exp(-0.5 * log_variance)
    below = torch.where(first | last, 0.0, _normal_cdf(inv_std * (left - 1 / 255)))
    return -torch.log((_normal_cdf(inv_std * (left + 1 / 255)) - below).clamp(min=1e-12))


def _normal_cdf(z: Tensor) -> Tensor:
    """Approximate the normal CDF as guided-diffusion does (error < 2e-4). sigmoid(2u) = (1 + tanh(u)) / 2 keeps
    precision in the lower tail."""
    return torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))


def _mean_per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


@functools.cache
def _shifted(shift: float) -> DDPM:
    """Return the noise schedule with this shift. The cache keeps the tables on each device."""
    return DDPM.linear(shift=shift)


@dataclass(frozen=True)
class DDPMObjective(Objective):
    """Noise prediction with learned variance over 1,000 steps, as in the DiT paper.

    prediction: "eps", or "v" to predict the velocity. min_snr: gamma of ``min_snr_weight``; None for weights of 1.
    shift: factor for every timestep's noise level, in training and sampling."""

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
        return EpsModel(model, self.schedule) if self.prediction == "v" else model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """Return eps as a weighted sum: the output itself or, for v-prediction, sigma x + alpha output."""
        if self.prediction != "v":
            return LinearForm(0.0, 1.0)
        alpha = trajectory.alphas[k]
        return LinearForm(math.sqrt(1 - alpha**2), alpha)

    def noise_level(self, timestep: Tensor) -> Tensor:
        return self.schedule.noise_level(timestep)

    @property
    def predicts(self) -> dict[str, Any]:
        # A shift changes the timesteps' noise levels, so it changes the meaning of the network's input.
        shifted = {} if self.shift == 1 else {"ddpm_shift": self.shift}
        return {**super().predicts, "prediction": self.prediction, **shifted}

    def to_dict(self) -> dict[str, Any]:
        """Return the name, and all settings that differ from their defaults."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **{k: v for k, v in chosen.items() if v != getattr(DDPMObjective, k)}}


OBJECTIVE = DDPMObjective
