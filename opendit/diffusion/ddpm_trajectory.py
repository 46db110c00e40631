"""Sample models of DDPM schedules; the schedule and its loss are in ``opendit.diffusion.ddpm``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.diffusion.ddpm import DDPM, at_least_float32, split_output
from opendit.diffusion.guidance import for_step
from opendit.diffusion.trajectory import LinearForm, Model, Trajectory


class DDPMTrajectory(Trajectory):
    """All timesteps of ``schedule``, the noisiest first, then the data.

    The model gets the timesteps that the network was trained on, (B,) int64, and returns (B, C, ...) eps, or (B, 2C,
    ...) eps and v; ``eps_model`` makes one of a model that predicts velocity. A ``point`` is the schedule's own index.
    ``clip_denoised`` clips each prediction of x_0 to [-1, 1]: for pixels, not for latents.
    """

    def __init__(self, schedule: DDPM, clip_denoised: bool = False):
        self.schedule, self.clip_denoised = schedule, clip_denoised
        self.times = schedule.timestep_map.flip(0).tolist()
        self.levels = [*reversed(schedule.noise_levels), 0.0]
        self.alphas = [*schedule.alphas_cumprod.sqrt().flip(0).tolist(), 1.0]
        self.alphas_cumprod: list[float] = [*schedule.alphas_cumprod.flip(0).tolist(), 1.0]

    def points(self, x: Tensor) -> Tensor:
        steps = torch.arange(len(self.times), device=x.device)
        return steps.flip(0)[:, None].repeat(1, len(x))

    def predict(self, model: Model, x: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The model's x_0, eps and v (None if it has no variance) from x (B, C, ...), each of x's shape; after
        clipping, the eps that agrees with the clipped x_0. Raises ValueError if the model's output doesn't fit x."""
        eps, v = split_output(model(x, self.schedule.model_timesteps(point)).to(x.dtype), x)
        denoised = self.schedule.predict_x0(x, point, eps)
        if self.clip_denoised:
            denoised = denoised.clamp(-1, 1)
            eps = self.schedule.predict_eps(x, point, denoised)
        return denoised, eps, v

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        return self.predict(model, x, point)[0]

    def denoise_weights(self, k: int) -> LinearForm | None:
        """x_0 = (x - sigma eps) / alpha, of a model that returns eps."""
        kept = self.alphas_cumprod[k]
        return None if self.clip_denoised else LinearForm(math.sqrt(1 / kept), -math.sqrt(1 / kept - 1))


@dataclass(frozen=True)
class EpsModel:
    """See :func:`eps_model`."""

    model: Model
    schedule: DDPM

    def at_level(self, level: float) -> "EpsModel":
        return EpsModel(for_step(self.model, level), self.schedule)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        velocity, v = split_output(at_least_float32(self.model(x, t)), x)
        eps = self.schedule.eps_of_velocity(x, t, velocity)
        return eps if v is None else torch.cat((eps, v), dim=1)


def eps_model(model: Model, schedule: DDPM) -> EpsModel:
    """A model that predicts velocity (and v) as one that predicts eps (and v), float32 at least.

    ``schedule``: the unshortened one, whose indices the network's timesteps are.
    """
    return EpsModel(model, schedule)
