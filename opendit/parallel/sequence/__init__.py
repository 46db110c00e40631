"""Sequence parallelism: the ranks of a group share the tokens of every sample; see docs/sequence_parallel.md."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor

from opendit.config.components import ParallelFlags
from opendit.config.names import AXIAL, BYTES, OWN_ATTENTION
from opendit.models import DiTConfig
from opendit.models.attention import AnyProjection, GridAttention, SequenceShards
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
    """The argument of ``use(sequence=...)``; build it with :func:`sequence_parallel`.

    ``strategy.attention(q, k, v, attend, length)`` is that of :class:`SharedSequence` for ``length`` tokens; a strategy
    with ``takes_projection`` has ``project_and_attend(x, qkv, heads, attend, length, float8)`` instead.

    Attributes:
        group: ranks that share sequences.
        plan: the chosen strategy, and the reason.
        strategy: of attention to all tokens; None if the model has none.
        axial: the exchange around attention along the axes of the tokens' grid; None if the model has none.
    """

    group: Group
    plan: StrategyChoice
    strategy: Strategy | None
    axial: AllToAll | DirectExchange | None = None

    shares_samples: ClassVar[bool] = True

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        """Return the shares of ``length`` tokens, in a grid of these sizes, with the methods that the model needs."""
        whole = cast(SequenceShards, SharedSequence(self, length)) if self.strategy is not None else None
        found = whole if self.axial is None else shared_grid(self.group, sizes, self.axial, whole)
        return cast(SequenceShards, found)

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        """Return the shares of a sequence of several streams of tokens."""
        exchange = cast(UlyssesRing, self.strategy).attention
        parts = tuple(SharedSequence(self, length) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, cast(Any, exchange)))


@dataclass(frozen=True)
class SharedSequence:
    """A sequence of ``length`` tokens: every rank has ``rows`` of them, the last ones with padding at the end.

    Padding goes through the layers as zeros or garbage, is cut off before every attention and from the result, and has
    a gradient of exactly zero. A rank may have nothing but padding.
    """

    sequence: SequenceParallel
    length: int

    axial: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Number of tokens of a rank, padding included."""
        return -(-self.length // self.sequence.group.size)

    @property
    def first(self) -> int:
        """Index of this rank's first token."""
        return self.rows * self.sequence.group.rank

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, rows, F) of all (B, length, F), with zeros for padding."""
        return take_tokens(x, self.rows, self.sequence.group)

    def of_projections(self, table: Tensor) -> Tensor:
        """Return the rows (rows, F) of a table (length, F) for this rank's tokens."""
        return self.take(table.unsqueeze(0)).squeeze(0)

    @property
    def takes_projection(self) -> bool:
        """True if the strategy computes q, k, v itself."""
        return self.sequence.strategy is not None and self.sequence.strategy.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        """Return the attention output (B, rows, D) of q (B, H, rows, d) and k, v (B, kv_heads, rows, d) of this rank's
        tokens, over all tokens."""
        return cast(UlyssesRing, self.sequence.strategy).attention(q, k, v, attend, self.length)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Return the attention output of x (B, rows, D), of which ``qkv`` computes q, k, v. float8: by products in
        float8."""
        strategy = cast("FastSeq | DirectFastSeq | DirectUlysses", self.sequence.strategy)
        return strategy.project_and_attend(x, qkv, heads, attend, self.length, float8)

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens (B, length, F), on every rank, from this rank's (B, rows, F); see :func:`gather_tokens`."""
        return gather_tokens(x, self.length, self.group)

    def join(self, x: Tensor) -> Tensor:
        """Return all tokens (B, length, F) of this rank's (B, rows, F); see :func:`join`."""
        return join(x, 1, self.group)[:, : self.length]

    def of_length(self, length: int) -> "SharedSequence":
        """Return the shares of a sequence of another length by the same ranks."""
        return SharedSequence(self.sequence, length)

    @property
    def group(self) -> Group:
        """Ranks that share the sequence."""
        return self.sequence.group

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        """Start ``mlp`` on this rank's tokens."""
        return RoutingByRanks(mlp, y, self)


def attention_note(note: str, sequence: SequenceParallel | None) -> str:
    """Describe the attention in use: ``note`` for the model's own, or that of the strategy."""
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
    """Build the strategy ``kind`` for this rank's sequence group; None for groups of one. Collective over all ranks.

    Args:
        mesh: of the run.
        kind: auto, fastseq, ulysses, ring or usp.
        shape: of the model's sequences, by which auto chooses; any other length works too.
        keep_gathered: see :class:`FastSeq`.
        groups: see :class:`DirectUlysses`; None: by the cost model.
        direct: through symmetric memory if possible; otherwise by collectives.

    Raises:
        ValueError: the number of heads forbids this kind, or these groups.
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
    """Return the shape by which --sequence_parallel_type chooses: ``samples`` latents at once, of the configured size
    or of ``size``, through layers that ``tensor_parallel`` ranks divide. lora: the layers have LoRA additions.

    Raises:
        ValueError: the model can't share samples that way.
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
