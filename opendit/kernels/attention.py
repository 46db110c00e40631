"""Which attention kernel to use: torch's fastest that takes this dtype, head size and card, with the reason, or the one
that was asked for.

Every kernel but ``math`` works in tiles and never builds the N x N matrix of scores in memory.
"""

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda as cuda_backends
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.kernels.names import ATTENTION, PACKAGE
from opendit.models.attention import local_attention

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF = (torch.bfloat16, torch.float16)
CUTE = "flash_attn.cute"  # FlashAttention 4, of the package flash-attn-4


@functools.cache
def flash_attn() -> tuple[Callable[..., Tensor | tuple], str] | None:
    """(function of q, k, v (B, N, H, d), its package): the newest FlashAttention installed, 4, 3, 2; or None."""
    for package in (CUTE, "flash_attn_interface", PACKAGE):
        try:
            return importlib.import_module(package).flash_attn_func, package
        except (ImportError, OSError, AttributeError):  # absent, or built for another torch
            continue
    return None


class LocalAttention:
    """softmax(q k^T / sqrt(d)) v over all tokens of a sample: q, k, v (B, H, N, d) to (B, H, N, d).

    ``backend`` is one of torch's cudnn, flash, efficient, math, or flash_attn for the package of that name, or auto for
    torch's own choice at each call; :func:`resolve_attention` turns auto into the measured best. torch.compile traces
    through it, and gets torch's flash in place of cudnn (RIGHT_WHEN_COMPILED says why) and flash_attn. The package is
    deterministic where torch is told to be.
    """

    def __init__(self, backend: str = "auto"):
        if backend not in ATTENTION:
            raise ValueError(f"the attention backend is one of {', '.join(ATTENTION)}, not {backend}")
        self.backend = backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend == "auto":
            return local_attention(q, k, v)
        backend = self.backend
        if backend in ("cudnn", PACKAGE) and torch.compiler.is_compiling():
            backend = "flash"
        if backend == PACKAGE:
            deterministic = torch.are_deterministic_algorithms_enabled()
            output = flash_attn()[0](*(x.transpose(1, 2) for x in (q, k, v)), deterministic=deterministic)
            output = output[0] if isinstance(output, tuple) else output  # some give the log-sum-exp, too
            return output.transpose(1, 2)
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v)

    def __repr__(self) -> str:
        return f"LocalAttention({self.backend!r})"


def resolve_attention(
    requested: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, length: int, *, tiled: bool = False
) -> tuple[str, str]:
    """(backend for :class:`LocalAttention`, why).

    Args:
        requested: auto, or one of the kernels (``--attention``). auto leaves flash_attn out: it is not measured.
        device, dtype, head_dim, length: of q, k and v (B, H, length, head_dim).
        tiled: never build the N x N matrix (``--enable_flashattn``): math is out of the question.

    Raises:
        ValueError: the backend that was asked for can't do it, or none can that ``tiled`` allows.
    """
    device = torch.device(device)
    shape = f"{str(dtype).removeprefix('torch.')}, head size {head_dim}, {length} tokens"
    LocalAttention(requested)  # checks the name
    if tiled and requested == "math":
        raise ValueError("attention 'math' builds the N x N matrix, which --enable_flashattn rules out")
    if device.type != "cuda":
        if requested in ("auto", "math"):
            return requested, "asked for" if requested == "math" else f"torch's own choice on {device.type}"
        raise ValueError(f"attention {requested!r} was asked for and needs a CUDA GPU, not {device.type}")
    if requested == PACKAGE and flash_attn() is None:
        raise ValueError("attention 'flash_attn' was asked for and is not installed: pip install flash-attn-4")
    if requested != "auto":
        if not usable(requested, device, dtype, head_dim, length):
            raise ValueError(f"attention {requested!r} was asked for and does not run here: {shape}")
        return requested, "asked for" if requested != PACKAGE else f"asked for, {flash_attn()[1]}"
    for backend, why in preferences(capability(device), dtype):
        if backend == "math" and tiled:
            continue
        if usable(backend, device, dtype, head_dim, length):
            return backend, f"{why} ({shape})"
    raise ValueError(f"no attention kernel avoids the N x N matrix here: {shape}")


def preferences(compute_capability: tuple[int, int], dtype: torch.dtype) -> list[tuple[str, str]]:
    """Backends with a reason each, the fastest first.

    Measured on an H200, bf16, head size 72, TFLOP/s forward/backward: 256 tokens flash 171/93, cuDNN 245/171; 8,192
    tokens flash 239/192, cuDNN 355/318. So the length does not change the order. Cards after Hopper get its order.
    """
    order = [("efficient", "the tiled kernel that takes this dtype and head size"), ("math", "no tiled kernel fits")]
    if dtype in HALF:
        order.insert(0, ("flash", "the fastest tiled kernel that runs here"))
        if compute_capability >= (9, 0):
            order.insert(0, ("cudnn", "fastest measured, on Hopper: at 256 tokens 1.4 x flash, backward 1.8 x"))
    return order


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


def usable(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> bool:
    """Whether torch would run this backend, forward and backward, on such q, k, v (asked of torch, not run); of
    flash_attn, whether its documentation says so."""
    if backend == "math":
        return True
    if backend == PACKAGE:
        package, card = flash_attn()[1], capability(device)
        oldest = (8, 0) if package == PACKAGE else (9, 0)
        largest = 128 if package == CUTE and card[0] in (10, 11) else 256
        return dtype in HALF and card >= oldest and head_dim % 8 == 0 and head_dim <= largest
    ask = {
        "cudnn": cuda_backends.can_use_cudnn_attention,
        "flash": cuda_backends.can_use_flash_attention,
        "efficient": cuda_backends.can_use_efficient_attention,
    }[backend]
    q = torch.empty(1, 1, length, head_dim, dtype=dtype, device=device, requires_grad=True)
    with sdpa_kernel(BACKENDS[backend]):
        return ask(cuda_backends.SDPAParams(q, q, q, None, 0.0, False, False), False)
