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

from opendit.diffusion.trajectory import Model, at_least_float32, split_output
from opendit.models.conditioning import Condition, joined
from opendit.models.families.base import Guidance


def for_step(model: Model, level: float) -> Model:
    """Return the model for all evaluations of the step that starts at noise level ``level`` (sigma).

    If ``model`` has a method ``at_level`` (see :class:`GuidedWithin`), call it with the level. Otherwise return
    ``model``.
    """
    choose = getattr(model, "at_level", None)
    return model if choose is None else choose(level)


def scale_of_family(guidance: Guidance, scale: float | None = None) -> float:
    """Convert the guidance scale of a family's pipeline in diffusers to the scale of :func:`cfg_model`; 1.0 is no
    guidance.

    A ``scale`` of None stands for the family's default. The conversion depends on the family's formula:

    - "uncond": the same scale, but at least 1, because pipelines guide above 1 only.
    - "cond": 1 + scale, because cond + g (cond - uncond) equals uncond + (1 + g) (cond - uncond).
    - "embedded": 1.0, because the network gets the scale as an input.

    Raises ValueError for a scale that is negative or not finite.
    """
    value = guidance.scale if scale is None else scale
    if not 0 <= value < math.inf:
        raise ValueError(f"--cfg_scale {value:g}: out of range; give a number from 0")
    if guidance.formula == "embedded":
        return 1.0
    return 1.0 + value if guidance.formula == "cond" else max(value, 1.0)


def rescale_to(guided: Tensor, cond: Tensor, parts: str) -> Tensor:
    """Give each row or patch of a guided prediction (B, C, ...) the norm of the same row or patch in the conditional
    prediction.

    parts: "row" or "patch", see ``Guidance.rescaled``; "" returns ``guided`` unchanged.
    """
    if parts == "row":
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    if parts == "patch":
        return guided * (_patch_norms(cond) / _patch_norms(guided))
    return guided


def _patch_norms(x: Tensor) -> Tensor:
    """Return the norm of each 2 x 2 patch of x (B, C, H, W), repeated at its four positions: (B, 1, H, W)."""
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
    """Return a model of (x, t) with classifier-free guidance, uncond + scale * (cond - uncond), [G] eq. 6.

    Args:
        model: ``model(x, t, y)``, called once per step with the conditional and the unconditional batch concatenated
            (2B). With ``scale`` 1.0 there is no guidance, and the model is called with the conditional batch (B) only.
        y: (B, ...) the condition: a tensor, or an object with ``cat``, ``expand_as``, ``len`` and ``shape``.
        null_y: the null condition, with y's shape or a shape that expands to y's.
        scale: a float, or (B, 1, ..., 1) with one scale per sample. With a tensor, both halves are always evaluated.
        guided_channels: number of leading eps channels that are guided; all by default. Meta's DiT guides 3 of its 4
            channels. Other channels, and those of a learned variance, come from the conditional prediction.
        rescaled: "row" or "patch" to restore norms of the conditional prediction; see :func:`rescale_to`.

    Returns:
        A model whose result is float32 at least.

    Raises:
        ValueError: null_y doesn't expand to y. The returned model raises ValueError if y and x differ in batch size,
            the output doesn't fit x, or guided_channels is not between 1 and C.
    """
    if not isinstance(scale, Tensor) and scale == 1.0:
        return lambda x, t: at_least_float32(model(x, t, y))
    try:
        null: Any = null_y  # declared as Any, because its type is that of y
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


# Users round noise levels to about three digits, such as 157 for the 157.4 of DDPM's noisiest timestep. So levels that
# differ by less than this fraction count as equal. Neighbours among 1,000 timesteps or steps differ by at least 0.5 %.
SAME_LEVEL = 0.003


def is_within(interval: tuple[float, float], level: float) -> bool:
    """Return True if the noise level ``level`` (sigma) lies in the interval; see :func:`guided_within`."""
    low, high = interval
    return low * (1 - SAME_LEVEL) <= level <= high * (1 + SAME_LEVEL)


@dataclass(frozen=True)
class GuidedWithin:
    """A model that is guided in an interval of noise levels only; see :func:`guided_within`."""

    low: float
    high: float
    noise_level: Callable[[Tensor], Tensor]
    guided: Model
    conditional: Model

    def at_level(self, level: float) -> Model:
        """Return the model for all evaluations of the step that starts at noise level ``level`` (sigma)."""
        return self.guided if is_within((self.low, self.high), level) else self.conditional

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at_level(float(self.noise_level(t[:1])))(x, t)


def guided_within(
    interval: tuple[float, float], noise_level: Callable[[Tensor], Tensor], guided: Model, conditional: Model
) -> GuidedWithin:
    """Return a model of (x, t) that applies guidance only in an interval of noise levels, [I].

    ``interval`` is (low, high). If low <= sigma <= high, ``guided`` is called, otherwise ``conditional``, which saves
    the unconditional half of the batch. [I] excludes the bound low itself. Here the bound is included, so low = 0
    includes even the end of the trajectory. A level within 0.3 % of a bound counts as equal to the bound.

    Samplers decide once per step, by the noise level at its start, as [I]'s code does. So if the first evaluation of a
    Heun step is guided, the second one is too, although its noise level is lower. A direct call of the returned model
    uses ``noise_level``, which maps the network's time to sigma, (B,); see ``Objective.noise_level``. All samples of a
    batch must have the same noise level, as in every sampler.

    Raises ValueError unless 0 <= low < high.
    """
    low, high = interval
    if not 0 <= low < high:
        raise ValueError(f"a guidance interval is 0 <= LOW < HIGH, got {low:g} {high:g}")
    return GuidedWithin(low, high, noise_level, guided, conditional)
