"""Buffers in torch's symmetric memory: every rank of a group reads and writes all ranks' buffers over NVLink.

Every rank has four buffers. Data is written before a barrier and read after it:

    output    all ranks write to a rank's buffer, barrier, the owner reads it
    input     like output; or a rank fills its own buffer, barrier, all ranks read what they need from it
    everyone  like output, but written after the barrier of input and read after the barrier of gradient
    gradient  a rank fills its own buffer, barrier, all ranks read what they need from it

A buffer is never used twice in a row. The next buffer's barrier ensures that all ranks have finished with the last
buffer. A layer's forward pass uses input, then output. The backward pass uses input, then output or gradient (FastSeq).
A recorded graph begins with input and ends with another buffer, so it can be replayed repeatedly.

A kernel transfers data at the full rate of the links. Copy engines are slower but occupy no multiprocessor. On H200s,
half of a layer's attention takes 107 us alone, 111 us during copies and 129 us during the kernel.
"""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.kernels.common import kernels_available
from opendit.kernels.exchange_heads import exchange_heads, send_rows
from opendit.parallel.collectives import Group

# (tensors of heads, the first head's index among all H heads)
Part = tuple[tuple[Tensor, ...], int]
Pair = tuple[Tensor, Tensor]  # (target, source), each (rows, h, d) and contiguous within a row


class Buffer(IntEnum):
    """The buffers of a layer; see the module's docstring."""

    INPUT, OUTPUT, EVERYONE, GRADIENT = 0, 1, 2, 3


@dataclass(frozen=True)
class PeerRows:
    """Views of all ranks' buffers."""

    of: list[Tensor]  # the view of each rank's buffer
    addresses: Tensor  # (P,) int64, the buffers' addresses for kernels
    offset: int = 0  # bytes from the start of a buffer to the view


def allocate(size: int, group: Group, device: torch.device) -> tuple[Any, Tensor]:
    """Allocate ``size`` bytes on every rank of the group. Return (torch's handle, this rank's memory). The memory is a
    tensor (size,) uint8, and is freed with this tensor."""
    from torch.distributed import _symmetric_memory as symmetric

    # multicast is a scarce resource, and is not used here
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    # torch zeroes the memory asynchronously. Wait, so that zeroing does not erase data from a faster rank.
    torch.cuda.synchronize(device)
    return symmetric.rendezvous(memory, cast(dist.ProcessGroup, group.handle)), memory


class PeerMemory:
    """The buffers of a group of ranks. Buffers grow with the largest shape. All ranks must make the same calls in the
    same order. allocate: function with the signature of :func:`allocate`."""

    def __init__(self, group: Group, device: torch.device, allocate: Callable[..., tuple[Any, Tensor]] = allocate):
        self.group, self.device, self._allocate = group, device, allocate
        # the last entry is in use; recorded graphs may use earlier ones
        self._made: dict[Buffer, list[Any]] = {buffer: [] for buffer in Buffer}
        self._views: dict[tuple[Any, ...], list[PeerRows]] = {}
        self._last: Buffer | None = Buffer.OUTPUT
        self._capturing = False
        self._stream = torch.cuda.Stream(device, priority=-1)  # for copy engines and for barriers of ready_beside
        self._copies: torch.cuda.Event | None = None  # end of the last copy; None if awaited

    def rows(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> PeerRows:
        """Return views of the beginning of every rank's buffer. An exchange of heads has shape (B, n, S, H, d)."""
        return self.slots(buffer, 1, shape, dtype)[0]

    @torch.inference_mode(False)  # training could not use a view that was created in inference mode
    def slots(self, buffer: Buffer, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[PeerRows]:
        key = (buffer, number, shape, dtype)
        if key not in self._views:
            size = torch.Size(shape).numel() * dtype.itemsize
            handle, addresses = self._handle(buffer, number * size)
            of = [handle.get_buffer(p, (number, *shape), dtype).unbind() for p in range(self.group.size)]
            self._views[key] = [
                PeerRows([*views], addresses, i * size) for i, views in enumerate(zip(*of, strict=True))
            ]
        return self._views[key]

    def _handle(self, buffer: Buffer, size: int) -> tuple[Any, ...]:
        made = self._made[buffer]
        if not made or made[-1][0].buffer_size < size:
            handle, memory = self._allocate(size, self.group, self.device)
            made.append((handle, torch.tensor(handle.buffer_ptrs, device=self.device), memory))
        return made[-1][:2]

    def begin(self, buffer: Buffer) -> None:
        """Enqueue a barrier if ``buffer`` was also used last, so that no rank still needs the old contents. Call this
        method before a use that may repeat the last buffer."""
        self._note_recording()
        if self._last == buffer:
            self._made[buffer][-1][0].barrier(channel=0)
            self._last = None

    def ready(self, buffer: Buffer, again: bool = False) -> None:
        """Enqueue the barrier between writing and reading ``buffer``. Only the device waits, not the host. again: True
        for another barrier in the same use."""
        self._barrier(buffer, again, channel=0)

    def ready_beside(self, buffer: Buffer, again: bool = False) -> torch.Event:
        """Like :meth:`ready`, but on the copy stream. Return the event at the barrier's end.

        The barrier waits for all copies and kernels enqueued so far. Later kernels of the current stream can run
        concurrently. Call this method when the copies are nearly done, because a waiting barrier delays other kernels.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._barrier(buffer, again, channel=1)  # each stream needs a separate channel of signals
        return self._stream.record_event()

    def _barrier(self, buffer: Buffer, again: bool, channel: int) -> None:
        self._note_recording()
        assert again == (buffer == self._last), "no buffer is used twice in a row"
        self._last = buffer
        self._made[buffer][-1][0].barrier(channel=channel)

    def _note_recording(self) -> None:
        """Reset the last used buffer when a CUDA graph's capture begins or ends, because captured kernels have not
        run."""
        if self._capturing != torch.cuda.is_current_stream_capturing():
            self._capturing, self._last, self._copies = not self._capturing, Buffer.OUTPUT, None

    def exchange(self, heads: tuple[Tensor, ...], rows: PeerRows, first: int, push: bool) -> None:
        shape = tuple(rows.of[0].shape)
        exchange_heads(heads, rows.addresses, shape, self.group.rank, first, push, offset=rows.offset)

    def send(self, rows: Tensor, heads: PeerRows, length: int) -> None:
        send_rows(rows, heads.addresses, self.group.rank, length)

    def exchange_beside(self, groups: list[Part], rows: PeerRows, push: bool) -> list[torch.cuda.Event]:
        """Exchange heads with copy engines, one group after another.

        The copies wait for all kernels enqueued so far, and run concurrently with later kernels. Return an event for
        each group. Before using a group, call :meth:`wait` with its event. Keep the group's heads in memory until then.

        Kernels copy the heads that stay on this rank, before all other copies.
        """
        shape, rank = tuple(rows.of[0].shape), self.group.rank
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for heads, first in groups:
                exchange_heads(heads, rows.addresses, shape, rank, first, push, own=True, offset=rows.offset)
        return self._copy([self._other_heads(heads, rows, first, push) for heads, first in groups])

    def copy_beside(self, groups: list[list[Pair]], own: Sequence[Pair] = ()) -> list[torch.cuda.Event]:
        """Copy rows between ranks, as :meth:`exchange_beside` does with heads. own: pairs on this card, copied
        first."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in own:
                target.copy_(source)
        return self._copy(groups)

    def _copy(self, groups: list[list[Pair]]) -> list[torch.cuda.Event]:
        events = []
        for pairs in groups:
            for target, source in pairs:
                _copy_rows(target, source, self._stream)
            events.append(self._stream.record_event())
        self._copies = events[-1]
        return events

    def _other_heads(self, heads: tuple[Tensor, ...], rows: PeerRows, first: int, push: bool) -> list[Pair]:
        found, (rank, size) = [], (self.group.rank, self.group.size)
        for peer in ((rank + i) % size for i in range(1, size)):
            n, length = rows.of[peer].shape[1], heads[0].shape[2]
            real = min(max(length - peer * n, 0), n)
            for s, part in enumerate(heads):
                theirs = rows.of[peer][:, :real, s, first : first + part.shape[1]]
                mine = part.transpose(1, 2)[:, peer * n : peer * n + real]
                found += zip(*((theirs, mine) if push else (mine, theirs)), strict=True)  # sample by sample
        return found

    def wait(self, event: torch.Event | torch.cuda.Event | None = None) -> None:
        """Make the current stream wait for an event of an exchange or copy. Without an event, wait for all."""
        event = event or self._copies
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if event is self._copies:
            self._copies = None


def sample_by_sample(targets: Tensor, sources: Tensor) -> list[Pair]:
    """Return a pair (target, source) for each sample of two tensors (B, n, D)."""
    return list(zip(targets.unsqueeze(2), sources.unsqueeze(2), strict=True))


def _copy_rows(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy (rows, h, d) with a copy engine; Tensor.copy_ would use a kernel. Rows must be contiguous."""
    from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

    rows, h, d = source.shape
    if not rows:
        return
    size = source.element_size()
    assert all(t.stride(2) == 1 and (h == 1 or t.stride(1) == d) for t in (target, source))
    pitches = [t.stride(0) * size for t in (target, source)]
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    (error,) = runtime.cudaMemcpy2DAsync(
        target.data_ptr(), pitches[0], source.data_ptr(), pitches[1], h * d * size, rows, kind, stream.cuda_stream
    )
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"copy between GPUs: {error.name}")


@functools.cache
def connect(group: Group, device: torch.device) -> tuple[PeerMemory | None, str]:
    """Return (symmetric memory of the group or None, reason). Make the first call on all ranks."""
    why_not = "no CUDA GPUs" if device.type != "cuda" else _obstacle(device)
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, (socket.gethostname(), why_not), group=group.handle)
    why_not = next((text for _, text in found if text), "")
    if not why_not and len({host for host, _ in found}) > 1:
        why_not = "the ranks are on several hosts"
    if why_not:
        return None, why_not
    return PeerMemory(group, device), "the GPUs reach each other's memory"


def _obstacle(device: torch.device) -> str:
    usable, why = kernels_available(device, torch.bfloat16)
    if not usable:
        return why
    try:
        from cuda.bindings import runtime  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError as error:
        return str(error)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "the GPUs can't reach each other's memory"
    return ""
