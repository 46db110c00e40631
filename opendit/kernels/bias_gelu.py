"""The MLP's activation with the bias of the layer before it: y = GELU(x + bias), tanh form.

x (..., D), bias (D,). Computed in fp32, I/O in bf16, fp16 or fp32; y has x's dtype. The layer before runs without its
bias, and backward makes the bias's gradient in the pass that it needs anyway: reads x and dy once, writes dx once.

    dx = GELU'(x + bias) * dy,  dbias = sum over rows of dx
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import Launch, Rows, block_width, tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import column_block, load_columns, store_column_sums

# ---------------------------------------------------------------------------------------------------------- reference


def bias_gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) in torch, in the inputs' precision."""
    return F.gelu(x + bias, approximate="tanh")


# ------------------------------------------------------------------------------------------------------------ kernels

FORWARD = Launch(rows=32, tiles=1, warps=4)
BACKWARD = Launch(rows=16, tiles=16, warps=4)


@triton.jit
def _sigmoid(u):
    """sigmoid(2 z), z = sqrt(2 / pi) * (u + 0.044715 u^3). GELU is u times this: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    return 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (u + 0.044715 * u * u * u)))


@triton.jit(do_not_specialize=("rows",))
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    first = (tl.program_id(0) // BLOCKS) * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    bias = load_columns(bias_ptr, column, D, BLOCK)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        u = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias
        tl.store(y_ptr + offsets, (u * _sigmoid(u)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // BLOCKS
    first = program * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    bias = load_columns(bias_ptr, column, D, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        u = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        s = _sigmoid(u)
        dx = dy * (s + u * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488178144 * u * u))
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx  # rows beyond ``stop`` have dy = 0
    store_column_sums(dbias_ptr + tl.cast(program, tl.int64) * D, total, column, D, BLOCK)


# ----------------------------------------------------------------------------------------------------------- operator


def _cut(kernel: str, default: Launch, x: Tensor) -> tuple[Rows, dict]:
    """All rows as those of one sample, cut for the kernel; what both kernels are launched with."""
    width = x.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = common.cut_rows(kernel, default, x.reshape(1, -1, width), 1, None, blocks)
    return cut, {"D": width, "BLOCK": block, "BLOCKS": blocks, **cut.launch.options()}


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    cut, options = _cut("bias_gelu_forward", FORWARD, x)
    y = _forward_fake(x, bias)
    _forward_kernel[(cut.programs * options["BLOCKS"],)](cut.x, bias, y, cut.length, **options)
    return y


def _forward_fake(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    cut, options = _cut("bias_gelu_backward", BACKWARD, x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = cut.new_total()
    grid = (cut.programs * options["BLOCKS"],)
    _backward_kernel[grid](dy.contiguous(), cut.x, bias, dx, total, cut.length, **options)
    return dx, common.finish_total(total, bias.dtype)


def _backward_fake(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, bias))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx, dy):
    return _backward_op(dy, *ctx.saved_tensors)


_backward_op = operator(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias) -> (Tensor, Tensor)", _backward, _backward_fake
)
_forward_op = operator(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor", _forward, _forward_fake, _autograd_backward, _setup_context
)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias), tanh form, by Triton kernels, differentiable in both.

    Args:
        x: (..., D) bf16, fp16 or fp32.
        bias: (D,), any of these dtypes.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: shapes, dtypes or devices don't fit.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must be (D,) = {tuple(x.shape[-1:])}, not {tuple(bias.shape)}")
    common.check_tensors(x=x, bias=bias)
    return _forward_op(x, bias)
