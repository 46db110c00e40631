"""Which kernels a run uses, and why: flags and hardware in, operations for the model and one line each out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opendit.kernels import layernorm_modulate as adaln
from opendit.kernels.add_table import add_table
from opendit.kernels.attention import LocalAttention, resolve_attention
from opendit.kernels.bias_gelu import bias_gelu
from opendit.kernels.common import kernels_available
from opendit.kernels.fp8_linear import float8_available, float8_ops
from opendit.kernels.gate_residual import gate_residual
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate
from opendit.kernels.linear import linear as unbiased
from opendit.kernels.rmsnorm_modulate import gate_residual_rmsnorm_modulate, residual_rmsnorm_modulate
from opendit.kernels.split_heads import split_heads
from opendit.kernels.swiglu import swiglu
from opendit.models.layers import TORCH_OPS, BlockOps, Projection, RMSNorm, layer_norm, modulate

if TYPE_CHECKING:
    from opendit.cli.shared_flags import SpeedFlags


@dataclass(frozen=True)
class KernelChoice:
    """What to hand to ``model.use``, and one line each that says why."""

    ops: BlockOps
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ops_note: str
    attention_note: str


def select_kernels(
    flags: "SpeedFlags", device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int
) -> KernelChoice:
    """The operations for activations of ``dtype`` on ``device``, heads of ``head_dim``, ``tokens`` tokens a sample.

    A kernel that was asked for and can't be used is replaced by its torch reference; the note says why.

    Raises:
        ValueError: the attention kernel that ``--attention`` names does not run here.
    """
    ops, ops_note = _block_ops(flags, device, dtype)
    attend, attention_note = _attention(flags, device, dtype, head_dim, tokens)
    if flags.enable_flashattn:
        usable, why = kernels_available(device, dtype)
        if usable:
            ops = replace(ops, linear_heads=_linear_heads)
        attention_note += "; qkv's gradient in one pass" if usable else f"; qkv's gradient by torch: {why}"
    if flags.fp8:
        usable, why = float8_available(device, dtype)
        if usable:
            ops, ops_note = float8_ops(), f"block linears in FP8, fused with everything between them ({why})"
        else:
            ops_note += f"; no FP8: {why}"
    return KernelChoice(ops, attend, ops_note, attention_note)


def _attention(flags, device, dtype, head_dim, tokens):
    asked = flags.attention != "auto"
    if not (flags.enable_flashattn or asked):
        return LocalAttention(), "torch's own choice (--enable_flashattn is off)"
    try:
        backend, why = resolve_attention(
            flags.attention, device, dtype, head_dim, tokens, tiled=flags.enable_flashattn
        )  # fmt: skip
    except ValueError as error:
        if asked:
            raise ValueError(f"--attention: {error}") from None
        return LocalAttention(), f"torch's own choice: {error}"
    return LocalAttention(backend), f"{backend}: {why}"


def _block_ops(flags, device, dtype) -> tuple[BlockOps, str]:
    if not (flags.enable_modulate_kernel or flags.enable_layernorm_kernel):
        return BlockOps(), "off (--enable_modulate_kernel and --enable_layernorm_kernel are)"
    norm, norm_note = (_apex_layer_norm() if flags.enable_layernorm_kernel else None), "torch's LayerNorm"
    if norm is not None:
        norm_note = "apex's FusedLayerNorm"
    elif flags.enable_layernorm_kernel:
        norm_note = "torch's LayerNorm, one kernel already (apex is not installed)"
    usable, why = kernels_available(device, dtype)
    if not flags.enable_modulate_kernel or not usable:
        reason = f"; no modulate kernel: {why}" if flags.enable_modulate_kernel else ""
        ops = BlockOps() if norm is None else BlockOps(layernorm_modulate=_after(norm, modulate))
        return ops, norm_note + reason
    ops = BlockOps(
        linear_gelu=_linear_gelu, linear_gate_residual=_linear_gate_residual, swiglu=swiglu, add_table=add_table
    )
    if flags.enable_layernorm_kernel:
        return replace(
            ops,
            layernorm_modulate=adaln.layernorm_modulate,
            residual_layernorm_modulate=adaln.residual_layernorm_modulate,
            linear_gate_residual_layernorm_modulate=_linear_gate_residual_layernorm_modulate,
            residual_rmsnorm_modulate=_residual_rmsnorm_modulate,
            linear_gate_residual_rmsnorm_modulate=_linear_gate_residual_rmsnorm_modulate,
        ), f"LayerNorm or RMSNorm + modulate, gated residual, GELU or SwiGLU and biases fused ({why})"
    return replace(
        ops,
        layernorm_modulate=_after(norm or layer_norm, adaln.modulate),
        residual_rmsnorm_modulate=_residual_modulate_after_rmsnorm,
    ), f"modulate, gated residual, GELU or SwiGLU and biases fused, {norm_note} ({why})"


# ------------------------------------------------------------------------- BlockOps by kernels: the biases move to them


def _linear_heads(x: Tensor, linear: Projection, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    bias = linear.bias
    # The matrix product adds a bias for nothing; only its gradient moves to the kernel. Not so for a parameter that
    # watches torch's calls: Gemini fetches it for one call and may free it before the next, so detach() gives no hold.
    if bias is None or torch.overrides.has_torch_function((bias,)):
        return split_heads(linear(x), num_heads)
    return split_heads(linear.product(x, bias.detach()), num_heads, bias)


def _linear_gelu(x: Tensor, linear: Projection) -> Tensor:
    if linear.bias is None:
        return TORCH_OPS.linear_gelu(x, linear)
    return bias_gelu(linear.product(x), linear.bias)


def _linear_gate_residual(x: Tensor, gate: Tensor, z: Tensor, linear: Projection) -> Tensor:
    return gate_residual(x, gate, linear.product(z, multiply=unbiased), linear.bias)


def _linear_gate_residual_layernorm_modulate(
    x: Tensor, gate: Tensor, z: Tensor, linear: Projection, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    branch = linear.product(z, multiply=unbiased)
    return gate_residual_layernorm_modulate(x, gate, branch, shift, scale, linear.bias)


def _residual_rmsnorm_modulate(x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return residual_rmsnorm_modulate(x, norm.weight, shift, scale)


def _linear_gate_residual_rmsnorm_modulate(
    x: Tensor, gate: Tensor, z: Tensor, linear: Projection, norm: RMSNorm, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    branch = linear.product(z, multiply=unbiased)
    return gate_residual_rmsnorm_modulate(x, gate, branch, norm.weight, shift, scale, linear.bias)


def _residual_modulate_after_rmsnorm(x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x, adaln.modulate(norm(x), shift, scale)


def _after(norm, modulation):
    """adaLN from a separate LayerNorm and modulation."""
    return lambda x, shift, scale: modulation(norm(x), shift, scale)


def _apex_layer_norm():
    """apex's LayerNorm without weights over the last dimension, or None when apex is not installed."""
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm
    except ImportError:
        return None
    return lambda x: fused_layer_norm(x, x.shape[-1:], 1e-6)
