"""Communication within one group of ranks: all-to-alls that overlap with computation in the forward and backward pass,
a ring of neighbours, gathers of tokens and features, and reduce-scatters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """A group of P ranks: process group (None for a single rank), index of this rank, and P."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None) -> "Group":
        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))


class Flight:
    """A collective in progress. Keeps its input and output in memory until the end."""

    def __init__(self, works: Sequence[Any], received: Tensor, sent: Tensor):
        self._works, self._received, self._sent = works, received, sent

    def wait(self) -> Tensor:
        """Wait for the collective and return the received tensor. On a GPU, only the current stream waits."""
        for work in self._works:
            work.wait()
        return self._received


# ------------------------------------------------------------------------------------------------------- all-to-all


@dataclass(frozen=True)
class Counts:
    """Numbers of rows that this rank sends to each rank and receives from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> "Counts":
        """Counts of the reverse exchange. Every row returns to its source."""
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
    """Differentiable all-to-all of tensors (P, ...): row p goes to rank p. With ``counts``, tensors are (rows, ...).

    Computation between ``start`` and ``finish`` overlaps with the exchange. In the backward pass, ``finish`` starts to
    exchange the gradient, and ``start`` waits for it. Use a new object for each exchange.
    """

    def __init__(self, group: Group, counts: Counts | None = None):
        self.group, self.counts = group, counts
        self.flight: Flight | None = None

    def start(self, send: Tensor) -> "Exchange":
        """Start to exchange ``send``: (P, ...), with equal shapes on all ranks; or (rows, ...) with ``counts``."""
        self._received = _Start.apply(send, self)
        return self

    def finish(self) -> Tensor:
        """Return the received tensor: (P, ...) with row p from rank p; or (rows, ...) with ``counts``. Call once."""
        received, self._received = self._received, None
        return _Finish.apply(received, self)

    def _depart(self, send: Tensor, counts: Counts | None) -> Tensor:
        """Start the collective and return its output tensor. Do not read the tensor before ``_land``."""
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
        return ctx.exchange._land(), None  # ``grad`` is a placeholder: see _Finish


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, received: Tensor, exchange: Exchange):
        ctx.exchange, ctx.shape = exchange, received.shape
        exchange._land()
        return received.view_as(received)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.exchange._depart(grad, ctx.exchange.counts and ctx.exchange.counts.back)
        return grad.new_empty(1).expand(ctx.shape), None  # a placeholder; the real gradient is in transit


# -------------------------------------------------------------------------------------------------------------- ring


class Ring:
    """Ring of ranks. Every rank sends tensors to the next rank while the caller computes. All tensors have one shape.
    Callers rely on the order in which ranks are visited."""

    def __init__(self, group: Group):
        self.group = group

    def arriving(self, shard: Tensor, into: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its shard) for all ranks: this rank, then the previous rank, and so on. The next shard arrives
        while the caller uses the last one. Do not change ``shard`` meanwhile. into: tensor (P, *shard.shape) that
        receives all shards."""
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
        """Sum ``piece(rank)`` over all ranks, for every rank. Return the sum for this rank.

        ``piece`` must return a new tensor, because the tensor is changed in place. It is called for the previous rank
        first and for this rank last, during communication. ``meanwhile`` is called during the last transfer.
        """
        rank, size = self.group.rank, self.group.size
        flight = None
        for step in range(1, size):
            part = piece((rank - step) % size)
            if flight is not None:
                part = part.add_(flight.wait())  # use the result, because add_ on Gemini's tensors returns a new tensor
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
    shard = shard.contiguous()
    received = shard.new_empty(group.size, *shard.shape)
    work = dist.all_gather_into_tensor(received.flatten(0, 1), shard, group=group.handle, async_op=True)
    return Flight([work], received, shard)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, length: int, factor: int, group: Group):
        ctx.group, ctx.rows, ctx.factor = group, x.shape[1], factor
        return side_by_side(start_gather(x, group).wait(), 1)[:, :length]

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = take_tokens(grad, ctx.rows, ctx.group)
        return own if ctx.factor == 1 else own * ctx.factor, None, None, None


def gather_tokens(x: Tensor, length: int, group: Group) -> Tensor:
    """Gather the tokens (B, n, F) of all ranks. Return the first N = ``length`` (B, N, F).

    Every rank must compute the same loss from the result. The backward pass does not communicate. It returns P times
    the gradient of this rank's tokens, for averages over all ranks.
    """
    return _GatherTokens.apply(x, length, group.size, group)


def take_tokens(x: Tensor, rows: int, group: Group) -> Tensor:
    """Select this rank's n = ``rows`` tokens (B, n, F) from all tokens (B, N, F), with zeros past the end."""
    mine = x[:, group.rank * rows : (group.rank + 1) * rows]
    return mine if mine.shape[1] == rows else torch.nn.functional.pad(mine, (0, 0, 0, rows - mine.shape[1]))


def start_sum(x: Tensor, dim: int, group: Group) -> Flight:
    """Start to sum x over all ranks. Each rank receives a slice of the sum along ``dim``. P must divide the
    dimension."""
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    share = parts.new_empty(parts.shape[1:])
    work = dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=group.handle, async_op=True)
    return Flight([work], share, parts)


def side_by_side(shares: Tensor, dim: int) -> Tensor:
    """Concatenate the ranks' slices, ``shares`` (P, ...), along dimension ``dim`` of a slice."""
    return shares.movedim(0, dim).flatten(dim, dim + 1)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return side_by_side(start_gather(share, group).wait(), dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return start_sum(grad, ctx.dim, ctx.group).wait(), None, None


class _SumShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_sum(x, dim, group).wait()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return side_by_side(start_gather(grad, ctx.group).wait(), ctx.dim), None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group.handle)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total, None


def join(share: Tensor, dim: int, group: Group) -> Tensor:
    """Gather the slices ``share`` of all ranks and concatenate them along ``dim``. The backward pass sums the gradients
    over all ranks."""
    return _Join.apply(share, dim, group)


def sum_shares(x: Tensor, dim: int, group: Group) -> Tensor:
    return _SumShares.apply(x, dim, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over all ranks, on every rank. The backward pass sums the gradients, too."""
    return _SumOverRanks.apply(x, group)


def join_result(x: Tensor, length: int, group: Group) -> Tensor:
    """Like :func:`gather_tokens`, but the backward pass returns the gradient of this rank's tokens without a factor."""
    return _GatherTokens.apply(x, length, 1, group)


class _ColumnProduct(torch.autograd.Function):
    """Computes x W^T of the gathered tokens. To save memory, the backward pass gathers the tokens again."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(side_by_side(start_gather(x, group).wait(), 1), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), rows = ctx.saved_tensors, grad.flatten(0, 1)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gathered = start_gather(x, ctx.group) if of_weight else None
        summed = start_sum(grad @ weight, 1, ctx.group) if of_x else None
        dweight, dbias = None, rows.sum(0) if of_bias else None
        if gathered is not None:
            whole = side_by_side(gathered.wait(), 1)
            del gathered
            dweight = rows.t() @ whole.flatten(0, 1)
        return None if summed is None else summed.wait(), dweight, dbias, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """Gather the tokens x (B, n, in) of all ranks. Return x W^T + bias (B, P n, out / P) for this rank's weight (out /
    P, in)."""
    return _ColumnProduct.apply(x, weight, bias, group)


# ------------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class SharedBatch:
    """Calls ``model(x, t, y)`` with the batch divided among the ranks of ``group``. Every rank gets the full result."""

    model: Callable[[Tensor, Tensor, Any], Tensor]
    group: Group

    def __call__(self, x: Tensor, t: Tensor, y: Any) -> Tensor:
        rows = -(-len(x) // self.group.size)
        first = self.group.rank * rows
        mine = torch.arange(first, first + rows, device=x.device).clamp(max=len(x) - 1)
        return start_gather(self.model(x[mine], t[mine], y[mine]), self.group).wait().flatten(0, 1)[: len(x)]
