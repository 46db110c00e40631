"""Kernels over many tensors at once: a table of addresses locates the tensors, and a table of blocks tells a program
which block of which tensor it processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.kernels.language import tl, triton


@triton.jit
def at(address, offsets, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to elements of the tensor at ``address``, an int64 of a table."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler move 16 bytes per thread
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


def block_table(counts: Tensor) -> Tensor:
    """Return (blocks, 2) int32: each block's tensor number, and the block's number in that tensor. counts: blocks of
    every tensor."""
    tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    return torch.stack([tensor, torch.arange(len(tensor)) - first], 1).int()


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the tensors' addresses; 0 where there is no tensor."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def send(host: Tensor, device: torch.device) -> Tensor:
    """Copy ``host`` to the device without waiting; pinned memory is not reused before the copy is done."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's name of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


class BlockTable:
    """Tensors of ``sizes`` elements divided into blocks of ``block``; each tensor's last block may be shorter.

    Attributes:
        blocks: (blocks, 2) int32 on the device: each block's tensor number, and its number in that tensor.
        first: the first block of every tensor, followed by the number of all blocks.
        block: elements per block.
    """

    def __init__(self, sizes: Sequence[int], block: int, device: torch.device):
        counts, self.block = -(-torch.tensor(sizes) // block), block
        self.first: list[int] = [0, *torch.cumsum(counts, 0).tolist()]
        self.blocks = send(block_table(counts), device)


class AddressTable:
    """(1 + rows, tensors) int64 on the device: sizes, and for every row of tensors their addresses; 0: no tensor.

    Attributes:
        table: as of the last :meth:`refresh`.
    """

    table: Tensor

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._sizes, self._device, self._sent = list(sizes), device, None

    def refresh(self, rows: Sequence[Sequence[Tensor | None]]) -> None:
        """Send the table again if an address has changed."""
        addresses = [address for row in rows for address in addresses_of(row)]
        if addresses != self._sent:
            self._sent, self.table = addresses, send(torch.tensor(self._sizes + addresses), self._device)


def check_tensors_fit(
    tensors: Sequence[Tensor], name: str, masters: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return ``tensors``, detached, which a kernel accesses together with ``masters``: on their device, or in pinned
    host memory.

    Raises:
        ValueError: sizes, dtypes, layouts or devices that don't fit.
    """
    tensors, device = [tensor.detach() for tensor in tensors], masters[0].device
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


def in_reach(tensor: Tensor) -> bool:
    """Return True if a GPU's kernels can read and write this tensor in host memory."""
    return tensor.device.type == "cpu" and (tensor.numel() == 0 or tensor.is_pinned())
