"""Expert-choice routing over several ranks (EC-DiT): experts choose tokens, which are sent to the experts' ranks.

An expert takes the k tokens of a sample with the highest affinity to the expert, regardless of the ranks that have
these tokens. Ranks that share a sequence gather the affinities (B x N x E numbers, without a gradient), so that every
rank knows all choices. The weight of a chosen token is its affinity, whose gradient is computed on the token's own
rank. Only chosen tokens are sent:

    own tokens ─chosen ones, by expert─▶ all-to-all ─▶ (experts, rows, D) ─▶ all-to-all ─▶ weighted sum

Every expert takes the same number of tokens of a sample. If each rank has whole samples, all sizes are therefore known
in advance. If ranks share a sequence, a rank may have any number of an expert's k tokens. In this case, the host reads
the number from the device while the device computes the shared MLP.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opendit.common.torch_utils import not_compiled
from opendit.models.experts import ExpertMlp, add_rows, rows_by_expert
from opendit.parallel.collectives import Counts, Exchange, Group, start_gather


class OwnTokens(Protocol):
    """A rank's part of a sequence (:class:`opendit.parallel.sequence.SharedSequence`)."""

    @property
    def group(self) -> Group: ...

    @property
    def rows(self) -> int: ...

    @property
    def length(self) -> int: ...


class RoutingByRanks:
    """Implementation of :class:`opendit.models.experts.Routing` for this rank's tokens y (B, n, D).

    Args:
        mlp: the layer, with this rank's experts if ``experts`` is not None, otherwise with all experts.
        y: the tokens.
        shared: this rank's shard of the sequence; None if y has all tokens of its samples.
        experts: group of ranks that divide the experts evenly, in order; None if this rank has all experts.
    """

    @not_compiled
    def __init__(self, mlp: ExpertMlp, y: Tensor, shared: OwnTokens | None = None, experts: Group | None = None):
        self._mlp, self._y, self._group = mlp, y, experts or Group(None, 0, 1)
        self.travels = self._group.size > 1
        self._pending = None if shared is None else _Pending(mlp, y, shared, self._group)
        if shared is None:
            chosen = _choose_here(mlp, y)
            self._send(chosen, [chosen.counts] * self._group.size)

    @not_compiled
    def compute(self) -> None:
        """Pass the tokens that have arrived through this rank's experts, and send them back."""
        if self._pending is not None:
            self._send(*self._pending.chosen())
        arrived, experts = self._out.finish(), len(self._arriving[0])
        places, most = _places(self._arriving, arrived.device)
        stacked = _Spread.apply(arrived, places, experts * most)
        out = self._mlp.experts(stacked.view(experts, most, arrived.shape[1])).flatten(0, 1)
        self._back = Exchange(self._group, self._counts.back).start(_Collect.apply(out, places))

    @not_compiled
    def result(self) -> Tensor:
        """Return the experts' weighted outputs, to be added to the tokens."""
        return add_rows(self._back.finish(), self._chosen.weights, self._chosen.rows, self._y)

    def _send(self, chosen: "Chosen", counts: Sequence[Sequence[int]]) -> None:
        """Start to send the chosen tokens to their experts. ``counts[r][e]`` is the number of rank r's tokens that
        expert e takes."""
        share = len(chosen.counts) // self._group.size
        sent = tuple(sum(chosen.counts[first : first + share]) for first in range(0, len(chosen.counts), share))
        own = slice(self._group.rank * share, (self._group.rank + 1) * share)
        self._arriving = tuple(tuple(of_rank[own]) for of_rank in counts)
        self._counts, self._chosen = Counts(sent, tuple(map(sum, self._arriving))), chosen
        self._out = Exchange(self._group, self._counts).start(self._y.flatten(0, 1)[chosen.rows])


# ------------------------------------------------------------------------------------------------------------ choices


@dataclass(frozen=True)
class Chosen:
    """Tokens of this rank that experts have chosen, expert by expert.

    Attributes:
        rows: (M,) indices of the chosen tokens among the flattened tokens (B n).
        weights: (M,) weights of the chosen tokens.
        counts: number of tokens that each expert has chosen.
    """

    rows: Tensor
    weights: Tensor
    counts: tuple[int, ...]


def _choose_here(mlp: ExpertMlp, y: Tensor) -> Chosen:
    weight, token = mlp.choose(mlp.affinities(y))
    rows = rows_by_expert(token, y.shape[1])
    return Chosen(rows.flatten(), weight.transpose(0, 1).flatten(), (rows.shape[1],) * len(rows))


class _Pending:
    """Choices of experts among the tokens of several ranks, before the host knows how many chosen tokens are on this
    rank."""

    def __init__(self, mlp: ExpertMlp, y: Tensor, shared: OwnTokens, group: Group):
        own, first = mlp.affinities(y), shared.group.rank * shared.rows
        gathered = start_gather(own.detach(), shared.group).wait().transpose(0, 1).flatten(1, 2)[:, : shared.length]
        _, token = mlp.choose(gathered[..., mlp.held] if group.size == 1 else gathered)
        place = token - first
        here = (place >= 0) & (place < y.shape[1])
        self._here = here.transpose(0, 1).flatten(1)  # (E, B k)
        self._rows = rows_by_expert(place, y.shape[1]).flatten()
        self._own = own[..., mlp.held] if group.size == 1 else own
        counts = self._here.sum(1)
        self._counts = counts.unsqueeze(0) if group.size == 1 else start_gather(counts, group).wait()
        self._rank, self._copied = group.rank, None
        if counts.is_cuda:
            self._counts = self._counts.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def chosen(self) -> tuple[Chosen, list[list[int]]]:
        """Wait for the counts. Return this rank's chosen tokens, and the counts: for every rank of the group, the
        number of its tokens that each expert has chosen."""
        if self._copied is not None:
            self._copied.synchronize()
        counts = self._counts.tolist()
        picked = torch.argsort(self._here.flatten().byte(), descending=True, stable=True)[: sum(counts[self._rank])]
        rows, expert = self._rows[picked], picked // self._here.shape[1]
        weights = self._own.flatten().gather(0, rows * self._own.shape[-1] + expert)
        return Chosen(rows, weights, tuple(counts[self._rank])), counts


# ------------------------------------------------------------------------------------------------------ rows by expert


@functools.lru_cache(maxsize=32)  # a cache, because ranks with whole samples always pass the same arguments
def _places(arriving: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, int]:
    """Map the received rows to indices in a flattened stack (experts, rows). The rows arrive rank by rank, and expert
    by expert for each rank. Return these indices and the stack's number of rows, which is the largest number of rows of
    any expert."""
    most = max(map(sum, zip(*arriving, strict=True)))
    bases, lengths, arrived, filled = [], [], 0, [0] * len(arriving[0])
    for of_rank in arriving:
        for expert, count in enumerate(of_rank):
            bases.append(expert * most + filled[expert] - arrived)
            lengths.append(count)
            filled[expert] += count
            arrived += count
    place = torch.tensor(bases).repeat_interleave(torch.tensor(lengths)).add_(torch.arange(arrived))
    return (place.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else place), most


class _Spread(torch.autograd.Function):
    """Scatters the rows of x (M, D) to distinct ``places`` (M,) of a zero tensor (rows, D)."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rows: int):
        ctx.save_for_backward(places)
        return x.new_zeros(rows, x.shape[1]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]], None, None


class _Collect(torch.autograd.Function):
    """The adjoint of :class:`_Spread`: ``x[places]`` for distinct places. The backward pass of torch's indexing would
    accumulate rows, which is unnecessary for distinct places."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor):
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x[places]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, ctx.saved_tensors[0], grad), None
