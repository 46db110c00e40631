"""The path from noise to data that samplers follow, and the meaning of a network's output along it.

Every objective has one trajectory (``DDPMTrajectory``, ``FlowTrajectory``, ``EDMTrajectory``). Samplers
(``opendit.diffusion.samplers``) work with any trajectory that defines the method they need: ``denoise`` or ``slope``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


class LinearForm(NamedTuple):
    """The weights in a sum: ``x`` is the weight of the state x, and ``output`` the weight of the model's output."""

    x: float
    output: float


class Trajectory(ABC):
    """A path with points 0 (noise) to ``steps`` (data). Step k leads from point k to point k + 1.

    At point k, x is alpha x_0 + alpha levels[k] noise, where alpha is ``alphas[k]``. A model is called as ``model(x,
    t)`` with x (B, C, ...) and the time in the unit of the objective's network, (B,).
    """

    # (steps + 1,), or (steps,) if the last point is never evaluated; the unit depends on the class
    times: Sequence[float]
    levels: Sequence[float]  # (steps + 1,) sigma / alpha, descending; guidance intervals use this unit
    alphas: Sequence[float]  # (steps + 1,)

    @property
    def steps(self) -> int:
        return len(self.levels) - 1

    def start(self, noise: Tensor) -> Tensor:
        """Return x at point 0, computed from standard normal ``noise`` (B, C, ...), in noise's shape."""
        return noise

    @abstractmethod
    def points(self, x: Tensor) -> Tensor:
        """Return a tensor (steps or steps + 1, B). Row k is the argument ``point`` of ``denoise`` and ``slope`` at
        point k."""

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """Return the x_0 that the model predicts from x (B, C, ...), in x's shape and dtype.

        Raises ValueError if the model's output doesn't fit x.
        """
        raise NotImplementedError

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """Return dx/dtime of the probability-flow ODE, in the unit of ``times``. Arguments are those of ``denoise``."""
        raise NotImplementedError

    def has_slope(self, k: int) -> bool:
        """Return True if ``slope`` is defined at point k."""
        return True

    def input_scale(self, k: int) -> float:
        """Return the factor that turns x into the model's input at point k."""
        return 1.0

    def denoise_weights(self, k: int) -> LinearForm | None:
        """Return the weights of x and of the model's output in the result of ``denoise`` at point k; None if it is no
        weighted sum."""
        return None

    def slope_weights(self, k: int) -> LinearForm | None:
        """Return the weights of x and of the model's output in the result of ``slope`` at point k; None if it is no
        weighted sum."""
        return None


def for_each_sample(values: Sequence[float], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Repeat each value for every sample of x (B, ...). Return (len(values), B) on x's device, with contiguous rows."""
    return torch.tensor(values, dtype=torch.float64).to(x.device, dtype)[:, None].repeat(1, len(x))


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bf16 and fp16 to float32, and leave float32 and float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_output(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a model's output for ``x`` (B, C, ...) into eps and v; v is None without learned variance.

    Raises ValueError if the output has neither x's shape nor x's shape with 2C channels.
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
