"""State in host memory that a GPU reads and writes in place, and work on a side stream."""

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
    """fp32 numbers in host memory, initially zero; page-locked if ``device`` is a GPU.

    The memory is freed with the last tensor in it.

    Attributes:
        numbers: all of them, (numel,).
        pages: that contain them.
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
        """Unlock the pages now, even if tensors still lie in them: no GPU may use them from here on."""
        self.pages.unlock()

    def take(self, like: Sequence[Tensor], start: int, multiple: int = 1) -> tuple[list[Tensor], int]:
        """Return tensors of the shapes of ``like``, one after the other from number ``start`` on, each beginning a
        multiple of ``multiple`` after it; and the end of the last one."""
        ends = list(accumulate((padded(tensor.numel(), multiple) for tensor in like), initial=start))
        parts = [
            self.numbers[first : first + tensor.numel()].view(tensor.shape)
            for first, tensor in zip(ends, like, strict=False)
        ]
        return parts, ends[-1]


def padded(size: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


class Pages(mmap.mmap):
    """Memory that unlocks its pages before it frees them. Otherwise the driver would consider them locked for ever, and
    memory later mapped at this address could not be locked."""

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
        with contextlib.suppress(Exception):  # CUDA may be gone when the interpreter exits
            self.unlock()


class SideStream:
    """Work that the device does beside its current stream, without the host waiting for either.

    On a CPU the work is deferred until it is waited for, so that a missing wait shows there, too.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` to enqueue kernels that start when everything given to the current stream so far is done."""
        if self._stream is None:
            self._held.append(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """Make the current stream wait for the work; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        while self._held:
            self._held.pop(0)()

    def finish(self) -> None:
        """Make the host wait for the work."""
        self.join()
        if self._stream is not None:
            self._stream.synchronize()
