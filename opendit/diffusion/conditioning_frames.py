"""Draw the conditioning frames of training clips: how many first frames each sample is given."""

import torch
from torch import Tensor

from opendit.config.architectures import parse_given
from opendit.diffusion.random import Stream, uniform
from opendit.models.given_frames import give

WITHOUT = 0.1  # share of clips of "first" and "prefix:K" without conditioning frames, so that the model can do without


def conditioning_lengths(mode: str, frames: int, u: Tensor) -> Tensor:
    """Draw the number of conditioning frames of clips of ``frames`` frames, (B,) int64; u (B,) is uniform in (0, 1).

    "random" draws any number from none to all but one, each equally likely; "first" and "prefix:K" give a fixed number,
    or none with probability ``WITHOUT``. Pictures, which are clips of one frame, have none.
    """
    count = parse_given(mode)
    if count is None:
        return (u * frames).long().clamp(max=frames - 1)
    return torch.where(u < WITHOUT, 0, min(count, frames - 1))


def draw_conditioning_frames(mode: str | None, latents: Tensor, seed: int, step: int, index: Tensor) -> Tensor | None:
    """Return mask ++ conditioning frames (B, 1 + C, T, H, W) of a training step's clean latents (B, C, T, H, W), keyed
    by (seed, step, index); None for a model without conditioning frames."""
    if mode is None:
        return None
    return give(
        latents, conditioning_lengths(mode, latents.shape[2], uniform(seed, step, index, Stream.CONDITIONING_FRAMES))
    )
