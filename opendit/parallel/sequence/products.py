"""The products of a qkv projection that a strategy has taken over, x W^T and its gradients: in the dtype of the
activations, or in float8 (kernels/fp8.py).

A strategy says when inputs and gradients travel; what travels, and how it is multiplied, is said here.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opendit.kernels import fp8
from opendit.kernels.fp8_linear import Modulated, Quantized, quantized
from opendit.kernels.fp8_weight import weight_in_float8
from opendit.models.attention import AnyProjection
from opendit.parallel.sequence.collectives import Group
from opendit.parallel.sequence.layout import linear_into, own_rows, weight_gradient

Saved = tuple[Tensor, ...]  # a weight, as the backward pass wants it


class Products:
    """In the dtype of the activations. One object for each call of a layer; it holds no activations."""

    def factor(self, weight: Tensor, group: Group | None = None) -> Saved:
        """The weight as the other factor of all products; to be saved for the backward pass. group: of its rows those
        of the heads that this rank of the group has; None: all."""
        return (weight if group is None else own_rows(weight, group),)

    def project(self, out: Tensor, sent: Tensor, factor: Saved, bias: Tensor | None) -> None:
        """sent W^T + bias, written to ``out``, contiguous and with as many rows of the factor's length."""
        linear_into(out, sent, factor[0], bias)

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient (..., out) of the product as a factor of the other two, of the same shape."""
        return grad

    def columns(self, factor: Saved) -> Saved:
        """The factor's rows as :meth:`input_gradient` wants them."""
        return factor

    def input_gradient(self, grad: Tensor, columns: Saved) -> Tensor:
        """grad W, (rows, D) of rows of :meth:`gradient`."""
        return grad @ columns[0]

    def input_gradient_into(self, out: Tensor, grad: Tensor, columns: Saved, add: bool) -> None:
        """The same written to ``out``, or added."""
        torch.addmm(out, grad, columns[0], beta=int(add), out=out)

    def weight_gradient(self, grad: Tensor, sent: Tensor) -> Tensor:
        """grad^T x, (out, D), of all tokens' gradients (rows, out) and inputs (rows, D)."""
        return grad.t() @ sent

    def own_weight_gradient(self, grad: Tensor, sent: Tensor, group: Group, whole: Tensor) -> Tensor:
        """The same of the rows of this rank's heads, at their place in ``whole``: see :func:`weight_gradient`."""
        return weight_gradient(grad, sent, group, whole)


class Float8Products(Products):
    """In float8. The input travels as bytes, half of what bf16 takes; the gradients of inputs travel in the dtype of
    the activations, because ranks add them up."""

    def __init__(self, dtypes: tuple[torch.dtype, torch.dtype], descale: Tensor):
        """dtypes: of the activations and of the weight. descale: of the input."""
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
    """A projection of x (B, n, D) that a strategy has taken over.

    x: what autograd sees of the input. weight (out, D) and bias (out,) or None: whole, in the canonical layout.
    sent: the input as ranks send it to each other, (B, n, D), which only ``products`` can read.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    sent: Tensor
    products: Products


def taken_over(x: Tensor | Modulated | Quantized, qkv: AnyProjection, float8: bool) -> Projected:
    """The projection ``qkv`` of x (B, n, D). float8: by products in float8, of what LayerNorm + modulate hands over.

    Ranks multiply each other's inputs, and the weight's gradient is one product over the tokens of all of them, so in
    float8 these must have one scale. They have: LayerNorm + modulate takes its scale from a bound that is made of the
    samples' modulation, which is the same on all ranks. (From a tensor's own amax it would not be.)
    """
    if not float8:
        given, weight, bias = in_working_dtype(cast(Tensor, x), qkv.weight, qkv.bias)
        return Projected(given, weight, bias, given.detach(), Products())
    assert isinstance(x, Modulated | Quantized), "an input whose scale the ranks have not agreed on"
    x = quantized(x)
    products = Float8Products((x.stand_in.dtype, qkv.weight.dtype), x.data.descale)
    sent = x.data.data.view(torch.uint8)  # not every way of sending knows float8
    return Projected(x.stand_in, qkv.weight, qkv.bias, sent, products)


def in_working_dtype(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast tensors as autocast would for a linear layer, before they are sent, so that half as much is sent. None stays
    None."""
    tensors, kind = (first, *others), first.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
