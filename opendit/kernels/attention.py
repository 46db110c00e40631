"""Choose the attention kernel, with a reason: the requested one, or the fastest for dtype, head size, length and GPU.

Every kernel except ``math`` works in tiles and never builds the N x N matrix of scores in memory.
:func:`resolve_attention` chooses for samples of equal length, and :func:`resolve_varlen` for a pack.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda as cuda_backends
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.config.names import ATTENTION, PACKAGE
from opendit.kernels import flash_attention_4
from opendit.kernels.common import FEATURES, compute_capability
from opendit.kernels.flash_attention_4 import CUTE, SegmentLengths, with_filled_heads
from opendit.models.attention import local_attention
from opendit.models.segments import SegmentRun

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF = (torch.bfloat16, torch.float16)
# Head size -> (token count, speed-up): FlashAttention 4 was measured faster than cuDNN from this count on (Hopper).
FLASH_ATTENTION_4 = {72: (2048, "1.3"), 128: (4096, "1.1")}


@functools.cache
def flash_attn() -> tuple[Callable[..., Tensor | tuple[Any, ...]], str] | None:
    """Return (function of q, k, v (B, N, H, d), package name) of the newest installed FlashAttention, or None."""
    for package in (CUTE, "flash_attn_interface", PACKAGE):
        try:
            return importlib.import_module(package).flash_attn_func, package
        except (ImportError, OSError, AttributeError):  # not installed, or built for another version of torch
            continue
    return None


def _installed() -> tuple[Callable[..., Tensor | tuple[Any, ...]], str]:
    found = flash_attn()
    assert found is not None, "only called where a package is installed"
    return found


def package_attention(q: Tensor, k: Tensor, v: Tensor, head_size: int) -> Tensor:
    """Compute attention of q, k, v (B, H, N, d) with the installed package. Heads are zero-padded to ``head_size``.

    With FlashAttention 4, only the backward pass pads. Results are deterministic if torch.use_deterministic_algorithms
    is on.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if head_size != q.shape[-1] and _installed()[1] == CUTE and flash_attention_4.backward_pass() is not None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return flash_attention_4.attend(q, k, v, head_size, deterministic=deterministic).transpose(1, 2)
    call = functools.partial(_call_package, d=q.shape[-1])
    return with_filled_heads(q, k, v, head_size, call).transpose(1, 2)


def _call_package(q: Tensor, k: Tensor, v: Tensor, d: int) -> Tensor:
    deterministic = torch.are_deterministic_algorithms_enabled()
    output = _installed()[0](q, k, v, softmax_scale=d**-0.5, deterministic=deterministic)
    return output[0] if isinstance(output, tuple) else output  # some versions also return the log-sum-exp


def right_head_size(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> int | None:
    """Return the size to which :func:`package_attention` must pad heads of ``head_dim`` for correct results.

    The size is ``head_dim`` or the next multiple of 32; None if neither gives correct results on this device.

    The sizes are tested on a few tokens, because some versions of the package have errors. For example, on Hopper
    flash-attn-4 4.0.0b36 returns a wrong dq for head size 72 (relative error 1.1). Sizes 64 and 128 are correct.
    """
    return _tried_head_size(torch.device(device).type, dtype, head_dim, _installed())


@functools.cache
def _tried_head_size(device: str, dtype: torch.dtype, head_dim: int, package: tuple[Any, ...]) -> int | None:
    return next((size for size in _padded_sizes(head_dim) if _is_right(device, dtype, head_dim, size)), None)


@torch.inference_mode(False)
@torch.enable_grad()
def _is_right(device: str, dtype: torch.dtype, head_dim: int, size: int) -> bool:
    """Return True if output and gradients, with heads padded to ``size``, agree with the formula in float64."""
    generator = torch.Generator().manual_seed(0)
    *leaves, grad = (torch.randn(2, 3, 193, head_dim, generator=generator).to(device, dtype) for _ in range(4))
    made, exact = ([x.to(kind).requires_grad_() for x in leaves] for kind in (dtype, torch.float64))
    try:
        out = package_attention(*made, head_size=size)
        found = [out, *torch.autograd.grad(out, made, grad)]
    except Exception:  # an error of the package's compiler, or an assertion; in either case the package can't be used
        return False
    out = _formula(*exact)
    return _agree(found, [out, *torch.autograd.grad(out, exact, grad.double())])


def _padded_sizes(head_dim: int) -> list[int]:
    return sorted({head_dim, -(-head_dim // 32) * 32})


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def _agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    # The bound 0.02 leaves a margin, because correct results in bf16 have a relative error of 0.0025.
    return all((a.double() - b).norm() < 0.02 * b.norm() for a, b in zip(found, wanted, strict=True))


class LocalAttention:
    """Attention softmax(q k^T / sqrt(d)) v over all tokens of a sample: q, k, v (B, H, N, d) to (B, H, N, d).

    ``backend`` is cudnn, flash, efficient or math (torch's kernels), flash_attn (the installed package), or auto
    (torch's choice at each call). torch's flash replaces flash_attn and cudnn for a single key, and under torch.compile
    (opendit.models.attention.RIGHT_WHEN_COMPILED).
    """

    def __init__(self, backend: str = "auto"):
        if backend not in ATTENTION:
            raise ValueError(f"the attention backend is one of {', '.join(ATTENTION)}, not {backend}")
        self.backend = backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend == "auto":
            return local_attention(q, k, v)
        backend = self.backend
        # cuDNN refuses one key; a sample in a pack may have one token
        if backend in ("cudnn", PACKAGE) and (k.shape[-2] == 1 or torch.compiler.is_compiling()):
            backend = "flash"
        if backend == PACKAGE:
            size = right_head_size(q.device, q.dtype, q.shape[-1])
            assert size is not None, "checked by usable"
            return package_attention(q, k, v, size)
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v)

    def __repr__(self) -> str:
        return f"LocalAttention({self.backend!r})"


def resolve_attention(
    requested: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, length: int, *, tiled: bool = False
) -> tuple[str, str]:
    """Return (backend for :class:`LocalAttention`, reason) for q, k and v (B, H, length, head_dim).

    Args:
        requested: auto, or one of the kernels (``--attention``).
        tiled: True to exclude math, because math builds the N x N matrix (``--enable_flashattn``).

    Raises:
        ValueError: the requested backend can't run, or ``tiled`` excludes every backend that can run.
    """
    device = torch.device(device)
    shape = f"{str(dtype).removeprefix('torch.')}, head size {head_dim}, {length} tokens"
    LocalAttention(requested)  # raises ValueError if the name is unknown
    if tiled and requested == "math":
        raise ValueError(
            "attention 'math' builds the N x N matrix, which --enable_flashattn rules out; leave one of them out"
        )
    if device.type != "cuda":
        if requested in ("auto", "math"):
            return requested, "asked for" if requested == "math" else f"torch's own choice on {device.type}"
        raise ValueError(f"attention {requested!r} was asked for and needs a CUDA GPU, not {device.type}")
    if requested == PACKAGE and flash_attn() is None:
        raise ValueError("attention 'flash_attn' was asked for and is not installed: pip install flash-attn-4")
    if requested != "auto":
        if not usable(requested, device, dtype, head_dim, length):
            wrong = f", or {_installed()[1]} is wrong here" if requested == PACKAGE else ""
            raise ValueError(f"attention {requested!r} was asked for and does not run here{wrong}: {shape}")
        return requested, "asked for" + (_how(device, dtype, head_dim) if requested == PACKAGE else "")
    note = ""
    for backend, why in preferences(compute_capability(device), dtype, head_dim, length):
        if backend == "math" and tiled:
            continue
        if usable(backend, device, dtype, head_dim, length):
            how = _how(device, dtype, head_dim) if backend == PACKAGE else ""
            return backend, f"{why}{how} ({shape}){note}"
        if backend == PACKAGE:
            note = f"; not {_installed()[1]}, which is installed: its results or gradients are wrong here"
    raise ValueError(f"no attention kernel avoids the N x N matrix here: {shape}")


def _how(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    size = right_head_size(device, dtype, head_dim)
    return f", {_installed()[1]}" + (f" with heads filled up to {size}" if size != head_dim else "")


def preferences(card: tuple[int, int], dtype: torch.dtype, head_dim: int, length: int) -> list[tuple[str, str]]:
    """Return (backend, reason) pairs, the fastest backend first, as measured on an H200 (docs/kernels.md). card:
    compute capability. FlashAttention 4 is listed only on Hopper, because it was measured only there."""
    order = torch_preferences(card, dtype)
    shortest, gain = FLASH_ATTENTION_4.get(head_dim, (math.inf, ""))
    if dtype in HALF and card == (9, 0) and length >= shortest:
        if (flash_attn() or ("", ""))[1] == CUTE:
            order.insert(0, (PACKAGE, f"fastest measured, on Hopper: at 8,192 tokens {gain} x cuDNN"))
    return order


def torch_preferences(card: tuple[int, int], dtype: torch.dtype) -> list[tuple[str, str]]:
    """Return the pairs of :func:`preferences` for torch's kernels only."""
    order = [("efficient", "the tiled kernel that takes this dtype and head size"), ("math", "no tiled kernel fits")]
    if dtype in HALF:
        order.insert(0, ("flash", "the fastest tiled kernel that runs here"))
        if card >= FEATURES["cudnn"].oldest:
            order.insert(0, ("cudnn", "fastest measured, on Hopper: at 256 tokens 1.4 x flash, backward 1.8 x"))
    return order


def usable(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> bool:
    """Return True if a backend can run, forward and backward, on q, k and v (1, 1, length, head_dim).

    torch's backends are checked without a run. flash_attn must support the shape, and must pass a test run.
    """
    if backend == "math":
        return True
    if backend == PACKAGE:
        package, card = _installed()[1], compute_capability(device)
        oldest = FEATURES["flash_attn" if package == PACKAGE else "flash_attn_3"].oldest
        largest = 128 if package == CUTE and card[0] in (10, 11) else 256
        documented = dtype in HALF and card >= oldest and head_dim % 8 == 0 and head_dim <= largest
        return documented and right_head_size(device, dtype, head_dim) is not None
    ask = {
        "cudnn": cuda_backends.can_use_cudnn_attention,
        "flash": cuda_backends.can_use_flash_attention,
        "efficient": cuda_backends.can_use_efficient_attention,
    }[backend]
    q = torch.empty(1, 1, length, head_dim, dtype=dtype, device=device, requires_grad=True)
    with sdpa_kernel(BACKENDS[backend]):
        return ask(cuda_backends.SDPAParams(q, q, q, None, 0.0, False, False), False)


# -------------------------------------------------------------------------------------------- samples of unequal length

# torch's varlen kernel leaves a run (see resolve_varlen) to a dense call in two cases: a segment has at least LONG
# tokens, or two or more segments have TOGETHER tokens in all. The dense kernel is then faster by a third to a half.
LONG, TOGETHER = 1024, 4096


@dataclass(frozen=True)
class VarlenAttention:
    """Attention for segments of unequal length, computed by ``package``; see ``opendit.models.segments.Varlen``.

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
        # Older versions lack the argument ``scale`` and use head_size ** -0.5.
        how: dict[str, Any] = {} if scale == q.shape[-1] ** -0.5 else {"scale": scale}
        return cast(Tensor, varlen_attn(q, k, v, offsets, offsets, longest, longest, **how))

    return call


@functools.cache
def _flash_attention_4() -> Callable[..., Tensor]:
    function = importlib.import_module(CUTE).flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
        found = function(q, k, v, softmax_scale=scale, **flash_attention_4.pack_arguments(offsets, longest))
        return found[0] if isinstance(found, tuple) else found

    return call


TORCH = "torch.nn.attention.varlen"
# Package -> function that imports its kernel, in order of preference. Kernels take (q, k, v, offsets, longest, scale).
PACKAGES = {CUTE: _flash_attention_4, TORCH: _torch_varlen}


def resolve_varlen(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, asked: str = "auto"
) -> tuple[VarlenAttention | None, str]:
    """Return (kernel for the segments of a pack, reason). If the kernel is None, each run is one dense call.

    A run is several neighbouring samples of equal length. FlashAttention 4 gets complete packs, because unequal lengths
    do not slow it down. torch's ``varlen_attn`` gets only short runs, because it is slower than cuDNN's dense kernel.
    For short runs, cuDNN would plan 50 ms for each new size, and many calls would occupy the host.

    asked: value of ``--attention``. If it names a kernel, that kernel gets all runs, in dense calls.
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
    """Return the head size to which to pad, so that ``package`` gives correct results on this device. None if no size
    does, or if the package is not installed."""
    return next((size for size in _padded_sizes(head_dim) if _right(package, device, dtype, head_dim, size)), None)


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
    return _agree(found, [out, *torch.autograd.grad(out, exact, grad.double())])
