"""Give kernels access to state in host memory: in place, or through a ring buffer of device memory.

A kernel adds ``shift + row * stride`` bytes to the addresses of the state's row ``row``: none where it reads and writes
the host's memory itself, otherwise the way from there to the ring buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.kernels.tensor_table import BlockTable

Launch = Callable[[int, int, int, int], None]  # for the blocks from a first to before a last one, with shift and stride


class InPlace:
    """Over the link, by the kernel's own loads and stores; also of state that lies on the device."""

    def run(self, launch: Launch, first: int, last: int) -> None:
        """Launches a kernel for these blocks on the current stream."""
        launch(first, last, 0, 0)

    def finish(self) -> None:
        """The host waits for what :meth:`run` does beside the current stream."""


class Staged:
    """Through a ring buffer: while a part is computed, the next ones come and the last one goes back, on streams of
    their own.

    Args:
        rows: the state, (rows, elements) fp32 in host memory, pinned if the kernel's device is a GPU.
        tensors: of every row, views of it; each begins at a multiple of the block's elements, one after the other.
        table: how the kernel cuts them into blocks.
        device: the kernel's.
        part: blocks of a part. depth: parts in the ring buffer.

    Raises:
        ValueError: a tensor that does not lie where its first block is.
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
        """The bytes of the ring buffer, on the kernel's device."""
        return self._ring.nbytes

    def run(self, launch: Launch, first: int, last: int) -> None:
        """Run like :meth:`InPlace.run`; the last parts may still be copied back when the current stream is done."""
        stride = 4 * (self._ring.shape[2] - self._rows.shape[1])
        gone: list[Any] = []
        if self._coming is not None and self._going is not None:
            self._coming.wait_stream(
                self._going
            )  # what is read now, and the ring buffer, as the last run has left them
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
        """The host waits until the last part is back."""
        if self._going is not None:
            self._going.synchronize()

    def _copy(self, stream: torch.cuda.Stream | None, after: "torch.Event | None", source: Tensor, target: Tensor):
        """Row by row, as only what is contiguous is copied without the host; the event at the end."""
        if stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for there, here in zip(source, target, strict=True):
                here.copy_(there, non_blocking=True)
            return stream.record_event()
