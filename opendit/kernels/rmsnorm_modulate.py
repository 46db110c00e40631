"""RMSNorm and modulation: y = RMSNorm(x) * (1 + scale) + shift with RMSNorm(x) = x / rms(x) * weight.

The weight (D,) is folded into the scale (B, D), so that LayerNorm's kernels can compute this with CENTER false:

    weight * (1 + scale) = 1 + scale',  scale' = (weight - 1) + weight * scale

torch computes scale', because it has few rows. Autograd computes the weight's gradient from the gradient of scale'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import check_inputs, check_tensors
from opendit.kernels.gate_residual import gate_residual_reference
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate_forward
from opendit.kernels.layernorm_modulate import ResidualNormModulate, layernorm_modulate_forward, modulate_reference

# ---------------------------------------------------------------------------------------------------------- reference


def rmsnorm_modulate_reference(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    return modulate_reference(F.rms_norm(x, x.shape[-1:], weight, eps), shift, scale, sample_of_row)


def residual_rmsnorm_modulate_reference(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return x, rmsnorm_modulate_reference(x, weight, shift, scale, eps, sample_of_row)


def gate_residual_rmsnorm_modulate_reference(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = gate_residual_reference(x, gate, branch, bias, sample_of_row)
    return h, rmsnorm_modulate_reference(h, weight, shift, scale, eps, sample_of_row)


# ----------------------------------------------------------------------------------------------------------- operator


def modulation_with_weight(x: Tensor, weight: Tensor | None, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return shift and scale' (B, D) in fp32, for LayerNorm's kernels with CENTER false. scale' is the scale with the
    weight folded in (see the module's docstring).

    In half precision, scale' and the weight's gradient would lose precision. Only torch operations use the weight, so
    that Gemini can intercept them. weight None: RMSNorm without weight.
    """
    if weight is None:
        return shift.float(), scale.float()
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be (D,) = {tuple(x.shape[-1:])}, not {tuple(weight.shape)}")
    check_tensors(x=x, weight=weight, shift=shift, scale=scale)
    weight = weight.float()
    return shift.float(), torch.addcmul(weight - 1, weight, scale.float())


def rmsnorm_modulate(
    x: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> Tensor:
    """Compute RMSNorm(x) * (1 + scale) + shift with Triton kernels, differentiable in x, weight, shift and scale.

    weight is (D,) bf16, fp16 or fp32, or None for a norm without weight. For all other arguments and errors, see
    :func:`opendit.kernels.layernorm_modulate.layernorm_modulate`; the dtypes of shift and scale may differ.
    """
    shift, scale = modulation_with_weight(x, weight, shift, scale)
    check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return layernorm_modulate_forward(x, shift, scale, sample_of_row, eps, True, False)[0]


def residual_rmsnorm_modulate(
    x: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x, RMSNorm(x) * (1 + scale) + shift), for a caller that also uses x. The backward kernel adds the
    gradients of x from both uses. For the arguments, see :func:`rmsnorm_modulate`."""
    shift, scale = modulation_with_weight(x, weight, shift, scale)
    check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return ResidualNormModulate.apply(x, shift, scale, eps, sample_of_row, False)


def gate_residual_rmsnorm_modulate(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h = x + gate * (branch + bias) and y = RMSNorm(h) * (1 + scale) + shift with Triton kernels.

    The operation is differentiable in all seven tensors. For arguments and errors, see :func:`rmsnorm_modulate` and
    :func:`opendit.kernels.gate_residual.gate_residual`. Returns (h, y), both of x's shape and dtype. y is computed from
    the rounded h.
    """
    shift, scale = modulation_with_weight(x, weight, shift, scale)
    check_inputs(x, sample_of_row, {"branch": branch}, bias, gate=gate, shift=shift, scale=scale)
    return gate_residual_layernorm_modulate_forward(x, gate, branch, shift, scale, bias, sample_of_row, eps, False)[:2]
