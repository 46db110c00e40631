"""Frozen weights of blocks in host memory, copied to the GPU before they are used (--offload blocks[:N]).

A block's frozen weights lie one after the other in page-locked memory. On the GPU there is a ring of AHEAD + 1 slots,
each as large as the largest such block, and the weights' tensors are views of a slot: of block number n, of slot n %
(AHEAD + 1). When a block is called, a side stream begins to copy the blocks that come AHEAD of it, in the order of
blocks, or against it in the backward pass, into the slots of blocks that are done. The device waits for the copy of the
block that is called; the host waits for nothing.

Blocks have to be recomputed in the backward pass, so that it calls them, too, and nothing else reads their weights in
between. Weights stay on the host as they were loaded: they are never copied back.

Copies can be part of a CUDA graph. A recorded pass begins with empty slots, because what lies in them when it is
replayed isn't known; and so does every other pass from then on, because a replay fills them unseen.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from opendit.parallel.host_memory import HostMemory, padded

AHEAD = 2  # blocks that are copied before they are needed
ALIGNMENT = 256  # bytes


def spread_numbers(depth: int, count: int) -> list[int]:
    """Return the numbers of ``count`` of ``depth`` blocks, spread evenly; all of them if ``count`` is more."""
    count = min(count, depth)
    return [number for number in range(depth) if (number + 1) * count // depth > number * count // depth]


class StreamedBlocks:
    """The frozen weights of some blocks, in host memory.

    Their parameters, on the meta device before, become views of the ring. Write values to ``host`` before the first
    call of a block.

    Args:
        model: has ``blocks``; it computes modulations within blocks from then on.
        count: number of blocks that are streamed; more than there are means all.
        device: that computes.
        deferred: on a CPU, copy when a block is called, and not when its copy begins: both must give the same bits.

    Attributes:
        host: the weights by the names of the model's parameters, in page-locked memory if the device is a GPU.
        blocks: number of blocks that are streamed.
        slots: the ring, uint8.
        copied: number of copies that have begun.
        recorded: a pass was recorded as a CUDA graph.
        recordable: the backward pass reaches the first of these blocks, and so waits for all copies.
    """

    def __init__(self, model: Any, count: int, device: torch.device, deferred: bool = True):
        self._device, self._deferred, self.copied = device, deferred, 0
        numbers = spread_numbers(len(model.blocks), count)  # so that others compute between two copies
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
        """Return a context in which the model's modulations are made beforehand, for many steps at once."""
        self._model.modulate_in_blocks = False
        self._forget()
        try:
            yield
        finally:
            self._model.modulate_in_blocks = True
            self._forget()

    def _forget(self) -> None:
        """Regard all slots as empty."""
        self._holds: list[int | None] = [None] * len(self.slots)
        self._ready: list[Any] = [None] * len(self.slots)
        self._last = 0

    def _begin_pass(self, *_: Any) -> None:
        self.recorded |= self._stream is not None and torch.cuda.is_current_stream_capturing()
        if self.recorded:
            self._forget()

    def _hook(self, number: int, of_block: bool) -> Callable[..., None]:
        """Return what runs before a block, or a module in one: sampling also calls modulations by themselves."""

        def use(*_: Any) -> None:
            if of_block or self._last != number or number not in self._holds:
                with _disable_current_modes():  # copies are none of the operations that but_attention keeps or repeats
                    self._use(number)

        return use

    def _use(self, number: int) -> None:
        """Let the device wait for a block's weights, and begin to copy those that come next."""
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
        """Begin to copy a block into its slot, when everything enqueued so far is done, unless it is there."""
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


def blocks_of(sizes: Sequence[int], count: int) -> tuple[int, int]:
    """Return the bytes that ``count`` streamed blocks of these sizes take in host memory, and those of the ring."""
    streamed = [sizes[number] for number in spread_numbers(len(sizes), count)]
    return sum(streamed), min(AHEAD + 1, len(streamed)) * max(streamed)
