"""FastSeq without collectives: copy engines carry inputs and their gradients beside the products.

    x_p in the input buffer ─barrier─▶ q, k, v of own heads: own tokens, and the others' as they arrive ─▶ attention
      ─▶ what the heads have seen goes back as in Ulysses (direct.py)

In the backward pass the inputs arrive once more, beside attention. Then the gradients of the others' inputs are made,
in the gradient buffer; after the barrier copy engines bring them to their owners, beside the product that makes the
weight's gradient. That of the own input comes last, and adds itself to what has arrived.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from opendit.kernels.common import kernels_available
from opendit.kernels.split_heads import split_heads, split_heads_reference
from opendit.models.layers import Attend, BlockOps
from opendit.parallel.sequence.direct import Collect, Depart, Layer
from opendit.parallel.sequence.layout import in_working_dtype, linear_into, own_rows, weight_gradient
from opendit.parallel.sequence.peer_memory import Buffer, Pair, PeerMemory, Rows


@dataclass(frozen=True)
class DirectFastSeq:
    """keep_gathered: keep the gathered input for the backward pass (N x D a layer) instead of gathering it again."""

    memory: PeerMemory
    keep_gathered: bool = False

    @torch.compiler.disable  # what other ranks read and write is in no graph of a compiler
    def __call__(self, x: Tensor, qkv: nn.Linear, num_heads: int, attend: Attend, ops: BlockOps, length: int) -> Tensor:
        """See :class:`opendit.parallel.sequence.Shards`."""
        x, weight, bias = in_working_dtype(x, qkv.weight, qkv.bias)
        layer = _Layer(self.memory, 1, num_heads, length, x.shape)
        seen = attend(*own_heads(x, weight, bias, layer, self.keep_gathered))
        return Collect.apply(layer, None if self.keep_gathered else x.detach(), Depart.apply(seen, layer, 0))


@dataclass
class _Layer(Layer):
    everyone: Tensor | None = None  # all tokens' inputs (B, N, D), there or still arriving
    events: dict = field(default_factory=dict)  # a rank's part of them

    @property
    def others(self) -> list[int]:
        rank, size = self.memory.group.rank, self.memory.group.size
        return [(rank + i) % size for i in range(1, size)]

    def tokens_of(self, rank: int) -> slice:
        first = rank * self.shape[1]
        return slice(first, first + self.real(rank))

    def _inputs(self, dtype: torch.dtype) -> Rows:
        """[1] of a rank's input buffer; [0] is where its gradient of what the heads have seen lies."""
        return self.memory.rows(Buffer.INPUT, (2, *self.shape), dtype)

    def lay_out(self, shard: Tensor) -> None:
        self._inputs(shard.dtype).of[self.memory.group.rank][1].copy_(shard)

    def gather(self, shard: Tensor, own: bool = True) -> None:
        """Starts to fill ``everyone``, after the barrier; with ``own``, this rank's part too."""
        rows, (B, _, D), rank = self._inputs(shard.dtype), self.shape, self.memory.group.rank
        self.everyone = shard.new_empty(B, self.length, D)

        def pairs(peer: int, theirs: Tensor) -> list[Pair]:
            mine = self.everyone[:, self.tokens_of(peer)].unsqueeze(2)
            return list(zip(mine, theirs[:, : self.real(peer)].unsqueeze(2), strict=True))

        groups = [pairs(peer, rows.of[peer][1]) for peer in self.others]
        events = self.memory.copy_beside(groups, pairs(rank, shard) if own else [])
        self.events.update(zip(self.others, events, strict=True))

    def shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its tokens' inputs) of every rank, its own first, the others' once they are there."""
        rank = self.memory.group.rank
        yield rank, own[:, : self.real(rank)]
        for peer in self.others:
            self.memory.wait(self.events.pop(peer))
            yield peer, self.everyone[:, self.tokens_of(peer)]

    def take_everyone(self) -> Tensor:
        for event in self.events.values():
            self.memory.wait(event)
        self.events.clear()
        everyone, self.everyone = self.everyone, None
        return everyone

    def gradient_for(self, owner: int, adder: int, dtype: torch.dtype) -> Tensor:
        """(B, its tokens, D) in the adder's gradient buffer: what it adds to the gradient of the owner's input."""
        slots = self.memory.rows(Buffer.GRADIENT, (self.memory.group.size, *self.shape), dtype)
        return slots.of[adder][owner][:, : self.real(owner)]

    def fetch_gradients(self, like: Tensor) -> Tensor:
        """(P - 1, B, n, D): what the others add to the gradient of this rank's input, still arriving."""
        (B, n, D), rank = self.shape, self.memory.group.rank
        found = like.new_empty(len(self.others), B, n, D)
        found[:, :, self.real(rank) :].zero_()
        self.memory.ready(Buffer.GRADIENT)
        groups = []
        for target, peer in zip(found[:, :, : self.real(rank)], self.others, strict=True):
            source = self.gradient_for(rank, peer, like.dtype)
            groups.append(list(zip(target.unsqueeze(2), source.unsqueeze(2), strict=True)))
        self.memory.copy_beside(groups)
        return found


def own_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, keep_gathered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, h, N, d) of this rank's heads for the tokens of all ranks.

    x: (B, n, D) of this rank; weight: (3 D, D) and bias (3 D,), whole, in the canonical layout, of x's dtype; or no
        bias.
    """
    if has_torch_function((weight, bias)):
        # Gemini's parameters: they are in memory for the length of this call only, and must all be named in it.
        return handle_torch_function(own_heads, (weight, bias), x, weight, bias, layer, keep_gathered)
    group = layer.memory.group
    # The kernel that brings the gradients of q, k, v together sums them up for the bias, too.
    split = split_heads if kernels_available(x.device, x.dtype)[0] else split_heads_reference
    own_bias = None if bias is None else own_rows(bias, group)
    qkv = _OwnProjection.apply(x, weight, None if bias is None else own_bias.detach(), layer, keep_gathered)
    return split(qkv, layer.num_heads // group.size, own_bias)


class _OwnProjection(torch.autograd.Function):
    """(B, N, 3 h d) of all tokens; the bias has no gradient here."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, own_bias: Tensor | None, layer: _Layer, keep_gathered: bool):
        layer.lay_out(x)
        layer.memory.ready(Buffer.INPUT)
        layer.gather(x, own=keep_gathered)
        # A copy, under the inputs' way. The three blocks of rows as they lie would be three products, whose few tiles
        # leave more multiprocessors idle at the end, or one batch of three, which takes no bias.
        own_weight = own_rows(weight, layer.memory.group)
        qkv = x.new_empty(len(x), layer.length, len(own_weight))
        for rank, shard in layer.shards(x):
            for out, tokens in zip(qkv[:, layer.tokens_of(rank)], shard, strict=True):  # sample by sample
                linear_into(out, tokens, own_weight, own_bias)
        everyone = layer.take_everyone()
        ctx.save_for_backward(weight, everyone if keep_gathered else None)
        ctx.layer = layer
        return qkv

    @staticmethod
    def backward(ctx, dqkv: Tensor):
        (weight, everyone), layer = ctx.saved_tensors, ctx.layer
        group = layer.memory.group
        own_weight = own_rows(weight, group)
        for peer in layer.others:
            _input_gradient(dqkv, own_weight, layer, peer, layer.gradient_for(peer, group.rank, dqkv.dtype))
        if everyone is None:
            everyone = layer.take_everyone()  # before the next barrier, after which others may overwrite it
        parts = layer.fetch_gradients(dqkv)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = weight_gradient(dqkv.flatten(0, 1), everyone.flatten(0, 1), group)
        layer.memory.wait()
        dx = parts[0] if len(parts) == 1 else parts.sum(0)
        _input_gradient(dqkv, own_weight, layer, group.rank, dx[:, : layer.real(group.rank)], add=True)
        return dx, dweight, None, None, None


def _input_gradient(dqkv: Tensor, own_weight: Tensor, layer: _Layer, rank: int, out: Tensor, add: bool = False) -> None:
    """The gradient of a rank's input, as far as it comes through this rank's heads, written to ``out`` or added.

    Made whether it is needed or not (before the first block everything may be frozen): without the gradient buffer's
    turn, the input buffer would be used twice in a row.
    """
    for target, rows in zip(out, dqkv[:, layer.tokens_of(rank)], strict=True):  # sample by sample
        torch.addmm(target, rows, own_weight, beta=int(add), out=target)
