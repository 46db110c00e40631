"""An example objective: straight paths from data to noise, with a network that predicts the data."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective, Prepared
from opendit.diffusion.samplers import Trajectory, for_each_sample

SETTINGS = DESCRIPTIONS["example"].settings


class Context(NamedTuple):
    x0: Tensor


class ExampleTrajectory(Trajectory):
    """The path x = (1 - t) x_0 + t noise for t from 1 to 0, with dx/dt = (x - x_0) / t."""

    def __init__(self, steps: int):
        self.times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
        self.levels = [t / max(1 - t, 1e-6) for t in self.times]
        self.alphas = [1 - t for t in self.times]

    def points(self, x: Tensor) -> Tensor:
        return for_each_sample(self.times, x, torch.float32)

    def slope(self, model, x: Tensor, point: Tensor) -> Tensor:
        return (x - model(x, 1000 * point).to(x.dtype)) / point.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))

    def has_slope(self, k: int) -> bool:
        return self.times[k] > 0


@dataclass(frozen=True)
class ExampleObjective(Objective):
    name: ClassVar[str] = "example"
    preview_sampler: ClassVar[str] = "euler"
    learn_sigma: ClassVar[bool] = False

    power: float = SETTINGS["power"].default

    def times_at(self, u):
        return u**self.power

    def prepare(self, x0, t, noise):
        share = t.view(-1, *(1,) * (x0.dim() - 1)).float()
        return Prepared((1 - share) * x0 + share * noise, 1000 * t.float(), Context(x0))

    def loss(self, output, prepared):
        return (output.float() - prepared.context.x0).square().flatten(1).mean(1)

    def trajectory(self, steps, even_in_noise=False):
        return ExampleTrajectory(steps)

    def noise_level(self, timestep):
        return timestep / (1000 - timestep)


OBJECTIVE = ExampleObjective
