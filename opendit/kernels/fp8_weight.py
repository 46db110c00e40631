"""Weights in float8: cast for one product, cached for many products, or stored only in float8."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl

from opendit.kernels import fp8
from opendit.kernels.fp8 import E4M3, Float8
from opendit.models.layers import Projection, StoredWeight, dense


class Float8Weight(Tensor):
    """A weight (out, in) that is in memory only as ``float8``.

    To autograd, and to code that reads shape, device or dtype, this is a tensor of ``dtype``, whose gradient also has
    this dtype. Operations that support the class (:func:`weight_in_float8`) read ``float8``; other uses raise
    RuntimeError.
    """

    float8: Float8
    # PyTorch's way to disable this hook. Otherwise torch functions would treat this class like Gemini's tensors, which
    # intercept calls.
    __torch_function__ = _disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # as torch documents it

    @staticmethod
    def __new__(cls, float8: Float8, dtype: torch.dtype) -> "Float8Weight":
        data = float8.data
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, float8: Float8, dtype: torch.dtype):
        self.float8 = float8

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight, kwargs = args[0], dict(kwargs or {})
        aten = torch.ops.aten
        if function == aten.detach.default or (
            function == aten.as_strided.default
            and (tuple(args[1]), tuple(args[2])) == (tuple(weight.shape), weight.stride())
        ):  # nn.Parameter calls these two functions
            return cls(weight.float8, weight.dtype)
        if function == aten.zeros_like.default:  # autograd calls this function for a missing gradient
            return torch.zeros(weight.shape, dtype=kwargs.get("dtype") or weight.dtype, device=weight.device)
        raise RuntimeError(f"{function} got a weight of shape {tuple(weight.shape)} that is there in float8 only")

    def __repr__(self, **_: Any) -> str:
        return f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


@dataclass(frozen=True)
class KeptWeight:
    """A cached cast of a weight to float8. Address and version identify the values that the weight had at the cast."""

    float8: Float8
    address: int
    version: int


def keep_weights(model: nn.Module) -> int:
    """Cast the weights of all projections that can run in float8, and cache the casts until the weights change.

    Sampling calls a model a hundred times with the same weights. If a weight is changed or moved, the cached cast
    becomes invalid, and from then on every product casts the weight. Returns the cache's size in bytes.
    """
    taken = 0
    for layer in model.modules():
        weight: Any = layer.matrix if isinstance(layer, Projection) else None
        if isinstance(weight, Tensor) and not weight.is_inference() and not any(n % 16 for n in weight.shape):
            cast = fp8.cast(weight.detach(), E4M3, exact=True)
            # cache this value now, because a CUDA graph capture would compute it only at each replay
            _ = cast.descale_of_columns
            owner: Any = weight
            owner.kept_float8 = KeptWeight(cast, weight.data_ptr(), weight._version)
            taken += cast.data.nbytes
    return taken


def weight_in_float8(weight: Tensor | StoredWeight, take: Callable[[Tensor], Tensor] | None = None) -> Float8:
    """Return weight (out, in) in e4m3: stored or cached float8 values, or a cast scaled by the weight's amax.

    take: function that selects rows of a tensor and returns a contiguous tensor. The scale is computed from all rows.
    """
    whole = _there(weight)
    if whole is None:
        weight = dense(weight)
        return fp8.cast(weight if take is None else take(weight), E4M3, exact=True, scaled_as=weight)
    # View the rows as bytes, because not every ``take`` supports float8.
    return whole if take is None else Float8(take(whole.data.view(torch.uint8)).view(E4M3), whole.descale)


def _there(weight: Tensor | StoredWeight) -> Float8 | None:
    """Return the stored or cached float8 values of a weight; None if the weight must be cast."""
    if isinstance(weight, Float8Weight | StoredWeight):
        return getattr(weight, "float8", None)
    kept = getattr(weight, "kept_float8", None)
    if kept is not None and (kept.address, kept.version) == (weight.data_ptr(), weight._version):
        return kept.float8
    return None
