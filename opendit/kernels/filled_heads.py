"""Pad heads with zeros to a size at which an attention kernel runs correctly. The zeros don't change the result."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import kernels_available, next_power_of_2
from opendit.kernels.language import tl, triton

# ---------------------------------------------------------------------------------------------------------- reference


def resize_heads_reference(x: Tensor, size: int) -> Tensor:
    """Return x (..., H, d), cut or padded with zeros to (..., H, size), contiguous."""
    return F.pad(x, (0, size - x.shape[-1])) if size > x.shape[-1] else x[..., :size].contiguous()


# ------------------------------------------------------------------------------------------------------------- kernel

ROWS = 32  # rows per program


@triton.jit(do_not_specialize=("heads", "total"))
def _resize_heads_kernel(
    x_ptr, out_ptr, heads, total, token_stride,
    HEAD_STRIDE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ``total`` rows of D values to rows of SIZE values. A row is one head of a token, and a token has ``heads``
    rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    live = (row < total)[:, None]
    start = (row // heads) * token_stride + (row % heads) * HEAD_STRIDE
    x = tl.load(x_ptr + start[:, None] + cols, mask=live & (cols < D), other=0.0)
    tl.store(out_ptr + row[:, None] * SIZE + cols, x, mask=live & (cols < SIZE))


def resize_heads(x: Tensor, size: int) -> Tensor:
    """Compute :func:`resize_heads_reference` with a Triton kernel, without gradient.

    The kernel reads and writes every value once. F.pad would first write zeros to the whole result, and torch copies
    slices of wider rows value by value.
    """
    heads, d = x.shape[-2:]
    by_token = x.reshape(-1, heads, d)
    by_token = by_token if by_token.stride(-1) == 1 else by_token.contiguous()
    resized = x.new_empty(*x.shape[:-1], size)
    total = by_token.shape[0] * heads
    _resize_heads_kernel[(triton.cdiv(total, ROWS),)](
        by_token, resized, heads, total, by_token.stride(0),
        HEAD_STRIDE=by_token.stride(1), D=d, SIZE=size, BLOCK=next_power_of_2(max(d, size)), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return resized


# ---------------------------------------------------------------------------------------------------------- operation


def with_heads_of(x: Tensor, size: int) -> Tensor:
    """Return x (..., H, d), cut or padded with zeros to (..., H, size), without gradient.

    The Triton kernel is used where it is available.
    """
    return (resize_heads if kernels_available(x.device, x.dtype)[0] else resize_heads_reference)(x, size)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, size: int) -> Tensor:
        ctx.d = x.shape[-1]
        return with_heads_of(x, size)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return with_heads_of(grads[0], ctx.d), None


def with_filled_heads(
    q: Tensor, k: Tensor, v: Tensor, head_size: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Call ``attend`` with q, k, v (..., H, d) padded with zeros to (..., H, head_size); return its result as
    (..., H, d).

    Tensors that ``attend`` saves for its backward pass are stored without the padding, and padded again in the backward
    pass. Otherwise q, k and v would be stored twice.
    """
    d = q.shape[-1]
    if head_size == d:
        return attend(q, k, v)
    parts = [q, k, v]
    filled = [_Resize.apply(x, head_size) for x in parts]

    def keep(saved: Tensor) -> tuple[Tensor, bool]:
        for own, wide in zip(parts, filled, strict=True):
            # ``saved`` is the padded form of q, k or v
            if saved.data_ptr() == wide.data_ptr() and saved.shape == wide.shape:
                return own.detach(), True
        wide = saved.shape[-1:] == (head_size,) and saved.dim() == q.dim()  # True for the output, which is also padded
        return (with_heads_of(saved, d) if wide else saved), wide

    def restore(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, wide = kept
        return with_heads_of(tensor, head_size) if wide else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        output = attend(*filled)
    for held in (filled, parts):  # autograd keeps the closures alive, so empty these lists to free their tensors
        held.clear()
    return _Resize.apply(output, d)
