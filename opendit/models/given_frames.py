"""Give a model some frames of a clip, as ``--given_frames`` says: the encoding as input channels of the network.

A model with given frames gets, beside the noisy latents x_t (C channels), one channel that is 1 in the given frames and
0 in the others, and C channels with the latents of the given frames and 0 elsewhere: x_t ++ mask ++ given.

Models that take them *in place* (Wan 2.2 TI2V) embed C channels: the given latents stand where the noisy ones were, and
the time of their tokens is 0. There is no loss on them.

Models of image to video (Wan 2.1 and 2.2 I2V) embed the mask, repeated, and the latents of a clip that is grey after
its first frame. They are always given that, and their loss is of all frames.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def given_channels(in_channels: int) -> int:
    """Return the number of channels after the C noisy ones: the mask, and the given latents."""
    return 1 + in_channels


def give(latents: Tensor, lengths: Tensor) -> Tensor:
    """Return mask ++ given (B, 1 + C, T, H, W) that give the first ``lengths`` (B,) frames of clips (B, C, T, H, W)."""
    frames = torch.arange(latents.shape[2], device=latents.device)
    mask = (frames < lengths.to(latents.device).unsqueeze(1)).to(latents.dtype)[:, None, :, None, None]
    return torch.cat([mask.expand(-1, 1, -1, *latents.shape[3:]), latents * mask], dim=1)


def with_given(x: Tensor, given: Tensor | None) -> Tensor:
    """Return the network's input: x (B, C, T, H, W) without ``given``, else x ++ ``given`` of :func:`give`."""
    return x if given is None else torch.cat([x, given.to(x.dtype)], dim=1)


def in_place(x: Tensor, channels: int) -> Tensor:
    """Return x ++ mask ++ given (B, 1 + 2 C, T, H, W) as the C = ``channels`` latents, given ones in their places."""
    x, mask, given = x.split([channels, 1, channels], dim=1)
    return torch.where(mask > 0, given, x)


def give_beside(latents: Tensor) -> Tensor:
    """mask ++ given (B, 1 + C, T, H, W), of latents (B, C, T, H, W) of clips that are grey after their first frame."""
    mask = torch.zeros_like(latents[:, :1])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def beside(x: Tensor, channels: int, given: int) -> Tensor:
    """Return x ++ mask ++ given (B, 1 + 2 C, T, H, W) with the mask repeated, so that ``given`` channels follow the C =
    ``channels`` noisy ones. Raises ValueError for x alone."""
    if x.shape[1] == channels:
        raise ValueError("a model of image to video is given the first frame of every clip")
    x, mask, latents = x.split([channels, 1, channels], dim=1)
    return torch.cat([x, mask.expand(-1, given - channels, -1, -1, -1), latents], dim=1)


def times_of_frames(t: Tensor, given: Tensor) -> Tensor:
    """Return the times (B, T) of the frames of samples at times t (B,): 0 for those given in place, see
    :func:`give`."""
    return t[:, None] * (1 - given[:, 0, :, 0, 0])


def without_any(x: Tensor, given: int) -> Tensor:
    """Append ``given`` channels of zeros to x (B, C, ...), for a network that gets no given frames."""
    return pad(x, (0, 0) * (x.dim() - 2) + (0, given))
