"""The registry of kernels: for each operation of a block, the kernels that can replace its torch reference.

The fields of :class:`opendit.models.layers.BlockOps` are the operations, with torch references. A row of
:data:`KERNELS` describes a kernel. :func:`chosen` returns a BlockOps with the kernels that a run's switches turn on. To
add a kernel, write a file, a test and a benchmark, and add a row here.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opendit.kernels import cublaslt, fp8_inference, fp8_linear
from opendit.kernels import layernorm_modulate as adaln
from opendit.kernels.add_table import add_table
from opendit.kernels.bias_gelu import bias_gelu
from opendit.kernels.gate_residual import gate_residual
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate
from opendit.kernels.gate_rmsnorm_residual import gate_rmsnorm_residual, gate_rmsnorm_residual_rmsnorm_modulate
from opendit.kernels.linear import linear as unbiased
from opendit.kernels.linear import linear_gelu
from opendit.kernels.rmsnorm_modulate import gate_residual_rmsnorm_modulate, residual_rmsnorm_modulate
from opendit.kernels.rotate_heads import StreamHeads, fits_across, join_heads, pack_heads, rotate_heads
from opendit.kernels.split_heads import split_heads
from opendit.kernels.swiglu import swiglu
from opendit.models.blocks import NormalisedProjection
from opendit.models.layers import TORCH_OPS, BlockOps, Kernel, Projection, RMSNorm, layer_norm

# ------------------------------------------------------------------------ operations that take over a projection's bias


def _linear_heads(
    x: Tensor, linear: Projection, num_heads: int, multiply: Callable[..., Any] = unbiased
) -> tuple[Tensor, Tensor, Tensor]:
    bias = linear.bias
    # The matrix product adds the bias at no cost. ``split_heads`` computes the bias's gradient. This needs the bias
    # twice, but Gemini's parameters (with a torch function) exist for one call only.
    if bias is None:
        return split_heads(linear.product(x, multiply=multiply), num_heads)
    if torch.overrides.has_torch_function((bias,)):
        return split_heads(linear(x), num_heads)
    return split_heads(linear.product(x, bias.detach(), multiply), num_heads, bias)


def _linear_gelu(x: Tensor, linear: Projection) -> Tensor:
    if linear.bias is None:
        return TORCH_OPS.linear_gelu(x, linear)
    return bias_gelu(linear.product(x, multiply=unbiased), linear.bias)


def _linear_gate_residual(
    x: Tensor,
    gate: Tensor,
    z: Tensor,
    linear: Projection,
    sample_of_row: Tensor | None = None,
    multiply: Callable[..., Any] = unbiased,
) -> Tensor:
    if isinstance(linear, NormalisedProjection):
        branch, norm = linear.before_norm(z, multiply), linear.norm
        return gate_rmsnorm_residual(x, gate, branch, norm.weight, norm.eps, sample_of_row)
    return gate_residual(x, gate, linear.product(z, multiply=multiply), linear.bias, sample_of_row)


def _linear_gate_residual_layernorm_modulate(
    x: Tensor,
    gate: Tensor,
    z: Tensor,
    linear: Projection,
    shift: Tensor,
    scale: Tensor,
    sample_of_row: Tensor | None = None,
    multiply: Callable[..., Any] = unbiased,
) -> tuple[Tensor, Tensor]:
    branch = linear.product(z, multiply=multiply)
    return gate_residual_layernorm_modulate(x, gate, branch, shift, scale, linear.bias, sample_of_row=sample_of_row)


def _linear_gate_residual_rmsnorm_modulate(
    x: Tensor,
    gate: Tensor,
    z: Tensor,
    linear: Projection,
    norm: RMSNorm,
    shift: Tensor,
    scale: Tensor,
    sample_of_row: Tensor | None = None,
    multiply: Callable[..., Any] = unbiased,
) -> tuple[Tensor, Tensor]:
    vectors = norm.weight, shift, scale
    if isinstance(linear, NormalisedProjection):
        branch, eps = linear.before_norm(z, multiply), (linear.norm.eps, norm.eps)
        return gate_rmsnorm_residual_rmsnorm_modulate(
            x, gate, branch, linear.norm.weight, *vectors, *eps, sample_of_row
        )
    branch = linear.product(z, multiply=multiply)
    return gate_residual_rmsnorm_modulate(x, gate, branch, *vectors, linear.bias, norm.eps, sample_of_row)


# --------------------------------------------------------------------------------------------------- other operations


def _residual_rmsnorm_modulate(
    x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return residual_rmsnorm_modulate(x, norm.weight, shift, scale, norm.eps, sample_of_row)


def _layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    return adaln.layernorm_modulate(x, shift, scale, sample_of_row=sample_of_row)


def _residual_layernorm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return adaln.residual_layernorm_modulate(x, shift, scale, sample_of_row=sample_of_row)


def _modulate_after_layernorm(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    return adaln.modulate(layer_norm(x), shift, scale, sample_of_row)


def _modulate_after_rmsnorm(
    x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return x, adaln.modulate(norm(x), shift, scale, sample_of_row)


def _normalise_rotate(
    q: Tensor,
    k: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    table: Tensor | None,
    across: bool = False,
) -> tuple[Tensor, Tensor]:
    if q_norm is None or k_norm is None:
        return rotate_heads(q, k, table=table)
    if _needs_torch(q, q_norm, k_norm, across):
        return TORCH_OPS.normalise_rotate(q, k, q_norm, k_norm, table, across)
    return rotate_heads(q, k, q_norm.weight, k_norm.weight, table, q_norm.eps, across)


def _needs_torch(q: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, across: bool) -> bool:
    """Return True if no kernel computes the norms, because they have too many channels or must sum squares over
    ranks."""
    divided = q_norm.sum_of_ranks is not None or k_norm.sum_of_ranks is not None
    return divided or (across and not fits_across(q.shape[2], q.shape[3]))


def _join_heads(streams: Sequence[tuple[Any, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():  # torch.compile can't see into join_heads
        parts = [
            (*_normalise_rotate(q, k, q_norm, k_norm, table, False), v) for q, k, v, q_norm, k_norm, table in streams
        ]
        q, k, v = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return q, k, v
    norms = [norm for *_, q_norm, k_norm, _ in streams for norm in (q_norm, k_norm) if norm is not None]
    eps = norms[0].eps if norms else 0.0
    found = []
    for q, k, v, q_norm, k_norm, table in streams:
        found.append(StreamHeads(q, k, v, q_norm and q_norm.weight, k_norm and k_norm.weight, table))
    return join_heads(found, eps)


def _pack_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    table: Tensor | None,
    across: bool,
    parts: int,
) -> Tensor:
    if q_norm is None or k_norm is None:
        return pack_heads(StreamHeads(q, k, v, table=table), parts)
    if _needs_torch(q, q_norm, k_norm, across):
        q, k = TORCH_OPS.normalise_rotate(q, k, q_norm, k_norm, table, across)
        return pack_heads(StreamHeads(q, k, v), parts)
    return pack_heads(StreamHeads(q, k, v, q_norm.weight, k_norm.weight, table), parts, q_norm.eps, across)


MODULATE, NORM, SPLIT, FLOAT8, INFERENCE = "modulate", "norm", "split", "float8", "inference"  # names of the switches

# A row can be used if the run turns all of its switches on. If an operation has several such rows, the last one is
# used. ``keeps`` names the activations that are saved for the backward pass: arguments, "u" (a projection's product) or
# "h" (the new residual stream). An operation with a gate saves u only if the gate has a gradient, so not with LoRA.
KERNELS = (
    Kernel("layernorm_modulate", _modulate_after_layernorm, {MODULATE}, keeps=("x", "norm(x)")),
    Kernel("layernorm_modulate", _layernorm_modulate, {MODULATE, NORM}, keeps=("x",)),
    Kernel("residual_layernorm_modulate", _residual_layernorm_modulate, {MODULATE, NORM}, keeps=("x",)),
    Kernel("residual_rmsnorm_modulate", _modulate_after_rmsnorm, {MODULATE}, keeps=("x", "norm(x)")),
    Kernel("residual_rmsnorm_modulate", _residual_rmsnorm_modulate, {MODULATE, NORM}, keeps=("x",)),
    Kernel("linear_heads", _linear_heads, {SPLIT}, keeps=("x",)),
    Kernel("linear_gelu", _linear_gelu, {MODULATE}, keeps=("x", "u"), after_product=bias_gelu),
    Kernel("linear_gelu", linear_gelu, {MODULATE, INFERENCE}, takes_projection=True),
    Kernel("linear_gate_residual", _linear_gate_residual, {MODULATE}, keeps=("z", "u")),
    Kernel(
        "linear_gate_residual_layernorm_modulate",
        _linear_gate_residual_layernorm_modulate,
        {MODULATE, NORM},
        keeps=("z", "u", "h"),
    ),
    Kernel(
        "linear_gate_residual_rmsnorm_modulate",
        _linear_gate_residual_rmsnorm_modulate,
        {MODULATE, NORM},
        keeps=("z", "u", "h"),
    ),
    Kernel("linear_heads", partial(_linear_heads, multiply=cublaslt.linear), {SPLIT, INFERENCE}),
    Kernel("linear_gate_residual", partial(_linear_gate_residual, multiply=cublaslt.linear), {MODULATE, INFERENCE}),
    Kernel(
        "linear_gate_residual_layernorm_modulate",
        partial(_linear_gate_residual_layernorm_modulate, multiply=cublaslt.linear),
        {MODULATE, NORM, INFERENCE},
    ),
    Kernel(
        "linear_gate_residual_rmsnorm_modulate",
        partial(_linear_gate_residual_rmsnorm_modulate, multiply=cublaslt.linear),
        {MODULATE, NORM, INFERENCE},
    ),
    Kernel("swiglu", swiglu, {MODULATE}, keeps=("x",)),
    Kernel("add_table", add_table, {MODULATE}),
    Kernel("normalise_rotate", _normalise_rotate, {MODULATE}, keeps=("q", "k")),
    Kernel("join_heads", _join_heads, {MODULATE}, keeps=("q", "k")),
    Kernel("pack_heads", _pack_heads, {MODULATE, INFERENCE}),
    # With FLOAT8, a projection's inputs and weight are saved in one byte per value.
    Kernel("layernorm_modulate", fp8_linear.Modulated, {FLOAT8}, keeps=("x",), float8=True),
    Kernel("residual_rmsnorm_modulate", fp8_linear.residual_rmsnorm_modulate, {FLOAT8}, keeps=("x",)),
    Kernel("linear", fp8_linear.linear, {FLOAT8}, keeps=("x",), float8=True),
    Kernel("linear_heads", fp8_linear.linear_heads, {FLOAT8}, keeps=("x",), float8=True, takes_projection=True),
    Kernel("linear_gelu", fp8_linear.linear_gelu, {FLOAT8}, keeps=("x", "u"), float8=True, takes_projection=True),
    Kernel(
        "linear_gate_residual",
        partial(_linear_gate_residual, multiply=fp8_linear.multiply),
        {FLOAT8},
        keeps=("z", "u"),
        float8=True,
    ),
    Kernel(
        "linear_gate_residual_layernorm_modulate",
        fp8_linear.linear_gate_residual_layernorm_modulate,
        {FLOAT8},
        keeps=("z", "u", "h"),
        float8=True,
    ),
    Kernel(
        "linear_gate_residual_rmsnorm_modulate",
        fp8_linear.linear_gate_residual_rmsnorm_modulate,
        {FLOAT8},
        keeps=("z", "u", "h"),
        float8=True,
    ),
    Kernel("swiglu", swiglu, {FLOAT8}, keeps=("x",)),
    Kernel("add_table", add_table, {FLOAT8}),
    Kernel("normalise_rotate", _normalise_rotate, {FLOAT8}, keeps=("q", "k")),
    Kernel("join_heads", _join_heads, {FLOAT8}, keeps=("q", "k")),
    Kernel("pack_heads", _pack_heads, {FLOAT8, INFERENCE}),
    *(
        Kernel(name, getattr(fp8_inference, name), {FLOAT8, INFERENCE}, float8=True, takes_projection=True)
        for name in ("linear_heads", "linear_gelu", "linear_gate_residual_layernorm_modulate")
    ),
    *(
        Kernel(name, getattr(fp8_inference, name), {FLOAT8, INFERENCE}, float8=True)
        for name in ("linear", "linear_gate_residual", "linear_gate_residual_rmsnorm_modulate")
    ),
)


def chosen(switches: Collection[str], others: Collection[Kernel] = ()) -> BlockOps:
    """Return a block's operations with these switches on. Operations without a kernel use torch's reference.

    ``others``: kernels that are not in the table; the table's kernels take precedence.
    """
    found = {kernel.operation: kernel for kernel in (*others, *KERNELS) if kernel.switches <= set(switches)}
    return BlockOps(**{name: kernel.function for name, kernel in found.items()}, kernels=tuple(found.values()))
