"""A block's linear layers in float8 without a backward pass, with one scale per row of an activation.

:func:`opendit.kernels.fp8.rows_in_float8` computes a scale while casting. The fused LayerNorm and modulation instead
derives the scale from an upper bound for each sample. Nothing is saved, and a sample's result doesn't depend on other
samples. fp8_linear.py is the counterpart for training.
"""

import functools
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import fp8
from opendit.kernels import gate_residual_layernorm_modulate as joined
from opendit.kernels.fp8 import Float8, rows_in_float8, weight_in_float8
from opendit.kernels.fp8_linear import EPS, Modulated, check_widths, residual_rmsnorm_modulate
from opendit.kernels.gate_residual import gate_residual
from opendit.kernels.gate_rmsnorm_residual import gate_rmsnorm_residual
from opendit.kernels.rmsnorm_modulate import modulation_with_weight
from opendit.kernels.split_heads import head_views
from opendit.models.blocks import NormalisedProjection
from opendit.models.layers import Projection, RMSNorm

# Products with fewer 128 x 128 output tiles leave the row scales to the next kernel. With row scales, cuBLAS 13 has
# only one tile size, and small products leave most of the GPU idle. fc2 of DiT-XL/2 on an H200, with and without row
# scales: 15.0 and 8.6 us for 512 rows, 40.4 and 31.5 for 4,096, 289 and 304 for 32,768.
TILES = 1024
# An activation is cast only if rows times output columns reach this number. A cast costs one more pass over the
# activation, and saves time in proportion to the output columns. Smaller products run in their input's dtype.
CAST_FROM = 8192 * 1152


@dataclass(frozen=True)
class QuantizedRows:
    """A float8 activation (B, N, D), the input of a linear layer. ``dtype``: dtype of the layer's output."""

    data: Float8
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.data.shape


def _in_float8(x: Tensor | QuantizedRows | Modulated, columns: int) -> Tensor | QuantizedRows:
    """Return x in float8 for a product with ``columns`` output columns; unchanged if the product is too small."""
    if isinstance(x, Modulated):
        return QuantizedRows(x.rows, x.x.dtype)
    if isinstance(x, Tensor) and x.numel() // x.shape[-1] * columns >= CAST_FROM:
        return QuantizedRows(rows_in_float8(x), x.dtype)
    return x


def multiply(x: Tensor | QuantizedRows | Modulated, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = _in_float8(x, len(weight))
    if isinstance(x, Tensor):
        return F.linear(x, weight, bias)
    check_widths(weight)
    w, rows = weight_in_float8(weight), x.data.data.flatten(0, -2)
    scales = x.data.descale, w.descale_of_columns
    y = fp8.product(rows, w.data, scales, x.dtype, None if bias is None else bias.to(x.dtype))
    return y.view(*x.shape[:-1], y.shape[-1])


def _unscaled_product(x: Tensor | QuantizedRows | Modulated, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (y, scale) with x W^T = y * scale, where y is (..., out) and scale (rows, 1). A scale of None means 1."""
    x = _in_float8(x, len(weight))
    few = -(-x.shape[:-1].numel() // 128) * -(-len(weight) // 128) < TILES
    # Apply the scale now if deferring saves nothing, or in fp16, where an unscaled y could overflow.
    if isinstance(x, Tensor) or not few or x.dtype == torch.float16:
        return multiply(x, weight), None
    check_widths(weight)
    w, rows = weight_in_float8(weight), x.data.data.flatten(0, -2)
    y = fp8.product(rows, w.data, (_one(rows.device), w.descale), x.dtype)
    return y.view(*x.shape[:-1], y.shape[-1]), x.data.descale


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def linear(x: Tensor | QuantizedRows | Modulated, layer: Projection) -> Tensor:
    return layer.product(cast(Tensor, x), layer.bias, multiply)


def linear_heads(
    x: Tensor | QuantizedRows | Modulated, linear: Projection, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, d) of x (B, N, D), as views of one product."""
    return head_views(multiply(x, linear.weight, linear.bias), num_heads)


def linear_gelu(x: Tensor | QuantizedRows | Modulated, linear: Projection) -> QuantizedRows:
    u, scale = _unscaled_product(x, linear.weight)
    return QuantizedRows(rows_in_float8(u, linear.bias, scale), u.dtype)


def linear_gate_residual(x: Tensor, gate: Tensor, z: Tensor | QuantizedRows | Modulated, linear: Projection) -> Tensor:
    if isinstance(linear, NormalisedProjection):
        branch = linear.before_norm(cast(Tensor, z), multiply)
        return gate_rmsnorm_residual(x, gate, branch, linear.norm.weight, linear.norm.eps)
    return gate_residual(x, gate, linear.product(cast(Tensor, z), multiply=multiply), linear.bias)


def linear_gate_residual_layernorm_modulate(
    x: Tensor, gate: Tensor, z: Tensor | QuantizedRows | Modulated, linear: Projection, shift: Tensor, scale: Tensor
) -> tuple[Tensor, QuantizedRows]:
    """Compute h = x + gate * linear(z), and LN(h) * (1 + scale) + shift for the next linear layer."""
    branch, branch_scale = _unscaled_product(z, linear.weight)
    h, y, _, _ = joined.gate_residual_layernorm_modulate_float8(
        x, gate, branch, shift, scale, linear.bias, EPS, by_row=True, branch_scale=branch_scale
    )
    return h, QuantizedRows(y, h.dtype)


def linear_gate_residual_rmsnorm_modulate(
    x: Tensor,
    gate: Tensor,
    z: Tensor | QuantizedRows | Modulated,
    linear: Projection,
    norm: RMSNorm,
    shift: Tensor,
    scale: Tensor,
) -> tuple[Tensor, QuantizedRows | Modulated]:
    """Compute h = x + gate * linear(z), and RMSNorm(h) * (1 + scale) + shift for the next linear layer."""
    if isinstance(linear, NormalisedProjection):
        return residual_rmsnorm_modulate(linear_gate_residual(x, gate, z, linear), norm, shift, scale)
    branch = linear.product(cast(Tensor, z), multiply=multiply)
    vectors = modulation_with_weight(x, norm.weight, shift, scale)
    h, y, _, _ = joined.gate_residual_layernorm_modulate_float8(
        x, gate, branch, *vectors, linear.bias, norm.eps, by_row=True, center=False
    )
    return h, QuantizedRows(y, h.dtype)
