"""Encoding of conditioning frames (``--given_frames``) as input channels of the network.

The input is x_t ++ mask ++ given, where ++ concatenates channels: the noisy latents x_t (C channels), a mask (1
channel) that is 1 in conditioning frames and 0 in other frames, and the latents of the conditioning frames (C
channels), which are 0 in other frames.

Models with conditioning frames *in place* (Wan 2.2 TI2V) embed only C channels: the clean latents replace the noisy
ones in conditioning frames, and the time of these tokens is 0. The loss excludes conditioning frames.

Image-to-video models (Wan 2.1 and 2.2 I2V) embed the repeated mask and the latents of a clip that is grey after its
first frame, in addition to x_t. They always get these channels, and their loss includes all frames.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def given_channels(in_channels: int) -> int:
    """Return the number of channels of mask ++ given for latents with ``in_channels`` channels."""
    return 1 + in_channels


def give(latents: Tensor, lengths: Tensor) -> Tensor:
    """Return mask ++ given (B, 1 + C, T, H, W) for latents (B, C, T, H, W). The first ``lengths[i]`` frames of clip i
    are conditioning frames."""
    frames = torch.arange(latents.shape[2], device=latents.device)
    mask = (frames < lengths.to(latents.device).unsqueeze(1)).to(latents.dtype)[:, None, :, None, None]
    return torch.cat([mask.expand(-1, 1, -1, *latents.shape[3:]), latents * mask], dim=1)


def with_given(x: Tensor, given: Tensor | None) -> Tensor:
    """Return the network's input: x (B, C, T, H, W) if ``given`` is None, otherwise x ++ ``given``, where ``given`` is
    the result of :func:`give`."""
    return x if given is None else torch.cat([x, given.to(x.dtype)], dim=1)


def in_place(x: Tensor, channels: int) -> Tensor:
    """Convert x ++ mask ++ given (B, 1 + 2 C, T, H, W) to C = ``channels`` channels, in which the given latents replace
    x in conditioning frames."""
    x, mask, given = x.split([channels, 1, channels], dim=1)
    return torch.where(mask > 0, given, x)


def first_frames_alone(pixels: Tensor) -> Tensor:
    """Return clips (B, 3, T, H, W) in [-1, 1] with all frames after the first one made grey."""
    grey = torch.zeros_like(pixels)
    grey[:, :, 0] = pixels[:, :, 0]
    return grey


def give_beside(latents: Tensor) -> Tensor:
    """Return mask ++ given (B, 1 + C, T, H, W) for an image-to-video model. latents: (B, C, T, H, W), the latents of
    clips that are grey after their first frame."""
    mask = torch.zeros_like(latents[:, :1])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def beside(x: Tensor, channels: int, given: int) -> Tensor:
    """Repeat the mask of x ++ mask ++ given (B, 1 + 2 C, T, H, W), so that ``given`` channels follow the C =
    ``channels`` noisy ones. Raises ValueError if x has only the noisy channels."""
    if x.shape[1] == channels:
        raise ValueError("a model of image to video is given the first frame of every clip")
    x, mask, latents = x.split([channels, 1, channels], dim=1)
    return torch.cat([x, mask.expand(-1, given - channels, -1, -1, -1), latents], dim=1)


def times_of_frames(t: Tensor, given: Tensor) -> Tensor:
    """Return the times (B, T) of frames: 0 for conditioning frames, and the sample's time t (B,) for other frames.
    given: the result of :func:`give`."""
    return t[:, None] * (1 - given[:, 0, :, 0, 0])


def without_any(x: Tensor, given: int) -> Tensor:
    """Append ``given`` channels of zeros to x (B, C, ...), the input of a network without conditioning frames."""
    return pad(x, (0, 0) * (x.dim() - 2) + (0, given))
