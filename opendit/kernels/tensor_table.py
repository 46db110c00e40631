"""Tables for kernels that process many tensors in one launch, and access to tensors in host memory.

The address table has the tensors' addresses. The block table has each program's tensor and block. State may be in host
memory, as rows of one tensor. Kernels access the state directly (:class:`InPlace`), or through a ring buffer in device
memory (:class:`Staged`). For a ring buffer, they add ``shift + k * stride`` bytes to the addresses in the state's row
k. For direct access, both numbers are 0.
"""

from collections.abc import Callable, Sequence
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
    """Return :attr:`BlockTable.blocks`, on the host, for tensors with these block counts."""
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
    return getattr(tl, str(dtype).removeprefix("torch."))


class BlockTable:
    """Division of tensors (``sizes`` elements) into blocks of ``block`` elements. A tensor's last block may be shorter.

    Attributes:
        blocks: (blocks, 2) int32 on the device: for each block, the tensor's number and the block's number in it.
        first: index of each tensor's first block, and at the end the number of all blocks.
    """

    def __init__(self, sizes: Sequence[int], block: int, device: torch.device):
        counts, self.block = -(-torch.tensor(sizes) // block), block
        self.first: list[int] = [0, *torch.cumsum(counts, 0).tolist()]
        self.blocks = send(block_table(counts), device)


class AddressTable:
    """A table (1 + rows, tensors) int64 on the device: sizes in the first row, addresses in later rows, 0 for no
    tensor. ``table`` is the table as of the last :meth:`refresh`."""

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
    """Return ``tensors``, detached, if a kernel can access them and ``masters`` in one launch.

    Raises:
        ValueError: a tensor is not contiguous, does not have its master's size or ``dtype``, or is neither on the
            masters' device nor in pinned host memory.
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
    """Return the device with kernels that access the masters: a GPU if any master is on a GPU."""
    return next((master.device for master in masters if master.device.type != "cpu"), masters[0].device)


def in_reach(tensor: Tensor) -> bool:
    """Return True if a GPU's kernels can read and write this tensor in host memory."""
    return tensor.device.type == "cpu" and (tensor.numel() == 0 or tensor.is_pinned())


# ---------------------------------------------------------------------------------------------------------- host memory

Launch = Callable[[int, int, int, int], None]  # arguments: first block, block after the last, shift, stride


class InPlace:
    """Direct access: the kernel's loads and stores go over the link to the host. Also used for state on the device."""

    def run(self, launch: Launch, first: int, last: int) -> None:
        """Launch a kernel for blocks ``first`` to ``last`` - 1 on the current stream."""
        launch(first, last, 0, 0)

    def finish(self) -> None:
        """Do nothing, because :meth:`run` uses only the current stream. See :meth:`Staged.finish`."""


class Staged:
    """Access through a ring buffer of ``depth`` slots, with ``part`` blocks each, in device memory.

    While the kernel processes one slot, other streams copy the next blocks in and the previous blocks back.

    Args:
        rows: the state, (rows, elements) fp32 in host memory, pinned if the kernel's device is a GPU.
        tensors: for each row of ``rows``, the tensors that are views of this row, in order. Each must begin at the
            first element of its first block; otherwise ValueError is raised.
        table: division of the tensors into blocks.
        device: device of the kernel.
    """

    def __init__(
        self,
        rows: Tensor,
        tensors: Sequence[Sequence[Tensor]],
        table: BlockTable,
        device: torch.device,
        part: int = 1024,
        depth: int = 3,
    ):
        for row, shards in zip(rows, tensors, strict=True):
            for tensor, first in zip(shards, table.first, strict=False):
                if tensor.numel() and tensor.data_ptr() != row.data_ptr() + 4 * first * table.block:
                    raise ValueError("a tensor in host memory does not lie where its first block is")
        self._rows, self._block, self._part = rows, table.block, part
        self._ring = torch.empty(depth, len(rows), part * table.block, device=device)
        streams = (torch.cuda.Stream(device) for _ in range(2)) if device.type == "cuda" else (None, None)
        self._coming, self._going = streams

    @property
    def nbytes(self) -> int:
        """Size of the ring buffer in bytes."""
        return self._ring.nbytes

    def run(self, launch: Launch, first: int, last: int) -> None:
        """Launch kernels for blocks ``first`` .. ``last`` - 1, slot by slot. Afterwards, the last copies to the host
        may still be in transit; see :meth:`finish`."""
        stride = 4 * (self._ring.shape[2] - self._rows.shape[1])
        gone: list[Any] = []
        if self._coming is not None and self._going is not None:
            self._coming.wait_stream(self._going)  # first finish the last run's copies to the host
            self._coming.wait_stream(torch.cuda.current_stream(self._ring.device))
        for number, begin in enumerate(range(first, last, self._part)):
            end, slot = min(begin + self._part, last), self._ring[number % len(self._ring)]
            there = self._rows[:, begin * self._block : end * self._block]
            here = slot[:, : there.shape[1]]
            self._copy(self._coming, gone[number - len(self._ring)] if number >= len(self._ring) else None, there, here)
            if self._coming is not None:
                torch.cuda.current_stream(self._ring.device).wait_stream(self._coming)
            launch(begin, end, slot.data_ptr() - there.data_ptr(), stride)
            computed = None
            if self._going is not None:
                computed = torch.cuda.current_stream(self._ring.device).record_event()
            gone.append(self._copy(self._going, computed, here, there))

    def finish(self) -> None:
        """Make the host wait until everything is copied back."""
        if self._going is not None:
            self._going.synchronize()

    def _copy(self, stream: torch.cuda.Stream | None, after: "torch.Event | None", source: Tensor, target: Tensor):
        """Copy on ``stream`` after the event ``after``, and return an event that marks the end. Rows are copied one by
        one, because only contiguous copies are asynchronous."""
        if stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for there, here in zip(source, target, strict=True):
                here.copy_(there, non_blocking=True)
            return stream.record_event()
