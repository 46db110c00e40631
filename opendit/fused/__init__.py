# pyright: standard
"""This project's fused operations for anybody's model: its kernels where they run, the same in torch where not.

    from opendit.fused import attention, gate_residual, layernorm_modulate

docs/api.md shows a plain DiT with them.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.kernels import gate_residual as gated
from opendit.kernels import layernorm_modulate as adaln
from opendit.kernels.attention import BACKENDS, torch_preferences
from opendit.kernels.capability import compute_capability
from opendit.kernels.common import kernels_available
from opendit.models.attention import RIGHT_WHEN_COMPILED


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """LN(x) * (1 + scale) + shift, LN without weights, in one pass: adaLN (Peebles & Xie 2023, sec. 3.2).

    x: (B, N, D) bf16, fp16 or fp32; shift, scale: (B, D); eps: DiT's, where ``nn.LayerNorm`` has 1e-5 unless told
    otherwise. Returns (B, N, D) in x's dtype.
    """
    if kernels_available(x.device, x.dtype)[0]:
        return adaln.layernorm_modulate(x, shift, scale, eps)
    return adaln.layernorm_modulate_reference(x, shift, scale, eps).to(x.dtype)


def gate_residual(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """x + gate * branch in one pass: adaLN-Zero's residual connection.

    x, branch: (B, N, D) bf16, fp16 or fp32; gate: (B, D). Returns (B, N, D) in x's dtype.
    """
    if kernels_available(x.device, x.dtype)[0]:
        return gated.gate_residual(x, gate, branch)
    return gated.gate_residual_reference(x, gate, branch).to(x.dtype)


def attention() -> AbstractContextManager[Any]:
    """A context in which ``F.scaled_dot_product_attention`` takes the fastest kernel measured for the card.

    With torch.compile, enter it within what is compiled: there it leaves out cuDNN, whose gradients would be wrong
    (opendit.models.attention); around a compiled function it can't know.
    """
    order = [SDPBackend.MATH]
    if torch.compiler.is_compiling():
        order = RIGHT_WHEN_COMPILED
    elif torch.cuda.is_available():
        order = [BACKENDS[name] for name, _ in torch_preferences(compute_capability(), torch.bfloat16)]
    return sdpa_kernel(order, set_priority=True)
