"""Choose the attention kernel for samples of unequal length in a pack, and give the reason.

The choice is FlashAttention 4 if it is installed and correct, else torch's ``varlen_attn``, else None. With None, each
run, that is, neighbouring samples of equal length, is one dense call.

FlashAttention 4 is as fast on unequal lengths as on equal ones, and processes complete packs (figures:
docs/kernels.md). torch's ``varlen_attn`` is slower than cuDNN's dense kernel at every length measured on an H200, 256
to 32,768. But cuDNN needs 50 ms to plan for each new number of samples or length, and calls for many short runs cost
the host more time than the GPU. Therefore ``varlen_attn`` processes only runs of few tokens, and longer runs are dense
calls.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from opendit.kernels import flash_attention_4
from opendit.kernels.attention import HALF
from opendit.kernels.capability import FEATURES, compute_capability
from opendit.kernels.filled_heads import with_filled_heads
from opendit.kernels.flash_attention_4 import CUTE, SegmentLengths
from opendit.models.segments import SegmentRun

# A run is a dense call if each of its segments has at least LONG tokens, or if it has at least two segments with
# TOGETHER tokens in all. On an H200, the dense kernel is then faster by a third to a half, and runs longer than the
# host takes to launch it.
LONG, TOGETHER = 1024, 4096


@dataclass(frozen=True)
class VarlenAttention:
    """Attention of segments of unequal length by the kernel of ``package``; see ``opendit.models.segments``.

    head_size: size to which heads are padded with zeros. With FlashAttention 4, only the backward pass needs padding.
    """

    package: str
    head_size: int

    def takes(self, run: SegmentRun) -> bool:
        if self.package == CUTE:
            return True
        return run.length < LONG and (run.count == 1 or run.count * run.length < TOGETHER)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        filled = self.head_size != q.shape[-1]
        if filled and self.package == CUTE and flash_attention_4.backward_pass() is not None:
            return flash_attention_4.attend(q, k, v, self.head_size, SegmentLengths(offsets, longest))
        function, scale = PACKAGES[self.package](), q.shape[-1] ** -0.5
        return with_filled_heads(q, k, v, self.head_size, lambda q, k, v: function(q, k, v, offsets, longest, scale))


@functools.cache
def _torch_varlen() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
        # Pass ``scale`` only if it differs from head_size ** -0.5. Older versions lack this argument and use that
        # value.
        how: dict[str, Any] = {} if scale == q.shape[-1] ** -0.5 else {"scale": scale}
        return cast(Tensor, varlen_attn(q, k, v, offsets, offsets, longest, longest, **how))

    return call


@functools.cache
def _flash_attention_4() -> Callable[..., Tensor]:
    function = importlib.import_module(CUTE).flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
        how = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        found = function(q, k, v, softmax_scale=scale, **how)
        return found[0] if isinstance(found, tuple) else found

    return call


TORCH = "torch.nn.attention.varlen"
# Package -> function that imports its kernel, in order of preference. Kernels take (q, k, v, offsets, longest, scale).
PACKAGES = {CUTE: _flash_attention_4, TORCH: _torch_varlen}


def resolve_varlen(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, asked: str = "auto"
) -> tuple[VarlenAttention | None, str]:
    """Return (kernel for segments of unequal length, reason). None instead of a kernel: each run is a dense call.

    asked: value of ``--attention``. If it names a kernel, that kernel is used for all runs, in dense calls.
    """
    device = torch.device(device)
    if asked != "auto":
        return None, f"one call a run, by {asked}, as asked for"
    if device.type != "cuda":
        return None, f"one call a run: varlen kernels need a CUDA GPU, not {device.type}"
    if dtype not in HALF:
        return None, "one call a run: varlen kernels take bf16 and fp16"
    if compute_capability(device) < FEATURES["flash_attn"].oldest:
        return None, "one call a run: this card is too old for a varlen kernel"
    wrong = []
    for package in PACKAGES:
        if package == CUTE and torch.are_deterministic_algorithms_enabled():
            continue  # with unequal lengths, the package may be nondeterministic
        size = right_size(package, device.type, dtype, head_dim)
        if size is None:
            wrong.append(package)
            continue
        filled = f", heads filled up to {size}" if size != head_dim else ""
        what = "for all" if package == CUTE else "for runs that don't fill the GPU"
        return VarlenAttention(package, size), f"{package} {what}{filled}"
    return None, f"one call a run: {' and '.join(wrong)} are missing, or wrong here"


@functools.cache
def right_size(package: str, device: str, dtype: torch.dtype, head_dim: int) -> int | None:
    """Return the size to which heads must be padded for correct results of ``package`` on this device.

    Return None if no size gives correct results, or the package is not installed.
    """
    sizes = sorted({head_dim, -(-head_dim // 32) * 32})
    return next((size for size in sizes if _right(package, device, dtype, head_dim, size)), None)


@torch.inference_mode(False)
@torch.enable_grad()
def _right(package: str, device: str, dtype: torch.dtype, head_dim: int, size: int) -> bool:
    """Return True if output and gradients for three segments agree with the formula in float64."""
    lengths, generator = (70, 193, 1), torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    qkv, grad = (torch.randn(sum(lengths), n, 3, head_dim, generator=generator).to(device, dtype) for n in (3, 1))
    grad = grad.squeeze(1)
    # As in a model, q, k and v are views of one tensor.
    made, exact = ([x.detach().requires_grad_() for x in qkv.to(kind).unbind(1)] for kind in (dtype, torch.float64))
    try:
        out = VarlenAttention(package, size)(*made, offsets=offsets, longest=max(lengths))
        found = [out, *torch.autograd.grad(out, made, grad)]
    except Exception:  # the package is missing, has another version, or can't run here
        return False
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    out = torch.cat([_formula(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])
    wanted = [out, *torch.autograd.grad(out, exact, grad.double())]
    return all((a.double() - b).norm() < 0.02 * b.norm() for a, b in zip(found, wanted, strict=True))


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v
