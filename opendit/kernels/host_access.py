"""Give kernels access to state in host memory, directly or through a ring buffer in device memory.

A kernel adds ``shift + row * stride`` bytes to the addresses of tensors in row ``row`` of the state. This offset is 0
for direct access. Otherwise it is the distance from the host memory to the ring buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.kernels.tensor_table import BlockTable

Launch = Callable[[int, int, int, int], None]  # arguments: first block, block after the last, shift, stride


class InPlace:
    """Direct access: the kernel's loads and stores go over the link to the host. Also used for state on the device."""

    def run(self, launch: Launch, first: int, last: int) -> None:
        """Launch a kernel for blocks ``first`` to ``last`` - 1 on the current stream."""
        launch(first, last, 0, 0)

    def finish(self) -> None:
        """Do nothing, because :meth:`run` uses only the current stream. See :meth:`Staged.finish`."""


class Staged:
    """Access through a ring buffer in device memory.

    The state is divided into parts of ``part`` blocks. While the kernel processes a part, the next parts are copied to
    the device and the previous part is copied back, on separate streams.

    Args:
        rows: the state, (rows, elements) fp32 in host memory, pinned if the kernel's device is a GPU.
        tensors: for each row of ``rows``, the tensors that are views of this row, in order. Each tensor must begin at
            the first element of its first block.
        table: division of the tensors into blocks.
        device: device of the kernel.
        part: blocks per part.
        depth: parts in the ring buffer.

    Raises:
        ValueError: a tensor does not begin at its first block.
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
        """Launch a kernel for each part of blocks ``first`` .. ``last`` - 1.

        When the current stream has finished, the last parts may still be in transit to the host; see :meth:`finish`.
        """
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
        """Make the host wait until the last part is copied back."""
        if self._going is not None:
            self._going.synchronize()

    def _copy(self, stream: torch.cuda.Stream | None, after: "torch.Event | None", source: Tensor, target: Tensor):
        """Copy row by row on ``stream`` after the event ``after``, and return an event that marks the end.

        Rows are copied one by one, because only contiguous copies are asynchronous.
        """
        if stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for there, here in zip(source, target, strict=True):
                here.copy_(there, non_blocking=True)
            return stream.record_event()
