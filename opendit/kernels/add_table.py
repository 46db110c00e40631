"""Add position embeddings: y = x + table, x (B, N, D), table (N, D) without gradient.

The sum is computed in fp32 and rounded once, to x's dtype. A program reads each table value once for several samples.
torch's kernel for two dtypes takes four times as long as the memory traffic. The backward pass is dx = dy.
"""

import torch
from torch import Tensor

from opendit.kernels.common import check_tensors
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator

# ---------------------------------------------------------------------------------------------------------- reference


def add_table_reference(x: Tensor, table: Tensor) -> Tensor:
    """Compute x + table in torch, in the more precise of the two dtypes, and return the sum in x's dtype."""
    return (x + table).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------ kernels

BLOCK, SAMPLES = 2048, 8  # values of the table per program, and samples to which a program adds them


@triton.jit(do_not_specialize=("samples",))
def _add_table_kernel(x_ptr, table_ptr, y_ptr, samples, size, BLOCK: tl.constexpr, SAMPLES: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    table = tl.load(table_ptr + place, mask=mask).to(tl.float32)
    first = tl.program_id(1) * SAMPLES
    for sample in range(first, tl.minimum(first + SAMPLES, samples)):
        offsets = tl.cast(sample, tl.int64) * size + place
        y = tl.load(x_ptr + offsets, mask=mask).to(tl.float32) + table
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(x: Tensor, table: Tensor) -> Tensor:
    y, size = _forward_fake(x, table), table.numel()
    grid = (-(-size // BLOCK), -(-x.shape[0] // SAMPLES))
    _add_table_kernel[grid](
        x.contiguous(), table.contiguous(), y, x.shape[0], size, BLOCK=BLOCK, SAMPLES=SAMPLES, num_warps=4
    )
    return y


def _forward_fake(x: Tensor, table: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_context(ctx, inputs, output) -> None:
    pass


def _autograd_backward(ctx, dy):
    return dy, None


_forward_op = operator(
    "add_table(Tensor x, Tensor table) -> Tensor", _forward, _forward_fake, _autograd_backward, _setup_context
)


def add_table(x: Tensor, table: Tensor) -> Tensor:
    """Compute x + table with a Triton kernel, differentiable in x only. x is (B, N, D) and table (1, N, D) or (N, D),
    both bf16, fp16 or fp32. Returns x's shape and dtype. Raises ValueError if shapes, dtypes or devices don't fit."""
    if x.dim() != 3 or table.numel() != x[0].numel() or table.shape[-2:] != x.shape[-2:]:
        raise ValueError(f"x must be (B, N, D) and table (N, D), not {tuple(x.shape)} and {tuple(table.shape)}")
    check_tensors(x=x, table=table)
    return _forward_op(x, table)
