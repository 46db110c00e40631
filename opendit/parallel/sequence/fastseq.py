"""FastSeq, OpenDiT's own: gather the input of attention, project only this rank's heads, exchange once.

    x_p --ring of shards--> q, k, v of this rank's heads for all tokens --attention--> all-to-all

A rank receives (P - 1)/P of the sequence N x D, while the q, k, v of the shards that are here are computed, and then
(P - 1)/P^2 of it. Together that is less than Ulysses' 4 (P - 1)/P^2 for 2 ranks, as much for 3, and more for others.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from opendit.models.attention import AnyProjection
from opendit.models.layers import Attend
from opendit.parallel.sequence.collectives import Exchange, Flight, Group, Ring, start_gather
from opendit.parallel.sequence.layout import (
    own_rows,
    side_by_side,
    tokens_by_rank,
    unpack,
    whole_rows,
    zeros_but_own,
)
from opendit.parallel.sequence.products import Products, taken_over


@dataclass(frozen=True)
class FastSeq:
    """keep_gathered: keep the gathered input for the backward pass (N x D a layer) instead of gathering it again."""

    group: Group
    keep_gathered: bool = False

    takes_projection: ClassVar[bool] = True  # inputs travel beside their products

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, num_heads: int, attend: Attend, length: int, float8: bool = False
    ) -> Tensor:
        """See :class:`opendit.models.attention.SequenceShards`."""
        taken = taken_over(x, qkv, float8)
        gathered = None if self.keep_gathered else _GatheredAgain(self.group)
        output = attend(*unpack(own_heads(*taken, num_heads, Ring(self.group), gathered), length))
        if gathered is not None:
            output = _GatherAhead.apply(output, taken.sent, gathered)
        sent = Exchange(self.group).start(tokens_by_rank(output, x.shape[1], self.group.size))
        return side_by_side(sent.finish())


class _GatheredAgain:
    """Pass a gather from the node of the backward pass that started it to another node."""

    def __init__(self, group: Group):
        self.group = group
        self._flight: Flight | None = None

    def start(self, shard: Tensor) -> None:
        """Starts to gather the ranks' shards (B, n, D)."""
        self._flight = start_gather(shard, self.group)

    def take(self) -> Tensor:
        """The gathered shards (P, B, n, D), once they are here."""
        flight, self._flight = self._flight, None
        assert flight is not None, "the gather was started"
        return flight.wait()


class _GatherAhead(torch.autograd.Function):
    """Nothing, in the forward pass; in the backward pass, the gather that :func:`own_heads` will need is started before
    the backward pass of attention, which hides it."""

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
    """q, k, v of this rank's heads for the tokens of all ranks, packed (P, B, n, 3, h, d): see layout.py.

    x: (B, n, D) of this rank, and the rest of :class:`Projected`: weight (3 D, D) and bias (3 D,) or None.
    gathered: will hold the input of all ranks in the backward pass; None: it is kept.
    """
    if has_torch_function((weight, bias)):
        # Gemini's parameters: they are in memory for the length of this call only, and must all be named in it.
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
            shards = ctx.gathered.take() if kept is None else kept
            whole = zeros_but_own(own_weight[0], ctx.dtype, group)
            grads["weight"] = products.own_weight_gradient(rows.flatten(0, 1), shards.view(-1, D), group, whole)
            grads["bias"] = whole_rows(exact.flatten(0, 1).sum(0), group) if ctx.needs_input_grad[2] else None

        dx = ctx.ring.reduce_scatter(lambda rank: products.input_gradient(rows[rank], columns), meanwhile=weights)
        return dx.view(B, n, D), grads["weight"], grads["bias"], None, None, None, None, None
