"""The discrete diffusion process of DDPM, with the learned variance and hybrid loss of Improved DDPM.

    [H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
    [N] Nichol, Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021
    [S] Salimans, Ho, "Progressive Distillation for Fast Sampling of Diffusion Models", 2022
    [M] Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023
    [B] Hoogeboom, Heek, Salimans, "simple diffusion", 2023

This is the objective of the DiT paper: the network predicts the noise eps and, in C more channels, v, which
interpolates the log variance of the reverse step between its two bounds. In place of eps it may predict the velocity
of [S], which its users call v-prediction; in this code v is [N]'s. Below, a bar-alpha of the papers is
``alphas_cumprod``. Tables are float64 on the CPU; what is looked up from them is float32. Arithmetic on tensors
runs in float32 at least: bf16 and fp16 arguments are promoted by the float32 coefficients.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.diffusion.prepared import Prepared

PREDICTIONS = ("eps", "v")  # of x_t: the noise, or the velocity


def linear_betas(T: int = 1000) -> Tensor:
    """The linear schedule of [H], rescaled so that any ``T`` ends at about the same noise. (T,) float64.

    Raises ValueError for a ``T`` of 20 or less: its last beta would be 1 or more.
    """
    scale = 1000 / T if T > 0 else math.inf
    if 0.02 * scale >= 1:
        raise ValueError(f"the linear schedule needs more than 20 steps, got {T}")
    return torch.linspace(1e-4 * scale, 0.02 * scale, T, dtype=torch.float64, device="cpu")


def space_timesteps(T: int, num_steps: int) -> list[int]:
    """``num_steps`` of the timesteps 0..T-1, evenly spaced, ascending; both ends are among them.

    The rounding is that of guided-diffusion (and of Meta's DiT): a running float sum, rounded half to even. One
    step alone is timestep 0 there, and so it is here. Raises ValueError unless 1 <= num_steps <= T.
    """
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
    """A schedule of n steps. Make one with ``DDPM.linear()`` and shorten it with ``respaced()``.

    Timesteps ``t`` in the arguments of its methods are (B,) int64 in [0, n), the schedule's own; the network gets
    ``model_timesteps(t)``. Methods take x of any rank, (B, C, H, W) or (B, C, T, H, W), and raise ValueError if
    ``t`` is not one int64 for each sample.
    """

    betas: Tensor  # (n,) float64, like the next four
    alphas_cumprod: Tensor
    posterior_mean_x0: Tensor  # weight of x_0 in the mean of q(x_{t-1} | x_t, x_0), [H] eq. 7
    posterior_mean_xt: Tensor  # weight of x_t in it
    posterior_log_variance: Tensor  # log of [H] eq. 7's beta-tilde, clipped
    timestep_map: Tensor  # (n,) int64: the timestep of the unshortened schedule, which the network was trained on
    _on_device: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def linear(cls, T: int = 1000, shift: float = 1.0) -> "DDPM":
        """The schedule that DiT trains with; ``shift`` multiplies sigma / alpha at every timestep, as [B] does for
        large pictures (their d / 64, eq. 4) and ``shift_times`` for flow. Raises ValueError as ``linear_betas`` does.
        """
        linear = cls.from_betas(linear_betas(T))
        if shift == 1:
            return linear
        kept = linear.alphas_cumprod / (linear.alphas_cumprod + shift**2 * (1 - linear.alphas_cumprod))
        return linear._with(kept, linear.timestep_map)

    @classmethod
    def from_betas(cls, betas: Tensor, timestep_map: Tensor | None = None) -> "DDPM":
        """``betas``: (n,); ``timestep_map``: (n,) int64, default 0..n-1.

        Raises ValueError for a beta outside (0, 1), and if the two differ in length.
        """
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
        # The variance at t = 0 is 0: its log is replaced by the next one ([N], their code). A schedule of one step
        # has no next one, and takes its upper bound beta.
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
        """Noise over signal at every step, sigma / alpha, rising."""
        return ((1 - self.alphas_cumprod) / self.alphas_cumprod).sqrt().tolist()

    def respaced(self, num_steps: int) -> "DDPM":
        """The schedule over ``space_timesteps(n, num_steps)``. Raises ValueError unless 1 <= num_steps <= n."""
        return self._keeping(torch.tensor(space_timesteps(self.num_steps, num_steps), device="cpu"))

    def respaced_by_noise(self, num_steps: int) -> "DDPM":
        """The schedule over ``num_steps`` timesteps that are as even in log(sigma / alpha) as whole ones can be; both
        ends are among them. Raises ValueError unless 1 <= num_steps <= n.

        DPM-Solver extrapolates along log(sigma / alpha), and must not take a step there that is much longer than the
        one before, as the last one of ``respaced`` is; its authors space timesteps so too (Lu et al. 2022).
        """
        if not 1 <= num_steps <= self.num_steps:
            raise ValueError(f"the number of sampling steps must be from 1 to {self.num_steps}, got {num_steps}")
        logs = torch.logit(self.alphas_cumprod)
        even = torch.linspace(float(logs[0]), float(logs[-1]), num_steps, dtype=torch.float64, device="cpu")
        nearest = (even[:, None] - logs).abs().argmin(1)
        # Near the data neighbouring timesteps are further apart than that: there all of them are taken, once.
        order = torch.arange(num_steps, device="cpu")
        distinct = (nearest - order).cummax(0).values + order
        return self._keeping(torch.minimum(distinct, self.num_steps - num_steps + order))

    def _keeping(self, keep: Tensor) -> "DDPM":
        """The schedule over the timesteps ``keep``, int64, ascending, whose noise levels stay what they are."""
        return self._with(self.alphas_cumprod[keep], self.timestep_map[keep])

    @staticmethod
    def _with(alphas_cumprod: Tensor, timestep_map: Tensor) -> "DDPM":
        """The schedule of these noise levels: [N] eq. 19 for its betas."""
        previous = torch.cat((torch.ones_like(alphas_cumprod[:1]), alphas_cumprod[:-1]))
        return DDPM.from_betas(1 - alphas_cumprod / previous, timestep_map)

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tables of coefficients on ``device``. They are copied once, so that no training step waits."""
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
            # A table first used under inference_mode would otherwise be an inference tensor for good, and training
            # could not save it for its backward pass.
            with torch.inference_mode(False):
                self._on_device[device] = {k: v.to(device, torch.float32) for k, v in tables.items()}
                self._on_device[device]["timestep_map"] = self.timestep_map.to(device)
        return self._on_device[device]

    def _at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        """Table ``name`` at ``t``, float32, (B, 1, ..., 1) with the rank of ``x``."""
        if t.dtype != torch.int64 or t.shape != x.shape[:1]:
            raise ValueError(f"t must be ({x.shape[0]},) int64, got {tuple(t.shape)} {t.dtype}")
        return self.tables(x.device)[name][t].reshape(-1, *(1,) * (x.ndim - 1))

    def model_timesteps(self, t: Tensor) -> Tensor:
        """Return the timesteps of the unshortened schedule for ``t``, which the network gets. (B,) int64."""
        return self.tables(t.device)["timestep_map"][t]

    def q_sample(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t of q(x_t | x_0), [H] eq. 4, from standard normal ``noise`` of x0's shape."""
        return self._at("sqrt_ac", t, x0) * x0 + self._at("sqrt_1m_ac", t, x0) * noise

    def predict_x0(self, xt: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """x_0 from x_t and its noise: ``q_sample`` solved for x0."""
        return self._at("sqrt_recip_ac", t, xt) * xt - self._at("sqrt_recip_ac_m1", t, xt) * eps

    def predict_eps(self, xt: Tensor, t: Tensor, x0: Tensor) -> Tensor:
        """The noise from x_t and x_0: ``q_sample`` solved for noise."""
        return (self._at("sqrt_recip_ac", t, xt) * xt - x0) / self._at("sqrt_recip_ac_m1", t, xt)

    def velocity(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """[S] appendix D: the derivative of x_t along the angle arctan(sigma / alpha), alpha noise - sigma x_0."""
        return self._at("sqrt_ac", t, x0) * noise - self._at("sqrt_1m_ac", t, x0) * x0

    def eps_of_velocity(self, xt: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """The noise from x_t and its velocity: ``q_sample`` and ``velocity`` solved for noise."""
        return self._at("sqrt_1m_ac", t, xt) * xt + self._at("sqrt_ac", t, xt) * velocity

    def noise_level(self, t: Tensor) -> Tensor:
        """Noise over signal in x_t, sigma / alpha: (B,) float32."""
        return self.tables(t.device)["sqrt_recip_ac_m1"][t]

    def posterior(self, x0: Tensor, xt: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (shape of x) and clipped log variance (B, 1, ..., 1) of q(x_{t-1} | x_t, x_0), [H] eq. 6 and 7."""
        mean = self._at("mean_x0", t, xt) * x0 + self._at("mean_xt", t, xt) * xt
        return mean, self._at("min_log_var", t, xt)

    def learned_log_variance(self, v: Tensor, t: Tensor) -> Tensor:
        """[N] eq. 15: v = -1 is the log of beta-tilde, v = 1 that of beta. ``v`` and the result: shape of x."""
        frac = (v + 1) / 2
        return frac * self._at("max_log_var", t, v) + (1 - frac) * self._at("min_log_var", t, v)


class DiffusionLoss(NamedTuple):
    """One number a sample, each (B,), float32: ``loss = mse + vb``."""

    loss: Tensor
    mse: Tensor  # weighted, if weights are asked for
    vb: Tensor  # bits per dimension; zero for a model without learned variance


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
    """The loss of each sample, from a model output that was evaluated at ``xt = q_sample(x0, t, noise)``.

    ``model_output``: (B, C, ...) for eps alone, which gives the simple loss, [H] eq. 14; or (B, 2C, ...) for eps and
    v, which gives the hybrid loss, [N] eq. 16, where the term of the variational bound trains the variance only: its
    mean is detached. As in Meta's DiT that term is in bits, averaged over dimensions, and has weight 1: the paper's
    0.001 times the 1000 terms of the bound, of which one is drawn at random.
    ``prediction``: one of PREDICTIONS; "v" puts the velocity in the place of eps. ``min_snr``: weighs the squared error
    as ``min_snr_weight`` does; the bound's term, which trains nothing else but the variance, keeps its weight.
    Computed in float32. Raises ValueError if the shapes don't fit each other, and for another ``prediction``.
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
    """The weights (B,) float32 that make a squared error that of x_0 times min(SNR, gamma), [M] sec. 3.4.

    An error of eps is SNR times that of x_0, one of the velocity SNR + 1 times; SNR is alpha^2 / sigma^2.
    """
    snr = schedule.tables(t.device)["snr"][t]
    return snr.clamp(max=gamma) / (snr + 1 if prediction == "v" else snr)


class DDPMContext(NamedTuple):
    """The inputs that the loss of a prepared micro-batch needs besides x_t: x_0 and the noise (B, C, ...), and the
    schedule's own timesteps (B,) int64 (the network gets those of the schedule that was not shortened)."""

    x0: Tensor
    t: Tensor
    noise: Tensor


def prepare(schedule: DDPM, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
    """x_t = ``q_sample(x0, t, noise)`` (float32 at least), ``model_timesteps(t)``, and what ``training_loss`` needs."""
    return Prepared(schedule.q_sample(x0, t, noise), schedule.model_timesteps(t), DDPMContext(x0, t, noise))


def at_least_float32(x: Tensor) -> Tensor:
    """bf16 and fp16 to float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_output(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A model's output for ``x`` (B, C, ...) into eps and v; v is None without learned variance.

    Raises ValueError if the output's shape is neither x's nor x's with 2C channels.
    """
    channels = x.shape[1]
    if output.shape == x.shape:
        return output, None
    if output.shape == (x.shape[0], 2 * channels, *x.shape[2:]):
        return output[:, :channels], output[:, channels:]
    raise ValueError(
        f"for x {tuple(x.shape)} a model must return {channels} or {2 * channels} channels of its size, "
        f"got {tuple(output.shape)}"
    )


def _variational_bound(schedule: DDPM, eps: Tensor, v: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
    """The bound's term at t, [N] eq. 4 to 6, in bits per dimension: (B,). KL(q || p), or -log p(x_0 | x_1) at t = 0."""
    true_mean, true_log_variance = schedule.posterior(x0, xt, t)
    mean, _ = schedule.posterior(schedule.predict_x0(xt, t, eps), xt, t)
    log_variance = schedule.learned_log_variance(v, t)
    kl = _normal_kl(true_mean, true_log_variance, mean, log_variance)
    nll = discretized_nll(x0, mean, log_variance)
    return torch.where(t == 0, _mean_per_sample(nll), _mean_per_sample(kl)) / math.log(2)


def _normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL(N1 || N2) of each element, in nats."""
    difference = log_variance2 - log_variance1
    return 0.5 * (-1 + difference + torch.exp(-difference) + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def discretized_nll(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """-log of the normal's mass on the bin x +- 1/255, the outer bins reaching to infinity ([H] eq. 13), in nats.

    x in [-1, 1], mean and log_variance have one shape, that of what is returned. The bins are those of 8-bit pixels;
    Meta's DiT keeps them for latents, and so do we.
    """
    centered = x - mean
    first, last = x < -0.999, x > 0.999
    # By symmetry the mass of any bin is that of one left of the mean, where the difference of the two distribution
    # functions doesn't cancel: right of it, float32 would lose all mass beyond 5.5 sigma.
    left = torch.where(first, centered, torch.where(last, -centered, -centered.abs()))
    inv_std = torch.exp(-0.5 * log_variance)
    below = torch.where(first | last, 0.0, _normal_cdf(inv_std * (left - 1 / 255)))
    return -torch.log((_normal_cdf(inv_std * (left + 1 / 255)) - below).clamp(min=1e-12))


def _normal_cdf(z: Tensor) -> Tensor:
    """guided-diffusion's approximation (error < 2e-4) rather than erf, so that losses compare with Meta's DiT.

    Its (1 + tanh(u)) / 2 is written as sigmoid(2u), which keeps the lower tail.
    """
    return torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))


def _mean_per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)
