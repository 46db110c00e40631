"""FlashAttention 4 (package flash-attn-4) with heads padded by zeros in the backward pass only.

At some head sizes, the package's forward pass is correct and its backward pass is not, so only the backward pass needs
padding. The package's autograd function saves its inputs unchanged, and can't pad them in the backward pass. Therefore
this module runs the forward pass without autograd, and calls the backward pass by its private name in the package.
Before a run uses this module, its results are tested (``attention.right_head_size``, ``varlen.resolve_varlen``).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opendit.kernels.filled_heads import with_heads_of

CUTE = "flash_attn.cute"
BACKWARD = "_flash_attn_bwd"


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

    Args:
        q, k, v: (B, N, H, d) bf16 or fp16, or (N, H, d) with ``lengths``.
        head_size: at least d.
        lengths: lengths of the samples in a pack.
        deterministic: compute the same gradients, bit for bit, in every run.

    Returns:
        The shape and dtype of q.

    Raises:
        AssertionError: the package does not have the needed function; see :func:`backward_pass`.
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
        out, logsumexp = function(q, k, v, softmax_scale=ctx.scale, return_lse=True, **_by(offsets, ctx.longest))
        ctx.save_for_backward(q, k, v, out, logsumexp, offsets)
        return out

    @staticmethod
    def backward(ctx, grad):
        *heads, logsumexp, offsets = ctx.saved_tensors
        function, d = backward_pass(), grad.shape[-1]
        assert function is not None
        filled = (with_heads_of(x, ctx.head_size) for x in (*heads, grad))
        how = {"softmax_scale": ctx.scale, "deterministic": ctx.deterministic, **_by(offsets, ctx.longest)}
        found = function(*filled, logsumexp, **how)
        return *(with_heads_of(x, d) for x in found[:3]), None, None, None


def _by(offsets: Tensor | None, longest: int | None) -> dict[str, Any]:
    """Return the package's keyword arguments for a pack; empty without ``offsets``."""
    if offsets is None:
        return {}
    return dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
