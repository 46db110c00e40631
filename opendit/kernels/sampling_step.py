"""Kernels for the start and the end of a sampling step, without gradients.

``embed_patches`` turns the sampler's state into tokens. ``take_step`` and ``gather_rows`` read rows of tables for each
sample. ``guided_update`` applies guidance and the sampler's update to the network's output.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import next_power_of_2, or_unused
from opendit.kernels.language import tl, triton

# -------------------------------------------------------------------------------------------------------------- patches


def as_clip(sides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sides (t, h, w) of a clip unchanged, and the sides (h, w) of a picture as (1, h, w)."""
    return cast("tuple[int, int, int]", (1,) * (3 - len(sides)) + tuple(sides))


def embed_patches_reference(
    x: Tensor, weight: Tensor, bias: Tensor, positions: Tensor | None, scale: Tensor | None = None, copies: int = 1
) -> Tensor:
    """Compute :func:`embed_patches` in torch, with sums in fp32 or fp64."""
    if scale is not None:
        x = x * scale.view(-1, *(1,) * (x.dim() - 1))
    wide = torch.promote_types(weight.dtype, torch.float32)
    convolve = F.conv2d if weight.dim() == 4 else F.conv3d
    y = convolve(x.to(weight.dtype).to(wide), weight.to(wide), bias.to(wide), stride=weight.shape[2:])
    y = y.flatten(2).mT
    return (y if positions is None else y + positions).to(weight.dtype).repeat(copies, 1, 1)


ROWS, COLUMNS = 16, 128  # tokens and columns per program


@triton.jit(do_not_specialize=("samples", "tokens", "T", "H", "W", "stride"))
def _embed_patches_kernel(
    x_ptr, scale_ptr, weight_ptr, bias_ptr, positions_ptr, y_ptr, samples, tokens, T, H, W, stride,
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COPIES: tl.constexpr, SCALED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(2)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    t, h, w = token // ((H // PH) * (W // PW)), token // (W // PW) % (H // PH), token % (W // PW)
    start = (t * PT * H + h * PH) * W + w * PW
    x_ptr += tl.cast(sample, tl.int64) * C * T * H * W
    factor = 1.0
    if SCALED:
        factor = tl.load(scale_ptr + sample * stride)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = cols < D
    y = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    VALUES: tl.constexpr = C * PT * PH * PW
    for first in range(0, VALUES, 16):
        # The values of a patch have the order of the convolution's weight: channel, frame, row, column.
        inside = first + tl.arange(0, 16)
        c, dt = inside // (PT * PH * PW), inside // (PH * PW) % PT
        dh, dw = inside // PW % PH, inside % PW
        there = inside < VALUES
        offset = ((c * T + dt) * H + dh) * W + dw
        x = tl.load(x_ptr + start[:, None] + offset[None, :], mask=live[:, None] & there[None, :], other=0.0) * factor
        place = cols[None, :] * VALUES + inside[:, None]
        weight = tl.load(weight_ptr + place, mask=there[:, None] & wide[None, :], other=0.0)
        y = tl.dot(x.to(weight_ptr.dtype.element_ty), weight, y, out_dtype=tl.float32, input_precision="ieee")
    y += tl.load(bias_ptr + cols, mask=wide, other=0.0).to(tl.float32)[None, :]
    mask = live[:, None] & wide[None, :]
    place = token[:, None] * D + cols[None, :]
    if PLACED:
        y += tl.load(positions_ptr + place, mask=mask, other=0.0).to(tl.float32)
    for copy in range(COPIES):
        row = tl.cast(copy * samples + sample, tl.int64) * tokens * D
        tl.store(y_ptr + row + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def embed_patches(
    x: Tensor, weight: Tensor, bias: Tensor, positions: Tensor | None, scale: Tensor | None = None, copies: int = 1
) -> Tensor:
    """Compute y = patches(s x) W^T + bias + positions, (copies * B, N, D) in W's dtype.

    The kernel rounds patches to W's dtype. Sums are fp32 and rounded once.

    Args:
        x: (B, C, H, W) or (B, C, T, H, W) fp32, contiguous: the sampler's state. Sides are divisible by the patch's.
        weight: weight (D, C, *patch) of the patch convolution, bf16, fp16 or fp32.
        bias: (D,).
        positions: (1, N, D) or (N, D), any of these dtypes; None: no positions are added.
        scale: (B,) fp32, the factor s of each sample, such as EDM's c_in; None: 1.
        copies: 2 to write the tokens twice, for both halves of a guided batch.
    """
    D, C, *patch = weight.shape
    patch, sides = as_clip(tuple(patch)), as_clip(tuple(x.shape[2:]))
    tokens = math.prod(side // p for side, p in zip(sides, patch, strict=True))
    y = torch.empty(copies * len(x), tokens, D, dtype=weight.dtype, device=x.device)
    positions = positions if positions is None else positions.contiguous()
    _embed_patches_kernel[(-(-tokens // ROWS), -(-D // COLUMNS), len(x))](
        x, or_unused(scale, x), weight.contiguous(), bias, or_unused(positions, x), y, len(x), tokens, *sides,
        or_unused(scale, x).stride(0),
        C=C, PT=patch[0], PH=patch[1], PW=patch[2], D=D, ROWS=ROWS, BLOCK=COLUMNS, COPIES=copies,
        SCALED=scale is not None, PLACED=positions is not None, num_warps=4,
    )  # fmt: skip
    return y


# ------------------------------------------------------------------------------------------------------- rows of tables


def take_step_reference(step: Tensor, rows: Tensor, stride: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.arange(len(step), device=step.device)
    found = (rows + step * stride).flatten(), numbers[step], order + step * len(step)
    step += 1
    return found


@triton.jit(do_not_specialize=("samples", "stride"))
def _take_step_kernel(
    step_ptr, rows_ptr, numbers_ptr, rows_out_ptr, numbers_out_ptr, cells_ptr, samples, stride,
    HALVES: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    step = tl.load(step_ptr + sample)
    for half in range(HALVES):
        place = half * samples + sample
        tl.store(rows_out_ptr + place, tl.load(rows_ptr + place) + step * stride)
    cols = tl.arange(0, BLOCK)
    row = tl.load(numbers_ptr + step * NUMBERS + cols, mask=cols < NUMBERS)
    tl.store(numbers_out_ptr + sample * NUMBERS + cols, row, mask=cols < NUMBERS)
    tl.store(cells_ptr + sample, step * samples + sample)
    tl.store(step_ptr + sample, step + 1)


WIDTH = 2048  # columns per program


@triton.jit
def _gather_rows_kernel(table_ptr, rows_ptr, out_ptr, columns, stride, WIDTH: tl.constexpr):
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    value = tl.load(table_ptr + row * stride + cols, mask=cols < columns)
    tl.store(out_ptr + tl.cast(tl.program_id(1), tl.int64) * columns + cols, value, mask=cols < columns)


def take_step(step: Tensor, rows: Tensor, stride: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Look up each sample's step in two tables, and add 1 to ``step``. Samples may be at different steps.

    Args:
        step: (B,) int64.
        rows: (halves, B) int64, contiguous: each sample's row number in the first table at step 0. The number grows by
            ``stride`` in each step.
        numbers: (steps, K) fp32, K values for each step.

    Returns:
        (halves * B,) int64: each sample's row number in the first table at its step.
        (B, K) fp32: each sample's row of ``numbers``.
        (B,) int64: step * B + b, the row of sample b in a table of all steps and samples.
    """
    B, count = len(step), numbers.shape[1]
    rows_out, cells = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device), torch.empty_like(step)
    numbers_out = torch.empty(B, count, dtype=numbers.dtype, device=numbers.device)
    _take_step_kernel[(B,)](
        step, rows, numbers, rows_out, numbers_out, cells, B, stride,
        HALVES=len(rows), NUMBERS=count, BLOCK=next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return rows_out, numbers_out, cells


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return ``table.index_select(0, rows)``. table: (R, W), may be a slice of columns; rows: (n,) int64.

    The kernel suits a few wide rows. For 16 rows of 195,840 values (DiT-XL/2's modulations) on an H200, torch's kernel
    took 17 us, four times the time of the memory traffic.
    """
    out = torch.empty(len(rows), table.shape[1], dtype=table.dtype, device=table.device)
    _gather_rows_kernel[(-(-table.shape[1] // WIDTH), len(rows))](
        table, rows, out, table.shape[1], table.stride(0), WIDTH=WIDTH, num_warps=8
    )
    return out


MOST_OLD, MOST_NEW = 3, 2  # maximum lengths of ``old`` and ``new``, and numbers of pointers in the kernel

# -------------------------------------------------------------------------------------------------- guidance and update


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


BLOCK = 256  # values of one sample per program


@triton.jit
def _sum(
    coefficients_ptr, FIRST: tl.constexpr, old0, old1, old2, prediction, noise, factor,
    OLD: tl.constexpr, NOISE: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """Sum the terms, each times its coefficient. FIRST: index of the first coefficient."""
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
    # position of the value in ``tokens``: (token; frame, row and column in the patch; channel)
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
        new1 = _sum(coefficients_ptr, OLD + 1 + NOISE, old0, old1, old2, prediction, noise, 0.0, OLD, NOISE, False)
        tl.store(new1_ptr + place, new1, mask=live)
    tl.store(new0_ptr + place, new0, mask=live)


def guided_update(
    tokens: Tensor, old: list[Tensor], new: list[Tensor], coefficients: Tensor, patch: tuple[int, ...],
    guidance: Tensor | None = None, channels: int | None = None, noise: Tensor | None = None,
    noise_rows: Tensor | None = None, variance: Tensor | None = None,
) -> None:  # fmt: skip
    """Unpatchify the network's output, apply guidance, and write the sampler's update to ``new``.

        o = u + g (c - u) in guided channels, o = c in other channels
        new_j = sum_i a[b, j, i] old_i + a[b, j, n] o + a[b, j, n + 1] noise

    c and u are the conditional and the unconditional prediction. Sample b has the coefficients a[b] and the guidance g.
    With a learned variance v, the noise's coefficient in new_0 is exp(p + q v) (Nichol and Dhariwal 2021, equation 15).
    The computation is fp32 and element-wise, so outputs may overwrite inputs.

    Args:
        tokens: (B or 2 B, N, prod(patch) * outputs), bf16, fp16 or fp32, contiguous: output of the network's last
            linear layer. The first C output channels are the prediction, and the next C, if any, are v. With
            ``guidance``, the conditional half comes first, then the unconditional half.
        old: one to three tensors (B, C, ...) fp32, contiguous.
        new: one or two tensors (B, C, ...) fp32, contiguous; may be among ``old``.
        coefficients: (B, len(new), terms) fp32, contiguous in each sample. The terms are the tensors of old, the
            prediction, and the noise if there is any.
        patch: (h, w) or (t, h, w).
        guidance: (B,) fp32.
        channels: number of guided channels, counted from the first; None: all.
        noise: (B, C, ...) fp32; with ``noise_rows``, (rows, C, ...).
        noise_rows: (B,) int64, the row of ``noise`` for each sample; None: row b for sample b.
        variance: (B, 2) fp32, contiguous in each sample: p and q.
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
