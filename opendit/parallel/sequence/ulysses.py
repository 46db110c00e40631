"""Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023), and in two dimensions with ring attention.

An all-to-all turns this rank's tokens with all heads into all tokens with this rank's heads, attention is local, and
another one turns the result back. :class:`UlyssesRing` sends q, k and v in one packed exchange. With a ring, the ranks
of a sequence are a grid: an exchange among the ``heads.size`` neighbouring ranks leaves each with some of the heads for
all their tokens, and ring attention covers the other dimension.

:class:`DirectUlysses` needs no collectives: every rank reads and writes the others' memory (peer_memory.py).

    x ─▶ q k v of own tokens in the input buffer ─barrier─▶ own heads read ─▶ attention
      ─▶ the attention output written to the others' output buffers ─barrier─▶ all heads, own tokens

The backward pass is the same with gradients, in the opposite direction. Heads go in groups: a kernel carries the first
group that attention needs and the last that it leaves, and the copy engines carry all others, during the attention to
those that have arrived.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from opendit.common.torch_utils import not_compiled
from opendit.kernels.exchange_heads import new_heads
from opendit.models.attention import AnyProjection, GridAttention, for_every_head
from opendit.models.layers import Attend
from opendit.parallel.collectives import Exchange, Group, Ring
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory, PeerRows
from opendit.parallel.sequence.products import (
    Products,
    column_sums,
    pack,
    prepare_projection,
    side_by_side,
    tokens_by_rank,
    unpack,
)
from opendit.parallel.sequence.ring import ring_attention


@dataclass(frozen=True)
class UlyssesRing:
    """Heads are shared over the group ``heads``, tokens over the group ``ring``; a group of one does nothing."""

    heads: Group
    ring: Group

    takes_projection: ClassVar[bool] = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention, length: int) -> Tensor:
        """See :class:`opendit.models.attention.SequenceShards`."""
        rows, block = q.shape[2], q.shape[2] * self.heads.size
        lengths = [min(max(length - i * block, 0), block) for i in range(self.ring.size)]
        mine, first = lengths[self.ring.rank], self.ring.rank * block
        around = self._around(attend, first, lengths) if self.ring.size > 1 else attend
        if self.heads.size == 1:
            output = around(*(part[:, :, :mine] for part in (q, k, v))).transpose(1, 2).flatten(2)
            return F.pad(output, (0, 0, 0, rows - mine)) if mine < rows else output
        ranks = self.heads.size
        arrived = Exchange(self.heads).start(pack(q, *for_every_head(q, k, v), ranks)).finish()
        output = around(*unpack(arrived, mine))
        return side_by_side(Exchange(self.heads).start(tokens_by_rank(output, rows, ranks)).finish())

    def _around(self, attend: GridAttention, first: int, lengths: list[int]) -> Attend:
        """Return attention to the keys of all ranks of the ring, for tokens from ``first`` on; every rank prepares its
        own."""

        def attend_around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(*attend.prepare(q, k, v, first), ring=Ring(self.ring), lengths=lengths)

        return attend_around


@dataclass(frozen=True)
class DirectUlysses:
    """Ulysses through symmetric memory.

    Attributes:
        memory: of the ranks that share sequences.
        groups: parts in which a rank's heads are exchanged, one after the other.
    """

    memory: PeerMemory
    groups: int = 1

    takes_projection: ClassVar[bool] = True  # its product is written where the others read it

    @not_compiled  # what other ranks read and write is in no graph of a compiler
    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, num_heads: int, attend: Attend, length: int, float8: bool = False
    ) -> Tensor:
        """See :class:`opendit.models.attention.SequenceShards`."""
        projected = prepare_projection(x, qkv, float8)
        layer = Layer(self.memory, self.groups, num_heads, length, projected.x.shape)
        parts, departed = project(*projected, layer), []
        for group in range(self.groups):
            q, k, v = _Arrive.apply(layer, group, *parts[3 * group : 3 * group + 3])
            departed.append(Depart.apply(attend(q, k, v), layer, group))
        return Collect.apply(layer, None, *departed)


@dataclass
class Layer:
    """One call: its sizes, and what its nodes leave for each other until the exchange is done.

    Attributes:
        shape: (B, n, D) of this rank's tokens.
        held: tensors that copy engines read.
        arriving: a group's event.
        doutput: a group's gradient of its heads, there or still arriving.
    """

    memory: PeerMemory
    groups: int
    num_heads: int
    length: int
    shape: tuple[int, ...]  # (B, n, D)
    held: list[Any] = field(default_factory=list)  # what copy engines read
    arriving: dict[int, torch.cuda.Event] = field(default_factory=dict)  # a group's event
    doutput: dict[int, Tensor] = field(
        default_factory=dict
    )  # a group's gradient, there or still arriving, of its heads

    def rows(self, buffer: Buffer, parts: int, dtype: torch.dtype) -> PeerRows:
        """Return (B, n, parts, H, d) of every rank: its own tokens, all heads."""
        B, n, D = self.shape
        return self.memory.rows(buffer, (B, n, parts, self.num_heads, D // self.num_heads), dtype)

    def heads_of(self, group: int) -> tuple[int, int]:
        """Return (index of the first, number) of a group of this rank's heads."""
        number = self.num_heads // (self.memory.group.size * self.groups)
        return (self.memory.group.rank * self.groups + group) * number, number

    def pull(self, parts: int, like: Tensor, first_to_arrive: int) -> list[tuple[Tensor, ...]]:
        """Return every group's heads, filled from all ranks' input buffers: those of one group by a kernel, which
        delays attention, and the others during attention, in the order of their distance from that one."""
        rows, (B, _, D) = self.rows(Buffer.INPUT, parts, like.dtype), self.shape
        self.memory.ready(Buffer.INPUT)
        firsts, number = zip(*map(self.heads_of, range(self.groups)), strict=True)
        found = [new_heads(parts, B, number[0], self.length, D // self.num_heads, like) for _ in firsts]
        now, *later = sorted(range(self.groups), key=lambda group: abs(group - first_to_arrive))
        self.memory.exchange(found[now], rows, firsts[now], push=False)
        if later:
            events = self.memory.exchange_beside([(found[g], firsts[g]) for g in later], rows, push=False)
            self.arriving.update(zip(later, events, strict=True))
        return found

    def send_gradient(self, grad: Tensor) -> None:
        """Send the gradient (B, n, D) of this rank's tokens' attention output to the ranks of the heads."""
        if self.groups > 1:
            self.rows(Buffer.INPUT, 1, grad.dtype).of[self.memory.group.rank].view(grad.shape).copy_(grad)
            found = [heads[0] for heads in self.pull(1, grad, self.groups - 1)]
        else:
            (B, n, D), (_, number) = self.shape, self.heads_of(0)
            d = D // self.num_heads
            heads = self.memory.rows(Buffer.INPUT, (B, self.length, number, d), grad.dtype)
            self.memory.send(grad.contiguous().view(B, n, self.num_heads, d), heads, self.length)
            self.memory.ready(Buffer.INPUT)
            found = [heads.of[self.memory.group.rank].transpose(1, 2)]  # read by attention's backward pass only
        self.doutput.update(enumerate(found))

    def real(self, rank: int) -> int:
        """Return the number of a rank's n tokens that are not padding."""
        n = self.shape[1]
        return min(max(self.length - rank * n, 0), n)

    def arrived(self, group: int) -> None:
        """Make the current stream wait for a group of heads that is still in transit."""
        if group in self.arriving:
            self.memory.wait(self.arriving.pop(group))

    def push(self, heads: tuple[Tensor, ...], rows: PeerRows, first: int, beside: bool) -> None:
        """Write a group's heads to all ranks' output buffers: beside what comes next, or at once by a kernel."""
        heads = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads)
        if beside:
            self.memory.exchange_beside([(heads, first)], rows, push=True)
            self.held.append(heads)
        else:
            self.memory.exchange(heads, rows, first, push=True)

    def push_gradients(self, grads: tuple[Tensor, ...], group: int) -> None:
        """Push gradients of q, k, v, or of any one or three tensors, to the ranks whose backward pass needs them."""
        rows, (first, _) = self.rows(Buffer.OUTPUT, len(grads), grads[0].dtype), self.heads_of(group)
        self.push(grads, rows, first, beside=group > 0)

    def gradients(self, dtype: torch.dtype, parts: int = 3) -> Tensor:
        """Return (B, n, 3 D) of q, k, v, complete, with zeros for padding; valid until the next exchange. parts: 1 for
        a single tensor."""
        self._all_there()
        own = self.rows(Buffer.OUTPUT, parts, dtype).of[self.memory.group.rank].flatten(2)
        own[:, self.real(self.memory.group.rank) :].zero_()
        return own

    def push_output(self, output: Tensor, group: int) -> None:
        """Write the attention output of a group of heads to this rank's and group's slot of every owner. Contiguous
        rows cross the links faster than rows with gaps (4 H200s, a loop of 20: 29 us and 41), and one more pass has to
        follow anyway."""
        slot = self._slots(output.dtype)[self.memory.group.rank * self.groups + group]
        self.push((output,), slot, 0, beside=group < self.groups - 1)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return (B, n, D): the attention output of all heads, with zeros for padding."""
        self._all_there()
        rank = self.memory.group.rank
        joined = torch.cat([slot.of[rank].flatten(2) for slot in self._slots(dtype)], dim=2)
        joined[:, self.real(rank) :].zero_()
        return joined

    def _slots(self, dtype: torch.dtype) -> list[PeerRows]:
        """Return (B, n, 1, h, d) in the output buffer for every group of heads, in the order of the heads."""
        (B, n, D), (_, number) = self.shape, self.heads_of(0)
        shape = (B, n, 1, number, D // self.num_heads)
        return self.memory.slots(Buffer.OUTPUT, self.num_heads // number, shape, dtype)

    def _all_there(self) -> None:
        self.memory.wait()
        self.memory.ready(Buffer.OUTPUT)
        self.held.clear()


def unread(like: Tensor) -> Tensor:
    """Return a gradient that tells the next node nothing: the memory of the others holds what it needs."""
    return like.new_empty(1).expand(like.shape)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, sent: Tensor, products: Products, layer: Layer
) -> tuple[Tensor, ...]:
    """Return q, k, v (B, h, N, d) of each group of this rank's heads: the first group's, the second's, ...; they are
    still arriving.

    x: (B, n, D) of this rank. The other arguments are as in :class:`Projected`; weight (3 D, D) and bias (3 D,) or
    None.
    """
    parameters = (weight, bias)
    if has_torch_function(parameters):
        # Gemini's parameters: they are in memory for the length of this call only, and must all be named in it.
        return handle_torch_function(project, parameters, x, *parameters, sent, products, layer)
    return _Project.apply(x, weight, bias, sent, products, layer)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, sent, products: Products, layer: Layer):
        factor = products.factor(weight)
        ctx.save_for_backward(sent, *factor)
        ctx.products, ctx.layer, ctx.dtype = products, layer, x.dtype
        products.project(layer.rows(Buffer.INPUT, 3, x.dtype).of[layer.memory.group.rank], sent, factor, bias)
        return tuple(part for heads in layer.pull(3, x, 0) for part in heads)

    @staticmethod
    def backward(ctx, *unread: Tensor):
        (sent, *factor), products, dx, dweight = ctx.saved_tensors, ctx.products, None, None
        dqkv = ctx.layer.gradients(ctx.dtype).flatten(0, 1)
        grad = products.gradient(dqkv)
        if ctx.needs_input_grad[0]:
            dx = products.input_gradient(grad, products.columns(factor)).view(sent.shape)
        if ctx.needs_input_grad[1]:
            dweight = products.weight_gradient(grad, sent.reshape(-1, sent.shape[2]))
        dbias = column_sums(dqkv) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: Layer, group: int, *heads: Tensor):
        ctx.layer, ctx.group = layer, group
        layer.arrived(group)
        return tuple(part.view_as(part) for part in heads)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.layer.push_gradients(grads, ctx.group)
        return None, None, *map(unread, grads)


class Depart(torch.autograd.Function):
    """Sends the attention output of a group of heads to the owners of the tokens; its gradient comes from
    :class:`Collect`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layer: Layer, group: int) -> Tensor:
        ctx.layer, ctx.group = layer, group
        layer.push_output(output, group)
        return unread(output)

    @staticmethod
    def backward(ctx: Any, unread: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.arrived(ctx.group)
        return ctx.layer.doutput.pop(ctx.group), None, None


class Collect(torch.autograd.Function):
    """Collects the attention output of all heads. shard: what the layer gathers again in the backward pass
    (fastseq.py), after the gradient."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, shard: Tensor | None, *sent: Tensor) -> Tensor:
        ctx.save_for_backward(shard)
        ctx.layer = layer
        return layer.output(sent[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.send_gradient(grad)
        (shard,) = ctx.saved_tensors
        if shard is not None:
            layer.gather_again(shard)
        return None, None, *(unread(layer.doutput[group]) for group in range(layer.groups))
