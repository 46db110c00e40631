"""Check the arguments of the fused operations."""

import torch
from torch import Tensor

from opendit.kernels.common import DTYPES, MAX_WIDTH, MIN_WIDTH


def check_inputs(
    x: Tensor, sample_of_row: Tensor | None, same_shape: dict[str, Tensor], bias: Tensor | None = None,
    **vectors: Tensor,
) -> None:  # fmt: skip
    """Raises ValueError unless x is (B, N, D), or (rows, D) or (1, rows, D) with sample_of_row (rows,), vectors (B, D),
    bias (D,)."""
    if sample_of_row is None:
        if x.dim() != 3:
            raise ValueError(f"x must be (B, N, D), or (rows, D) with sample_of_row; it is {tuple(x.shape)}")
    elif not _fits_rows(x, sample_of_row) or sample_of_row.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"the packed form takes x (rows, D) and sample_of_row (rows,) int32 or int64, not {tuple(x.shape)} and "
            f"{tuple(sample_of_row.shape)} {sample_of_row.dtype}"
        )
    width = x.shape[-1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"the width D must be {MIN_WIDTH} to {MAX_WIDTH}, not {width}")
    for name, other in same_shape.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, not {tuple(other.shape)}")
    first = next(iter(vectors.values()))
    for name, vector in vectors.items():
        expected = (first.shape[0] if sample_of_row is not None else x.shape[0], width)
        if vector.shape != expected:
            raise ValueError(f"{name} must be (B, D) = {expected}, not {tuple(vector.shape)}")
    if "shift" in vectors and vectors["shift"].dtype != vectors["scale"].dtype:
        raise ValueError(f"shift and scale differ in dtype: {vectors['shift'].dtype}, {vectors['scale'].dtype}")
    if bias is not None:
        if bias.shape != (width,):
            raise ValueError(f"bias must be (D,) = ({width},), not {tuple(bias.shape)}")
        vectors = {**vectors, "bias": bias}
    check_tensors(x=x, **same_shape, **vectors)


def _fits_rows(x: Tensor, sample_of_row: Tensor) -> bool:
    rows = tuple(sample_of_row.shape)
    return tuple(x.shape[:-1]) in (rows, (1, *rows))


def check_tensors(**tensors: Tensor) -> None:
    """Raises ValueError unless all are of a dtype that kernels take and on the first one's device."""
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be bf16, fp16 or fp32, not {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {device}")
