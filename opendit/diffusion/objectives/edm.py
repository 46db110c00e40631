"""EDM: a denoiser. Its network has inputs and targets of unit variance at every noise level.

    [K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models", 2022

x = x_0 + sigma noise. The denoiser is D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), with the network F ([K] eq. 7
and table 1). The network gets 1000 c_noise, from -1554 to 1095, because timestep embeddings are designed for a span of
1000. [K]'s c_noise, ln(sigma) / 4, spans only 2.6.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective, Prepared, above_0
from opendit.diffusion.samplers import LinearForm, Model, Trajectory, as_rows, at_least_float32, for_each_sample

SETTINGS = DESCRIPTIONS["edm"].settings

NOISE_SCALE = 250.0  # the network's time is this times ln(sigma)
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0  # for sampling, [K] table 1


def log_normal_sigmas(u: Tensor, mean: float, std: float) -> Tensor:
    """Map uniform u in (0, 1) to noise levels for training: ln(sigma) ~ N(mean, std^2), [K] table 1."""
    return torch.exp(mean + std * torch.special.ndtri(u))


def karras_sigmas(steps: int) -> Tensor:
    """Return ``steps`` noise levels from SIGMA_MAX to SIGMA_MIN ([K] eq. 5), then 0, for sampling, in float64."""
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    first, last = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    return torch.cat(((first + ramp * (last - first)) ** RHO, ramp.new_zeros(1)))


def network_times(sigma: Tensor) -> Tensor:
    """Return the network's time at noise level sigma, 1000 c_noise, in sigma's dtype."""
    return NOISE_SCALE * sigma.log()


def sigmas_of(timestep: Tensor) -> Tensor:
    """Return the noise levels of the network's times ``timestep``; the inverse of ``network_times``."""
    return torch.exp(timestep / NOISE_SCALE)


def denoise(model: Callable[..., Tensor], x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """Return the denoiser's D(x; sigma), [K] eq. 7, in x's shape, float32 at least. x: (B, C, ...). sigma: (B,). model:
    the network F, called with c_in x and 1000 c_noise (B,). Raises ValueError if the output has another shape."""
    scale = torch.rsqrt(sigma**2 + sigma_data**2)
    skip, out = (sigma_data * scale) ** 2, sigma * sigma_data * scale
    output = model(as_rows(scale, x) * x, network_times(sigma).to(x.dtype))
    return as_rows(skip, x) * x + as_rows(out, x) * _checked(output, x).to(x.dtype)


class EDMContext(NamedTuple):
    """Input of the loss besides x_t and the network's time: F's target (B, C, ...), float32 at least."""

    target: Tensor


def _checked(output: Tensor, x: Tensor) -> Tensor:
    if output.shape != x.shape:
        raise ValueError(f"EDM's network returns the shape of its input {tuple(x.shape)}, got {tuple(output.shape)}")
    return output


class EDMTrajectory(Trajectory):
    """The trajectory over the noise levels ``sigmas``, (n + 1,), descending; see ``karras_sigmas``. The model is the
    network F of ``denoise``. A ``point`` is the noise level sigma, (B,), in x's dtype."""

    def __init__(self, sigmas: Tensor, sigma_data: float):
        self.sigma_data = sigma_data
        self.times = self.levels = sigmas.tolist()
        self.alphas = [1.0] * len(self.levels)

    def start(self, noise: Tensor) -> Tensor:
        return noise * self.levels[0]

    def points(self, x: Tensor) -> Tensor:
        return for_each_sample(self.levels, x, x.dtype)

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        return denoise(model, x, point, self.sigma_data)

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """Return dx/dsigma = (x - D(x; sigma)) / sigma, [K] eq. 1 and 3 for sigma = t."""
        return (x - self.denoise(model, x, point)) / as_rows(point, x)

    def has_slope(self, k: int) -> bool:
        return self.levels[k] > 0

    def input_scale(self, k: int) -> float:
        return 1 / math.sqrt(self.levels[k] ** 2 + self.sigma_data**2)

    def denoise_weights(self, k: int) -> LinearForm:
        """Return c_skip and c_out, [K] table 1."""
        scale = self.input_scale(k)
        return LinearForm((self.sigma_data * scale) ** 2, self.levels[k] * self.sigma_data * scale)

    def slope_weights(self, k: int) -> LinearForm:
        skip, out = self.denoise_weights(k)
        return LinearForm((1 - skip) / self.levels[k], -out / self.levels[k])


@dataclass(frozen=True)
class EDMObjective(Objective):
    """EDM. mean, std: parameters of ln(sigma) in training. sigma_data: the data's standard deviation."""

    name: ClassVar[str] = "edm"
    preview_sampler: ClassVar[str] = "heun"
    learn_sigma: ClassVar[bool] = False

    mean: float = SETTINGS["mean"].default
    std: float = SETTINGS["std"].default
    sigma_data: float = SETTINGS["sigma_data"].default

    def __post_init__(self) -> None:
        above_0("--edm_std", self.std)
        above_0("--edm_sigma_data", self.sigma_data)

    def times_at(self, u: Tensor) -> Tensor:
        return log_normal_sigmas(u, self.mean, self.std)

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Return c_in (x_0 + sigma noise), the network's time in float32, and F's target. ``t`` is sigma.

        The target (x_0 - c_skip x) / c_out ([K] eq. 8) equals c_in (sigma x_0 / sigma_data - sigma_data noise). This
        form avoids cancellation at small sigma."""
        if x0.shape != noise.shape or t.shape != x0.shape[:1]:
            raise ValueError(f"x0 {tuple(x0.shape)}, noise {tuple(noise.shape)} and sigma {tuple(t.shape)} don't fit")
        x0, noise, sigma = at_least_float32(x0), at_least_float32(noise), t
        scale = torch.rsqrt(sigma**2 + self.sigma_data**2)
        x = as_rows(scale, x0) * (x0 + as_rows(sigma, x0) * noise)
        target = as_rows(scale * sigma / self.sigma_data, x0) * x0 - as_rows(scale * self.sigma_data, x0) * noise
        return Prepared(x, network_times(sigma).float(), EDMContext(target))

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """Return each sample's mean squared error of F's ``output`` (B, C, ...), [K] eq. 8. It equals D's error times
        lambda(sigma), because lambda = 1 / c_out^2."""
        (target,) = prepared.context
        return (at_least_float32(_checked(output, target)) - target).square().flatten(1).mean(1)

    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        return EDMTrajectory(karras_sigmas(steps), self.sigma_data)

    def noise_level(self, timestep: Tensor) -> Tensor:
        return sigmas_of(timestep)

    @property
    def predicts(self) -> dict[str, Any]:
        return {**super().predicts, "edm_sigma_data": self.sigma_data}


OBJECTIVE = EDMObjective
