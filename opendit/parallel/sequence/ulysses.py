"""Ulysses sequence parallelism (Jacobs et al., "DeepSpeed Ulysses", 2023), alone or combined with ring attention.

An all-to-all sends heads, so that a rank has some heads for all tokens. Attention is then local. A second all-to-all
returns the result. :class:`UlyssesRing` sends q, k and v in one packed exchange. If an exchange has one sample,
attention reads q, k and v from the received tensor, and its output is sent without a copy:

    x ─▶ q k v of own tokens ─one kernel─▶ (P, n, 3, h, d) ─all-to-all─▶ (N, 3, h, d) ─▶ attention
      ─▶ (N, h, d) ─all-to-all─▶ (P, n, h, d) ─copy─▶ all heads of own tokens

With a ring, a sequence's ranks form a grid. The ranks of a row exchange heads. The ranks of a column use ring
attention.

:class:`DirectUlysses` needs no collectives, because ranks access each other's memory (peer_memory.py):

    x ─▶ q k v of own tokens in the input buffer ─barrier─▶ own heads read ─▶ attention
      ─▶ the attention output written to the others' output buffers ─barrier─▶ all heads, own tokens

The backward pass sends gradients in the opposite direction. Heads are sent in groups. A kernel transfers the first
incoming group and the last outgoing group. Copy engines transfer all other groups during attention.
"""

import math
from collections.abc import Callable, Sequence
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
from opendit.parallel.sequence.choose import split_groups
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory, PeerRows, sample_by_sample
from opendit.parallel.sequence.products import (
    Products,
    column_sums,
    prepare_projection,
    side_by_side,
    tokens_by_rank,
    unpack,
)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: list[int]) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the keys of all ranks, for this rank's queries: (B, H, n, d).

    q, k, v have this rank's tokens without padding. k and v may have fewer heads than q (grouped-query attention).
    lengths: every rank's n. The first rank's n must be the largest; n may be 0.
    """
    return _RingAttention.apply(q, k, v, ring, lengths)


def _pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Pack k, v (B, H, n, d) as (2, B, rows, H, d), with equal shapes on all ranks. Rows past n are uninitialised."""
    B, H, n, d = k.shape
    packed = k.new_empty(2, B, rows, H, d)
    packed[0, :, :n].copy_(k.transpose(1, 2))
    packed[1, :, :n].copy_(v.transpose(1, 2))
    return packed


def _unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor]:
    k, v = packed[:, :, :length].transpose(2, 3).unbind(0)
    return k, v


def _of_shared(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients (B, H, n, d) of keys or values over the query heads that share a key-value head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: list[int]):
        kv, wide = _pack(k, v, lengths[0]), torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), None
        for source, block in ring.arriving(kv):
            if not lengths[source] or not q.shape[2]:
                continue
            part, part_lse = attend_part(q, *for_every_head(q, *_unpack(block, lengths[source])))
            out, lse = (part.to(wide), part_lse) if lse is None else merge(out, lse, part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.ring, ctx.lengths = ring, lengths
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        ring, lengths = ctx.ring, ctx.lengths
        dq = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        arriving = ring.arriving(kv)

        def next_part() -> tuple[int, Tensor]:
            """Wait for the next rank's keys. Return (rank, gradients of its keys and values)."""
            source, block = next(arriving)
            if not lengths[source] or not q.shape[2]:
                return source, torch.zeros_like(block)
            k, v = _unpack(block, lengths[source])
            part, dk, dv = attend_part_backward(dout, q, *for_every_head(q, k, v), out, lse)
            torch.add(dq, part, out=dq)  # dq.add_ would leave dq unchanged on Gemini's tensors
            return source, _pack(_of_shared(dk, k.shape[1]), _of_shared(dv, k.shape[1]), lengths[0])

        _, own = next_part()

        def piece(rank: int) -> Tensor:
            if rank == ring.group.rank:
                return own
            source, part = next_part()
            assert source == rank  # keys arrive in the order in which gradients are requested
            return part

        dk, dv = _unpack(ring.reduce_scatter(piece), lengths[ring.group.rank])
        return dq.to(q.dtype), dk, dv, None, None


HALF = (torch.bfloat16, torch.float16)


def reference_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    p = (q @ k.transpose(-1, -2) * scale - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0


def attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (attention output (B, H, N, d), log-sum-exp of the scores (B, H, N)). q: (B, H, N, d). k, v: (B, H, M, d).
    The log-sum-exp is fp32 for half-precision inputs."""
    if _flash(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        return out, lse
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    out, lse = reference_forward(q.float(), k.float(), v.float())
    return out.to(q.dtype), lse


def attend_part_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of attention to these keys. ``dq`` is only these keys' term. ``out`` (B, H, N, d) and ``lse``
    (B, H, N) must be the results over all keys."""
    if _flash(q):
        # seed and offset of dropout; not read without dropout
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, offset
        )
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, False)
    grads = reference_backward(*(t.float() for t in (dout, q, k, v, out, lse)))
    dq, dk, dv = (grad.to(q.dtype) for grad in grads)
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of attention to two sets of keys. ``out`` (B, H, N, d) and ``lse`` (B, H, N) are fp32 or wider.
    ``out`` is changed in place. Return the merged out and lse.

    out' = (e^lse out + e^part_lse part) / (e^lse + e^part_lse), computed as an interpolation between out and part.
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    return out.lerp_(part.to(out.dtype), weight), torch.logaddexp(lse, part_lse)


@dataclass(frozen=True)
class UlyssesRing:
    """Ulysses over the group ``heads``, combined with ring attention over the group ``ring``. A group of one rank
    disables its method. Samples and heads are exchanged in groups, while attention runs for other groups."""

    heads: Group
    ring: Group
    groups: int = 1  # number of groups, see split_groups()
    memory: PeerMemory | None = None  # symmetric memory of ``heads``, for sampling

    takes_projection: ClassVar[bool] = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention, length: int) -> Tensor:
        return self.exchange(q, k, v, attend, attend.prepared.of_samples, length)

    def exchange(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: GridAttention,
        attend_of: Callable[[slice], Attend],
        length: int,
    ) -> Tensor:
        """Attend from this rank's tokens to the tokens of all ranks.

        Args:
            own: normalises and rotates this rank's q and k.
            attend_of: function that returns the attention for a slice of the batch, with all tokens.
        """
        (B, H, rows, _), ranks = q.shape, self.heads.size
        first, block = (self.ring.rank * ranks + self.heads.rank) * rows, ranks * rows
        lengths = [min(max(length - i * block, 0), block) for i in range(self.ring.size)]
        mine = lengths[self.ring.rank]

        def attend(q: Tensor, k: Tensor, v: Tensor, samples: slice) -> Tensor:
            if self.ring.size > 1:
                return ring_attention(q, k, v, Ring(self.ring), lengths)
            return attend_of(samples)(q, k, v)

        if ranks == 1:
            q, k, v = own.prepare(q[:, :, :mine], k[:, :, :mine], v[:, :, :mine], first)
            output = attend(q, k, v, slice(None)).transpose(1, 2).flatten(2)
            return F.pad(output, (0, 0, 0, rows - mine)) if mine < rows else output
        number, of_heads = split_groups(self.groups, B, H // ranks)
        groups = [slice(i * B // number, (i + 1) * B // number) for i in range(number)]
        arriving, leaving = [], []
        peers = self.memory if torch.is_inference_mode_enabled() and not torch.compiler.is_compiling() else None

        def start(send: Tensor, buffer: Buffer, slot: int) -> Exchange | PeerExchange:
            if peers is None:
                return Exchange(self.heads).start(send)
            return PeerExchange(peers, buffer, slot, number * of_heads).start(send)

        parts = (_cut(part, number) for part in (q, k, v))
        for samples, q, k, v in zip(groups, *parts, strict=True):
            packed = own.of_samples(samples).pack(q, k, v, first, of_heads * ranks)
            for part in _cut(packed, of_heads):
                arriving.append((samples, start(part, Buffer.INPUT, len(arriving))))
        for samples, exchange in arriving:
            output = attend(*unpack(exchange.finish(), mine), samples)
            leaving.append(start(tokens_by_rank(output, rows, ranks), Buffer.OUTPUT, len(leaving)))
        return side_by_side([exchange.finish() for exchange in leaving], number)


class PeerExchange:
    """An all-to-all of tensors (P, ...) without gradients: copy engines write row p to rank p's memory.

    Used like :class:`Exchange`. The received tensor is a view of the buffer, and must be read before the buffer's next
    use.

    Args:
        slot: index of this exchange among the ``number`` exchanges in one use of the buffer, in starting order.
    """

    def __init__(self, memory: PeerMemory, buffer: Buffer, slot: int, number: int):
        self._memory, self._buffer, self._slot, self._number = memory, buffer, slot, number

    def start(self, send: Tensor) -> "PeerExchange":
        memory, rank, size = self._memory, self._memory.group.rank, self._memory.group.size
        of = memory.slots(self._buffer, self._number, tuple(send.shape), send.dtype)[self._slot].of
        pairs = [sample_by_sample(of[p][rank].flatten(1)[:, None], send[p].flatten(1)[:, None]) for p in range(size)]
        others = [pair for i in range(1, size) for pair in pairs[(rank + i) % size]]
        memory.copy_beside([others], pairs[rank])
        self._arrived = memory.ready_beside(self._buffer, again=self._slot > 0)
        self._sent, self._received = send, of[rank]  # copy engines read ``send`` until the event
        return self

    def finish(self) -> Tensor:
        self._memory.wait(self._arrived)
        self._sent = None
        return self._received


def _cut(x: Tensor, number: int) -> Sequence[Tensor]:
    """Like ``x.chunk(number)``, but avoid the copy in the backward pass of a single chunk."""
    return x.chunk(number) if number > 1 else [x]


@dataclass(frozen=True)
class DirectUlysses:
    """Ulysses with symmetric memory."""

    memory: PeerMemory  # symmetric memory of the ranks that share sequences
    groups: int = 1  # number of head groups on a rank; groups are exchanged one after another

    # the strategy writes q, k, v directly to buffers that other ranks read
    takes_projection: ClassVar[bool] = True

    @not_compiled  # a compiler can't see that other ranks read and write the buffers
    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, num_heads: int, attend: Attend, length: int, float8: bool = False
    ) -> Tensor:
        projected = prepare_projection(x, qkv, float8)
        layer = Layer(self.memory, self.groups, num_heads, length, projected.x.shape)
        parts, departed = project(*projected, layer), []
        for group in range(self.groups):
            q, k, v = _Arrive.apply(layer, group, *parts[3 * group : 3 * group + 3])
            departed.append(Depart.apply(attend(q, k, v), layer, group))
        return Collect.apply(layer, None, *departed)


@dataclass
class Layer:
    """Sizes of one attention call, and the state of its exchanges."""

    memory: PeerMemory
    groups: int  # number of head groups on a rank
    num_heads: int
    length: int  # number of tokens of all ranks, without padding
    shape: tuple[int, ...]  # (B, n, D) of this rank's tokens
    held: list[Any] = field(default_factory=list)  # tensors that copy engines read
    arriving: dict[int, torch.cuda.Event] = field(default_factory=dict)  # for each group, the end of its transfer
    doutput: dict[int, Tensor] = field(default_factory=dict)  # for each group, the output's gradient

    def rows(self, buffer: Buffer, parts: int, dtype: torch.dtype) -> PeerRows:
        """Return views of every rank's buffer as rows (B, n, parts, H, d): the rank's tokens with all heads."""
        B, n, D = self.shape
        return self.memory.rows(buffer, (B, n, parts, self.num_heads, D // self.num_heads), dtype)

    def heads_of(self, group: int) -> tuple[int, int]:
        """Return a group's (index of the first head, number of heads) on this rank."""
        number = self.num_heads // (self.memory.group.size * self.groups)
        return (self.memory.group.rank * self.groups + group) * number, number

    def pull(self, parts: int, like: Tensor, first_to_arrive: int) -> list[tuple[Tensor, ...]]:
        """Read this rank's heads from all ranks' input buffers, and return every group's tensors. A kernel reads the
        group ``first_to_arrive``. Copy engines read all other groups during attention."""
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
        """Send the gradient (B, n, D) of this rank's attention output to the ranks with the heads."""
        if self.groups > 1:
            self.rows(Buffer.INPUT, 1, grad.dtype).of[self.memory.group.rank].view(grad.shape).copy_(grad)
            found = [heads[0] for heads in self.pull(1, grad, self.groups - 1)]
        else:
            (B, n, D), (_, number) = self.shape, self.heads_of(0)
            d = D // self.num_heads
            heads = self.memory.rows(Buffer.INPUT, (B, self.length, number, d), grad.dtype)
            self.memory.send(grad.contiguous().view(B, n, self.num_heads, d), heads, self.length)
            self.memory.ready(Buffer.INPUT)
            # only the backward pass of attention reads this view
            found = [heads.of[self.memory.group.rank].transpose(1, 2)]
        self.doutput.update(enumerate(found))

    def real(self, rank: int) -> int:
        n = self.shape[1]
        return min(max(self.length - rank * n, 0), n)

    def arrived(self, group: int) -> None:
        if group in self.arriving:
            self.memory.wait(self.arriving.pop(group))

    def push(self, heads: tuple[Tensor, ...], rows: PeerRows, first: int, beside: bool) -> None:
        """Write a group's heads to all ranks' output buffers. beside: True to use copy engines, concurrently with later
        kernels; False to use a kernel."""
        heads = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads)
        if beside:
            self.memory.exchange_beside([(heads, first)], rows, push=True)
            self.held.append(heads)
        else:
            self.memory.exchange(heads, rows, first, push=True)

    def push_gradients(self, grads: tuple[Tensor, ...], group: int) -> None:
        """Write a group's gradients of q, k, v (or of a single tensor) to the ranks that own the tokens."""
        rows, (first, _) = self.rows(Buffer.OUTPUT, len(grads), grads[0].dtype), self.heads_of(group)
        self.push(grads, rows, first, beside=group > 0)

    def gradients(self, dtype: torch.dtype, parts: int = 3) -> Tensor:
        """Return the complete gradient (B, n, parts * D) of q, k, v, with zeros for padding. The result is valid until
        the next exchange. parts: 3 for q, k, v, or 1 for a single tensor."""
        self._all_there()
        own = self.rows(Buffer.OUTPUT, parts, dtype).of[self.memory.group.rank].flatten(2)
        own[:, self.real(self.memory.group.rank) :].zero_()
        return own

    def push_output(self, output: Tensor, group: int) -> None:
        """Write a group's attention output to the tokens' owners, into the slot for this rank and group. Contiguous
        slots are sent faster than rows with gaps: 29 us instead of 41 us on 4 H200s."""
        slot = self._slots(output.dtype)[self.memory.group.rank * self.groups + group]
        self.push((output,), slot, 0, beside=group < self.groups - 1)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return the attention output (B, n, D) of all heads for this rank's tokens, with zeros for padding."""
        self._all_there()
        rank = self.memory.group.rank
        joined = torch.cat([slot.of[rank].flatten(2) for slot in self._slots(dtype)], dim=2)
        joined[:, self.real(rank) :].zero_()
        return joined

    def _slots(self, dtype: torch.dtype) -> list[PeerRows]:
        (B, n, D), (_, number) = self.shape, self.heads_of(0)
        shape = (B, n, 1, number, D // self.num_heads)
        return self.memory.slots(Buffer.OUTPUT, self.num_heads // number, shape, dtype)

    def _all_there(self) -> None:
        self.memory.wait()
        self.memory.ready(Buffer.OUTPUT)
        self.held.clear()


def unread(like: Tensor) -> Tensor:
    """Return a placeholder with the shape of ``like``. The next autograd node reads the ranks' buffers instead."""
    return like.new_empty(1).expand(like.shape)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, sent: Tensor, products: Products, layer: Layer
) -> tuple[Tensor, ...]:
    """Return q, k, v (B, h, N, d) of this rank's heads, group after group. The data may still be arriving. x (B, n, D),
    weight, bias, sent and products are the fields of :class:`Projected`."""
    parameters = (weight, bias)
    if has_torch_function(parameters):
        # Gemini fetches parameters only for one call, so parameters must be arguments of the call.
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
    """Sends a group's attention output to the tokens' owners. The backward pass returns the gradient that
    :class:`Collect` has fetched."""

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
    """Collects the attention output of all heads. shard: this rank's input, if the backward pass must gather all inputs
    again (fastseq.py); otherwise None."""

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
