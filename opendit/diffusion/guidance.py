"""Classifier-free guidance, also limited to an interval of noise levels.

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
    """Return the model for all evaluations of a step that starts at noise level sigma ``level``.

    A model with a method ``at_level`` (see :class:`GuidedWithin`) chooses by the level; any other is returned
    unchanged.
    """
    choose = getattr(model, "at_level", None)
    return model if choose is None else choose(level)


def scale_of_family(guidance: Guidance, scale: float | None = None) -> float:
    """Return the scale of :func:`cfg_model` for a family's guidance; 1.0 is none.

    scale: as the family's pipeline in diffusers counts it; None for the family's own.

    - "uncond": the same scale. Pipelines guide above 1 only.
    - "cond": cond + g (cond - uncond) is uncond + (1 + g) (cond - uncond). Pipelines guide above 0 only.
    - "embedded": 1.0; the network gets the scale as an input instead.

    Raises ValueError for a scale that is negative or not finite.
    """
    value = guidance.scale if scale is None else scale
    if not 0 <= value < math.inf:
        raise ValueError(f"--cfg_scale {value:g}: out of range; give a number from 0")
    if guidance.formula == "embedded":
        return 1.0
    return 1.0 + value if guidance.formula == "cond" else max(value, 1.0)


def rescale_to(guided: Tensor, cond: Tensor, parts: str) -> Tensor:
    """Return a guided prediction (B, C, ...) whose parts have the norms that they have in the conditional one; see
    ``Guidance.rescaled``. "": none."""
    if parts == "row":
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    if parts == "patch":
        return guided * (_patch_norms(cond) / _patch_norms(guided))
    return guided


def _patch_norms(x: Tensor) -> Tensor:
    """Return the norm of every patch of 2 x 2 of x (B, C, H, W), at each of its places: (B, 1, H, W)."""
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
    """Classifier-free guidance, [G] eq. 6 in the form uncond + scale * (cond - uncond), as a model of (x, t).

    Args:
        model: ``model(x, t, y)``, called once a step with the conditional batch and then the unconditional one in one
            batch of 2B. With ``scale`` 1.0, which is the conditional model itself, it is called with B only.
        y: (B, ...) any condition: a tensor, or an object with ``cat``, ``expand_as``, ``len`` and ``shape``.
        null_y: the condition that stands for "none", of y's shape or expandable to it.
        scale: may be (B, 1, ..., 1), one for each sample; both halves are always evaluated then.
        guided_channels: number of eps channels, from the first, that are guided; all by default. Meta's DiT samples
            with 3 of its 4. Other channels, and v, are the conditional ones.
        rescaled: parts that get back the norm of the conditional prediction, see :func:`rescale_to`.

    Returns:
        A model whose result is float32 at least.

    Raises:
        ValueError: null_y doesn't expand to y; or, when the model is called: y and x differ in batch size, the output
            doesn't fit x, or guided_channels is not between 1 and C.
    """
    if not isinstance(scale, Tensor) and scale == 1.0:
        return lambda x, t: at_least_float32(model(x, t, y))
    try:
        null: Any = null_y  # of the same type as y
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
        split_output(cond, x)  # a wrong shape is reported as for any model
        uncond = uncond[:, :channels]
        result = rescale_to(uncond + scale * (cond[:, :channels] - uncond), cond[:, :channels], rescaled)
        return torch.cat((result, cond[:, channels:]), dim=1)

    return guided


# Users write levels with three digits: 157 for the 157.4 of DDPM's noisiest timestep. Levels that differ by less than
# this share count as equal; neighbours among 1,000 timesteps or steps differ by 0.5 % at least.
SAME_LEVEL = 0.003


def is_within(interval: tuple[float, float], level: float) -> bool:
    """Return True if the noise level sigma ``level`` lies in the interval; see :func:`guided_within`."""
    low, high = interval
    return low * (1 - SAME_LEVEL) <= level <= high * (1 + SAME_LEVEL)


@dataclass(frozen=True)
class GuidedWithin:
    """Guidance in a limited interval of noise levels, see :func:`guided_within`."""

    low: float
    high: float
    noise_level: Callable[[Tensor], Tensor]
    guided: Model
    conditional: Model

    def at_level(self, level: float) -> Model:
        """Return the model for all evaluations of a step that starts at noise level sigma ``level``."""
        return self.guided if is_within((self.low, self.high), level) else self.conditional

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at_level(float(self.noise_level(t[:1])))(x, t)


def guided_within(
    interval: tuple[float, float], noise_level: Callable[[Tensor], Tensor], guided: Model, conditional: Model
) -> GuidedWithin:
    """Guidance in a limited interval of noise levels, [I], as a model of (x, t).

    ``guided`` is called where low <= sigma <= high for ``interval`` = (low, high), and ``conditional`` elsewhere, which
    saves the second half of the batch there. ([I] excludes low itself; here 0 means all levels below high, including
    the end of the trajectory. A level within 0.3 % of a bound counts as the bound.)

    Samplers decide once per step, by the level where it starts, as [I]'s code does: Heun's second evaluation, at the
    lower level where the step ends, is guided if the first one is. Called directly, the model decides by
    ``noise_level``: sigma over the scale of the signal, (B,), for the network's time; see ``Objective.noise_level``. A
    batch has one noise level, as in every sampler.

    Raises ValueError unless 0 <= low < high.
    """
    low, high = interval
    if not 0 <= low < high:
        raise ValueError(f"a guidance interval is 0 <= LOW < HIGH, got {low:g} {high:g}")
    return GuidedWithin(low, high, noise_level, guided, conditional)
