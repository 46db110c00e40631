"""Attention by packages that need padded heads. FlashAttention 4 (flash-attn-4) pads only in its backward pass.

At some head sizes, a package is correct only if heads are padded with zeros. Zeros don't change the result.
FlashAttention 4 needs the padding only in the backward pass, but the package's autograd function can't pad there. So
this module calls the package's forward pass without autograd, and a private function for the backward pass. Results are
tested before a run uses a package (``attention.right_head_size``, ``attention.right_size``).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import kernels_available, next_power_of_2
from opendit.kernels.language import tl, triton

# ------------------------------------------------------------------------------------------------ heads of another size


def resize_heads_reference(x: Tensor, size: int) -> Tensor:
    """Return x (..., H, d), cut or padded with zeros to (..., H, size), contiguous."""
    return F.pad(x, (0, size - x.shape[-1])) if size > x.shape[-1] else x[..., :size].contiguous()


ROWS = 32  # rows per program


@triton.jit(do_not_specialize=("heads", "total"))
def _resize_heads_kernel(
    x_ptr, out_ptr, heads, total, token_stride,
    HEAD_STRIDE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ``total`` rows of D values to rows of SIZE values. A row is one of the ``heads`` heads of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    live = (row < total)[:, None]
    start = (row // heads) * token_stride + (row % heads) * HEAD_STRIDE
    x = tl.load(x_ptr + start[:, None] + cols, mask=live & (cols < D), other=0.0)
    tl.store(out_ptr + row[:, None] * SIZE + cols, x, mask=live & (cols < SIZE))


def resize_heads(x: Tensor, size: int) -> Tensor:
    """Compute :func:`resize_heads_reference` with a Triton kernel, without gradient. Each value is read and written
    once. F.pad would first write zeros everywhere, and torch copies slices of wider rows value by value."""
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


def with_heads_of(x: Tensor, size: int) -> Tensor:
    """Compute :func:`resize_heads_reference`, by the Triton kernel where it is available; without gradient."""
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
    """Call ``attend`` with q, k, v (..., H, d) zero-padded to (..., H, head_size); return its result as (..., H, d).

    Tensors that ``attend`` saves for its backward pass are stored without padding, and padded again in the backward
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
        wide = saved.shape[-1:] == (head_size,) and saved.dim() == q.dim()  # True also for the padded output
        return (with_heads_of(saved, d) if wide else saved), wide

    def restore(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, wide = kept
        return with_heads_of(tensor, head_size) if wide else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        output = attend(*filled)
    for held in (filled, parts):  # autograd keeps the closures alive, so free the tensors in these lists
        held.clear()
    return _Resize.apply(output, d)


CUTE = "flash_attn.cute"
BACKWARD = "_flash_attn_bwd"


# ----------------------------------------------------------------------------------------------------- FlashAttention 4


class SegmentLengths(NamedTuple):
    """Lengths of the samples in a pack: offsets (samples + 1,) int32, and the largest length."""

    offsets: Tensor
    longest: int


@functools.cache
def backward_pass() -> Callable[..., Any] | None:
    """Return the package's backward pass; None if the package is not installed or doesn't have this function."""
    try:
        return getattr(importlib.import_module(f"{CUTE}.interface"), BACKWARD)
    except (ImportError, OSError, AttributeError):
        return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_size: int,
    lengths: SegmentLengths | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v with FlashAttention 4; pad heads to ``head_size`` in the backward pass only.

    q, k and v are (B, N, H, d), bf16 or fp16. For a pack, they are (N, H, d), and ``lengths`` has the samples' lengths.
    With ``deterministic``, gradients have the same bits in all runs. The backward pass raises AssertionError if
    :func:`backward_pass` returns None.
    """
    return _FilledBackward.apply(q, k, v, head_size, lengths, deterministic)


class _FilledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, head_size, lengths, deterministic):
        package, ctx.scale = importlib.import_module(CUTE), q.shape[-1] ** -0.5
        ctx.head_size, ctx.deterministic = head_size, deterministic
        ctx.longest = None if lengths is None else lengths.longest
        offsets = None if lengths is None else lengths.offsets
        function = package.flash_attn_func if lengths is None else package.flash_attn_varlen_func
        out, logsumexp = function(
            q, k, v, softmax_scale=ctx.scale, return_lse=True, **pack_arguments(offsets, ctx.longest)
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, offsets)
        return out

    @staticmethod
    def backward(ctx, grad):
        *heads, logsumexp, offsets = ctx.saved_tensors
        function, d = backward_pass(), grad.shape[-1]
        assert function is not None
        filled = (with_heads_of(x, ctx.head_size) for x in (*heads, grad))
        how = {"softmax_scale": ctx.scale, "deterministic": ctx.deterministic, **pack_arguments(offsets, ctx.longest)}
        found = function(*filled, logsumexp, **how)
        return *(with_heads_of(x, d) for x in found[:3]), None, None, None


def pack_arguments(offsets: Tensor | None, longest: int | None) -> dict[str, Any]:
    """Return the package's arguments for a pack's offsets and longest sample; none without ``offsets``."""
    if offsets is None:
        return {}
    return dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
