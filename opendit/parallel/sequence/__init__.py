"""Sequence parallelism: the ranks of a group divide the tokens of every sample among them; see
docs/sequence_parallel.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor

from opendit.config.components import ParallelFlags
from opendit.config.names import AXIAL, BYTES, OWN_ATTENTION
from opendit.models.attention import AnyProjection, GridAttention, SequenceShards
from opendit.models.dit import DiTConfig
from opendit.models.experts import ExpertMlp, Routing
from opendit.models.layers import Attend
from opendit.parallel.collectives import Group, gather_tokens, join, take_tokens
from opendit.parallel.hardware import H200
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence.axial import AllToAll, DirectExchange, shared_grid
from opendit.parallel.sequence.choose import Shape, StrategyChoice, make_plan
from opendit.parallel.sequence.fastseq import DirectFastSeq, FastSeq
from opendit.parallel.sequence.peer_memory import connect
from opendit.parallel.sequence.routing import RoutingByRanks
from opendit.parallel.sequence.streams import SharedStreams
from opendit.parallel.sequence.ulysses import DirectUlysses, UlyssesRing

Strategy = FastSeq | DirectFastSeq | DirectUlysses | UlyssesRing


@dataclass(frozen=True)
class SequenceParallel:
    """Sequence parallelism of a model: the argument of ``model.use(sequence=...)``. Build it with
    :func:`sequence_parallel`.

    A strategy has the method ``attention(q, k, v, attend, length)``, or, if its ``takes_projection`` is True,
    ``project_and_attend(x, qkv, heads, attend, length, float8)``. :class:`SharedSequence` calls these to implement its
    methods of the same names, for sequences of ``length`` tokens.

    Attributes:
        group: ranks that share sequences.
        plan: the chosen strategy, and the reason for it.
        strategy: strategy for attention to all tokens; None if the model has no such attention.
        axial: exchange for attention along the axes of the tokens' grid; None if the model has no such attention.
    """

    group: Group
    plan: StrategyChoice
    strategy: Strategy | None
    axial: AllToAll | DirectExchange | None = None

    shares_samples: ClassVar[bool] = True

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        """Return this rank's shard of a sequence of ``length`` tokens. If the model attends along axes, ``sizes`` are
        the sizes of the tokens' grid."""
        whole = cast(SequenceShards, SharedSequence(self, length)) if self.strategy is not None else None
        found = whole if self.axial is None else shared_grid(self.group, sizes, self.axial, whole)
        return cast(SequenceShards, found)

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        """Return this rank's shard of a sequence of several token streams with these lengths."""
        exchange = cast(UlyssesRing, self.strategy).attention
        parts = tuple(SharedSequence(self, length) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, cast(Any, exchange)))


@dataclass(frozen=True)
class SharedSequence:
    """This rank's shard of a sequence of ``length`` tokens. Every rank has ``rows`` tokens; the last ranks may have
    padding at the end, or only padding.

    Layers process padding tokens, with arbitrary values. Padding is removed before every attention and from the result,
    and its gradient is exactly zero.
    """

    sequence: SequenceParallel
    length: int

    axial: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Number of tokens per rank, including padding."""
        return -(-self.length // self.sequence.group.size)

    @property
    def first(self) -> int:
        """Index of this rank's first token."""
        return self.rows * self.sequence.group.rank

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, rows, F) of all tokens (B, length, F), with zeros for padding."""
        return take_tokens(x, self.rows, self.sequence.group)

    def of_projections(self, table: Tensor) -> Tensor:
        """Return the rows (rows, F) of a table (length, F) for this rank's tokens."""
        return self.take(table.unsqueeze(0)).squeeze(0)

    @property
    def takes_projection(self) -> bool:
        """True if the strategy computes q, k, v itself."""
        return self.sequence.strategy is not None and self.sequence.strategy.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        """Return the attention output (B, rows, D) of this rank's queries q (B, H, rows, d) over the keys and values of
        all ranks. k, v: (B, kv_heads, rows, d) of this rank's tokens."""
        return cast(UlyssesRing, self.sequence.strategy).attention(q, k, v, attend, self.length)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Return the attention output of x (B, rows, D) over all tokens. ``qkv`` is the layer that projects x to q, k,
        v. float8: compute the projection in float8."""
        strategy = cast("FastSeq | DirectFastSeq | DirectUlysses", self.sequence.strategy)
        return strategy.project_and_attend(x, qkv, heads, attend, self.length, float8)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, rows, F) of all ranks with :func:`gather_tokens`. Return all tokens (B, length, F)."""
        return gather_tokens(x, self.length, self.group)

    def join(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, rows, F) of all ranks with :func:`join`. Return all tokens (B, length, F)."""
        return join(x, 1, self.group)[:, : self.length]

    def of_length(self, length: int) -> "SharedSequence":
        """Return this rank's shard of a sequence of another length."""
        return SharedSequence(self.sequence, length)

    @property
    def group(self) -> Group:
        """Ranks that share the sequence."""
        return self.sequence.group

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        """Start ``mlp`` on this rank's tokens y. Its experts choose among the tokens of all ranks."""
        return RoutingByRanks(mlp, y, self)


def attention_note(note: str, sequence: SequenceParallel | None) -> str:
    """Describe the attention in use: the strategy's attention, or without a strategy, the model's attention, which
    ``note`` describes."""
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
) -> SequenceParallel | None:
    """Build the strategy ``kind`` for this rank's sequence group; return None if the group has only one rank.
    Collective over all ranks.

    Args:
        mesh: mesh of the run.
        kind: auto, fastseq, ulysses, ring or usp.
        shape: shape of the model's sequences, from which auto chooses. Sequences of other lengths work, too.
        keep_gathered: see :class:`FastSeq`.
        groups: see :class:`DirectUlysses`; None to choose with the cost model.
        direct: use symmetric memory if possible. False for collectives.

    Raises:
        ValueError: this kind, or this number of groups, does not work with the model's number of heads.
    """
    if mesh.sp_size == 1:
        return None
    group = Group.of(mesh.sp_group)
    memory, why = connect(group, mesh.device) if direct and shape.plain else (None, "not asked for")
    if not shape.plain:
        why = "q, k and v take more than one product, as with --lora or captions in the sequence"
    plan = make_plan(kind, mesh.sp_size, shape, groups, replace(H200, direct=memory is not None))
    if plan.kind == AXIAL:
        strategy = None
    elif plan.kind == "fastseq":
        strategy = FastSeq(group, keep_gathered) if memory is None else DirectFastSeq(memory, keep_gathered)
    elif plan.kind == "usp":
        strategy = UlyssesRing(*map(Group.of, mesh.split_sequence(plan.heads_over)))
    elif plan.kind == "ring":
        strategy = UlyssesRing(Group(None, 0, 1), group)
    elif memory is not None:
        strategy = DirectUlysses(memory, plan.groups)
    else:
        strategy = UlyssesRing(group, Group(None, 0, 1))
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
    """Return the shape from which --sequence_parallel_type auto chooses a strategy.

    Args:
        parallel, attention, precision: flags of the run.
        config: configuration of the model.
        samples: number of samples in a micro-batch.
        size: size of the latents; None for the size in ``config``.
        tensor_parallel: number of ranks that divide the layers.
        lora: True if the layers have LoRA additions.

    Raises:
        ValueError: the model does not support this type of sequence parallelism.
    """
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
