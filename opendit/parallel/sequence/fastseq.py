"""FastSeq, OpenDiT's own method: gather the input of attention, and exchange only the attention output.

    x_p --ring of shards--> q, k, v of this rank's heads for all tokens --attention--> all-to-all

A rank receives (P - 1)/P of the sequence (N x D numbers) during the projection, and (P - 1)/P^2 after attention.
Ulysses sends 4 (P - 1)/P^2: more for P = 2, the same for P = 3, less for P > 3.

:class:`FastSeq` uses collectives. In :class:`DirectFastSeq`, copy engines transfer inputs and gradients during the
matrix products:

    x_p in the input buffer ─barrier─▶ q, k, v of own heads: own tokens first, other ranks' tokens as they arrive ─▶
    attention
      ─▶ the attention output goes back as in Ulysses (ulysses.py)

The backward pass of :class:`DirectFastSeq`:

1. During attention, copy engines send this rank's input to all ranks again, unless ``keep_gathered``.
2. This rank computes its terms of other ranks' input gradients, in the gradient buffer.
3. After a barrier, copy engines bring each term to the input's owner, during the product for the weight's gradient.
4. This rank computes the term for its input, and adds the terms that have arrived.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from opendit.common.torch_utils import not_compiled
from opendit.kernels.common import kernels_available
from opendit.kernels.fp8_linear import dequantised
from opendit.kernels.linear import sum_parts, sum_parts_reference
from opendit.kernels.split_heads import split_heads, split_heads_reference
from opendit.models.attention import AnyProjection
from opendit.models.layers import Attend, LowRank
from opendit.parallel.collectives import Exchange, Flight, Group, Ring, join, start_gather
from opendit.parallel.sequence.peer_memory import Buffer, Pair, PeerMemory, sample_by_sample
from opendit.parallel.sequence.products import (
    Products,
    Saved,
    own_rows,
    prepare_projection,
    side_by_side,
    tokens_by_rank,
    unpack,
    whole_rows,
    zeros_but_own,
)
from opendit.parallel.sequence.ulysses import Collect, Depart, Layer


@dataclass(frozen=True)
class FastSeq:
    """FastSeq with collectives. keep_gathered: True to save the gathered input (N x D numbers per layer) for the
    backward pass; False to gather it again."""

    group: Group
    keep_gathered: bool = False

    # the strategy computes q, k, v, so that transfers of inputs overlap with the products
    takes_projection: ClassVar[bool] = True

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, num_heads: int, attend: Attend, length: int, float8: bool = False
    ) -> Tensor:
        projected, frozen = prepare_projection(x, qkv, float8), not qkv.weight.requires_grad
        gathered = None if self.keep_gathered and not frozen else _GatheredAgain(self.group)
        packed = own_heads(*projected, num_heads, Ring(self.group), gathered)
        if qkv.low_rank is not None:
            packed = self._with_low_rank(packed, dequantised(x), qkv.low_rank)
        output = attend(*unpack(packed, length))
        if gathered is not None and not frozen:
            output = _GatherAhead.apply(output, projected.sent, gathered)
        sent = Exchange(self.group).start(tokens_by_rank(output, x.shape[1], self.group.size))
        return side_by_side([sent.finish()])

    def _with_low_rank(self, packed: Tensor, x: Tensor, low_rank: LowRank) -> Tensor:
        """Add the LoRA update to the packed q, k, v. Ranks gather x A^T instead of x (B, n, D), because x A^T has only
        a few numbers per token."""
        thin = join(F.linear(x, low_rank.a).unsqueeze(0), 0, self.group)
        own = low_rank._replace(b=own_rows(low_rank.b, self.group))
        return own.add_to(packed.flatten(3), thin).view(packed.shape)


class _GatheredAgain:
    """A gather in progress. One node of the backward pass starts the gather, and another node waits."""

    def __init__(self, group: Group):
        self.group = group
        self._flight: Flight | None = None

    def start(self, shard: Tensor) -> None:
        self._flight = start_gather(shard, self.group)

    def take(self) -> Tensor:
        flight, self._flight = self._flight, None
        assert flight is not None, "the gather was started"
        return flight.wait()


class _GatherAhead(torch.autograd.Function):
    """Identity function. Its backward pass starts the gather that :func:`own_heads` needs. So the gather overlaps with
    the backward pass of attention."""

    @staticmethod
    def forward(ctx, output: Tensor, shard: Tensor, gathered: _GatheredAgain):
        ctx.save_for_backward(shard)
        ctx.gathered = gathered
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.gathered.start(*ctx.saved_tensors)
        return grad, None, None


def own_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sent: Tensor,
    products: Products,
    num_heads: int,
    ring: Ring,
    gathered: _GatheredAgain | None,
) -> Tensor:
    """Return q, k, v of this rank's heads for the tokens of all ranks, packed (P, B, n, 3, h, d).

    x (B, n, D), weight, bias, sent and products are the fields of :class:`Projected`. gathered: used to gather the
    input again in the backward pass; None to save the gathered input.
    """
    if has_torch_function((weight, bias)):
        # Gemini fetches parameters only for one call, so parameters must be arguments of the call.
        return handle_torch_function(
            own_heads, (weight, bias), x, weight, bias, sent, products, num_heads, ring, gathered
        )
    return _OwnHeads.apply(x, weight, bias, sent, products, num_heads, ring, gathered)


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, sent, products, num_heads, ring, gathered):
        (B, n, D), group = x.shape, ring.group
        own_weight = products.factor(weight, group)
        own_bias = None if bias is None else own_rows(bias, group)
        packed = x.new_empty(group.size, B, n, len(own_weight[0]))
        kept = sent.new_empty(group.size, B, n, D) if gathered is None else None
        for source, shard in ring.arriving(sent, into=kept):
            products.project(packed[source], shard, own_weight, own_bias)
        ctx.save_for_backward(kept, *own_weight)
        ctx.products, ctx.ring, ctx.gathered, ctx.shape, ctx.dtype = products, ring, gathered, x.shape, weight.dtype
        return packed.unflatten(3, (3, num_heads // group.size, -1))

    @staticmethod
    def backward(ctx, grad: Tensor):
        kept, *own_weight = ctx.saved_tensors
        (B, n, D), group, products, grads = ctx.shape, ctx.ring.group, ctx.products, {}
        exact = grad.flatten(3).flatten(1, 2)  # (P, B n, ...)
        rows, columns = products.gradient(exact), products.columns(own_weight)

        def weights() -> None:
            if ctx.needs_input_grad[1]:
                shards = ctx.gathered.take() if kept is None else kept
                whole = zeros_but_own(own_weight[0], ctx.dtype, group)
                grads["weight"] = products.own_weight_gradient(rows.flatten(0, 1), shards.view(-1, D), group, whole)
            grads["bias"] = whole_rows(exact.flatten(0, 1).sum(0), group) if ctx.needs_input_grad[2] else None

        dx = ctx.ring.reduce_scatter(lambda rank: products.input_gradient(rows[rank], columns), meanwhile=weights)
        return dx.view(B, n, D), grads.get("weight"), grads["bias"], None, None, None, None, None


@dataclass(frozen=True)
class DirectFastSeq:
    """FastSeq with symmetric memory. keep_gathered: see :class:`FastSeq`."""

    memory: PeerMemory
    keep_gathered: bool = False

    # the strategy computes q, k, v, so that transfers of inputs overlap with the products
    takes_projection: ClassVar[bool] = True

    @not_compiled  # a compiler can't see that other ranks read and write the buffers
    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, num_heads: int, attend: Attend, length: int, float8: bool = False
    ) -> Tensor:
        projected = prepare_projection(x, qkv, float8)
        layer = _Layer(self.memory, 1, num_heads, length, projected.x.shape)
        output = attend(*direct_heads(*projected, layer, self.keep_gathered))
        return Collect.apply(layer, None if self.keep_gathered else projected.sent, Depart.apply(output, layer, 0))


@dataclass
class _Layer(Layer):
    # for each other rank, the event after which this rank's input has arrived there
    events: list[Any] = field(default_factory=list)

    @property
    def others(self) -> list[int]:
        """All other ranks, in the order of the ring, beginning with the next rank."""
        rank, size = self.memory.group.rank, self.memory.group.size
        return [(rank + i) % size for i in range(1, size)]

    def tokens_of(self, rank: int) -> slice:
        """Return the slice of the sequence with a rank's tokens, without padding."""
        first = rank * self.shape[1]
        return slice(first, first + self.real(rank))

    def inputs(self, buffer: Buffer, dtype: torch.dtype) -> list[Tensor]:
        """Return a view (B, N, D) of every rank's buffer, for the inputs of all tokens."""
        B, _, D = self.shape
        return self.memory.rows(buffer, (B, self.length, D), dtype).of

    def gather(self, shard: Tensor) -> None:
        self.held.append(shard)
        self.events = self.memory.copy_beside([self._to(p, shard, Buffer.INPUT) for p in self.others])

    def gather_again(self, shard: Tensor) -> None:
        """Start to copy this rank's inputs to ``Buffer.EVERYONE`` on all ranks, for the backward pass. The buffer may
        be read after the barrier of ``Buffer.GRADIENT``."""
        self.held.append(shard)
        own, *groups = (self._to(p, shard, Buffer.EVERYONE) for p in (self.memory.group.rank, *self.others))
        self.memory.copy_beside(groups, own)

    def _to(self, rank: int, shard: Tensor, buffer: Buffer) -> list[Pair]:
        mine = self.memory.group.rank
        target = self.inputs(buffer, shard.dtype)[rank][:, self.tokens_of(mine)]
        return sample_by_sample(target, shard[:, : self.real(mine)])

    def shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, inputs of the rank's tokens): first this rank, then all others as inputs arrive."""
        rank, buffer = self.memory.group.rank, self.inputs(Buffer.INPUT, own.dtype)
        yield rank, own[:, : self.real(rank)]
        for i, peer in enumerate(reversed(self.others)):  # the previous rank's inputs arrive first
            self.memory.wait(self.events[i])
            self.memory.ready(Buffer.INPUT, again=i > 0)
            yield peer, buffer[rank][:, self.tokens_of(peer)]

    def gradient_for(self, owner: int, adder: int, dtype: torch.dtype) -> Tensor:
        """Return a slot (B, tokens of ``owner``, D) in rank ``adder``'s gradient buffer. The slot is for ``adder``'s
        term of ``owner``'s input gradient."""
        slots = self.memory.rows(Buffer.GRADIENT, (self.memory.group.size, *self.shape), dtype)
        return slots.of[adder][owner][:, : self.real(owner)]

    def fetch_gradients(self, like: Tensor) -> Tensor:
        """Start to fetch other ranks' terms of this rank's input gradient. Return the tensor (P - 1, B, n, D) that
        receives the terms."""
        (B, n, D), rank = self.shape, self.memory.group.rank
        found, groups = like.new_empty(len(self.others), B, n, D), []
        found[:, :, self.real(rank) :].zero_()
        for target, peer in zip(found[:, :, : self.real(rank)], self.others, strict=True):
            source = self.gradient_for(rank, peer, like.dtype)
            groups.append(sample_by_sample(target, source))
        self.memory.copy_beside(groups)
        return found


def direct_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, sent: Tensor, products: Products, layer: _Layer, keep_gathered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, h, N, d) of this rank's heads for the tokens of all ranks. x (B, n, D), weight, bias, sent and
    products are the fields of :class:`Projected`."""
    if has_torch_function((weight, bias)):
        # Gemini fetches parameters only for one call, so parameters must be arguments of the call.
        return handle_torch_function(
            direct_heads, (weight, bias), x, weight, bias, sent, products, layer, keep_gathered
        )
    group = layer.memory.group
    # The kernel that joins the gradients of q, k and v also computes the bias's gradient.
    split = split_heads if kernels_available(x.device, x.dtype)[0] else split_heads_reference
    qkv, own_bias = _OwnProjection.apply(x, weight, bias, sent, products, layer, keep_gathered)
    return split(qkv, layer.num_heads // group.size, own_bias)


class _OwnProjection(torch.autograd.Function):
    """Computes q, k, v of this rank's heads for all tokens: (B, N, 3 h d), with the bias added. Also returns the bias
    (3 h d,), because :func:`split_heads` computes its gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, sent, products: Products, layer: _Layer, keep_gathered: bool):
        group = layer.memory.group
        own_bias = None if bias is None else own_rows(bias, group)
        layer.gather(sent)
        # Copy the weight's rows for this rank's heads, during the transfer of inputs. Without the copy, q, k and v
        # would need three products, with more idle multiprocessors. A batched product can't add a bias.
        own_weight = products.factor(weight, group)
        qkv = x.new_empty(len(x), layer.length, len(own_weight[0]))
        for rank, shard in layer.shards(sent):
            for out, tokens in zip(qkv[:, layer.tokens_of(rank)], shard, strict=True):  # sample by sample
                products.project(out, tokens, own_weight, own_bias)
        everyone = None
        if keep_gathered:
            everyone = layer.inputs(Buffer.INPUT, sent.dtype)[group.rank].clone()
            everyone[:, layer.tokens_of(group.rank)] = sent[:, : layer.real(group.rank)]
        # save the copied rows (3 D D / P numbers per layer) for the backward pass
        ctx.save_for_backward(everyone, *own_weight)
        ctx.layer, ctx.products, ctx.dtypes = layer, products, (sent.dtype, weight.dtype)
        return qkv, own_bias

    @staticmethod
    def backward(ctx, dqkv: Tensor, own_dbias: Tensor | None):
        (everyone, *own_weight), layer, products = ctx.saved_tensors, ctx.layer, ctx.products
        memory, group, dweight, dbias = layer.memory, layer.memory.group, None, None
        made, columns, (sent, weight) = products.gradient(dqkv), products.columns(own_weight), ctx.dtypes
        for peer in layer.others:
            out = layer.gradient_for(peer, group.rank, dqkv.dtype)
            _input_gradient(products, made[:, layer.tokens_of(peer)], columns, out)
        there = memory.ready_beside(Buffer.GRADIENT)
        if ctx.needs_input_grad[2]:  # computed here, while this rank may have to wait for others
            dbias = whole_rows(cast(Tensor, own_dbias), group)
        if ctx.needs_input_grad[1]:
            dweight = zeros_but_own(own_weight[0], weight, group)
        memory.wait(there)
        parts = layer.fetch_gradients(dqkv)
        if dweight is not None:
            everyone = layer.inputs(Buffer.EVERYONE, sent)[group.rank] if everyone is None else everyone
            dweight = products.own_weight_gradient(made.flatten(0, 1), everyone.flatten(0, 1), group, dweight)
        memory.wait()
        layer.held.clear()
        dx = parts[0] if len(parts) == 1 else _sum(parts)
        own = made[:, layer.tokens_of(group.rank)]
        _input_gradient(products, own, columns, dx[:, : layer.real(group.rank)], add=True)
        return dx, dweight, dbias, None, None, None, None


def _sum(parts: Tensor) -> Tensor:
    return (sum_parts if kernels_available(parts.device, parts.dtype)[0] else sum_parts_reference)(parts)


def _input_gradient(products: Products, grad: Tensor, columns: Saved, out: Tensor, add: bool = False) -> None:
    """Write this rank's term of an input gradient (B, n, D) to ``out``, or add it to ``out`` if ``add``. grad: the
    gradient (B, n, 3 h d) of q, k, v.

    Call this function even if no gradient is needed, so that the input buffer is not used twice in a row.
    """
    for target, rows in zip(out, grad, strict=True):  # sample by sample
        products.input_gradient_into(target, rows, columns, add)
