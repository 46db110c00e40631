"""Host memory that a GPU reads and writes in place, and a side stream."""

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from opendit.models.layers import hidden_from_checkpoint

# cudaHostRegisterPortable | cudaHostRegisterMapped: kernels can use the memory's host addresses
PORTABLE_AND_MAPPED = 3


class HostMemory:
    """fp32 tensor ``numbers`` (numel,) of zeros in host memory, page-locked if ``device`` is a GPU. The memory is freed
    with the last tensor that uses it."""

    def __init__(self, numel: int, device: torch.device):
        # Not pin_memory=True, because torch's pinned allocator rounds up to powers of two: 10.8 GB would take 16 GiB.
        self.pages = Pages(-1, max(4 * numel, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would copy locked pages. Huge pages are locked much faster. Some systems do not support this advice.
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
        """Return (tensors, end). tensors: consecutive views of ``numbers`` from index ``start``, with the shapes of
        ``like``. Each view is padded to a multiple of ``multiple`` numbers. end: the index after the last padding."""
        ends = list(accumulate((padded(tensor.numel(), multiple) for tensor in like), initial=start))
        parts = [
            self.numbers[first : first + tensor.numel()].view(tensor.shape)
            for first, tensor in zip(ends, like, strict=False)
        ]
        return parts, ends[-1]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Pages(mmap.mmap):
    """Memory mapping that can be page-locked, and is unlocked before it is freed. Otherwise new memory at the same
    address could not be locked."""

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
    """Stream for kernels that run concurrently with the current stream. On a CPU, calls are deferred until ``join``, so
    that CPU tests detect a missing wait."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` with its kernels on the side stream. They start after all kernels enqueued so far."""
        if self._stream is None:
            self._held.append(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        while self._held:
            self._held.pop(0)()

    def finish(self) -> None:
        self.join()
        if self._stream is not None:
            self._stream.synchronize()


AHEAD = 2  # maximum number of blocks that are copied before they are called
ALIGNMENT = 256  # bytes


def spread_numbers(depth: int, count: int) -> list[int]:
    """Return the indices of ``count`` of ``depth`` blocks, evenly spread; all indices if ``count`` > ``depth``."""
    count = min(count, depth)
    return [number for number in range(depth) if (number + 1) * count // depth > number * count // depth]


def streamed_numbers(depth: int, count: int, recomputed: int | None = None) -> list[int]:
    """Return the indices of ``count`` streamed blocks, evenly spread over the ``recomputed`` ones; None: all blocks are
    recomputed."""
    among = range(depth) if recomputed is None else spread_numbers(depth, recomputed)
    return [among[number] for number in spread_numbers(len(among), count)]


class StreamedBlocks:
    """Frozen weights of ``count`` blocks, stored in host memory and streamed to the GPU (--offload blocks[:N]).

    The constructor replaces the blocks' frozen parameters by views of slots on the GPU. The replaced parameters may be
    on the meta device. Write the weights' values to ``host`` before the first call of a block. Only recomputed blocks
    are streamed, because a block's weights are valid only during its calls.

    The GPU has AHEAD + 1 slots, each with room for the largest streamed block. When a block is called, a side stream
    begins to copy the next AHEAD blocks, or in the backward pass the previous blocks. The host never waits.

    Copies can be recorded in a CUDA graph. During and after a recording, a pass copies every block, because the slots'
    contents are unknown.

    Attributes:
        deferred: on a CPU, True copies a block as late as possible, False as early as possible. Tests compare both.
        copied: number of copies begun.
        recordable: True if every backward pass waits for all copies, because it reaches the first streamed block.
    """

    def __init__(self, model: Any, count: int, device: torch.device, deferred: bool = True):
        self._device, self._deferred, self.copied = device, deferred, 0
        # Streamed blocks are spread evenly, so that other blocks compute between two copies.
        recomputed = sum(block.recomputed for block in model.blocks)
        numbers = streamed_numbers(len(model.blocks), count, recomputed)
        blocks = [(f"blocks.{number}.", model.blocks[number]) for number in numbers]
        self.blocks = len(blocks)
        frozen = [[(n, p) for n, p in block.named_parameters() if not p.requires_grad] for _, block in blocks]
        places = [list(accumulate((padded(p.nbytes, ALIGNMENT) for _, p in each), initial=0)) for each in frozen]
        sizes = [ends[-1] for ends in places]
        memory = HostMemory(sum(sizes) // 4, device).numbers.view(torch.uint8)
        self._rows = list(memory.split(sizes))
        count = min(AHEAD + 1, len(blocks))
        self.slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(count)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.recorded = False
        self._forget()
        reached = (p for block in model.blocks[: numbers[0] + 1] for p in block.parameters())
        self.recordable = any(parameter.requires_grad for parameter in reached)
        self.host: dict[str, Tensor] = {}
        for number, ((prefix, block), each, ends) in enumerate(zip(blocks, frozen, places, strict=True)):
            for (name, parameter), start in zip(each, ends, strict=False):
                place = slice(start, start + parameter.nbytes)

                def shaped(memory: Tensor, place: slice = place, like: Tensor = parameter) -> Tensor:
                    return memory[place].view(like.dtype).view(like.shape)

                self.host[prefix + name] = shaped(self._rows[number])
                owner, _, attribute = name.rpartition(".")
                on_device = nn.Parameter(shaped(self.slots[number % count]), requires_grad=False)
                setattr(block.get_submodule(owner), attribute, on_device)
            for module in block.modules():
                module.register_forward_pre_hook(self._hook(number, of_block=module is block))
        model.register_forward_pre_hook(self._begin_pass)
        self._model, model.modulate_in_blocks = model, True

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Return a context for sampling. Modulations are computed outside the blocks, for many steps at once."""
        self._model.modulate_in_blocks = False
        self._forget()
        try:
            yield
        finally:
            self._model.modulate_in_blocks = True
            self._forget()

    def _forget(self) -> None:
        self._holds: list[int | None] = [None] * len(self.slots)
        self._ready: list[Any] = [None] * len(self.slots)
        self._last = 0

    def _begin_pass(self, *_: Any) -> None:
        self.recorded |= self._stream is not None and torch.cuda.is_current_stream_capturing()
        if self.recorded:
            self._forget()

    def _hook(self, number: int, of_block: bool) -> Callable[..., None]:
        """Return a hook to run before a block or a module in the block. Modules need the hook because sampling calls
        modulations outside the block."""

        def use(*_: Any) -> None:
            if of_block or self._last != number or number not in self._holds:
                with hidden_from_checkpoint():
                    self._use(number)

        return use

    def _use(self, number: int) -> None:
        """Make the device wait for a block's weights, and begin to copy the weights of the next blocks."""
        ahead = 1 if number > self._last or number == 0 else -1
        self._last = number
        self._begin(number)
        slot = number % len(self.slots)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready[slot])
        elif self._ready[slot]:
            self._copy(number)
            self._ready[slot] = None
        for other in range(number + ahead, number + ahead * (len(self.slots)), ahead):
            if 0 <= other < len(self._rows):
                self._begin(other)

    def _begin(self, number: int) -> None:
        """Begin to copy a block, unless its slot already has the block. The copy waits for all kernels enqueued so
        far."""
        slot = number % len(self.slots)
        if self._holds[slot] == number:
            return
        self._holds[slot], self.copied = number, self.copied + 1
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._copy(number)
                self._ready[slot] = self._stream.record_event()
        elif self._deferred:
            self._ready[slot] = True
        else:
            self._copy(number)

    def _copy(self, number: int) -> None:
        row = self._rows[number]
        self.slots[number % len(self.slots)][: len(row)].copy_(row, non_blocking=True)


def blocks_of(sizes: Sequence[int], count: int, recomputed: int | None = None) -> tuple[int, int]:
    """Return (bytes in host memory, bytes of the GPU's slots) for the :func:`streamed_numbers`. sizes: each block's
    bytes."""
    streamed = [sizes[number] for number in streamed_numbers(len(sizes), count, recomputed)]
    return sum(streamed), min(AHEAD + 1, len(streamed)) * max(streamed)
