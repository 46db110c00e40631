# pyright: standard
"""OpenDiT's fused operations for use in any model.

Each operation uses a fast kernel where one is available. Elsewhere plain torch computes the result.

    from opendit.fused import attention, gate_residual, layernorm_modulate

docs/api.md shows a plain DiT that uses these operations.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.kernels import gate_residual as gated
from opendit.kernels import layernorm_modulate as adaln
from opendit.kernels.attention import BACKENDS, torch_preferences
from opendit.kernels.common import compute_capability, kernels_available
from opendit.models.attention import RIGHT_WHEN_COMPILED


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute adaLN, LN(x) * (1 + scale) + shift, in one pass (Peebles & Xie 2023, sec. 3.2). LN is a layer norm over D
    without weight and bias. Returns (B, N, D) in x's dtype.

    Args:
        x: (B, N, D) bf16, fp16 or fp32.
        shift: (B, D).
        scale: (B, D).
        eps: DiT uses 1e-6, unlike ``nn.LayerNorm``'s 1e-5.
    """
    if kernels_available(x.device, x.dtype)[0]:
        return adaln.layernorm_modulate(x, shift, scale, eps)
    return adaln.layernorm_modulate_reference(x, shift, scale, eps).to(x.dtype)


def gate_residual(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """Compute adaLN-Zero's residual connection, x + gate * branch, in one pass. Returns (B, N, D) in x's dtype.

    Args:
        x: (B, N, D) bf16, fp16 or fp32.
        gate: (B, D).
        branch: (B, N, D).
    """
    if kernels_available(x.device, x.dtype)[0]:
        return gated.gate_residual(x, gate, branch)
    return gated.gate_residual_reference(x, gate, branch).to(x.dtype)


def attention() -> AbstractContextManager[Any]:
    """Return a context in which ``F.scaled_dot_product_attention`` prefers the kernels measured fastest on this GPU, in
    bf16. Without a GPU, it uses torch's plain implementation.

    With torch.compile, enter the context inside the compiled function, so that it excludes cuDNN. cuDNN gives wrong
    gradients in compiled code (opendit.models.attention).
    """
    order = [SDPBackend.MATH]
    if torch.compiler.is_compiling():
        order = RIGHT_WHEN_COMPILED
    elif torch.cuda.is_available():
        order = [BACKENDS[name] for name, _ in torch_preferences(compute_capability(), torch.bfloat16)]
    return sdpa_kernel(order, set_priority=True)
