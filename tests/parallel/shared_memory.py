"""PeerMemory's replacement for tests, with the host's shared memory, gloo barriers and torch copies."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.kernels.exchange_heads import exchange_heads_reference, send_rows_reference
from opendit.parallel.collectives import Group
from opendit.parallel.sequence.peer_memory import Buffer, Pair, Part, PeerRows

# Buffer -> buffers that are no longer needed once all ranks have reached its barrier.
DEAD = {
    Buffer.INPUT: (Buffer.OUTPUT, Buffer.EVERYONE, Buffer.GRADIENT),
    Buffer.OUTPUT: (Buffer.INPUT,),
    Buffer.GRADIENT: (Buffer.INPUT, Buffer.OUTPUT),
}


class SharedMemory:
    """Shared memory for exchanges between ranks.

    Background exchanges run at once with ``early``, otherwise only when the caller waits for them. Buffers that are no
    longer needed are filled with NaN.
    """

    SIZE = 2**18

    def __init__(self, group: Group, folder: str, early: bool = False):
        self.group, self._late, self._asked, self._last, self._early = group, [], 0, Buffer.OUTPUT, early
        self._bytes = [
            [torch.from_file(f"{folder}/{b.name}{p}", True, self.SIZE, dtype=torch.uint8) for p in range(group.size)]
            for b in Buffer
        ]

    def rows(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> PeerRows:
        return self.slots(buffer, 1, shape, dtype)[0]

    def slots(self, buffer: Buffer, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[PeerRows]:
        size = number * torch.Size(shape).numel() * dtype.itemsize
        assert size <= self.SIZE
        of = [memory[:size].view(dtype).view(number, *shape) for memory in self._bytes[buffer]]
        return [PeerRows([views[i] for views in of], torch.empty(0)) for i in range(number)]

    def begin(self, buffer: Buffer) -> None:
        if self._last == buffer:
            dist.barrier(self.group.handle)
            self._last = None

    def ready(self, buffer: Buffer, again: bool = False) -> None:
        assert not self._late or buffer == Buffer.INPUT  # background exchanges may still read it
        self._barrier(buffer, again)

    def ready_beside(self, buffer: Buffer, again: bool = False) -> int:
        return self._later([partial(self._barrier, buffer, again)])[0]

    def _barrier(self, buffer: Buffer, again: bool) -> None:
        assert again == (buffer == self._last)
        self._last = buffer
        dist.barrier(self.group.handle)
        if not again:
            for dead in DEAD[buffer]:
                self._bytes[dead][self.group.rank].fill_(255)
            dist.barrier(self.group.handle)

    def send(self, rows: Tensor, heads: PeerRows, length: int) -> None:
        send_rows_reference(rows, heads.of, self.group.rank)

    def exchange(self, heads: tuple[Tensor, ...], rows: PeerRows, first: int, push: bool) -> None:
        exchange_heads_reference(heads, rows.of, first, push)

    def exchange_beside(self, groups: list[Part], rows: PeerRows, push: bool) -> list[int]:
        if not push:
            for heads, _ in groups:
                self._spoil(heads)
        return self._later([partial(self.exchange, heads, rows, first, push) for heads, first in groups])

    def copy_beside(self, groups: list[list[Pair]], own: list[Pair] = ()) -> list[int]:
        self._spoil(target for pairs in (own, *groups) for target, _ in pairs)
        return self._later([partial(self._copy, pairs) for pairs in (own, *groups)])[1:]

    @staticmethod
    def _copy(pairs: list[Pair]) -> None:
        for target, source in pairs:
            target.copy_(source)

    @staticmethod
    def _spoil(targets: Iterable[Tensor]) -> None:
        for target in targets:
            target.fill_(torch.nan if target.is_floating_point() else 255)  # the byte 255 is also NaN in float8

    def _later(self, works: list[Callable[[], None]]) -> list[int]:
        self._late += works
        self._asked += len(works)
        if self._early:
            self.wait()
        return list(range(self._asked - len(works), self._asked))

    def wait(self, event: int | None = None) -> None:
        while self._late and (event is None or self._asked - len(self._late) <= event):
            self._late.pop(0)()
