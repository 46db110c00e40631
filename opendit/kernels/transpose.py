"""Transpose a matrix at memory bandwidth. torch's copy of a transposed view takes about seven times as long."""

from typing import Any

import torch
from torch import Tensor

from opendit.kernels.common import block_width
from opendit.kernels.language import tl, triton
from opendit.kernels.tiles import column_block

TILE = {"ROWS": 64, "num_warps": 4}


@triton.jit(do_not_specialize=("rows", "sixteens"))
def _transpose_kernel(
    x_ptr, y_ptr, rows, sixteens, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Transpose x (rows, D) to y (D, 16 * sixteens).

    ROWS is a multiple of 16, so that the last tile also writes the padding.
    """
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    start = (tl.program_id(0) // BLOCKS) * ROWS
    offsets, mask = column_block(column, start, rows, D, BLOCK, ROWS)
    tile = tl.load(x_ptr + offsets, mask=mask, other=0)
    row = start + tl.arange(0, ROWS)
    cols = column + tl.arange(0, BLOCK)
    offsets = (cols.to(tl.int64) * (sixteens * 16))[:, None] + row[None, :]
    tl.store(y_ptr + offsets, tl.trans(tile), mask=(cols < D)[:, None] & (row < sixteens * 16)[None, :])


def tiles_of(x: Tensor, launch: dict[str, Any]) -> tuple[tuple[int], int, dict[str, Any]]:
    """Return grid, number of rows, and options for a kernel whose programs each process one tile of x (..., D)."""
    width = x.shape[-1]
    rows, block = x.numel() // width, block_width(width)
    blocks = -(-width // block)
    return (-(-rows // launch["ROWS"]) * blocks,), rows, {"D": width, "BLOCK": block, "BLOCKS": blocks, **launch}


def transpose(x: Tensor) -> Tensor:
    """Transpose x (T, D) to (D, T rounded up to a multiple of 16), padded with zeros.

    x must be contiguous, and may have any dtype that Triton supports.
    """
    grid, rows, shape = tiles_of(x, TILE)
    sixteens = -(-rows // 16)
    y = torch.empty(x.shape[1], 16 * sixteens, dtype=x.dtype, device=x.device)
    _transpose_kernel[grid](x, y, rows, sixteens, **shape)
    return y
