"""The strategies' communication: all-to-alls that overlap in both directions, a ring of neighbours, token gathers.

Everything talks to one group of ranks, never to the world.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Ranks that share a sequence, or every layer: ``rank`` of ``size`` in the process group ``handle`` (None: this
    rank alone)."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None) -> "Group":
        """The group of a process group that this rank is in."""
        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))


class Flight:
    """A collective under way, and the tensors that it reads and writes, which must live until it has ended."""

    def __init__(self, works: Sequence[Any], received: Tensor, sent: Tensor):
        self._works, self._received, self._sent = works, received, sent

    def wait(self) -> Tensor:
        """Return what was received. On a GPU the stream waits for it, not the host."""
        for work in self._works:
            work.wait()
        return self._received


# ------------------------------------------------------------------------------------------------------- all-to-all


@dataclass(frozen=True)
class Counts:
    """Rows of a tensor (rows, ...) that go to each rank of a group, in the order of the ranks, and that come from
    each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> "Counts":
        """Return the counts of the exchange that brings every row back."""
        return Counts(self.received, self.sent)


def _start_all_to_all(send: Tensor, group: Group, counts: Counts | None = None) -> Flight:
    if group.size == 1:
        return Flight([], send, send)
    send = send.contiguous()
    if counts is None:
        received, sizes = torch.empty_like(send), ()
    else:
        received = send.new_empty(sum(counts.received), *send.shape[1:])
        sizes = list(counts.received), list(counts.sent)
    work = dist.all_to_all_single(received, send, *sizes, group=group.handle, async_op=True)
    return Flight([work], received, send)


class Exchange:
    """All-to-all of tensors (P, ...): row p goes to rank p. With ``counts`` of tensors (rows, ...): so many rows to and
    from each rank. Its adjoint is an all-to-all too.

    ``start`` and ``finish`` are two nodes of the graph, so that what lies between them runs while the exchange is under
    way. Autograd runs nodes in the opposite order of their creation: what was finished last is started first in the
    backward pass, and waited for where it was started. So overlap in the forward pass is overlap in the backward pass.
    One object for each exchange.
    """

    def __init__(self, group: Group, counts: Counts | None = None):
        self.group, self.counts = group, counts
        self.flight: Flight | None = None

    def start(self, send: Tensor) -> "Exchange":
        """Sends ``send`` on its way: (P, ...) of one shape on all ranks, or (rows, ...)."""
        self._received = _Start.apply(send, self)
        return self

    def finish(self) -> Tensor:
        """Return what arrived: (P, ...), row p from rank p, or (rows, ...). Call it once for each ``start``."""
        received, self._received = self._received, None
        return _Finish.apply(received, self)

    def _depart(self, send: Tensor, counts: Counts | None) -> Tensor:
        """The tensor that the collective is writing to; not to be read before ``_land``."""
        self.flight = _start_all_to_all(send, self.group, counts)
        return self.flight._received

    def _land(self) -> Tensor:
        flight, self.flight = self.flight, None
        assert flight is not None, "it has departed"
        return flight.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, send: Tensor, exchange: Exchange):
        ctx.exchange = exchange
        return exchange._depart(send, exchange.counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.exchange._land(), None  # (grad tells nothing, see _Finish)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, received: Tensor, exchange: Exchange):
        ctx.exchange, ctx.shape = exchange, received.shape
        exchange._land()
        return received.view_as(received)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.exchange._depart(grad, ctx.exchange.counts and ctx.exchange.counts.back)
        return grad.new_empty(1).expand(ctx.shape), None  # what arrives may have another shape


# -------------------------------------------------------------------------------------------------------------- ring


class Ring:
    """Tensors of one shape travel from every rank to the next, while the caller computes with those that are here.

    The one place to change for another transport: what it promises is the order in which shards arrive and pieces are
    asked for, the same in every rank's own count.
    """

    def __init__(self, group: Group):
        self.group = group

    def arriving(self, shard: Tensor, into: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """(rank, its shard) of every rank: the own one, then the previous rank's, and so on around the ring.

        While the caller works on one, the next is under way; a caller that changes the own shard meanwhile breaks it.
        ``into``: (P, *shard.shape), keeps all of them.
        """
        rank, size = self.group.rank, self.group.size
        held = shard = shard.contiguous()
        if into is not None:
            into[rank].copy_(shard)
        for step in range(size):
            source, flight = (rank - step) % size, None
            if step < size - 1:
                flight = self._pass_on(held, None if into is None else into[(source - 1) % size])
            yield source, held
            if flight is not None:
                held = flight.wait()

    def reduce_scatter(self, piece: Callable[[int], Tensor], meanwhile: Callable[[], None] = lambda: None) -> Tensor:
        """The sum over all ranks of their ``piece(this rank)``.

        piece: makes a tensor for a rank, fresh (it is added to), of one shape; asked for the previous rank's first,
            then the one's before it, the own one last. While it works, the sum made before is under way.
        meanwhile: called while the last sum is under way.
        """
        rank, size = self.group.rank, self.group.size
        flight = None
        for step in range(1, size):
            part = piece((rank - step) % size)
            if flight is not None:
                part = part.add_(flight.wait())  # the result counts: on Gemini's tensors add_ makes another tensor
            flight = self._pass_on(part)
        own = piece(rank)
        meanwhile()
        return own if flight is None else own.add_(flight.wait())

    def _pass_on(self, send: Tensor, received: Tensor | None = None) -> Flight:
        rank, size, handle = self.group.rank, self.group.size, self.group.handle
        received = torch.empty_like(send) if received is None else received
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, group=handle, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, received, group=handle, group_peer=(rank - 1) % size),
            ]
        )
        return Flight(works, received, send)


# ------------------------------------------------------------------------------------------------------- all-gather


def start_gather(shard: Tensor, group: Group) -> Flight:
    """(P, *shard.shape) of every rank's shard, in the order of ranks."""
    shard = shard.contiguous()
    received = shard.new_empty(group.size, *shard.shape)
    work = dist.all_gather_into_tensor(received.flatten(0, 1), shard, group=group.handle, async_op=True)
    return Flight([work], received, shard)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, length: int, group: Group):
        ctx.group, ctx.rows = group, x.shape[1]
        return start_gather(x, group).wait().transpose(0, 1).flatten(1, 2)[:, :length]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return take_tokens(grad, ctx.rows, ctx.group) * ctx.group.size, None, None


def gather_tokens(x: Tensor, length: int, group: Group) -> Tensor:
    """All ``length`` tokens (B, N, F), on every rank, from this rank's (B, n, F); the padding at the end is cut off.

    Every rank of the group must make the same loss of the result. The adjoint of a gather is then P x this rank's rows
    of the gradient, which is the same on all ranks: no communication. With that factor the mean over all ranks, which
    the training plugins take, is the mean over data-parallel ranks for every parameter.
    """
    return _GatherTokens.apply(x, length, group)


def take_tokens(x: Tensor, rows: int, group: Group) -> Tensor:
    """This rank's tokens (B, n, F) of all (B, N, F), n = ``rows``; those past the end are zeros."""
    mine = x[:, group.rank * rows : (group.rank + 1) * rows]
    return mine if mine.shape[1] == rows else torch.nn.functional.pad(mine, (0, 0, 0, rows - mine.shape[1]))
