"""State in host memory that a GPU reads and writes in place, and work beside the device's own."""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# cudaHostRegisterPortable | cudaHostRegisterMapped: kernels reach the memory by its own addresses.
PORTABLE_AND_MAPPED = 3


class HostMemory:
    """fp32 numbers in host memory, zeros at first; page-locked if ``device`` is a GPU.

    The memory goes with the last tensor that lies in it.

    Attributes:
        numbers: all of them, (numel,).
        pages: that they lie in.
    """

    def __init__(self, numel: int, device: torch.device):
        # Not pin_memory=True: torch's pinned allocator rounds up to a power of two, 16 GiB for 10.8 GB.
        self.pages = Pages(-1, max(4 * numel, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would have to copy pages that are locked. Huge pages are locked much faster; not every system has them.
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with contextlib.suppress(AttributeError, OSError):
                self.pages.madvise(getattr(mmap, advice))
        self.numbers = torch.frombuffer(self.pages, dtype=torch.float32, count=numel) if numel else torch.empty(0)
        if device.type == "cuda" and numel:
            self.pages.lock(self.numbers.data_ptr())

    def unlock(self) -> None:
        """Unlocks the pages now, however many tensors still lie in them: no GPU may use them from here on."""
        self.pages.unlock()

    def take(self, like: Sequence[Tensor], start: int, multiple: int = 1) -> tuple[list[Tensor], int]:
        """Tensors of the shapes of ``like``, one after the other from number ``start`` on, each beginning a multiple of
        ``multiple`` after it; and where the last one ends."""
        ends = list(accumulate((padded(tensor.numel(), multiple) for tensor in like), initial=start))
        parts = [
            self.numbers[first : first + tensor.numel()].view(tensor.shape)
            for first, tensor in zip(ends, like, strict=False)
        ]
        return parts, ends[-1]


def padded(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


class Pages(mmap.mmap):
    """Unlocks its pages before it gives them back: the driver would take them for locked for ever, and the next memory
    at this address could not be."""

    _address = 0

    def lock(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, len(self), PORTABLE_AND_MAPPED))
        self._address = address

    def unlock(self) -> None:
        if self._address:
            torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._address))
            self._address = 0

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end there may be no CUDA any more
            self.unlock()


class SideStream:
    """Work that the device does beside what its current stream is given, without the host waiting for either.

    On a CPU the work is held back until it is waited for: a wait that is missing shows there, too.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        """``work`` enqueues what is to be done when all is done that the current stream has been given."""
        if self._stream is None:
            self._held.append(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """The current stream goes on when the work is done; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        while self._held:
            self._held.pop(0)()

    def finish(self) -> None:
        """The host waits until the work is done."""
        self.join()
        if self._stream is not None:
            self._stream.synchronize()
