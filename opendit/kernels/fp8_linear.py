"""A block's linear layers in float8, forward and backward, and the operations that compute their inputs.

    y = x W^T (e4m3 x e4m3),  dx = dy W (e5m2 x e4m3),  dW = dy^T x (e5m2 x e4m3)

fp8.py describes scales and formats. The tensor cores need the summed dimension contiguous in both factors, so the
backward pass transposes W, dy and x. Every forward pass casts the weights from their current values. The exceptions are
float8 weights that sampling caches or FSDP2 gathers.

If only linear layers read an activation, the kernel writes it in float8 only. Autograd then sees a stand-in with the
activation's shape and dtype, but without memory. The stand-in carries the gradient (:class:`Quantized`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from opendit.kernels import bias_gelu, fp8, lora
from opendit.kernels import gate_residual_layernorm_modulate as joined
from opendit.kernels import layernorm_modulate as adaln
from opendit.kernels.common import interpreting, kernels_available, missing, pretending
from opendit.kernels.fp8 import E4M3, E5M2, Float8, weight_in_float8
from opendit.kernels.gate_rmsnorm_residual import gate_rmsnorm_residual
from opendit.kernels.rmsnorm_modulate import modulation_with_weight
from opendit.kernels.split_heads import gather_heads_float8, head_views, split_heads
from opendit.models.blocks import NormalisedProjection
from opendit.models.layers import LowRank, Projection, RMSNorm, in_working_dtype, unwritten

EPS = 1e-6


def float8_available(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Return (True, reason) if blocks can run in float8 on ``device`` with activations of ``dtype``, otherwise (False,
    reason)."""
    usable, why = kernels_available(device, dtype)
    if not usable or (interpreting() and not pretending()):
        return usable, why
    if dtype == torch.float32:
        return False, "FP8 works with bf16 or fp16, not --mixed_precision fp32"
    too_old = missing("float8", device)
    return (True, why) if too_old is None else (False, too_old)


# -------------------------------------------------------------------------------------------- inputs of linear layers


@dataclass(frozen=True)
class Quantized:
    """A float8 activation (B, N, D), the input of a linear layer. Its values are ``data``. Autograd sees ``stand_in``.
    Do not read elements of ``stand_in``: they may not be in memory."""

    stand_in: Tensor
    data: Float8

    @property
    def shape(self) -> torch.Size:
        return self.stand_in.shape


@dataclass(frozen=True)
class Modulated:
    """The deferred result of LN(x) * (1 + scale) + shift. A linear layer later computes it in float8.

    Without ``center``, the norm is RMSNorm, with its weight folded into the scale (rmsnorm_modulate.py). A torch
    function that gets this object, for example in the final layer, gets the result in x's dtype. If several linear
    layers read one object, the first computes the float8 values for all.
    """

    x: Tensor
    shift: Tensor
    scale: Tensor
    sample_of_row: Tensor | None = None
    eps: float = EPS
    center: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*(a._in_its_dtype() if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    @functools.cached_property
    def quantized(self) -> Quantized:
        """The result in float8 with one scale, for training."""
        of_norm = self.sample_of_row, self.eps, self.center
        return Quantized(*_NormModulate.apply(self.x, self.shift, self.scale, *of_norm))

    @functools.cached_property
    def rows(self) -> Float8:
        """The result in float8 with one scale per row, without gradients."""
        x, shift, scale = self.x, self.shift, self.scale
        return adaln.layernorm_modulate_float8(x, shift, scale, self.eps, by_row=True, center=self.center)[0]

    def _in_its_dtype(self) -> Tensor:
        of_norm = self.sample_of_row, self.eps, True, self.center
        return adaln.layernorm_modulate_forward(self.x, self.shift, self.scale, *of_norm)[0]


def quantized(x: Tensor | Quantized | Modulated) -> Quantized:
    """Return x (B, N, D) in float8: unchanged, computed by :class:`Modulated`, or cast from a tensor."""
    if isinstance(x, Quantized):
        return x
    if isinstance(x, Modulated):
        return x.quantized
    # under autocast, torch's norms return fp32, so cast to the dtype of autocast
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return Quantized(x, fp8.cast(x.detach(), E4M3))


def check_widths(weight: Tensor) -> None:
    """Raise ValueError unless the tensor cores support a weight (out, in) of this size in float8."""
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise ValueError(
            f"--fp8: a weight of {tuple(weight.shape)} has a width that is no multiple of 16; leave it out"
        )


class _Dequantised(Function):
    @staticmethod
    def forward(ctx, stand_in, x):
        return (x.data.to(stand_in.dtype) * x.descale).to(stand_in.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def dequantised(x: Tensor | Quantized | Modulated) -> Tensor:
    """Return x (B, N, D) converted from float8 to the activations' dtype, for products that are not in float8."""
    return x if isinstance(x, Tensor) else _Dequantised.apply(quantized(x).stand_in, quantized(x).data)


def _stand_in(like: Tensor, width: int) -> Tensor:
    return torch.empty_strided((*like.shape[:-1], width), (0,) * like.dim(), dtype=like.dtype, device=like.device)


# ------------------------------------------------------------------------------------------------- the three products


# In the autograd functions below, x is the second input and W the third. If W is frozen, x is not saved.


def _forward_product(
    ctx, x: Float8, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None, unread: bool = False
):
    """Return x W^T + bias (..., out) in ``dtype``, and the tensors to save for :func:`_backward_products`. unread: True
    to return memory without values instead of the product."""
    check_widths(weight)
    w = weight_in_float8(weight)
    rows = x.data.flatten(0, -2)
    if unread:
        y = unwritten((len(rows), weight.shape[0]), rows, dtype)
    else:
        y = fp8.product(rows, w.data, (x.descale, w.descale), dtype, bias if bias is None else bias.to(dtype))
    ctx.dtypes, ctx.shape = (dtype, weight.dtype), x.data.shape
    kept = (x.data, x.descale) if ctx.needs_input_grad[2] else (None, None)
    return y.view(*ctx.shape[:-1], weight.shape[0]), (*kept, w.data, w.descale)


def _backward_products(ctx, dy: Float8, saved: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return dx in x's shape, and dW (out, in); None if not needed. dW sums over all tokens, so its partial sums are
    accumulated in fp32."""
    (x, x_descale, w, w_descale), (dtype, weight_dtype) = saved, ctx.dtypes
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = fp8.product(dy.data.flatten(0, -2), fp8.transposed(w), (dy.descale, w_descale), dtype).view(ctx.shape)
    if ctx.needs_input_grad[2]:
        columns = fp8.transposed(dy.data), fp8.transposed(x)
        dw = fp8.product(*columns, (dy.descale, x_descale), weight_dtype, fast=False)
    return dx, dw


# ---------------------------------------------------------------------------------------------------------- operations


class _NormModulate(Function):
    @staticmethod
    def forward(ctx, x, shift, scale, sample_of_row, eps, center):
        of_norm = {"sample_of_row": sample_of_row, "center": center}
        y, mean, rstd = adaln.layernorm_modulate_float8(x, shift, scale, eps, **of_norm)
        ctx.save_for_backward(x, scale, mean, rstd, sample_of_row)
        return _stand_in(x, x.shape[-1]), y

    @staticmethod
    def backward(ctx, dy, _):
        return *adaln.gradients(ctx, dy, ctx.saved_tensors), None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx, stand_in, x, weight, bias):
        y, saved = _forward_product(ctx, x, weight, stand_in.dtype, bias)
        ctx.save_for_backward(*saved)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dw = _backward_products(ctx, fp8.cast(dy, E5M2), ctx.saved_tensors)
        return dx, None, dw, _sum_of_rows(dy, ctx.bias_dtype) if ctx.needs_input_grad[3] else None


def _sum_of_rows(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.flatten(0, -2).sum(0, dtype=torch.float32).to(dtype)


class _LinearBesideLora(Function):
    """x W^T + bias + scale * (x a^T) b^T. The product with W is in float8, and LoRA's products are in x's dtype. LoRA's
    products are added in place, forward and backward."""

    @staticmethod
    def forward(ctx, stand_in, x, weight, bias, a, b, scale, unread):
        y, saved = _forward_product(ctx, x, weight, stand_in.dtype, bias, unread)
        given, descale = (stand_in, None) if any(stand_in.stride()) else (x.data, x.descale)
        rows = given.flatten(0, -2)
        thin = rows.to(a.dtype) @ a.t() if descale is None else lora.thin_product(rows, descale, a)
        if not unread:
            lora.add_low_rank(y.flatten(0, -2), thin, b.t(), scale)
        ctx.save_for_backward(given, descale, a, b, thin, *saved)
        ctx.scale, ctx.bias_dtype = scale, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        given, descale, a, b, thin, *saved = ctx.saved_tensors
        dy8, of_thin = Float8.empty(dy.shape, E5M2, dy.device), (dy.flatten(0, -2), b, thin, ctx.scale)
        written = fp8.kernel_arguments(dy8, fp8.amax(dy), fp8.SAMPLED_GRADIENT)
        found = lora.low_rank_gradients_and_cast(*of_thin, *written)
        if found is None:
            dy8, found = fp8.cast(dy, E5M2), lora.low_rank_gradients(*of_thin)
        dthin, db = found
        dx, dw = _backward_products(ctx, dy8, saved)
        if dx is not None:
            lora.add_low_rank(dx.flatten(0, -2), dthin, a, 1.0)
        rows = given.flatten(0, -2)
        da = dthin.t() @ rows.to(a.dtype) if descale is None else lora.thin_gradient(dthin, rows, descale)
        dbias = _sum_of_rows(dy, ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return dx, None, dw, dbias, da, db, None, None


class _BiasGelu(Function):
    @staticmethod
    def forward(ctx, u, bias):
        ctx.save_for_backward(u, bias)
        return _stand_in(u, u.shape[-1]), bias_gelu.bias_gelu_float8(u, bias)

    @staticmethod
    def backward(ctx, dh, _):
        return bias_gelu.gradients(ctx, dh)


class _LinearHeads(Function):
    @staticmethod
    def forward(ctx, stand_in, x, weight, bias, num_heads):
        qkv, saved = _forward_product(ctx, x, weight, stand_in.dtype, bias)
        ctx.save_for_backward(*saved)
        ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[3] else None
        return head_views(qkv, num_heads)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dqkv, dbias = gather_heads_float8(dq, dk, dv, ctx.bias_dtype)
        dx, dw = _backward_products(ctx, dqkv, ctx.saved_tensors)
        return dx, None, dw, dbias, None


class _LinearGelu(Function):
    @staticmethod
    def forward(ctx, stand_in, x, weight, bias):
        u, saved = _forward_product(ctx, x, weight, stand_in.dtype)
        ctx.save_for_backward(u, bias, *saved)
        return _stand_in(stand_in, weight.shape[0]), bias_gelu.bias_gelu_float8(u, bias)

    @staticmethod
    def backward(ctx, dh, _):
        u, bias, *saved = ctx.saved_tensors
        du, dbias = bias_gelu.bias_gelu_backward_float8(dh, u, bias, ctx.needs_input_grad[3])
        dx, dw = _backward_products(ctx, du, saved)
        return dx, None, dw, dbias


class _GateResidualNormModulate(Function):
    @staticmethod
    def forward(ctx, x, gate, branch, shift, scale, bias, sample_of_row, eps, center):
        of_norm = {"sample_of_row": sample_of_row, "center": center}
        h, y, mean, rstd = joined.gate_residual_layernorm_modulate_float8(
            x, gate, branch, shift, scale, bias, eps, **of_norm
        )
        joined.save(ctx, h, gate, branch, scale, bias, mean, rstd, sample_of_row)
        return h, _stand_in(h, h.shape[-1]), y

    @staticmethod
    def backward(ctx, dh, dy, _):
        return *joined.gradients(ctx, dh, dy), None, None, None


# ------------------------------------------------------------------------------------------------------------ BlockOps


def multiply(
    x: Tensor | Quantized | Modulated, weight: Tensor, bias: Tensor | None = None, low_rank: LowRank | None = None
) -> Tensor:
    """Return x W^T + bias (..., out) in x's dtype, computed in float8. LoRA's products are in x's dtype. This is the
    ``multiply`` argument of ``Projection.product``."""
    x = quantized(x)
    if low_rank is None:
        return _Linear.apply(x.stand_in, x.data, weight, bias)
    factors = in_working_dtype(*low_rank[:2])
    return _LinearBesideLora.apply(x.stand_in, x.data, weight, bias, *factors, low_rank.scale, low_rank.unread)


def linear(x: Tensor | Quantized | Modulated, layer: Projection) -> Tensor:
    return layer.product(cast(Tensor, x), layer.bias, multiply)


def residual_rmsnorm_modulate(
    x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Modulated]:
    """Return x, and RMSNorm(x) * (1 + scale) + shift for the next linear layer to compute."""
    vectors = modulation_with_weight(x, norm.weight, shift, scale)
    return x, Modulated(x, *vectors, sample_of_row, norm.eps, center=False)


def linear_gate_residual_layernorm_modulate(
    x: Tensor,
    gate: Tensor,
    z: Tensor | Quantized | Modulated,
    linear: Projection,
    shift: Tensor,
    scale: Tensor,
    sample_of_row: Tensor | None = None,
    eps: float = EPS,
    center: bool = True,
) -> tuple[Tensor, Quantized]:
    """Compute h = x + gate * linear(z), and LN(h) * (1 + scale) + shift for the next linear layer."""
    branch, bias = linear.product(cast(Tensor, z), multiply=multiply), linear.bias
    h, stand_in, data = _GateResidualNormModulate.apply(x, gate, branch, shift, scale, bias, sample_of_row, eps, center)
    return h, Quantized(stand_in, data)


def linear_gate_residual_rmsnorm_modulate(
    x: Tensor,
    gate: Tensor,
    z: Tensor | Quantized | Modulated,
    linear: Projection,
    norm: RMSNorm,
    shift: Tensor,
    scale: Tensor,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Quantized | Modulated]:
    """Compute h = x + gate * linear(z), and RMSNorm(h) * (1 + scale) + shift for the next linear layer."""
    if isinstance(linear, NormalisedProjection):
        branch = linear.before_norm(cast(Tensor, z), multiply)
        h = gate_rmsnorm_residual(x, gate, branch, linear.norm.weight, linear.norm.eps, sample_of_row)
        return residual_rmsnorm_modulate(h, norm, shift, scale, sample_of_row)
    vectors = modulation_with_weight(x, norm.weight, shift, scale)
    return linear_gate_residual_layernorm_modulate(x, gate, z, linear, *vectors, sample_of_row, norm.eps, center=False)


# Without LoRA, the functions below bypass the projection's forward method. With LoRA they call the projection, because
# LoRA's gradients need the product's gradient in the activations' dtype.


def linear_heads(
    x: Tensor | Quantized | Modulated, linear: Projection, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, d) of x (B, N, D), as views of one product in float8."""
    if linear.low_rank is not None:
        return split_heads(linear.product(cast(Tensor, x), linear.bias, multiply), num_heads)
    x = quantized(x)
    return _LinearHeads.apply(x.stand_in, x.data, linear.matrix, linear.bias, num_heads)


def linear_gelu(x: Tensor | Quantized | Modulated, linear: Projection) -> Quantized:
    """Compute GELU(linear(x)), tanh form, for the next linear layer."""
    if linear.low_rank is not None:
        return Quantized(*_BiasGelu.apply(linear.product(cast(Tensor, x), multiply=multiply), linear.bias))
    x = quantized(x)
    return Quantized(*_LinearGelu.apply(x.stand_in, x.data, linear.matrix, linear.bias))
