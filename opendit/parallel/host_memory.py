"""Host memory that a GPU reads and writes in place, and work on a side stream."""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# cudaHostRegisterPortable | cudaHostRegisterMapped: kernels can use the addresses that the memory has on the host.
PORTABLE_AND_MAPPED = 3


class HostMemory:
    """fp32 numbers in host memory, initially zero. The memory is page-locked if ``device`` is a GPU, and is freed with
    the last tensor that uses it.

    Attributes:
        numbers: all numbers, (numel,).
        pages: memory that contains the numbers.
    """

    def __init__(self, numel: int, device: torch.device):
        # Not pin_memory=True, because torch's pinned allocator rounds sizes up to powers of two: 10.8 GB would take 16
        # GiB.
        self.pages = Pages(-1, max(4 * numel, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK, because a fork would copy locked pages. HUGEPAGE, because huge pages are locked much faster. Not
        # every system supports this advice.
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with contextlib.suppress(AttributeError, OSError):
                self.pages.madvise(getattr(mmap, advice))
        self.numbers = torch.frombuffer(self.pages, dtype=torch.float32, count=numel) if numel else torch.empty(0)
        if device.type == "cuda" and numel:
            self.pages.lock(self.numbers.data_ptr())

    def unlock(self) -> None:
        """Unlock the pages now, even if tensors still use them. No GPU may access the pages afterwards."""
        self.pages.unlock()

    def take(self, like: Sequence[Tensor], start: int, multiple: int = 1) -> tuple[list[Tensor], int]:
        """Return (tensors with the shapes of ``like``, end index of the last one including padding). The tensors are
        consecutive views of ``numbers``, starting at index ``start``. Each is padded to a multiple of ``multiple``
        numbers."""
        ends = list(accumulate((padded(tensor.numel(), multiple) for tensor in like), initial=start))
        parts = [
            self.numbers[first : first + tensor.numel()].view(tensor.shape)
            for first, tensor in zip(ends, like, strict=False)
        ]
        return parts, ends[-1]


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


class Pages(mmap.mmap):
    """Memory mapping that can be page-locked, and is unlocked before it is freed. Without unlocking, the driver would
    consider the pages locked forever, and memory mapped at the same address later could not be locked."""

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
    """Second stream for work that runs concurrently with the current stream. The host does not wait for the work.

    On a CPU the work is deferred until ``join``, so that tests on a CPU also detect a missing wait.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work``, which enqueues kernels. These kernels start after all work that is on the current stream so
        far."""
        if self._stream is None:
            self._held.append(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """Make the current stream wait for the work. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        while self._held:
            self._held.pop(0)()

    def finish(self) -> None:
        """Make the host wait for the work."""
        self.join()
        if self._stream is not None:
            self._stream.synchronize()
