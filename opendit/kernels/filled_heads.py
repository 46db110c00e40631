"""Heads filled up with zeros to a size that an attention kernel takes, or is right at: zeros change nothing."""

from collections.abc import Callable

import torch
from torch import Tensor


def fill(x: Tensor, size: int) -> Tensor:
    """x (..., d) with zeros up to (..., size). (F.pad would write zeros to all of it first.)"""
    d = x.shape[-1]
    filled = x.new_empty(*x.shape[:-1], size)
    filled[..., :d] = x
    filled[..., d:] = 0
    return filled


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, size: int) -> Tensor:
        ctx.d = x.shape[-1]
        return fill(x, size)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return grads[0][..., : ctx.d], None


def with_filled_heads(
    q: Tensor, k: Tensor, v: Tensor, head_size: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """What ``attend`` makes of q, k, v (..., d) as (..., head_size), (..., d).

    What it keeps of them for its backward pass is kept without the zeros, which are added anew: else q, k and v would
    be kept a second time.
    """
    d = q.shape[-1]
    if head_size == d:
        return attend(q, k, v)
    parts = [q, k, v]
    filled = [_Fill.apply(x, head_size) for x in parts]

    def keep(saved: Tensor) -> tuple[Tensor, bool]:
        for own, wide in zip(parts, filled, strict=True):
            if saved.data_ptr() == wide.data_ptr() and saved.shape == wide.shape:  # another object of the same memory
                return own.detach(), True
        wide = saved.shape[-1:] == (head_size,) and saved.dim() == q.dim()  # the output
        return (saved[..., :d].contiguous() if wide else saved), wide

    def restore(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, wide = kept
        return fill(tensor, head_size) if wide else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        output = attend(*filled)
    filled.clear(), parts.clear()  # autograd keeps the functions above, and by them what they refer to
    return output[..., :d]
