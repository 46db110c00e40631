"""GELU(x W^T + bias), tanh form, without a backward pass, computed in the product's epilogue.

Training must save the product before GELU, so there GELU is a separate pass (bias_gelu.py). Without a backward pass,
cuBLAS applies bias and GELU to the fp32 sums before writing, so that the hidden layer is written once and never read
back.
"""

import torch
from torch import Tensor

from opendit.kernels import cublaslt
from opendit.models.layers import TORCH_OPS, Projection, StoredWeight


def linear_gelu(x: Tensor, linear: Projection) -> Tensor:
    """Return GELU(linear(x)) (..., out) for x (..., in), without gradients.

    On CPUs, for a layer without bias, and for a stored weight, the torch reference is used.
    """
    if linear.bias is None or not x.is_cuda or isinstance(linear.matrix, StoredWeight):
        return TORCH_OPS.linear_gelu(x, linear)
    return cublaslt.linear_gelu(x, linear.matrix, linear.bias, product_and_gelu)


def product_and_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(x W^T + bias) (..., out) with torch: x (..., in), weight (out, in), bias (out,)."""
    y = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)
