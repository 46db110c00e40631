"""Pad heads with zeros to a size that an attention kernel supports, or is correct at. The zeros change nothing."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import kernels_available, next_power_of_2
from opendit.kernels.language import tl, triton

# ---------------------------------------------------------------------------------------------------------- reference


def resize_heads_reference(x: Tensor, size: int) -> Tensor:
    """Return contiguous x (..., H, d) with heads of ``size`` values: cut, or padded with zeros."""
    return F.pad(x, (0, size - x.shape[-1])) if size > x.shape[-1] else x[..., :size].contiguous()


# ------------------------------------------------------------------------------------------------------------- kernel

ROWS = 32  # of a program


@triton.jit(do_not_specialize=("heads", "total"))
def _resize_heads_kernel(
    x_ptr, out_ptr, heads, total, token_stride,
    HEAD_STRIDE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ``total`` rows of D values, ``heads`` per token, to rows of SIZE."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    live = (row < total)[:, None]
    start = (row // heads) * token_stride + (row % heads) * HEAD_STRIDE
    x = tl.load(x_ptr + start[:, None] + cols, mask=live & (cols < D), other=0.0)
    tl.store(out_ptr + row[:, None] * SIZE + cols, x, mask=live & (cols < SIZE))


def resize_heads(x: Tensor, size: int) -> Tensor:
    """Compute :func:`resize_heads_reference` with a Triton kernel, without gradient.

    F.pad first writes zeros to the whole result, and torch copies rows that are part of wider ones value by value; the
    kernel reads and writes everything once.
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
    """Return x (..., H, d) as (..., H, size), cut or padded with zeros, with the kernel where it runs; without
    gradient."""
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
    """Call ``attend`` with q, k, v (..., H, d) padded by zeros to (..., H, head_size); return (..., H, d).

    The tensors that ``attend`` saves for its backward pass are stored without the zeros, which are added again there:
    otherwise q, k and v would be stored twice.
    """
    d = q.shape[-1]
    if head_size == d:
        return attend(q, k, v)
    parts = [q, k, v]
    filled = [_Resize.apply(x, head_size) for x in parts]

    def keep(saved: Tensor) -> tuple[Tensor, bool]:
        for own, wide in zip(parts, filled, strict=True):
            if saved.data_ptr() == wide.data_ptr() and saved.shape == wide.shape:  # the same memory
                return own.detach(), True
        wide = saved.shape[-1:] == (head_size,) and saved.dim() == q.dim()  # the output
        return (with_heads_of(saved, d) if wide else saved), wide

    def restore(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, wide = kept
        return with_heads_of(tensor, head_size) if wide else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        output = attend(*filled)
    for held in (filled, parts):  # autograd keeps the closures above alive, and with them these lists
        held.clear()
    return _Resize.apply(output, d)
