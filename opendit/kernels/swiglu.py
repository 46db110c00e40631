"""SwiGLU's activation: y = SiLU(a) * b, where x = [a | b] (Shazeer 2020, "GLU Variants Improve Transformer").

x (..., 2 H) is the output of one projection, and y is (..., H). The computation is fp32, and y has x's dtype. The
forward pass reads x once and writes y once. The backward pass reads x and dy once and writes dx = [da | db] once:

    s = sigmoid(a),  da = dy * b * s * (1 + a * (1 - s)),  db = dy * a * s
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import Launch, check_tensors
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import column_block, logistic

# ---------------------------------------------------------------------------------------------------------- reference


def swiglu_reference(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


# ------------------------------------------------------------------------------------------------------------ kernels

# A program has one tile, because these kernels compute no sums over tiles. The backward pass holds twice as many
# tensors in registers, so its tiles have half as many rows.
FORWARD = Launch(rows=32, tiles=1, warps=4)
BACKWARD = Launch(rows=16, tiles=1, warps=4)


@triton.jit
def _sigmoid(a, APPROXIMATE: tl.constexpr):
    return logistic(-1.4426950408889634 * a, APPROXIMATE)  # exp(-a) as a power of 2


@triton.jit
def _halves(column, start, stop, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of a tile in y, the offsets of a in x, and the mask. Offsets of b in x are H larger."""
    offsets, mask = column_block(column, start, stop, H, BLOCK, ROWS)
    wide, _ = column_block(column, start, stop, 2 * H, BLOCK, ROWS)
    return offsets, wide, mask


@triton.jit(do_not_specialize=("rows",))
def _swiglu_forward_kernel(
    x_ptr, y_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """D: H, the number of y's columns."""
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    first = (tl.program_id(0) // BLOCKS) * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, wide, mask = _halves(column, start, stop, D, BLOCK, ROWS)
        a = tl.load(x_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + D + wide, mask=mask, other=0.0).to(tl.float32)
        y = a * _sigmoid(a, APPROXIMATE) * b
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def _swiglu_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """D: H, the number of dy's columns."""
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    first = (tl.program_id(0) // BLOCKS) * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, wide, mask = _halves(column, start, stop, D, BLOCK, ROWS)
        a = tl.load(x_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + D + wide, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        s = _sigmoid(a, APPROXIMATE)
        silu = a * s
        da = dy * b * (s + silu * (1.0 - s))
        tl.store(dx_ptr + wide, da.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + D + wide, (dy * silu).to(dx_ptr.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(x: Tensor) -> Tensor:
    y = _forward_fake(x)
    cut, options = common.cut_blocks("swiglu_forward", FORWARD, y)
    _swiglu_forward_kernel[(cut.programs * options["BLOCKS"],)](x.contiguous(), y, cut.length, **options)
    return y


def _forward_fake(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = _backward_fake(dy, x)
    cut, options = common.cut_blocks("swiglu_backward", BACKWARD, dy)
    _swiglu_backward_kernel[(cut.programs * options["BLOCKS"],)](cut.x, x.contiguous(), dx, cut.length, **options)
    return dx


def _backward_fake(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx, dy):
    return _backward_op(dy, *ctx.saved_tensors)


_backward_op = operator("swiglu_backward(Tensor dy, Tensor x) -> Tensor", _backward, _backward_fake)
_forward_op = operator("swiglu(Tensor x) -> Tensor", _forward, _forward_fake, _autograd_backward, _setup_context)


def swiglu(x: Tensor) -> Tensor:
    """Compute SiLU(a) * b with differentiable Triton kernels. x: [a | b] (..., 2 H), bf16, fp16 or fp32. Returns (...,
    H) in x's dtype. Raises ValueError if the last dimension is odd, or the dtype is not supported."""
    if x.shape[-1] % 2:
        raise ValueError(f"x must be (..., 2 H), not {tuple(x.shape)}")
    check_tensors(x=x)
    return _forward_op(x)
