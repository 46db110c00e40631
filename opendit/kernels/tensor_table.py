"""Tables for kernels that process many tensors in one launch.

The address table holds the tensors' addresses. The block table tells each program which tensor and which block to
process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.kernels.language import tl, triton


@triton.jit
def at(address, offsets, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to the elements at ``offsets`` of the tensor at ``address``, an int64 from an address table."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:  # allows accesses of 16 bytes per thread
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


def block_table(counts: Tensor) -> Tensor:
    """Return (blocks, 2) int32: for each block, the tensor's number and the block's number in the tensor.

    counts: number of blocks of each tensor.
    """
    tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    return torch.stack([tensor, torch.arange(len(tensor)) - first], 1).int()


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the address of each tensor; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def send(host: Tensor, device: torch.device) -> Tensor:
    """Copy ``host`` to the device without waiting. torch doesn't reuse the pinned memory until the copy is done."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


class BlockTable:
    """Division of tensors with ``sizes`` elements into blocks of ``block`` elements. A tensor's last block may be
    shorter.

    Attributes:
        blocks: (blocks, 2) int32 on the device: for each block, the tensor's number and the block's number in the
            tensor.
        first: number of the first block of each tensor, and at the end the number of all blocks.
        block: elements per block.
    """

    def __init__(self, sizes: Sequence[int], block: int, device: torch.device):
        counts, self.block = -(-torch.tensor(sizes) // block), block
        self.first: list[int] = [0, *torch.cumsum(counts, 0).tolist()]
        self.blocks = send(block_table(counts), device)


class AddressTable:
    """A table (1 + rows, tensors) int64 on the device: sizes in the first row, and addresses in the other rows.

    Address 0 means that there is no tensor.

    Attributes:
        table: the table as of the last :meth:`refresh`.
    """

    table: Tensor

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._sizes, self._device, self._sent = list(sizes), device, None

    def refresh(self, rows: Sequence[Sequence[Tensor | None]]) -> None:
        """Copy the table to the device again if an address in ``rows`` has changed."""
        addresses = [address for row in rows for address in addresses_of(row)]
        if addresses != self._sent:
            self._sent, self.table = addresses, send(torch.tensor(self._sizes + addresses), self._device)


def check_tensors_fit(
    tensors: Sequence[Tensor], name: str, masters: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Check that a kernel can access ``tensors`` together with ``masters``, and return ``tensors``, detached.

    The tensors must be contiguous, have ``dtype`` and the masters' sizes, and be on the masters' device or in pinned
    host memory.

    Raises:
        ValueError: sizes, dtypes, layouts or devices don't fit.
    """
    tensors, device = [tensor.detach() for tensor in tensors], device_of(masters)
    if len(tensors) != len(masters):
        raise ValueError(f"{name}: {len(tensors)} tensors for {len(masters)} masters")
    for tensor, master in zip(tensors, masters, strict=True):
        reached = tensor.device == device or (device.type == "cuda" and in_reach(tensor))
        if tensor.numel() != master.numel() or tensor.dtype != dtype or not reached:
            raise ValueError(
                f"{name}: {tensor.numel()} x {tensor.dtype} on {tensor.device} for a master of "
                f"{master.numel()} on {device}; expected {dtype}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensors


def device_of(masters: Sequence[Tensor]) -> torch.device:
    """Return the device whose kernels access the masters: the GPU if one of them is on a GPU."""
    return next((master.device for master in masters if master.device.type != "cpu"), masters[0].device)


def in_reach(tensor: Tensor) -> bool:
    """Return True if a GPU's kernels can read and write this tensor in host memory."""
    return tensor.device.type == "cpu" and (tensor.numel() == 0 or tensor.is_pinned())
