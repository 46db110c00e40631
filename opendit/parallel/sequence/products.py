"""Matrix products of the qkv projection in sequence parallelism, and conversions between layouts of tokens and heads.

The products are x W^T and its gradients, in the dtype of the activations or in float8 (kernels/fp8.py).

The *packed* layout of q, k, v is (P, B, n, 3, h, d), for P ranks with n tokens each, and one rank's h = H / P heads.
All-to-alls and FastSeq's projections return this layout. With one sample, q, k and v are views of the packed tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import fp8
from opendit.kernels.fp8 import weight_in_float8
from opendit.kernels.fp8_linear import Modulated, Quantized, quantized
from opendit.models.attention import AnyProjection
from opendit.models.layers import in_working_dtype
from opendit.parallel.collectives import Group

Saved = tuple[Tensor, ...]  # a weight in the form for the backward pass


class Products:
    """Products in the dtype of the activations. Use a new object for each call of a layer."""

    def factor(self, weight: Tensor, group: Group | None = None) -> Saved:
        """Prepare the weight for all products. The result can be saved for the backward pass. group: select only the
        rows of this rank's heads; None for all rows."""
        return (weight if group is None else own_rows(weight, group),)

    def project(self, out: Tensor, sent: Tensor, factor: Saved, bias: Tensor | None) -> None:
        """Write sent W^T + bias to the contiguous tensor ``out``."""
        linear_into(out, sent, factor[0], bias)

    def gradient(self, grad: Tensor) -> Tensor:
        """Prepare the product's gradient (..., out) for the backward pass, without changing the shape."""
        return grad

    def columns(self, factor: Saved) -> Saved:
        return factor

    def input_gradient(self, grad: Tensor, columns: Saved) -> Tensor:
        """Return grad W (rows, D). grad: some rows of the result of :meth:`gradient`."""
        return grad @ columns[0]

    def input_gradient_into(self, out: Tensor, grad: Tensor, columns: Saved, add: bool) -> None:
        """Write the product of grad and W to ``out``, or add it to ``out`` if ``add`` is True."""
        torch.addmm(out, grad, columns[0], beta=int(add), out=out)

    def weight_gradient(self, grad: Tensor, sent: Tensor) -> Tensor:
        """Return a weight's gradient (3 D, D), equal to ``whole_rows(grad.T @ x, group)``.

        Args:
            grad: gradients (tokens, 3 h d) of this rank's heads.
            x: inputs (tokens, D).
            whole: memory for the result, from :func:`zeros_but_own`.
        """
        return grad.t() @ sent

    def own_weight_gradient(self, grad: Tensor, sent: Tensor, group: Group, whole: Tensor) -> Tensor:
        """Write the weight's gradient to this rank's rows of ``whole``, and return ``whole`` as (3 D, D). See
        :func:`weight_gradient`."""
        return weight_gradient(grad, sent, group, whole)


class Float8Products(Products):
    """Products in float8. Ranks send inputs in float8. They send input gradients in the dtype of the activations,
    because these are summed.

    Args:
        dtypes: (dtype of the activations, dtype of the weight).
        descale: factor from the float8 input to its values.
    """

    def __init__(self, dtypes: tuple[torch.dtype, torch.dtype], descale: Tensor):
        self._dtypes, self._descale = dtypes, descale

    def factor(self, weight: Tensor, group: Group | None = None) -> Saved:
        made = weight_in_float8(weight, None if group is None else lambda rows: own_rows(rows, group))
        if made.data.shape[0] % 16 or made.data.shape[1] % 16:
            rows = f"{tuple(made.data.shape)}, of the heads of one rank"
            raise ValueError(f"--fp8: a weight of {rows} has a width that is no multiple of 16; leave it out")
        return made.data, made.descale

    def project(self, out: Tensor, sent: Tensor, factor: Saved, bias: Tensor | None) -> None:
        (weight, descale), dtype = factor, out.dtype
        out, sent = out.view(-1, len(weight)), _float8(sent).reshape(-1, sent.shape[-1])
        bias = None if bias is None else bias.to(dtype)
        fp8.product(sent, weight, (self._descale, descale), dtype, bias, out=out)

    def gradient(self, grad: Tensor) -> Tensor:
        made = fp8.cast(grad, fp8.E5M2)
        self._grad_descale = made.descale
        return made.data

    def columns(self, factor: Saved) -> Saved:
        return fp8.transposed(factor[0]), factor[1]

    def input_gradient(self, grad: Tensor, columns: Saved) -> Tensor:
        return fp8.product(grad, columns[0], (self._grad_descale, columns[1]), self._dtypes[0])

    def input_gradient_into(self, out: Tensor, grad: Tensor, columns: Saved, add: bool) -> None:
        if add:
            out.add_(self.input_gradient(grad, columns))
        else:
            fp8.product(grad, columns[0], (self._grad_descale, columns[1]), out.dtype, out=out)

    def weight_gradient(self, grad: Tensor, sent: Tensor) -> Tensor:
        factors = fp8.transposed(grad), fp8.transposed(_float8(sent))
        return fp8.product(*factors, (self._grad_descale, self._descale), self._dtypes[1], fast=False)

    def own_weight_gradient(self, grad: Tensor, sent: Tensor, group: Group, whole: Tensor) -> Tensor:
        whole[:, group.rank] = self.weight_gradient(grad, sent).unflatten(0, (3, -1))
        return whole.flatten(0, 2)


def _float8(sent: Tensor) -> Tensor:
    return sent.view(fp8.E4M3)


class Projected(NamedTuple):
    """Operands of a projection of x (B, n, D)."""

    x: Tensor  # the tensor in the autograd graph, without values in float8
    weight: Tensor  # (out, D)
    bias: Tensor | None  # (out,)
    sent: Tensor  # x in the form that ranks send; only ``products`` can read it
    products: Products


def prepare_projection(x: Tensor | Modulated | Quantized, qkv: AnyProjection, float8: bool) -> Projected:
    """Prepare the projection ``qkv`` of x (B, n, D). float8: True for products in float8; x must then be an output of
    LayerNorm + modulate.

    In float8, one product reads the inputs of all ranks, so the scale must be equal on all ranks. This is true because
    LayerNorm + modulate computes the scale from the samples' modulation.
    """
    if not float8:
        given, weight, bias = in_working_dtype(cast(Tensor, x), qkv.weight, qkv.bias)
        return Projected(given, weight, bias, given.detach(), Products())
    assert isinstance(x, Modulated | Quantized), "an input whose scale the ranks have not agreed on"
    x = quantized(x)
    products = Float8Products((x.stand_in.dtype, qkv.weight.dtype), x.data.descale)
    sent = x.data.data.view(torch.uint8)  # not every collective supports float8
    return Projected(x.stand_in, qkv.weight, qkv.bias, sent, products)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out, x = out.view(-1, len(weight)), x.reshape(-1, x.shape[-1])
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def column_sums(x: Tensor) -> Tensor:
    """Return x.sum(0) for x (rows, columns), computed as a product with ones. torch's sum takes twice as long."""
    return torch.mv(x.t(), x.new_ones(len(x)))


def own_rows(parameter: Tensor, group: Group) -> Tensor:
    """Select the rows (3 h d, ...) of this rank's heads from the rows (3 D, ...) of q, k and v."""
    # torch.cat of contiguous blocks is three times as fast as a copy of a strided view
    return torch.cat(parameter.unflatten(0, (3, group.size, -1))[:, group.rank].unbind())


def whole_rows(rows: Tensor, group: Group) -> Tensor:
    """Invert :func:`own_rows`, with zeros in the rows of other ranks' heads."""
    whole = rows.new_zeros(3, group.size, len(rows) // 3, *rows.shape[1:])
    whole[:, group.rank] = rows.unflatten(0, (3, -1))
    return whole.flatten(0, 2)


def zeros_but_own(own_weight: Tensor, dtype: torch.dtype, group: Group) -> Tensor:
    """Allocate a weight's gradient (3, P, h d, D) in ``dtype``. The rows of other ranks' heads are zero, and the rows
    of this rank's heads are uninitialised. own_weight: this rank's rows of the weight, (3 h d, D)."""
    whole = own_weight.new_empty(3, group.size, len(own_weight) // 3, own_weight.shape[1], dtype=dtype)
    others = [part for rows in whole for part in (rows[: group.rank], rows[group.rank + 1 :]) if part.numel()]
    if others:
        torch._foreach_zero_(others)  # a single kernel
    return whole


def weight_gradient(grad: Tensor, x: Tensor, group: Group, whole: Tensor) -> Tensor:
    """Return a weight's gradient (3 D, D), equal to ``whole_rows(grad.T @ x, group)``. x: inputs (tokens, D). grad:
    gradients (tokens, 3 h d) of this rank's heads. whole: memory for the result, from :func:`zeros_but_own`."""
    torch.bmm(grad.unflatten(1, (3, -1)).permute(1, 2, 0), x.expand(3, *x.shape), out=whole[:, group.rank])
    return whole.flatten(0, 2)


class _Unpack(torch.autograd.Function):
    """:func:`unpack` with a faster backward pass: one pass over memory instead of three with autograd."""

    @staticmethod
    def forward(ctx, packed: Tensor, length: int):
        ctx.shape = packed.shape
        P, B, n = packed.shape[:3]
        rows = packed.transpose(0, 1).reshape(B, P * n, *packed.shape[3:])  # a view for one sample
        return rows[:, :length].permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        n, length = ctx.shape[2], grads[0].shape[2]
        packed = grads[0].new_empty(ctx.shape)
        whole, rest = divmod(length, n)  # number of ranks with n tokens; number of tokens of the next rank
        by_head = packed.permute(3, 1, 4, 0, 2, 5)  # (3, B, h, P, n, d)
        by_head[:, :, :, whole:].zero_()
        for target, grad in zip(by_head, grads, strict=True):
            target[:, :, :whole].copy_(grad[:, :, : whole * n].unflatten(2, (whole, n)))
            if rest:
                target[:, :, whole, :rest].copy_(grad[:, :, whole * n :])
        return packed, None


def unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, h, length, d) from the packed tensor (P, B, n, 3, h, d). Tokens past ``length`` are padding
    and are dropped."""
    return _Unpack.apply(packed, length)


def tokens_by_rank(heads: Tensor, rows: int, ranks: int) -> Tensor:
    """Return the attention output (B, h, N, d) as (P, B, n, h, d) to send. Row p has the n = ``rows`` tokens of rank p,
    with zeros for padding."""
    by_token, missing = heads.transpose(1, 2), ranks * rows - heads.shape[2]
    if missing:
        by_token = F.pad(by_token, (0, 0, 0, 0, 0, missing))
    return by_token.unflatten(1, (ranks, rows)).transpose(0, 1).contiguous()


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, samples: int, *received: Tensor):
        (P, b, n, h, d), groups = received[0].shape, len(received) // samples
        joined = received[0].new_empty(samples, b, n, groups, P, h, d)
        ctx.shape, wide = joined.shape, d * joined.element_size() % 8 == 0
        for target, part in zip(_parts_of(joined), received, strict=True):
            if wide:  # larger units make a GPU's strided copy up to twice as fast
                target, part = target.view(torch.int64), part.view(torch.int64)
            target.copy_(part)
        return joined.view(samples * b, n, -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, *_parts_of(grad.reshape(ctx.shape))


def _parts_of(joined: Tensor) -> list[Tensor]:
    """Return views (P, b, n, h, d) of all samples (samples, b, n, groups, P, h, d)."""
    return [part.permute(2, 0, 1, 3, 4) for sample in joined for part in sample.unbind(2)]


def side_by_side(received: Sequence[Tensor], samples: int = 1) -> Tensor:
    """Join the heads of all ranks: return (B, n, D). samples: number of sample groups. received: a tensor (P, b, n, h,
    d) for each (sample group, head group), sample group by sample group."""
    return _SideBySide.apply(samples, *received)
