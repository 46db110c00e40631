"""Draw the number of leading frames of each training clip that serve as conditioning frames."""

import torch
from torch import Tensor

from opendit.config.architectures import parse_given
from opendit.diffusion.random import Stream, uniform
from opendit.models.given_frames import give

# fraction of clips that get no conditioning frames in modes "first" and "prefix:K", so that the model learns that case
# too
WITHOUT = 0.1


def conditioning_lengths(mode: str, frames: int, u: Tensor) -> Tensor:
    """Draw the number of conditioning frames of each clip, (B,) int64. ``u`` (B,) is uniform in (0, 1).

    Each clip has ``frames`` frames. Mode "random" draws any number from 0 to frames - 1, each equally likely. "first"
    and "prefix:K" give a fixed number, or 0 with probability ``WITHOUT``. Pictures are clips of one frame and get 0.
    """
    count = parse_given(mode)
    if count is None:
        return (u * frames).long().clamp(max=frames - 1)
    return torch.where(u < WITHOUT, 0, min(count, frames - 1))


def draw_conditioning_frames(mode: str | None, latents: Tensor, seed: int, step: int, index: Tensor) -> Tensor | None:
    """Return a training step's mask and conditioning frames, concatenated along the channels: (B, 1 + C, T, H, W), for
    clean latents (B, C, T, H, W).

    The random numbers are keyed by (seed, step, index). If ``mode`` is None, the model has no conditioning frames, and
    the result is None.
    """
    if mode is None:
        return None
    return give(
        latents, conditioning_lengths(mode, latents.shape[2], uniform(seed, step, index, Stream.CONDITIONING_FRAMES))
    )
