"""Kernels over many tensors at once: they find the tensors in a table of addresses, and a program finds its block of a
tensor in a table of blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opendit.kernels.common import tl, triton


@triton.jit
def at(address, offsets, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to elements of the tensor at ``address``, an int64 of a table."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler move 16 bytes a thread
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


def block_table(counts: Tensor) -> Tensor:
    """(blocks, 2) int32: the number of the block's tensor, and of the block in it; counts: blocks of every tensor."""
    tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    return torch.stack([tensor, torch.arange(len(tensor)) - first], 1).int()


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """0 where there is no tensor."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def send(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on the device, without waiting; pinned memory is not used again before the copy is done."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def triton_dtype(dtype: torch.dtype):
    """Triton's name of a dtype of torch."""
    return getattr(tl, str(dtype).removeprefix("torch."))
