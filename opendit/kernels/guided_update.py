"""The end of a sampling step in one kernel, without gradients: unpatchify, guidance, and the sampler's update.

    o = u + g (c - u) in guided channels, o = c in other channels
    new_j = sum_i a[b, j, i] old_i + a[b, j, n] o + a[b, j, n + 1] noise

c and u are the conditional and the unconditional prediction, and old_i are n tensors of the sampler's state. The kernel
suits samplers whose update is linear in the state, the predictions so far, and noise. Every sample b has its own
coefficients a and guidance g. With a learned variance (Nichol, Dhariwal 2021, eq. 15), the noise's coefficient in new_0
is exp(p + q v), where v is the second half of the network's output channels. The computation is fp32 and element-wise,
so that a sample doesn't depend on the other samples of the batch, and outputs may overwrite inputs.
"""

import math

import torch
from torch import Tensor

from opendit.kernels.common import or_unused
from opendit.kernels.embed_patches import as_clip
from opendit.kernels.language import tl, triton

MOST_OLD, MOST_NEW = 3, 2  # maximum length of ``old`` and of ``new``, equal to the number of the kernel's pointers

# ---------------------------------------------------------------------------------------------------------- reference


def unpatchify_reference(tokens: Tensor, channels: int, patch: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
    """Return (B, channels, *sides) from tokens (B, N, prod(patch) * channels)."""
    grid = [side // p for side, p in zip(sides, patch, strict=True)]
    axes = len(sides)
    x = tokens.view(len(tokens), *grid, *patch, channels)
    order = [axis for i in range(axes) for axis in (1 + i, 1 + axes + i)]
    return x.permute(0, 1 + 2 * axes, *order).reshape(len(tokens), channels, *sides)


def guided_update_reference(
    tokens: Tensor, old: list[Tensor], new: list[Tensor], coefficients: Tensor, patch: tuple[int, ...],
    guidance: Tensor | None = None, channels: int | None = None, noise: Tensor | None = None,
    noise_rows: Tensor | None = None, variance: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute :func:`guided_update` in torch."""
    B, C, *sides = old[0].shape
    output = unpatchify_reference(tokens, tokens.shape[-1] // math.prod(patch), patch, tuple(sides)).to(old[0].dtype)

    def of_samples(numbers: Tensor) -> Tensor:
        return numbers.view(-1, *(1,) * (1 + len(sides)))

    prediction = output[:B, :C]
    if guidance is not None:
        guided = C if channels is None else channels
        low = output[B:, :guided]
        prediction = torch.cat((low + of_samples(guidance) * (output[:B, :guided] - low), output[:B, guided:C]), 1)
    terms = [*old, prediction]
    if noise is not None:
        terms.append(noise if noise_rows is None else noise[noise_rows])
    sums = []
    for j in range(len(new)):
        weights = [of_samples(coefficients[:, j, i]) for i in range(len(terms))]
        if j == 0 and variance is not None:
            weights[-1] = torch.exp(of_samples(variance[:, 0]) + of_samples(variance[:, 1]) * output[:B, C : 2 * C])
        sums.append(sum(weight * term for weight, term in zip(weights, terms, strict=True)))
    for into, value in zip(new, sums, strict=True):
        into.copy_(value)


# ------------------------------------------------------------------------------------------------------------- kernel

BLOCK = 256  # values of one sample that a program processes


@triton.jit
def _sum(
    coefficients_ptr, FIRST: tl.constexpr, old0, old1, old2, prediction, noise, factor,
    OLD: tl.constexpr, NOISE: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """Sum the terms, each times its coefficient in one row of the sample's coefficients."""
    total = tl.load(coefficients_ptr + FIRST) * old0
    if OLD > 1:
        total += tl.load(coefficients_ptr + FIRST + 1) * old1
    if OLD > 2:
        total += tl.load(coefficients_ptr + FIRST + 2) * old2
    total += tl.load(coefficients_ptr + FIRST + OLD) * prediction
    if NOISE:
        if not VARIANCE:
            factor = tl.load(coefficients_ptr + FIRST + OLD + 1)
        total += factor * noise
    return total


@triton.jit(do_not_specialize=("samples", "tokens", "T", "H", "W", "stride", "variance_stride"))
def _guided_update_kernel(
    tokens_ptr, old0_ptr, old1_ptr, old2_ptr, new0_ptr, new1_ptr, coefficients_ptr, guidance_ptr, noise_ptr,
    noise_rows_ptr, variance_ptr, samples, tokens, T, H, W, stride, variance_stride,
    C: tl.constexpr, OUT: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr,
    OLD: tl.constexpr, NEW: tl.constexpr, GUIDED: tl.constexpr, NOISE: tl.constexpr, NOISE_ROWS: tl.constexpr,
    VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1)
    size = C * T * H * W
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    c, t, h, w = place // (T * H * W), place // (H * W) % T, place // W % H, place % W
    # Position of the value in ``tokens``: (token; frame, row and column in the patch; channel).
    token = (t // PT * (H // PH) + h // PH) * (W // PW) + w // PW
    inside = ((t % PT * PH + h % PH) * PW + w % PW) * OUT + c
    row = tl.cast(sample, tl.int64) * tokens * (PT * PH * PW * OUT)
    value = token * (PT * PH * PW * OUT) + inside
    prediction = tl.load(tokens_ptr + row + value, mask=live).to(tl.float32)
    if GUIDED:
        other = tl.cast(samples, tl.int64) * tokens * (PT * PH * PW * OUT)
        low = tl.load(tokens_ptr + other + row + value, mask=live & (c < CHANNELS), other=0.0).to(tl.float32)
        guided = low + tl.load(guidance_ptr + sample) * (prediction - low)
        prediction = tl.where(c < CHANNELS, guided, prediction)
    place += tl.cast(sample, tl.int64) * size
    old0 = tl.load(old0_ptr + place, mask=live)
    old1, old2, noise, factor = old0, old0, old0, 0.0
    if OLD > 1:
        old1 = tl.load(old1_ptr + place, mask=live)
    if OLD > 2:
        old2 = tl.load(old2_ptr + place, mask=live)
    if NOISE:
        noise_place = place
        if NOISE_ROWS:
            noise_place += (tl.load(noise_rows_ptr + sample) - sample) * size
        noise = tl.load(noise_ptr + noise_place, mask=live)
    coefficients_ptr += sample * stride
    variance_ptr += sample * variance_stride
    if VARIANCE:
        v = tl.load(tokens_ptr + row + value + C, mask=live).to(tl.float32)
        factor = tl.exp(tl.load(variance_ptr) + tl.load(variance_ptr + 1) * v)
    new0 = _sum(coefficients_ptr, 0, old0, old1, old2, prediction, noise, factor, OLD, NOISE, VARIANCE)
    if NEW > 1:
        new1 = _sum(
            coefficients_ptr, OLD + 1 + NOISE, old0, old1, old2, prediction, noise, 0.0, OLD, NOISE, False
        )  # fmt: skip
        tl.store(new1_ptr + place, new1, mask=live)
    tl.store(new0_ptr + place, new0, mask=live)


# ---------------------------------------------------------------------------------------------------------- operation


def guided_update(
    tokens: Tensor, old: list[Tensor], new: list[Tensor], coefficients: Tensor, patch: tuple[int, ...],
    guidance: Tensor | None = None, channels: int | None = None, noise: Tensor | None = None,
    noise_rows: Tensor | None = None, variance: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the update and write ``new``.

    Args:
        tokens: (B or 2 B, N, prod(patch) * outputs), bf16, fp16 or fp32, contiguous: output of the network's last
            linear layer. The first C output channels are the prediction, and the next C, if any, are v. With
            ``guidance``, the conditional half comes first, then the unconditional half.
        old: one to three tensors (B, C, ...) fp32, contiguous.
        new: one or two tensors (B, C, ...) fp32, contiguous, to write to; may be among ``old``.
        coefficients: (B, len(new), terms) fp32, contiguous in each sample. The terms are the tensors of old, the
            prediction, and the noise if there is any.
        patch: (h, w) or (t, h, w).
        guidance: (B,) fp32.
        channels: number of guided channels, counted from the first; None: all.
        noise: (B, C, ...) fp32; with ``noise_rows``, (rows, C, ...).
        noise_rows: (B,) int64, the row of ``noise`` for each sample; None: row b for sample b.
        variance: (B, 2) fp32, contiguous in each sample: p and q of the noise's coefficient in new_0.
    """
    B, C, *sides = old[0].shape
    sides, patch = as_clip(tuple(sides)), as_clip(tuple(patch))
    first = old[0]
    pointers = [*old, *[first] * (MOST_OLD - len(old)), *new, *[first] * (MOST_NEW - len(new))]
    size = C * math.prod(sides)
    _guided_update_kernel[(-(-size // BLOCK), B)](
        tokens, *pointers, coefficients, or_unused(guidance, first), or_unused(noise, first),
        or_unused(noise_rows, first), or_unused(variance, first), B, tokens.shape[1], *sides, coefficients.stride(0),
        or_unused(variance, first).stride(0),
        C=C, OUT=tokens.shape[2] // math.prod(patch), PT=patch[0], PH=patch[1], PW=patch[2], CHANNELS=channels or C,
        OLD=len(old), NEW=len(new), GUIDED=guidance is not None, NOISE=noise is not None,
        NOISE_ROWS=noise_rows is not None, VARIANCE=variance is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
