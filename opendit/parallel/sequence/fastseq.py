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

from opendit.models.layers import Attend, Projection
from opendit.parallel.sequence.collectives import Exchange, Flight, Group, Ring, start_gather
from opendit.parallel.sequence.layout import (
    in_working_dtype,
    linear_into,
    own_rows,
    side_by_side,
    tokens_by_rank,
    unpack,
    weight_gradient,
    whole_rows,
    zeros_but_own,
)


@dataclass(frozen=True)
class FastSeq:
    """keep_gathered: keep the gathered input for the backward pass (N x D a layer) instead of gathering it again."""

    group: Group
    keep_gathered: bool = False

    takes_projection: ClassVar[bool] = True  # inputs travel beside their products

    def project_and_attend(self, x: Tensor, qkv: Projection, num_heads: int, attend: Attend, length: int) -> Tensor:
        """See :class:`opendit.models.attention.SequenceShards`."""
        x, weight, bias = in_working_dtype(x, qkv.weight, qkv.bias)
        gathered = None if self.keep_gathered else _GatheredAgain(self.group)
        output = attend(*unpack(own_heads(x, weight, bias, num_heads, Ring(self.group), gathered), length))
        if gathered is not None:
            output = _GatherAhead.apply(output, x.detach(), gathered)
        sent = Exchange(self.group).start(tokens_by_rank(output, x.shape[1], self.group.size))
        return side_by_side(sent.finish())


class _GatheredAgain:
    """Where one node of the backward pass leaves the gather that it started for another."""

    def __init__(self, group: Group):
        self.group = group
        self._flight: Flight | None = None

    def start(self, shard: Tensor) -> None:
        """Starts to gather the ranks' shards (B, n, D)."""
        self._flight = start_gather(shard, self.group)

    def take(self) -> Tensor:
        """The gathered shards (P, B, n, D), once they are here."""
        flight, self._flight = self._flight, None
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
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, ring: Ring, gathered: _GatheredAgain | None
) -> Tensor:
    """q, k, v of this rank's heads for the tokens of all ranks, packed (P, B, n, 3, h, d): see layout.py.

    x: (B, n, D) of this rank; weight: (3 D, D) and bias (3 D,), whole, in the canonical layout, of x's dtype.
    gathered: will hold the input of all ranks in the backward pass; None: it is kept.
    """
    if has_torch_function((weight, bias)):
        # Gemini's parameters: they are in memory for the length of this call only, and must all be named in it.
        return handle_torch_function(own_heads, (weight, bias), x, weight, bias, num_heads, ring, gathered)
    return _OwnHeads.apply(x, weight, bias, num_heads, ring, gathered)


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, num_heads, ring, gathered):
        (B, n, D), group = x.shape, ring.group
        own_weight, own_bias = own_rows(weight, group), None if bias is None else own_rows(bias, group)
        packed = x.new_empty(group.size, B, n, len(own_weight))
        kept = x.new_empty(group.size, B, n, D) if gathered is None else None
        for source, shard in ring.arriving(x, into=kept):
            linear_into(packed[source], shard, own_weight, own_bias)
        ctx.save_for_backward(weight, kept)
        ctx.ring, ctx.gathered, ctx.shape = ring, gathered, x.shape
        return packed.unflatten(3, (3, num_heads // group.size, -1))

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight, kept = ctx.saved_tensors
        (B, n, D), group, grads = ctx.shape, ctx.ring.group, {}
        own_weight, rows = own_rows(weight, group), grad.flatten(3).flatten(1, 2)  # rows: (P, B n, ...)

        def weights() -> None:
            shards = ctx.gathered.take() if kept is None else kept
            flat = rows.flatten(0, 1)
            grads["weight"] = weight_gradient(flat, shards.view(-1, D), group, zeros_but_own(own_weight, group))
            grads["bias"] = whole_rows(flat.sum(0), group) if ctx.needs_input_grad[2] else None

        dx = ctx.ring.reduce_scatter(lambda rank: rows[rank] @ own_weight, meanwhile=weights)
        return dx.view(B, n, D), grads["weight"], grads["bias"], None, None, None
