"""Embed patches in one kernel, without gradients: y = patches(s x) W^T + bias + positions.

x (B, C, ..., H, W) fp32 is a sampler's state, and s (B,) scales x to the network's input (1, or EDM's c_in). The kernel
gathers patches from x and rounds them to W's dtype, the dtype of the network's input. Sums are fp32 and rounded once.
Both halves of a guided batch start with the same tokens, so the kernel computes these once and writes them twice.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import or_unused
from opendit.kernels.language import tl, triton

# ---------------------------------------------------------------------------------------------------------- reference


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


# ------------------------------------------------------------------------------------------------------------- kernel

ROWS, BLOCK = 16, 128  # tokens and columns per program


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
        # The values of a patch are in the order of the convolution's weight: channel, frame, row, column.
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


# ---------------------------------------------------------------------------------------------------------- operation


def embed_patches(
    x: Tensor, weight: Tensor, bias: Tensor, positions: Tensor | None, scale: Tensor | None = None, copies: int = 1
) -> Tensor:
    """Return (copies * B, N, D) in weight's dtype: the B samples' tokens, repeated ``copies`` times.

    Args:
        x: (B, C, H, W) or (B, C, T, H, W) fp32, contiguous; its sides are divisible by the patch's.
        weight: weight (D, C, *patch) of the patch convolution, bf16, fp16 or fp32.
        bias: (D,).
        positions: (1, N, D) or (N, D), any of these dtypes; None: no positions are added.
        scale: (B,) fp32, the factor s of each sample; None: 1.
        copies: number of times that the tokens are written.
    """
    D, C, *patch = weight.shape
    patch, sides = as_clip(tuple(patch)), as_clip(tuple(x.shape[2:]))
    tokens = math.prod(side // p for side, p in zip(sides, patch, strict=True))
    y = torch.empty(copies * len(x), tokens, D, dtype=weight.dtype, device=x.device)
    positions = positions if positions is None else positions.contiguous()
    _embed_patches_kernel[(-(-tokens // ROWS), -(-D // BLOCK), len(x))](
        x, or_unused(scale, x), weight.contiguous(), bias, or_unused(positions, x), y, len(x), tokens, *sides,
        or_unused(scale, x).stride(0),
        C=C, PT=patch[0], PH=patch[1], PW=patch[2], D=D, ROWS=ROWS, BLOCK=BLOCK, COPIES=copies,
        SCALED=scale is not None, PLACED=positions is not None, num_warps=4,
    )  # fmt: skip
    return y
