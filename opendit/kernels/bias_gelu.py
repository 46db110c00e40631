"""The MLP's activation with the previous layer's bias: y = GELU(x + bias), tanh form, x (..., D), bias (D,).

The linear layer runs without its bias. The computation is fp32, and y has x's dtype. One backward pass reads x and dy
once, writes dx once, and also sums the bias's gradient:

    dx = GELU'(x + bias) * dy,  dbias = sum over rows of dx
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common, fp8
from opendit.kernels.common import Launch, check_tensors
from opendit.kernels.fp8 import Float8
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import (
    column_block,
    float8_factor,
    float8_range,
    gelu_sigmoid,
    load_columns,
    store_column_sums,
)

# ---------------------------------------------------------------------------------------------------------- reference


def bias_gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


# ------------------------------------------------------------------------------------------------------------ kernels

FORWARD = Launch(rows=32, tiles=1, warps=4)
BACKWARD = Launch(rows=32, tiles=16, warps=4, stages=3)
# fewer programs than FORWARD, because each program first reads all partial maxima
FORWARD_FLOAT8 = Launch(rows=32, tiles=4, warps=4)


@triton.jit(do_not_specialize=("rows",))
def _bias_gelu_forward_kernel(
    x_ptr, bias_ptr, y_ptr, partial_ptr, descale_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr,
    LIMIT: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    first = (tl.program_id(0) // BLOCKS) * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    factor = 1.0
    if FLOAT8:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    bias = load_columns(bias_ptr, column, D, BLOCK)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        u = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias
        y = u * gelu_sigmoid(u, u * u, APPROXIMATE)
        if FLOAT8:
            y = float8_range(y, factor, LIMIT)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def _bias_gelu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, descale_ptr, dbias_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr,
    LIMIT: tl.constexpr, APPROXIMATE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // BLOCKS
    first = program * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    factor = 1.0
    if FLOAT8:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    bias = load_columns(bias_ptr, column, D, BLOCK)
    if SUMS:
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        u = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        square = u * u
        s = gelu_sigmoid(u, square, APPROXIMATE)
        dx = dy * (s + u * (s - s * s) * (1.5957691216057308 + 0.2140644488178144 * square))
        if SUMS:
            total += dx  # rows beyond ``stop`` add nothing, because their dy is 0
        if FLOAT8:
            dx = float8_range(dx, factor, LIMIT)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if SUMS:
        store_column_sums(dbias_ptr + tl.cast(program, tl.int64) * D, total, column, D, BLOCK)


# ----------------------------------------------------------------------------------------------------------- operator


def _launch_forward(x: Tensor, bias: Tensor, y: Tensor | Float8, partial: Tensor | None = None) -> None:
    cut, options = common.cut_blocks("bias_gelu_forward", FORWARD if isinstance(y, Tensor) else FORWARD_FLOAT8, x)
    pointers, format_options = fp8.kernel_arguments(y, partial, fp8.SAMPLED)
    grid = (cut.programs * options["BLOCKS"],)
    _bias_gelu_forward_kernel[grid](cut.x, bias, *pointers, cut.length, **options, **format_options)


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    y = _forward_fake(x, bias)
    _launch_forward(x, bias, y)
    return y


def _forward_fake(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def bias_gelu_float8(x: Tensor, bias: Tensor) -> Float8:
    """Compute GELU(x + bias) of x (..., D) in e4m3."""
    y = Float8.empty(x.shape, fp8.E4M3, x.device)
    _launch_forward(x, bias, y, fp8.amax(x, bias=bias))
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, bias: Tensor, sums: bool, dx: Tensor | Float8, partial: Tensor | None = None
) -> Tensor | None:
    cut, options = common.cut_blocks("bias_gelu_backward", BACKWARD, x)
    total = cut.new_total() if sums else None
    pointers, format_options = fp8.kernel_arguments(dx, partial, fp8.SAMPLED_GRADIENT)
    _bias_gelu_backward_kernel[(cut.programs * options["BLOCKS"],)](
        dy, cut.x, bias, *pointers, common.or_unused(total, x), cut.length, SUMS=sums, **options, **format_options
    )
    return None if total is None else common.finish_total(total, bias.dtype)


def _backward(dy: Tensor, x: Tensor, bias: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    dx, none = _backward_fake(dy, x, bias, False)
    dbias = _launch_backward(dy.contiguous(), x, bias, sums, dx)
    return dx, none if dbias is None else dbias


def _backward_fake(dy: Tensor, x: Tensor, bias: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), common.like_bias(bias if sums else None, x)


def bias_gelu_backward_float8(dy: Tensor, x: Tensor, bias: Tensor, sums: bool) -> tuple[Float8, Tensor | None]:
    """Return (dx in e5m2, dbias); dbias is None without ``sums``. dx's scale follows from dy's amax."""
    dy, dx = dy.contiguous(), Float8.empty(x.shape, fp8.E5M2, x.device)
    return dx, _launch_backward(dy, x, bias, sums, dx, fp8.amax(dy))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the saved x and bias; None for a frozen bias."""
    dx, dbias = _backward_op(dy, *ctx.saved_tensors, ctx.needs_input_grad[1])
    return dx, dbias if ctx.needs_input_grad[1] else None


_backward_op = operator(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, bool sums) -> (Tensor, Tensor)", _backward, _backward_fake
)
_forward_op = operator("bias_gelu(Tensor x, Tensor bias) -> Tensor", _forward, _forward_fake, gradients, _setup_context)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(x + bias), tanh form, with Triton kernels, differentiable in both. x is (..., D) and bias (D,), both
    bf16, fp16 or fp32. Returns x's shape and dtype. Raises ValueError if shapes, dtypes or devices don't fit."""
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must be (D,) = {tuple(x.shape[-1:])}, not {tuple(bias.shape)}")
    check_tensors(x=x, bias=bias)
    return _forward_op(x, bias)
