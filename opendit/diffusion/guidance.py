"""Classifier-free guidance, optionally limited to an interval of noise levels.

[G] Ho, Salimans, "Classifier-Free Diffusion Guidance", 2022
[I] Kynkaanniemi et al., "Applying Guidance in a Limited Interval Improves Sample and Distribution
Quality", 2024
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opendit.diffusion.samplers import Model, at_least_float32, split_output
from opendit.models.conditioning import Condition, joined
from opendit.models.families.base import Guidance


def scale_of_family(guidance: Guidance, scale: float | None = None) -> float:
    """Convert a guidance scale of diffusers' pipeline (None: the family's default) to the scale of :func:`cfg_model`,
    where 1.0 means no guidance.

    With ``guidance.formula`` "uncond", the scale stays, but is at least 1. With "cond", 1 is added, because cond + g
    (cond - uncond) equals uncond + (1 + g) (cond - uncond). With "embedded", the result is 1.0, because the network
    gets the scale as an input. Raises ValueError for a scale that is negative or not finite."""
    value = guidance.scale if scale is None else scale
    if not 0 <= value < math.inf:
        raise ValueError(f"--cfg_scale {value:g}: out of range; give a number from 0")
    if guidance.formula == "embedded":
        return 1.0
    return 1.0 + value if guidance.formula == "cond" else max(value, 1.0)


def rescale_to(guided: Tensor, cond: Tensor, parts: str) -> Tensor:
    """Rescale a guided prediction (B, C, ...) to the norms of the conditional prediction ``cond``. parts: "row" (last
    dimension), "patch" (2 x 2 positions), or "" to return ``guided`` unchanged."""
    if parts == "row":
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    if parts == "patch":
        return guided * (_patch_norms(cond) / _patch_norms(guided))
    return guided


def _patch_norms(x: Tensor) -> Tensor:
    """Return each 2 x 2 patch's norm, repeated at its four positions, (B, 1, H, W). x: (B, C, H, W)."""
    squares = x.square().sum(1, keepdim=True).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return squares.sum((3, 5), keepdim=True).sqrt().expand_as(squares).flatten(4).flatten(2, 3)


def cfg_model(
    model: Callable[[Tensor, Tensor, Any], Tensor],
    y: Condition,
    null_y: Condition,
    scale: float | Tensor,
    guided_channels: int | None = None,
    rescaled: str = "",
) -> Model:
    """Return a model of (x, t) with guidance: uncond + scale * (cond - uncond), [G] eq. 6, float32 at least.

    Args:
        model: ``model(x, t, y)``, called once per step. It gets the concatenated conditional and unconditional batch
            (2B), or with ``scale`` 1.0 the conditional batch (B) only.
        y: (B, ...) the condition: a tensor, or an object with ``cat``, ``expand_as``, ``len`` and ``shape``.
        null_y: the null condition, with y's shape or a shape that expands to y's.
        scale: a float, or a tensor (B, 1, ..., 1) with a scale for each sample.
        guided_channels: number of leading channels that are guided; None for x's channels. Meta's DiT guides 3 of 4.
            Other channels, and a learned variance, come from the conditional prediction.
        rescaled: see :func:`rescale_to`.

    Raises ValueError if null_y doesn't expand to y. The returned model raises ValueError if shapes don't fit."""
    if not isinstance(scale, Tensor) and scale == 1.0:
        return lambda x, t: at_least_float32(model(x, t, y))
    try:
        null: Any = null_y  # Any: the type is y's
        y_both = joined((y, null.expand_as(y)))
    except RuntimeError as e:
        raise ValueError(f"null_y {tuple(null_y.shape)} does not expand to y {tuple(y.shape)}") from e

    def guided(x: Tensor, t: Tensor) -> Tensor:
        channels = x.shape[1] if guided_channels is None else guided_channels
        if not 1 <= channels <= x.shape[1]:
            raise ValueError(f"guided_channels must be between 1 and {x.shape[1]}, got {channels}")
        if len(y) != len(x):
            raise ValueError(f"{len(y)} conditions for {len(x)} samples")
        cond, uncond = at_least_float32(model(torch.cat((x, x)), torch.cat((t, t)), y_both)).chunk(2)
        split_output(cond, x)  # raises ValueError for a wrong shape
        uncond = uncond[:, :channels]
        result = rescale_to(uncond + scale * (cond[:, :channels] - uncond), cond[:, :channels], rescaled)
        return torch.cat((result, cond[:, channels:]), dim=1)

    return guided


# Levels that differ by a smaller fraction count as equal, because users round them. Neighbours among 1,000 timesteps
# differ by at least 0.5 %.
SAME_LEVEL = 0.003


def is_within(interval: tuple[float, float], level: float) -> bool:
    low, high = interval
    return low * (1 - SAME_LEVEL) <= level <= high * (1 + SAME_LEVEL)


@dataclass(frozen=True)
class GuidedWithin:
    """A model of (x, t) that calls ``guided`` at noise levels low <= sigma <= high, and ``conditional`` elsewhere
    ([I]).

    Levels within 0.3 % of a bound count as equal to it. Unlike in [I], the interval includes low, so low = 0 includes
    the trajectory's end. Raises ValueError unless 0 <= low < high.

    Samplers choose the model once per step, by the noise level at the step's start. In a direct call, ``noise_level``
    maps the network's time (B,) to sigma (B,), and all samples must have one noise level."""

    interval: tuple[float, float]
    noise_level: Callable[[Tensor], Tensor]
    guided: Model
    conditional: Model

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low < high:
            raise ValueError(f"a guidance interval is 0 <= LOW < HIGH, got {low:g} {high:g}")

    def at_level(self, level: float) -> Model:
        return self.guided if is_within(self.interval, level) else self.conditional

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at_level(float(self.noise_level(t[:1])))(x, t)
