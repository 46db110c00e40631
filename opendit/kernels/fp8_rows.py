"""Cast x, or GELU(x + bias) in tanh form, to e4m3 in one pass with one scale per row, without gradients.

x is (..., D), and bias (D,). The computation is fp32. A program holds a complete row, and so computes the row's largest
absolute value and its codes in a single read. The result for a token depends on this token only, so that a sample
doesn't depend on the other samples of the batch.
"""

import torch
from torch import Tensor

from opendit.kernels import fp8
from opendit.kernels.common import or_unused, split_width
from opendit.kernels.fp8 import E4M3, Float8
from opendit.kernels.language import tl, triton
from opendit.kernels.tiles import gelu_coarse, largest_of, load_tiles, load_vectors, power_of_2, store_tiles

# ---------------------------------------------------------------------------------------------------------- reference


def rows_in_float8_reference(y: Tensor) -> Float8:
    """Cast y (..., D), which must be finite, to e4m3 with one scale per row, in torch."""
    rows = y.float().flatten(0, -2)
    factor = fp8.float8_factor_reference(rows.abs().amax(1, keepdim=True), fp8.EXACT)
    return Float8(fp8.float8_reference(rows, factor, E4M3).view(y.shape), 1 / factor)


# ------------------------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=("rows",))
def _rows_kernel(
    x_ptr, scale_ptr, bias_ptr, y_ptr, descale_ptr, rows,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, GELU: tl.constexpr,
    SCALED: tl.constexpr, TARGET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, rows)):
        live = start + tl.arange(0, 1) < rows
        row = tl.cast(start, tl.int64)
        y, yt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, 1)
        if SCALED:
            number = tl.load(scale_ptr + row)
            y *= number
            yt *= number
        if GELU:
            bias, bias_t = load_vectors(bias_ptr, D, MAIN, TAIL)
            y = gelu_coarse(y + bias, APPROXIMATE)
            yt = gelu_coarse(yt + bias_t, APPROXIMATE)
        largest = largest_of(y, yt, TAIL)
        factor, descale = power_of_2(largest, TARGET)
        # Finite values need no clamping, because the factor follows from the row's largest absolute value. If that
        # value is infinite, the descale NaN makes the whole row NaN. A NaN in the row is ignored in the maximum, but
        # stays NaN.
        tl.store(descale_ptr + row, tl.where(largest < float("inf"), descale, float("nan")))
        store_tiles(y_ptr, y * factor, yt * factor, row, live, D, MAIN, TAIL, 1)


# ---------------------------------------------------------------------------------------------------------- operation


def default_warps(width: int, rows: int) -> int:
    """Return the number of warps per program, 1 to 16: one for each 2,048 columns of the main block.

    For at most 1,024 rows, which leave the GPU half empty, there are four times as many warps.

    Measured on an H200 for GELU's 4,608 columns: 512 rows took 4.7 us with 4 warps and 3.9 with 8; 32,768 rows 118 with
    4 and 112 with 2.
    """
    return min(16, max(1, split_width(width)[0] // (512 if rows <= 1024 else 2048)))


def rows_in_float8(
    x: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, warps: int | None = None, chunk: int = 1
) -> Float8:
    """Cast x (..., D) bf16, fp16 or fp32 to e4m3 with one scale per row; with ``bias`` (D,), GELU(x + bias).

    Args:
        scale: (rows, 1) fp32, factors for the rows of x.
        warps: warps per program.
        chunk: rows that a program processes, one after the other.
    """
    x, y = x.contiguous(), Float8.empty(x.shape, E4M3, x.device, by_row=True)
    rows, width = y.descale.shape[0], x.shape[-1]
    main, tail = split_width(width)
    approximate = x.is_cuda and torch.version.hip is None  # the inline assembly of tiles.logistic is for NVIDIA GPUs
    _rows_kernel[(-(-rows // chunk),)](
        x, or_unused(scale, x), or_unused(bias, x), y.data, y.descale, rows,
        D=width, MAIN=main, TAIL=tail, CHUNK=chunk, GELU=bias is not None, SCALED=scale is not None, TARGET=fp8.EXACT,
        APPROXIMATE=approximate, num_warps=warps or default_warps(width, rows),
    )  # fmt: skip
    return y
