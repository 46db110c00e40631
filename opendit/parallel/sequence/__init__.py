"""Sequence parallelism: the ranks of a group divide the tokens of every sample. See docs/sequence_parallel.md."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.torch_utils import not_compiled
from opendit.config.components import ParallelFlags
from opendit.config.names import AXIAL, BYTES, OWN_ATTENTION
from opendit.models.attention import AnyProjection, GridAttention, SequenceShards
from opendit.models.dit import DiTConfig
from opendit.models.experts import ExpertMlp, Routing, add_rows, rows_by_expert
from opendit.models.layers import Attend
from opendit.parallel.collectives import Counts, Exchange, Group, gather_tokens, join, start_gather, take_tokens
from opendit.parallel.hardware import H200
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence.axial import AllToAll, DirectExchange, shared_grid
from opendit.parallel.sequence.choose import Shape, StrategyChoice, make_plan
from opendit.parallel.sequence.fastseq import DirectFastSeq, FastSeq
from opendit.parallel.sequence.peer_memory import connect
from opendit.parallel.sequence.ulysses import DirectUlysses, UlyssesRing

Strategy = FastSeq | DirectFastSeq | DirectUlysses | UlyssesRing


@dataclass(frozen=True)
class SequenceParallel:
    """Sequence parallelism of a model: the argument of ``model.use(sequence=...)``. Build it with
    :func:`sequence_parallel`.

    A strategy with ``takes_projection`` has the method ``project_and_attend(x, qkv, heads, attend, length, float8)``.
    Any other strategy has the method ``attention(q, k, v, attend, length)``.
    """

    group: Group
    plan: StrategyChoice
    strategy: Strategy | None  # attention to all tokens; None if the model has no such attention
    axial: AllToAll | DirectExchange | None = None  # exchange for attention along the axes of a grid

    shares_samples: ClassVar[bool] = True

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        """Return this rank's shard of a sequence of ``length`` tokens. sizes: sizes of the grid of tokens, for
        attention along axes."""
        whole = cast(SequenceShards, SharedSequence(self, length)) if self.strategy is not None else None
        found = whole if self.axial is None else shared_grid(self.group, sizes, self.axial, whole)
        return cast(SequenceShards, found)

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        """Return this rank's shard of a sequence of several token streams. lengths: the streams' lengths."""
        exchange = cast(UlyssesRing, self.strategy).exchange
        parts = tuple(SharedSequence(self, length) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, cast(Any, exchange)))


@dataclass(frozen=True)
class SharedSequence:
    """This rank's shard of a sequence of ``length`` tokens. Every rank has ``rows`` tokens. The last ranks may have
    padding. Padding is removed before every attention and from the result, so its gradient is zero."""

    sequence: SequenceParallel
    length: int

    axial: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        return -(-self.length // self.sequence.group.size)

    @property
    def first(self) -> int:
        return self.rows * self.sequence.group.rank

    def take(self, x: Tensor) -> Tensor:
        return take_tokens(x, self.rows, self.sequence.group)

    def of_projections(self, table: Tensor) -> Tensor:
        return self.take(table.unsqueeze(0)).squeeze(0)

    @property
    def takes_projection(self) -> bool:
        return self.sequence.strategy is not None and self.sequence.strategy.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        return cast(UlyssesRing, self.sequence.strategy).attention(q, k, v, attend, self.length)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        strategy = cast("FastSeq | DirectFastSeq | DirectUlysses", self.sequence.strategy)
        return strategy.project_and_attend(x, qkv, heads, attend, self.length, float8)

    def gather(self, x: Tensor) -> Tensor:
        return gather_tokens(x, self.length, self.group)

    def join(self, x: Tensor) -> Tensor:
        return join(x, 1, self.group)[:, : self.length]

    def of_length(self, length: int) -> "SharedSequence":
        return SharedSequence(self.sequence, length)

    @property
    def group(self) -> Group:
        return self.sequence.group

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        return RoutingByRanks(mlp, y, self)


def attention_note(note: str, sequence: SequenceParallel | None) -> str:
    """Describe the attention in use. note: describes the model's attention."""
    if sequence is None or sequence.plan.kind not in OWN_ATTENTION:
        return note
    ring = f"{sequence.plan.kind}: to a part of the keys at a time, merged by log-sum-exps"
    return ring if sequence.axial is None else f"{note}; to all tokens {ring}"


def sequence_parallel(
    mesh: Mesh,
    kind: str,
    shape: Shape,
    *,
    keep_gathered: bool = False,
    groups: int | None = None,
    direct: bool = True,
    sampling: bool = False,
) -> SequenceParallel | None:
    """Build the strategy ``kind`` for this rank's sequence group. Call on all ranks. Return None if the group has one
    rank.

    Args:
        shape: shape for which ``auto`` chooses. Sequences of other lengths work, too.
        keep_gathered: see :class:`FastSeq`.
        groups: number of groups of Ulysses (see :class:`StrategyChoice`); None to choose with the cost model.
        direct: True to use symmetric memory if possible.
        sampling: True if no gradients are needed.

    Raises ValueError if ``kind`` or ``groups`` does not work with the model's number of heads.
    """
    if mesh.sp_size == 1:
        return None
    group = Group.of(mesh.sp_group)
    peers, why = connect(group, mesh.device) if direct else (None, "not asked for")
    memory = peers if shape.plain else None
    if not shape.plain:
        why = "q, k and v take more than one product, as with --lora or captions in the sequence"
        why += "" if peers is None else "; samples by symmetric memory"
    hardware = replace(H200, direct=memory is not None, engines=sampling and peers is not None)
    plan = make_plan(kind, mesh.sp_size, shape, groups, hardware)
    if plan.kind == AXIAL:
        strategy = None
    elif plan.kind == "fastseq":
        strategy = FastSeq(group, keep_gathered) if memory is None else DirectFastSeq(memory, keep_gathered)
    elif plan.kind == "usp":
        heads, ring = map(Group.of, mesh.split_sequence(plan.heads_over))
        strategy = UlyssesRing(heads, ring)
    elif plan.kind == "ring":
        strategy = UlyssesRing(Group(None, 0, 1), group)
    elif memory is not None:
        strategy = DirectUlysses(memory, plan.groups)
    else:
        strategy = UlyssesRing(group, Group(None, 0, 1), plan.groups, peers)
    axial = None
    if shape.axial:
        axial = AllToAll() if memory is None else DirectExchange(memory)
    one_sided = isinstance(strategy or axial, DirectUlysses | DirectFastSeq | DirectExchange)
    way = "symmetric memory" if one_sided else "collectives"
    plan = replace(plan, reason=f"{plan.reason}; by {way} ({why})")
    return SequenceParallel(group, plan, strategy, axial)


def sequence_shape(
    parallel: ParallelFlags,
    attention: str,
    precision: str,
    config: DiTConfig,
    samples: int,
    size: tuple[int, ...] | None = None,
    tensor_parallel: int = 1,
    lora: bool = False,
) -> Shape:
    """Return the shape for --sequence_parallel_type auto. samples: number of samples in a micro-batch. size: size of
    the latents; None for the configuration's. Raises ValueError if the model does not support the type."""
    if parallel.sequence_parallel_size > 1:
        config.check_sequence_parallel(parallel.sequence_parallel_type)
    return Shape(
        tokens=math.prod(config.grid_of(size or config.input_size)),
        hidden=config.hidden_size // tensor_parallel,
        heads=config.num_heads // tensor_parallel,
        samples=samples,
        bytes=BYTES[precision],
        types=parallel.sequence_types(config.sequence_types, attention),
        plain=not lora and config.plain_projections,
        axial=config.axial_attention,
    )


# ------------------------------------------------------------------------------------------ captions in the sequence
#
# These sequences have two streams: caption tokens and media tokens. Ranks divide each stream evenly. A stream's layers
# process only this stream's tokens. Attention reads all ranks' tokens in the order of the sequence, without padding.


@dataclass(frozen=True)
class SharedStreams:
    """This rank's shards of a sequence of several streams."""

    parts: tuple[Any, ...]  # each stream's shard
    lengths: tuple[int, ...]  # each stream's length on all ranks
    ranks: int
    # UlyssesRing.exchange. It is called with q, k, v (B, H, rows, d) of this rank's tokens, and with the total token
    # count including padding. None if projections return all tokens.
    exchange: Callable[[Tensor, Tensor, Tensor, GridAttention, Callable[[slice], Attend], int], Tensor] | None

    takes_projection = False
    axial = False

    @property
    def rows_of_streams(self) -> tuple[int, ...]:
        return tuple(part.rows for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(self.rows_of_streams)

    def take_stream(self, number: int, x: Tensor) -> Tensor:
        return self.parts[number].take(x)

    def gather_stream(self, number: int, x: Tensor) -> Tensor:
        return self.parts[number].gather(x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        """Return the attention output for q, k, v (B, H, n, d) of this rank's tokens, or without ``exchange`` of all
        tokens."""
        order = self._order(q.device)

        def in_order(samples: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = attend.of_samples(samples)(*(part.index_select(2, order) for part in (q, k, v)))
            return output.new_zeros(*q.shape[:2], self.ranks * self.rows, q.shape[3]).index_copy(2, order, output)

        if self.exchange is None:
            return in_order(slice(None), q, k, v).transpose(1, 2).flatten(2)
        attend_of = functools.partial(functools.partial, in_order)
        return self.exchange(q, k, v, attend.prepared, attend_of, self.ranks * self.rows)

    def attention_of_streams(self, projected: Sequence[tuple[Tensor, ...]], attend: GridAttention) -> Sequence[Tensor]:
        """Return every stream's attention output (B, n, H d) from every stream's q, k, v (B, n, H, d)."""
        if self.exchange is not None:
            q, k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*projected, strict=True))
            return self.attention(q, k, v, attend).split(self.rows_of_streams, dim=1)
        cut = [[x[:, :length] for x in parts] for parts, length in zip(projected, self.lengths, strict=True)]
        q, k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*cut, strict=True))
        outputs = attend(q, k, v).transpose(1, 2).flatten(2).split(self.lengths, dim=1)
        return [
            F.pad(output, (0, 0, 0, parts[0].shape[1] - output.shape[1]))
            for output, parts in zip(outputs, projected, strict=True)
        ]

    def _order(self, device: torch.device) -> Tensor:
        """Return every token's index in the concatenation of all ranks' tokens, in the order of the sequence."""
        found, start = [], 0
        for length, rows in zip(self.lengths, self.rows_of_streams, strict=True):
            at = torch.arange(length, device=device)
            found.append(at // rows * self.rows + start + at % rows)
            start += rows
        return torch.cat(found)


# ------------------------------------------------------------------------------------------ experts over several ranks
#
# Expert-choice routing (EC-DiT): an expert takes the k tokens of a sample with the highest affinities, and weights the
# outputs by the affinities. Ranks that share a sequence gather the affinities (B x N x E numbers, without a gradient),
# so that every rank knows all choices. Only chosen tokens are sent:
#
#     own tokens ─chosen ones, by expert─▶ all-to-all ─▶ (experts, rows, D) ─▶ all-to-all ─▶ weighted sum
#
# If every rank has complete samples, all sizes are known in advance. If ranks share a sequence, the host must read from
# the device how many of an expert's k tokens each rank has. Meanwhile the device computes the shared MLP.


class RoutingByRanks:
    """Implementation of :class:`opendit.models.experts.Routing` for this rank's tokens y (B, n, D).

    Args:
        shared: this rank's shard of the sequence; None if y has all tokens of its samples.
        experts: group of ranks that divide the experts evenly; None if ``mlp`` has all experts.
    """

    @not_compiled
    def __init__(self, mlp: ExpertMlp, y: Tensor, shared: SharedSequence | None = None, experts: Group | None = None):
        self._mlp, self._y, self._group = mlp, y, experts or Group(None, 0, 1)
        self.travels = self._group.size > 1
        self._pending = None if shared is None else _Pending(mlp, y, shared, self._group)
        if shared is None:
            chosen = _choose_here(mlp, y)
            self._send(chosen, [chosen.counts] * self._group.size)

    @not_compiled
    def compute(self) -> None:
        if self._pending is not None:
            self._send(*self._pending.chosen())
        arrived, experts = self._out.finish(), len(self._arriving[0])
        places, most = _places(self._arriving, arrived.device)
        stacked = _Spread.apply(arrived, places, experts * most)
        out = self._mlp.experts(stacked.view(experts, most, arrived.shape[1])).flatten(0, 1)
        self._back = Exchange(self._group, self._counts.back).start(_Collect.apply(out, places))

    @not_compiled
    def result(self) -> Tensor:
        return add_rows(self._back.finish(), self._chosen.weights, self._chosen.rows, self._y)

    def _send(self, chosen: "Chosen", counts: Sequence[Sequence[int]]) -> None:
        """Start to send the chosen tokens to their experts. Expert e takes ``counts[r][e]`` tokens of rank r."""
        share = len(chosen.counts) // self._group.size
        sent = tuple(sum(chosen.counts[first : first + share]) for first in range(0, len(chosen.counts), share))
        own = slice(self._group.rank * share, (self._group.rank + 1) * share)
        self._arriving = tuple(tuple(of_rank[own]) for of_rank in counts)
        self._counts, self._chosen = Counts(sent, tuple(map(sum, self._arriving))), chosen
        self._out = Exchange(self._group, self._counts).start(self._y.flatten(0, 1)[chosen.rows])


# ------------------------------------------------------------------------------------------------------------ choices


@dataclass(frozen=True)
class Chosen:
    """Tokens of this rank that experts have chosen, expert by expert."""

    rows: Tensor  # (M,) indices among the flattened tokens (B n)
    weights: Tensor  # (M,)
    counts: tuple[int, ...]  # number of chosen tokens for each expert


def _choose_here(mlp: ExpertMlp, y: Tensor) -> Chosen:
    weight, token = mlp.choose(mlp.affinities(y))
    rows = rows_by_expert(token, y.shape[1])
    return Chosen(rows.flatten(), weight.transpose(0, 1).flatten(), (rows.shape[1],) * len(rows))


class _Pending:
    """Experts' choices from a divided sequence, before the host knows the counts."""

    def __init__(self, mlp: ExpertMlp, y: Tensor, shared: SharedSequence, group: Group):
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
        """Wait for the counts. Return (this rank's chosen tokens, counts by rank and expert)."""
        if self._copied is not None:
            self._copied.synchronize()
        counts = self._counts.tolist()
        picked = torch.argsort(self._here.flatten().byte(), descending=True, stable=True)[: sum(counts[self._rank])]
        rows, expert = self._rows[picked], picked // self._here.shape[1]
        weights = self._own.flatten().gather(0, rows * self._own.shape[-1] + expert)
        return Chosen(rows, weights, tuple(counts[self._rank])), counts


# ------------------------------------------------------------------------------------------------------ rows by expert


@functools.lru_cache(maxsize=32)  # the arguments never change if samples are not split over ranks
def _places(arriving: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, int]:
    """Return (indices, rows) for a stack (experts, rows) of received tokens. indices: each token's place in the
    flattened stack; tokens arrive sorted by rank, then by expert. rows: the largest token count of an expert."""
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
    """Returns ``x[places]`` for distinct places. The backward pass of torch's indexing is slower, because it supports
    repeated places."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor):
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x[places]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, ctx.saved_tensors[0], grad), None
