"""This project's fused operations for anybody's model: its kernels where they run, the same in torch where not.

    from opendit.fused import attention, gate_residual, layernorm_modulate

docs/api.md shows a plain DiT with them.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.kernels.attention import BACKENDS, preferences
from opendit.kernels.common import kernels_available


@functools.cache
def _pick(module: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    operation = importlib.import_module(f"opendit.kernels.{module}")
    if kernels_available(device, dtype)[0]:
        return getattr(operation, module)
    reference = getattr(operation, f"{module}_reference")
    return lambda x, *others: reference(x, *others).to(x.dtype)


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LN(x) * (1 + scale) + shift, LN without weights, in one pass: adaLN (Peebles & Xie 2023, sec. 3.2).

    x: (B, N, D) bf16, fp16 or fp32; shift, scale: (B, D). Returns (B, N, D) in x's dtype.
    """
    return _pick("layernorm_modulate", x.device, x.dtype)(x, shift, scale)


def gate_residual(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """x + gate * branch in one pass: adaLN-Zero's residual connection.

    x, branch: (B, N, D) bf16, fp16 or fp32; gate: (B, D). Returns (B, N, D) in x's dtype.
    """
    return _pick("gate_residual", x.device, x.dtype)(x, gate, branch)


def attention():
    """A context in which ``F.scaled_dot_product_attention`` takes the fastest kernel measured for the card."""
    order = [SDPBackend.MATH]
    if torch.cuda.is_available():
        order = [BACKENDS[name] for name, _ in preferences(torch.cuda.get_device_capability(), torch.bfloat16)]
    return sdpa_kernel(order, set_priority=True)
