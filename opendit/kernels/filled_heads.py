"""Heads filled up with zeros to a size that an attention kernel takes, or is right at: zeros change nothing."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def with_filled_heads(
    q: Tensor, k: Tensor, v: Tensor, head_size: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """What ``attend`` makes of q, k, v (..., H, d) as (..., H, head_size), (..., H, d).

    What it keeps of them for its backward pass is kept without the zeros, which are added anew: else q, k and v would
    be kept a second time.
    """
    d = q.shape[-1]
    if head_size == d:
        return attend(q, k, v)
    parts = [q, k, v]
    filled = [F.pad(x, (0, head_size - d)) for x in parts]

    def keep(saved: Tensor) -> tuple[Tensor, bool]:
        for own, wide in zip(parts, filled, strict=True):
            if saved.data_ptr() == wide.data_ptr() and saved.shape == wide.shape:  # another object of the same memory
                return own.detach(), True
        wide = saved.shape[-1:] == (head_size,) and saved.dim() == q.dim()  # the output
        return (saved[..., :d].contiguous() if wide else saved), wide

    def restore(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, wide = kept
        return F.pad(tensor, (0, head_size - d)) if wide else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        output = attend(*filled)
    for held in (filled, parts):  # autograd keeps the functions above, and by them what they refer to
        held.clear()
    return output[..., :d]
