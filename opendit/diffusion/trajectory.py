"""The path that sampling takes: the points from noise to data, and the meaning of a network's output at each.

An objective has one trajectory (``DDPMTrajectory``, ``FlowTrajectory``, ``EDMTrajectory``); samplers
(``opendit.diffusion.samplers``) go along any that answers what they ask: ``denoise`` or ``slope``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


class LinearForm(NamedTuple):
    """A quantity that is ``x`` times x plus ``output`` times what the model returns."""

    x: float
    output: float


class Trajectory(ABC):
    """Points 0 (noise) to ``steps`` (data); step k leads from point k to point k + 1.

    At point k, x is alpha x_0 + alpha levels[k] noise, alpha being ``alphas[k]``. A model is called as ``model(x, t)``,
    with x (B, C, ...) and what the objective's network gets as time, (B,).
    """

    times: Sequence[float]  # (steps + 1,) or, where nothing is evaluated at the last point, (steps,): its own unit
    levels: Sequence[float]  # (steps + 1,) sigma / alpha, falling: the unit of guidance's interval
    alphas: Sequence[float]  # (steps + 1,)

    @property
    def steps(self) -> int:
        return len(self.levels) - 1

    def start(self, noise: Tensor) -> Tensor:
        """x at point 0, of noise's shape, from standard normal ``noise`` (B, C, ...)."""
        return noise

    @abstractmethod
    def points(self, x: Tensor) -> Tensor:
        """(steps or steps + 1, B): row k is the ``point`` of ``denoise`` and ``slope`` for x (B, C, ...) there."""

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """The x_0 that the model predicts from x (B, C, ...), of x's shape and dtype. Raises ValueError if the model's
        output doesn't fit x."""
        raise NotImplementedError

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """dx/dtime of the probability-flow ODE, time being that of ``times``; as ``denoise``."""
        raise NotImplementedError

    def has_slope(self, k: int) -> bool:
        """True if ``slope`` is defined at point k."""
        return True

    def input_scale(self, k: int) -> float:
        """The factor of x in what the model gets at point k."""
        return 1.0

    def denoise_weights(self, k: int) -> LinearForm | None:
        """``denoise`` at point k as a weighted sum; None if it is not one."""
        return None

    def slope_weights(self, k: int) -> LinearForm | None:
        """``slope`` at point k as a weighted sum; None if it is not one."""
        return None


def for_each_sample(values: Sequence[float], x: Tensor, dtype: torch.dtype) -> Tensor:
    """(len(values), B) on x's device: each value once for every sample of x (B, ...), rows contiguous."""
    return torch.tensor(values, dtype=torch.float64).to(x.device, dtype)[:, None].repeat(1, len(x))
