"""Choose a run's kernels from its flags and hardware, and give a one-line reason for each choice."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.config.components import SpeedFlags
from opendit.kernels.attention import LocalAttention, VarlenAttention, resolve_attention, resolve_varlen
from opendit.kernels.common import kernels_available
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.operations import FLOAT8, INFERENCE, MODULATE, NORM, SPLIT, chosen
from opendit.kernels.short_attention import ShortAttention, short_is_faster
from opendit.models.layers import BlockOps, Kernel, modulate


@dataclass(frozen=True)
class KernelChoice:
    """The arguments of ``model.use``, with one-line reasons for the log."""

    ops: BlockOps
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ops_note: str
    attention_note: str
    varlen: VarlenAttention | None = None  # kernel for packs of samples with unequal lengths


def select_kernels(
    flags: SpeedFlags,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    *,
    inference: bool = False,
    shared: bool = False,
    packs: bool = False,
) -> KernelChoice:
    """Return the kernels for activations of ``dtype`` on ``device``, heads of ``head_dim``, and ``tokens`` per sample.

    If a requested kernel can't be used, torch's reference replaces the kernel, and the note gives the reason.

    Args:
        inference: True if no gradients are needed; this allows operations that save nothing for a backward pass.
        shared: True if ranks share a sample's tokens, and so must agree on the scales of FP8.
        packs: True if one sequence holds several samples of unequal length.

    Raises:
        ValueError: the attention kernel that ``--attention`` names does not run here.
    """
    switches, others, ops_note = _switches(flags, device, dtype)
    attend, attention_note = _attention(flags, device, dtype, head_dim, tokens)
    if flags.enable_flashattn:
        usable, why = kernels_available(device, dtype)
        if usable:
            switches.add(SPLIT)
        attention_note += "; qkv's gradient in one pass" if usable else f"; qkv's gradient by torch: {why}"
    if inference and MODULATE in switches:
        switches.add(INFERENCE)
    if inference and SPLIT in switches and flags.attention == "auto" and short_is_faster(device):
        attend = ShortAttention(attend)
        attention_note += "; a special kernel for few and short samples"
    if flags.fp8:
        usable, why = float8_available(device, dtype)
        if usable:
            switches, others = {FLOAT8, INFERENCE} if inference and not shared else {FLOAT8}, ()
            ops_note = f"block linears in FP8, fused with everything between them ({why})"
        else:
            ops_note += f"; no FP8: {why}"
    varlen = None
    if packs:
        varlen, why = resolve_varlen(device, dtype, head_dim, flags.attention)
        attention_note += f"; in packs {why}"
    return KernelChoice(chosen(switches, others), attend, ops_note, attention_note, varlen)


def _attention(flags, device, dtype, head_dim, tokens):
    asked = flags.attention != "auto"
    if not (flags.enable_flashattn or asked):
        return LocalAttention(), "torch's own choice (--enable_flashattn is off)"
    try:
        backend, why = resolve_attention(flags.attention, device, dtype, head_dim, tokens, tiled=flags.enable_flashattn)
    except ValueError as error:
        if asked:
            raise ValueError(f"--attention {flags.attention}: {error}; choose another") from None
        return LocalAttention(), f"torch's own choice: {error}"
    return LocalAttention(backend), f"{backend}: {why}"


def _switches(flags, device, dtype) -> tuple[set[str], tuple[Kernel, ...], str]:
    """Return the switches that are on, apex's kernels (not in the kernel table), and a description of both."""
    if not (flags.enable_modulate_kernel or flags.enable_layernorm_kernel):
        return set(), (), "off (--enable_modulate_kernel and --enable_layernorm_kernel are)"
    norm, norm_note = (_apex_layer_norm() if flags.enable_layernorm_kernel else None), "torch's LayerNorm"
    if norm is not None:
        norm_note = "apex's FusedLayerNorm"
    elif flags.enable_layernorm_kernel:
        norm_note = "torch's LayerNorm, one kernel already (apex is not installed)"
    usable, why = kernels_available(device, dtype)
    if not flags.enable_modulate_kernel or not usable:
        reason = f"; no modulate kernel: {why}" if flags.enable_modulate_kernel else ""
        apex = () if norm is None else (Kernel("layernorm_modulate", lambda x, *vectors: modulate(norm(x), *vectors)),)
        return set(), apex, norm_note + reason
    if flags.enable_layernorm_kernel:
        fused = f"LayerNorm or RMSNorm + modulate, gated residual, rotations, GELU or SwiGLU and biases fused ({why})"
        return {MODULATE, NORM}, (), fused
    return {MODULATE}, (), f"modulate, gated residual, rotations, GELU or SwiGLU and biases fused, {norm_note} ({why})"


def _apex_layer_norm():
    """Return apex's LayerNorm without weights over the last dimension, or None if apex is not installed."""
    try:
        # type checkers don't find apex, because apex is not on PyPI
        from apex.normalization.fused_layer_norm import (  # pyright: ignore[reportMissingImports]
            fused_layer_norm,
        )
    except ImportError:
        return None
    return lambda x: fused_layer_norm(x, x.shape[-1:], 1e-6)
