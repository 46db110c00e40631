"""Given frames in training: how many frames of a clip are given is drawn for every sample."""

import torch
from torch import Tensor

from opendit.config.architectures import parse_given
from opendit.diffusion.random import Stream, uniform
from opendit.models.given_frames import give

WITHOUT = 0.1  # share of the clips of "first" and "prefix:K" of which no frame is given: so a model draws without, too


def given_lengths(mode: str, frames: int, u: Tensor) -> Tensor:
    """Draw the number of first frames that are given of clips of ``frames``, (B,) int64; u (B,) uniform in (0, 1).

    "random" gives any number but all of them, none among them, each as often; "first" and "prefix:K" their own, and
    none in a share of ``WITHOUT``. Pictures, which are clips of one frame, are given none.
    """
    count = parse_given(mode)
    if count is None:
        return (u * frames).long().clamp(max=frames - 1)
    return torch.where(u < WITHOUT, 0, min(count, frames - 1))


def draw_given(mode: str | None, latents: Tensor, seed: int, step: int, index: Tensor) -> Tensor | None:
    """mask ++ given (B, 1 + C, T, H, W) of a training step's clean latents (B, C, T, H, W), keyed by (seed, step,
    index); None for a model without given frames."""
    if mode is None:
        return None
    return give(latents, given_lengths(mode, latents.shape[2], uniform(seed, step, index, Stream.GIVEN)))
