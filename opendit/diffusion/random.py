"""Counter-based random numbers keyed by the sample, not by the process.

A sample's random numbers are a pure function of ``(seed, step, index in the global batch, stream)``. So ranks that
share a sample agree without communication, and a run resumes exactly on any number of GPUs.

The generator is Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), in torch's
int64 arithmetic or as one kernel. CPU and GPU give equal bits."""

import math
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from opendit.config.architectures import parse_given
from opendit.config.components import TokenRoute
from opendit.kernels.common import kernels_available
from opendit.kernels.philox import philox_bits
from opendit.models.conditioning import give

_MASK = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """Purposes of random numbers. Different streams are independent."""

    TIMESTEP = 0
    NOISE = 1
    VAE = 2
    CONDITION_DROP = 3
    FLIP = 4
    CROP = 5
    SAMPLE_INIT = 6
    SAMPLE_STEP = 7
    CONDITIONING_FRAMES = 8
    PLACE = 9
    TAGS = 10
    ROUTE = 11
    INTERVAL = 12
    EXPERT = 13
    ROUTE_DROP = 14


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten Philox rounds, and return four int64 tensors of uniform 32-bit values. ``counter``: four broadcastable
    int64 tensors of 32-bit values. ``seed``: a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2^64, so they have the bits of unsigned products
        p0, p1 = c0 * _MUL[0], c2 * _MUL[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: int, step: int, index: Tensor, stream: Stream, count: int) -> Tensor:
    """Return uniform 32-bit integers, (B, count) int64, for the samples ``index`` (B,) int64 in step ``step``. A
    sample's bits don't depend on other samples."""
    if index.is_cuda and kernels_available(index.device, torch.float32)[0]:
        return philox_bits(seed, step, index.long(), int(stream), count)
    block = torch.arange((count + 3) // 4, device=index.device)
    words = philox4x32(
        (
            block[None, :],
            index[:, None].long() & _MASK,
            torch.full((1, 1), step & _MASK, device=index.device),
            torch.full((1, 1), int(stream), device=index.device),
        ),
        seed,
    )
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :count]


def uniform(seed: int, step: int, index: Tensor, stream: Stream, shape: tuple[int, ...] = ()) -> Tensor:
    """Return uniform numbers in the open interval (0, 1), float64, shape (B, *shape); see :func:`random_bits`."""
    bits = random_bits(seed, step, index, stream, math.prod(shape))
    return ((bits.double() + 0.5) * 2.0**-32).reshape(len(index), *shape)


def integers(seed: int, step: int, index: Tensor, stream: Stream, high: int) -> Tensor:
    """Return one uniform integer in [0, high) per sample, (B,) int64. ``high`` must be below 2^31."""
    return (random_bits(seed, step, index, stream, 1)[:, 0] * high) >> 32


def normal(seed: int, step: int, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers, float32, shape (B, *shape). The Box-Muller transform in float64 differs between
    processors in its last bits; rounding to float32 removes the difference."""
    count = math.prod(shape)
    u = uniform(seed, step, index, stream, (count + count % 2,))
    radius, angle = torch.sqrt(-2.0 * torch.log(u[:, 0::2])), 2.0 * math.pi * u[:, 1::2]
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pairs.flatten(1)[:, :count].float().reshape(len(index), *shape)


def initial_noise(seed: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw the noise at which sampling starts: (B, *shape) float32 standard normal, on ``index``'s device. ``index``:
    (B,) int64, the samples' indices in the job. A sample's noise depends only on ``seed`` and its index."""
    return normal(seed, 0, index, Stream.SAMPLE_INIT, shape)


def keyed_noise(seed: int, index: Tensor, shape: tuple[int, ...]) -> Callable[[int], Tensor]:
    """Return a ``noise_fn``. A sample's noise in step k depends only on ``seed``, k and the sample's index."""
    return lambda k: normal(seed, k, index, Stream.SAMPLE_STEP, shape)


# fraction of clips without conditioning frames in the modes "first" and "prefix:K"
WITHOUT = 0.1


def conditioning_lengths(mode: str, frames: int, u: Tensor) -> Tensor:
    """Map ``u`` (B,), uniform in (0, 1), to each clip's number of conditioning frames, (B,) int64.

    In mode "random", each number from 0 to frames - 1 is equally likely. Modes "first" and "prefix:K" give 1 or K, at
    most frames - 1; with probability ``WITHOUT``, they give 0."""
    count = parse_given(mode)
    if count is None:
        return (u * frames).long().clamp(max=frames - 1)
    return torch.where(u < WITHOUT, 0, min(count, frames - 1))


def draw_conditioning_frames(mode: str | None, latents: Tensor, seed: int, step: int, index: Tensor) -> Tensor | None:
    """Return a training step's mask and conditioning frames for clean latents (B, C, T, H, W), concatenated along the
    channels to (B, 1 + C, T, H, W). Return None if ``mode`` is None."""
    if mode is None:
        return None
    return give(
        latents, conditioning_lengths(mode, latents.shape[2], uniform(seed, step, index, Stream.CONDITIONING_FRAMES))
    )


def draw_route(
    route: TokenRoute | None, tokens: int | None, seed: int, step: int, index: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return (:func:`draw_kept_tokens`, :func:`draw_dropped`). From step ``route.until`` on, the first is None."""
    sparse = route is not None and (route.until is None or step < route.until)
    kept = draw_kept_tokens(route if sparse else None, tokens, seed, step, index)
    return kept, draw_dropped(route, 0.0 if route is None else route.drop, seed, step, index)


def draw_kept_tokens(
    route: TokenRoute | None, tokens: int | None, seed: int, step: int, index: Tensor
) -> Tensor | None:
    """Draw each sample's tokens for the route's blocks: indices (B, route.kept(tokens)) int64, ascending. All subsets
    are equally likely. Return None if the blocks process all tokens."""
    if route is None or tokens is None or route.share == 0:
        return None
    u = uniform(seed, step, index, Stream.ROUTE, (tokens,))
    order = torch.sort(u, dim=1, stable=True).indices  # stable: breaks ties equally on every device
    return order[:, : route.kept(tokens)].sort(dim=1).values


def draw_dropped(route: TokenRoute | None, share: float, seed: int, step: int, index: Tensor) -> Tensor | None:
    """Draw (B,) bool, True with probability ``share``. For a True sample, mask tokens replace the tokens after a fused
    route. Return None without a fused route."""
    if route is None or not route.fused:
        return None
    return uniform(seed, step, index, Stream.ROUTE_DROP) < share
