"""Blocks of all architectures, built from specifications.

A block is a sequence of branches, each added to the residual stream x (B, N, D):

    x = x + gate * branch(norm(x) * (1 + scale) + shift)

The condition determines shift, scale and gate (adaLN-Zero; Peebles & Xie 2023). A branch that is not modulated is
``x + branch(norm(x))``.

              branches                                                norm    MLP
    DiT       attention, [caption, not modulated], MLP                layer   GELU
    EC-DiT    as DiT                                                  layer   GELU and experts, summed
    ST-DiT    attention in frames, along time, [to all], [caption],   layer   GELU
              MLP
    MovieGen  attention, [caption, not modulated], MLP                rms     SwiGLU
    FLUX.1    attention, MLP in two streams; later blocks have one    layer   GELU
              stream, and one norm for both branches
    FLUX.2    as FLUX.1                                               layer   SwiGLU
    Z-Image   attention, MLP, and a norm after each                   rms     SwiGLU
    Wan       attention, caption (not modulated), MLP                 layer   GELU
    Cosmos    attention, caption, MLP                                 layer   GELU, exact

``--norm`` and ``--mlp`` can change the norm and the MLP of the first four rows. The other rows are public models
(opendit/models/families). Code that parallelises blocks or counts their operations reads the specification.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from opendit.config.names import BUT_ATTENTION
from opendit.models.attention import (
    Attention,
    CrossAttention,
    FrameAttention,
    GridAttention,
    TemporalAttention,
    TokenGrid,
    of_rows,
)
from opendit.models.experts import ExpertMlp, Experts, Routing
from opendit.models.layers import (
    PLAIN,
    BlockOps,
    BranchModulations,
    ExactMlp,
    Mlp,
    Options,
    Projection,
    RMSNorm,
    SwiGlu,
    TableModulation,
    layer_norm,
    modulation,
    multiply,
)

# Input of cross-attention: (tokens, mask) or (keys, values, mask). tokens: (B, L, D). mask: (B, L) bool. keys, values:
# (B, L, H, d), a block's projections of the tokens.
Context = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
# A block's shifts, scales and gates, concatenated to (B, chunks * D). Or (c, shared), the arguments with which
# ``Block.modulate`` computes them.
Modulation = Tensor | tuple[Tensor, Tensor | None]
Sum = tuple[Tensor, Tensor, Tensor, Projection]  # (x, gate, z, last): the deferred sum x + gate * last(z)

# ------------------------------------------------------------------------------------------------------ specification

ATTENTIONS = {"all": Attention, "frame": FrameAttention, "time": TemporalAttention}
MLPS = {"gelu": Mlp, "gelu_exact": ExactMlp, "swiglu": SwiGlu}


@dataclass(frozen=True)
class Branch:
    """A branch of a block."""

    name: str  # name of the branch's module
    sees: Literal["all", "frame", "time", "caption"] | None  # the tokens that a token attends to; None for the MLP
    modulated: bool = True  # True if the branch has a shift, a scale and a gate

    @property
    def norm(self) -> str:
        return f"{self.name.removesuffix('_attn')}_norm"


ATTENTION = Branch("attn", "all")
# The caption's branch needs no gate, because its output projection is initialised to zero.
CAPTION = Branch("cross_attn", "caption", modulated=False)
MLP = Branch("mlp", None)
READ_VALUES = ("scale", "shift")  # modulation vectors of the streams in ``BlockSpec.read``


@dataclass(frozen=True)
class BlockSpec:
    """The specification of a block.

    Attributes:
        width: Width D of the residual stream.
        heads: Number of heads of queries.
        mlp_hidden: Width of the MLP's hidden layer.
        branches: The block's branches, in order.
        norm: Norm before every branch, "layer" (without weights) or "rms" (one weight per channel if ``norm_weight``).
        mlp: "gelu" (tanh approximation), "gelu_exact" or "swiglu".
        kv_heads: Number of heads of keys and values; None for ``heads``.
        experts: Experts in addition to the MLP; None for no experts.
        options: Options that all architectures support.
        eps: Epsilon of the norms.
        norm_weight: True if RMS norms have weights.
        norm_after: True to also normalise each branch's output, before the gate.
        parallel: True if attention and MLP share one norm, shift, scale and gate.
        caption_norm: Norm before the caption's branch. False: the norm ``norm``; True: LayerNorm with weights and
            biases; None: no norm.
        values: Names of a modulated branch's modulation vectors, in order. Without "shift" the shift is 0.
        tanh_gates: True to apply tanh to the gates.
        source: Source of the modulation. "own": a linear layer of the block. "table": a learned table plus the
            modulation that all blocks share. "shared": vectors of the shared modulation. "branches": the shared
            modulation plus one low-rank correction for each branch. "none": no branch is modulated.
        shared_first: For source "shared", the number of the block's first vector in the shared modulation.
        condition: Width of the condition c; None for D.
        context: Width of the caption's tokens; None for D.
        silu: True to apply SiLU before the modulation's linear layer.
        modulation_bias: True if the modulation's linear layer has a bias; None for ``options.bias``.
        streams: Token streams with separate weights, in sequence order, such as ("text", "media"). Empty if all tokens
            share the weights.
        read: Streams that only provide keys and values. The block does not change their tokens.
    """

    width: int
    heads: int
    mlp_hidden: int
    branches: tuple[Branch, ...] = (ATTENTION, MLP)
    norm: str = "layer"
    mlp: str = "gelu"
    kv_heads: int | None = None
    experts: Experts | None = None
    options: Options = PLAIN
    eps: float = 1e-6
    norm_weight: bool = True
    norm_after: bool = False
    parallel: bool = False
    caption_norm: bool | None = False
    values: tuple[str, ...] = ("shift", "scale", "gate")
    tanh_gates: bool = False
    source: Literal["own", "table", "shared", "branches", "none"] = "own"
    shared_first: int = 0
    condition: int | None = None
    context: int | None = None
    silu: bool = True
    modulation_bias: bool | None = None
    streams: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """Number of vectors in the block's modulation."""
        modulated = sum(branch.modulated for branch in self.branches)
        own = len(self.values) * (min(1, modulated) if self.parallel else modulated)
        return own * max(1, len(self.streams) - len(self.read)) + len(READ_VALUES) * len(self.read)

    def modulation(self) -> nn.Module:
        if self.source == "none":
            return NoModulation()
        if self.source == "table":
            return TableModulation(self.width, self.chunks)
        if self.source == "shared":
            return SharedModulation(self.shared_first * self.width, self.chunks * self.width)
        if self.source == "branches":
            modulated = sum(branch.modulated for branch in self.branches)
            each = (modulation(self.width, len(self.values), self.options, self.condition) for _ in range(modulated))
            return BranchModulations(each)
        options = self.options if self.modulation_bias is None else replace(self.options, bias=self.modulation_bias)
        return modulation(self.width, self.chunks, options, self.condition, self.silu)

    def layer(self, branch: Branch) -> nn.Module:
        if branch.sees == "caption":
            return CrossAttention(self.width, self.heads, self.options, self.context)
        if branch.sees is not None:
            attention = ATTENTIONS[branch.sees](self.width, self.heads, self.options, self.kv_heads)
            if self.parallel:  # The two branches are summed, so the bias of the MLP's last layer suffices.
                attention.proj = Projection(self.width, self.width, bias=False)
            return attention
        if self.experts is not None:
            return ExpertMlp(self.width, self.mlp_hidden, self.options.bias, self.experts)
        return MLPS[self.mlp](self.width, self.mlp_hidden, self.options.bias)


# ---------------------------------------------------------------------------------------------------- residual stream


class ResidualStream:
    """The residual stream x (B, N, D) of a block or of an uncut stack (see :func:`is_cut`). A branch's output is added
    only when x is read. So a fused operation can compute the sum and the next norm in one pass.

    Callers must not keep references to x and branch outputs, so that their memory is freed early. rows: see
    :func:`of_rows`. stack: False for a single block.
    """

    def __init__(self, x: Tensor, rows: tuple[Tensor, ...] = (), stack: bool = False):
        self._parts: tuple[Any, ...] = (x,)  # (x,), or (x, gate, z, last) for x + gate * last(z)
        self._routing: tuple[Tensor, Routing] | None = None
        self._rows, self._stack, self._outside = rows, stack, True
        self._streams: list[ResidualStream] | None = None
        self._join: Callable[..., Tensor] = torch.cat  # ``join`` of the grid that split the stream

    def split(self, grid: TokenGrid, ops: BlockOps) -> "list[ResidualStream]":
        """Split into one residual stream for each token stream of the grid. They are joined only when x is read, so a
        stack of joint blocks does not copy the tokens between blocks."""
        if self._streams is None:
            parts = zip(grid.split(self.take(ops)), grid.rows_of_streams(), strict=True)
            self._streams = [ResidualStream(part, rows, self._stack) for part, rows in parts]
            self._join = grid.join
        return self._streams

    def norm(
        self, ops: BlockOps, shift: Tensor, scale: Tensor, norm: RMSNorm | None = None, joined: bool = True
    ) -> Tensor:
        """Return norm(x) * (1 + scale) + shift. The norm is LayerNorm if ``norm`` is None. joined: True if a fused
        operation may compute the pending sum and the norm. In FP8, only the linear layers of ``BlockOps`` can read the
        result."""
        if self._streams is not None:
            self.put(self.take(ops))
        if joined and len(self._parts) > 1:
            x, y = ops.residual_then_norm(*cast(Sum, self._taken()), shift, scale, norm, self._rows)
        # x is also used outside of the norm. The backward pass of this operation adds the gradients from both uses.
        elif self._outside or norm is not None:
            x, y = ops.residual_and_norm(self.take(ops), shift, scale, norm, self._rows)
        else:
            x = self.take(ops)
            y = ops.layernorm_modulate(x, shift, scale, *self._rows)
        self._parts, self._outside = (x,), False
        return y

    def add(self, gate: Tensor, z: Tensor, last: Projection, routing: Routing | None = None) -> None:
        """Add gate * (last(z) + routing.result()). last: the branch's last layer. routing: the branch's experts, if
        any. A single block adds the experts' result last, so that tokens can return from other ranks meanwhile."""
        (x,) = self._taken()
        if routing is not None and routing.travels and not self._stack:
            self._routing = gate, routing
        elif routing is not None:
            x = x + gate.unsqueeze(1) * routing.result()
        self._parts = x, gate, z, last

    def put(self, x: Tensor) -> None:
        """Set the residual stream to x, computed from the result of :meth:`take`."""
        self._parts = (x,)

    def take(self, ops: BlockOps, unread: bool = False) -> Tensor:
        """Return x including all pending sums, and empty the stream. unread: True if no value of x is read, as at the
        end of a recomputed block. LoRA then computes only what the backward pass needs."""
        if self._streams is not None:
            streams, self._streams = self._streams, None
            return self._join([stream.take(ops, unread) for stream in streams])
        if len(self._parts) == 1:
            (x,) = self._taken()
        else:
            x, gate, z, last = self._taken()
            # The gradients of a gate, and of a norm after the last layer, need the layer's output.
            skip = unread and isinstance(last, Projection) and not gate.requires_grad
            with last.output_unread() if skip else nullcontext():
                x = ops.linear_gate_residual(x, gate, z, last, *self._rows)
        if self._routing is not None:
            (gate, routing), self._routing = self._routing, None
            x = x + gate.unsqueeze(1) * routing.result()
        return x

    def _taken(self) -> tuple[Any, ...]:
        parts, self._parts = self._parts, ()
        return parts


# -------------------------------------------------------------------------------------------------------------- blocks


class Block(nn.Module):
    """A Transformer block that maps x (B, N, D) to (B, N, D), built from any specification.

    Blocks exchange only tensors: ``m = block.modulate(c)``, ``x = block(x, m, context, grid)``. So FSDP2 shard units,
    pipeline stages, checkpoints and compiled regions can begin at any block. If a block is a shard unit, it computes
    the modulation during the call, because only then its weights are present: ``block(x, (c, shared), ...)``.
    """

    mlp: Mlp
    attn: Attention
    cross_attn: nn.Module  # only in blocks with a caption branch
    adaLN_modulation: nn.Module
    recomputed = True  # True to recompute the block in the backward pass when ``run_blocks`` checkpoints
    recomputing = False  # True while the block is recomputed: its output is not read

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.spec = spec
        self.ops: BlockOps = BlockOps()
        self.branches: list[tuple[Branch, str | None]] = [(branch, _norm_of(spec, branch)) for branch in spec.branches]
        for branch, norm in self.branches:
            if norm is not None and branch.sees != "caption" and not (spec.parallel and branch.sees is None):
                setattr(self, norm, RMSNorm(spec.width, spec.eps, spec.norm_weight))
            if spec.norm_after:
                setattr(self, f"{branch.norm}_after", RMSNorm(spec.width, spec.eps))
        for branch, norm in self.branches:
            if norm is not None and branch.sees == "caption":
                made = nn.LayerNorm(spec.width, spec.eps) if spec.caption_norm else RMSNorm(spec.width, spec.eps)
                setattr(self, norm, made)
            setattr(self, branch.name, spec.layer(branch))
        self.adaLN_modulation = spec.modulation()

    def modulate(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return shifts, scales and gates, concatenated to (B, chunks * D), for the condition c (B, D). shared: the
        modulation that all blocks share, if any."""
        return self.adaLN_modulation(c, shared)

    def forward(
        self, x: Tensor, m: Modulation, context: Context | None = None, grid: TokenGrid | None = None
    ) -> Tensor:
        """Run the block on x (B, N, D) and return (B, N, D). m is the result of :meth:`modulate`, or the pair of its
        arguments."""
        residual = ResidualStream(x, of_rows(grid))
        del x
        self.add_branches(residual, self.modulate(*m) if isinstance(m, tuple) else m, context, grid)
        return residual.take(self.ops, unread=self.recomputing)

    def add_branches(self, x: ResidualStream, m: Tensor, context: Context | None, grid: TokenGrid | None) -> None:
        """Add gate * branch(norm(x) * (1 + scale) + shift) to x for every branch. For the arguments, see
        :meth:`forward`."""
        vectors, spec, y = self.vectors(m), self.spec, None
        if grid is not None and grid.learned is not None:
            x.put(x.take(self.ops) + grid.learned)
        for branch, name in self.branches:
            norm = None if name is None else getattr(self, name)
            if not branch.modulated and branch.sees == "caption":
                before = norm or (layer_norm if spec.caption_norm is not None else _unchanged)
                x.put(self._add_caption(x.take(self.ops), before, context, grid))
            elif spec.source == "none":
                stream = x.take(self.ops)
                z, last, _ = self._but_last(branch, (norm or layer_norm)(stream), context, grid)
                x.put(stream + self.ops.linear(z, last))
            else:
                if y is None:
                    shift, scale, gate = next(vectors)
                    y = x.norm(self.ops, shift, scale, norm, joined=branch.sees != "caption")
                else:
                    # The attention's output must be added before the MLP's output.
                    x.put(x.take(self.ops, unread=self.recomputing))
                x.add(gate, *self._but_last(branch, y, context, grid))
                y = y if spec.parallel else None  # Drop the reference to y, to free its memory.

    def vectors(self, m: Tensor) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Split the result of :meth:`modulate`. Yield shift, scale and gate (B, D) of each modulated branch."""
        spec = self.spec
        chunks = m.chunk(spec.chunks, dim=1) if spec.chunks else ()
        for first in range(0, len(chunks), len(spec.values)):
            found = dict(zip(spec.values, chunks[first : first + len(spec.values)], strict=True))
            gate = found.get("gate")  # A stream in ``BlockSpec.read`` has no gate.
            gate = gate.tanh() if gate is not None and spec.tanh_gates else gate
            yield found["shift"] if "shift" in found else torch.zeros_like(found["scale"]), found["scale"], gate

    def _but_last(
        self, branch: Branch, y: Tensor, context: Context | None, grid: TokenGrid | None
    ) -> tuple[Tensor, Projection, Routing | None]:
        """Run a branch on y up to its last layer. Return the last layer's input, the layer, and the routing of an MLP
        with experts (None without experts)."""
        layer: Any = getattr(self, branch.name)
        if branch.sees == "caption":
            assert context is not None, "cross-attention is of models with a text"
            return layer.output(y, *context, grid=grid, ops=self.ops), self._last(branch, layer.proj), None
        if branch.sees is not None:
            return layer.output(y, self.ops, grid), self._last(branch, layer.proj), None
        routing = layer.start(y, grid and grid.shards) if self.spec.experts else None
        z = layer.hidden(y, self.ops)  # Tokens travel to other ranks' experts during this computation.
        if routing is not None:
            routing.compute()
        return z, self._last(branch, layer.fc2), routing

    def _last(self, branch: Branch, layer: Projection) -> Projection:
        if not self.spec.norm_after:
            return layer
        return cast(Projection, NormalisedProjection(layer, getattr(self, f"{branch.norm}_after")))

    def _add_caption(
        self, x: Tensor, norm: Callable[[Tensor], Tensor], context: Context | None, grid: TokenGrid | None
    ) -> Tensor:
        """Return x + cross_attn(norm(x)), as in PixArt-alpha (Chen et al. 2024, sec. 2.3)."""
        assert context is not None, "cross-attention is of models with a text"
        return x + self.cross_attn(norm(x), *context, grid=grid, ops=self.ops)

    def keys_values(self, context: Context | None) -> Context | None:
        """Replace the context's tokens by this block's keys and values, for use in several calls. Without
        cross-attention, return the context unchanged."""
        attention = getattr(self, "cross_attn", None)
        if attention is None or context is None:
            return context
        assert len(context) == 2, "keys and values are made of tokens, once"
        tokens, mask = context
        return *attention.keys_values(tokens, mask), mask


def _norm_of(spec: BlockSpec, branch: Branch) -> str | None:
    if branch.sees == "caption" and spec.caption_norm is not False:
        return branch.norm if spec.caption_norm else None
    if spec.norm != "rms":
        return None
    return spec.branches[0].norm if spec.parallel else branch.norm


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class NormalisedProjection:
    """A branch's last layer followed by a norm, with the interface of a :class:`Projection` without bias."""

    layer: Projection
    norm: RMSNorm

    bias: ClassVar[None] = None

    def __call__(self, z: Tensor) -> Tensor:
        return self.norm(self.layer(z))

    def product(self, z: Tensor, bias: None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return self.norm(self.before_norm(z, multiply))

    def before_norm(self, z: Tensor, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return self.layer.product(z, self.layer.bias, multiply)


class NoModulation(nn.Module):
    """Empty modulation (B, 0), for blocks without modulation."""

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        return c.new_zeros(len(c), 0)


class SharedModulation(nn.Module):
    """A block's modulation: ``count`` columns of the shared modulation (B, n), from column ``first``."""

    def __init__(self, first: int, count: int):
        super().__init__()
        self.part = slice(first, first + count)

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        assert shared is not None, "the model makes what its blocks share"
        return shared[:, self.part]


class JointBlock(nn.Module):
    """A block with separate weights for text tokens and media tokens, and one attention over both (MM-DiT; Esser et al.
    2024, fig. 2). x (B, N, D) holds one stream after another; in a pack, each segment does. ``grid.streams`` holds the
    streams' token counts."""

    recomputed, recomputing = True, False  # as in :class:`Block`

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.spec = spec
        self._ops: BlockOps = BlockOps()
        alone = replace(spec, streams=(), read=())
        for number, name in enumerate(spec.streams):
            own = replace(alone, shared_first=spec.shared_first + number * alone.chunks)
            if name in spec.read:
                block = Block(replace(own, branches=(ATTENTION,), values=READ_VALUES))
                block.attn.proj = cast(Any, None)
            else:
                block = Block(own)
            self.add_module(name, block)

    @property
    def streams(self) -> list[Block]:
        return [cast(Block, getattr(self, name)) for name in self.spec.streams]

    @property
    def ops(self) -> BlockOps:
        return self._ops

    @ops.setter
    def ops(self, ops: BlockOps) -> None:
        self._ops = ops
        for stream in self.streams:
            stream.ops = ops

    def modulate(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        return torch.cat([stream.modulate(c, shared) for stream in self.streams], dim=1)

    def forward(
        self, x: Tensor, m: Modulation, context: Context | None = None, grid: TokenGrid | None = None
    ) -> Tensor:
        residual = ResidualStream(x)
        self.add_branches(residual, self.modulate(*m) if isinstance(m, tuple) else m, context, grid)
        return residual.take(self._ops, unread=self.recomputing)

    def add_branches(self, x: ResidualStream, m: Tensor, context: Context | None, grid: TokenGrid | None) -> None:
        assert grid is not None, "a grid says which tokens are of which stream"
        streams, residuals = self.streams, x.split(grid, self._ops)
        parts = m.split([stream.spec.chunks * stream.spec.width for stream in streams], dim=1)
        vectors = [stream.vectors(part) for stream, part in zip(streams, parts, strict=True)]
        every = list(zip(streams, residuals, vectors, strict=True))
        for branch, name in max((stream.branches for stream in streams), key=len):
            gates, outputs = [], []
            own_branch = [each for each in every if (branch, name) in each[0].branches]
            for stream, residual, own in own_branch:
                shift, scale, gate = next(own)
                norm = None if name is None else getattr(stream, name)
                outputs.append(residual.norm(stream.ops, shift, scale, norm))
                gates.append(gate)
            if branch.sees is None:
                found = [each[0]._but_last(branch, y, None, None) for each, y in zip(own_branch, outputs, strict=True)]
            else:
                attended = joint_attention([stream.attn for stream in streams], outputs, self._ops, grid)
                found = [
                    (z, stream._last(branch, stream.attn.proj), None)
                    for stream, z in zip(streams, attended, strict=True)
                ]
            for (_, residual, _), gate, more in zip(own_branch, gates, found, strict=True):
                if gate is not None:
                    residual.add(gate, *more)

    def keys_values(self, context: Context | None) -> Context | None:
        return context


def joint_attention(layers: Sequence[Attention], inputs: Sequence[Tensor], ops: BlockOps, grid: TokenGrid) -> Any:
    """Attend from each stream's tokens (B, n_i, D) to all streams' tokens; return one output (B, n_i, D) per stream.
    Each stream's layer normalises its queries and keys. If ranks divide the tokens, rotations are applied later, when a
    rank has tokens in sequence order."""
    tables, rotated = [None] * len(layers), grid
    if grid.rotary is not None and grid.shards is None:
        tables, rotated = grid.split(grid.rotary, dim=-3), replace(grid, rotary=None)
    attend, projected = GridAttention(layers[0], rotated, ops, normalised=True), []
    in_order = grid.shards is None and grid.interleaved is None
    joins = ops.join_heads if in_order and not any(layer.across for layer in layers) else None
    for layer, x, table in zip(layers, inputs, tables, strict=True):
        parts = layer.project(x, ops)
        if joins is None:
            parts = layer.prepare(*parts, TokenGrid(grid.sizes, table), ops)
        more = () if joins is None else (layer.q_norm, layer.k_norm, table)
        projected.append((*(part.transpose(1, 2) for part in parts), *more))
    if grid.shards is not None:
        return grid.shards.attention_of_streams(projected, attend)
    joined = joins(projected) if joins is not None else [grid.join(parts) for parts in zip(*projected, strict=True)]
    q, k, v = (part.transpose(1, 2) for part in joined)
    return grid.split(attend(q, k, v).transpose(1, 2).flatten(2))


def make_block(spec: BlockSpec) -> Any:
    return JointBlock(spec) if spec.streams else Block(spec)


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """For type checkers: a ``ModuleList`` of ``Block`` items."""

        def __iter__(self) -> Iterator[Block]: ...
        def __getitem__(self, index: int) -> Block: ...


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    modulations: Iterable[Modulation],
    context: Context | list[Context] | None = None,
    grid: TokenGrid | None = None,
    *,
    checkpointed: bool | str = False,
) -> Tensor:
    """Run x (B, N, D) through all blocks. An uncut stack (see :func:`is_cut`) uses one :class:`ResidualStream`.

    Args:
        modulations: m of every block, in order; an iterator is advanced at the beginning of each block. An uncut stack
            needs computed modulations, not pairs (c, shared).
        context: One context for all blocks, or a list with one context for each block.
        checkpointed: True to recompute blocks in the backward pass (``--grad_checkpoint``) and keep only x and m;
            "but_attention" also keeps the outputs of self-attention. Blocks with ``recomputed = False`` are never
            recomputed.
    """
    # An iterator, because zip on a longer iterable would consume one more modulation than there are blocks.
    modulations = iter(modulations)
    contexts = context if isinstance(context, list) else [context] * len(blocks)
    if checkpointed or not blocks or any(map(is_cut, blocks)):
        for block, context in zip(blocks, contexts, strict=True):
            arguments = x, next(modulations), context, grid
            if checkpointed and block.recomputed:
                contexts_of = partial(_checkpoint_contexts, block, keep_attention=checkpointed == BUT_ATTENTION)
                # preserve_rng_state=False: a block uses no random numbers, and reading the random state would break a
                # CUDA graph capture.
                x = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts_of)
            else:
                x = block(*arguments)
        return x
    residual = ResidualStream(x, of_rows(grid), stack=True)
    del x  # Drop this reference so that the first block can free the memory.
    for block, context in zip(blocks, contexts, strict=True):
        block.add_branches(residual, cast(Tensor, next(modulations)), context, grid)
    return residual.take(blocks[-1].ops)


# torch's operators that implement scaled_dot_product_attention. Other packages' attention kernels are recomputed.
ATTENTION_OPERATORS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
}


def _checkpoint_contexts(block: Any, keep_attention: bool) -> tuple[Any, Any]:
    """Return contexts for a block's forward pass and for its recomputation. keep_attention: True to save the output of
    self-attention. Attention with fewer keys than queries (to a caption) is always recomputed."""

    def policy(context: Any, operator: Any, *args: Any, **how: Any) -> CheckpointPolicy:
        if operator in ATTENTION_OPERATORS and args[1].shape[-2] >= args[0].shape[-2]:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    kept, used = create_selective_checkpoint_contexts(policy) if keep_attention else (nullcontext(), nullcontext())
    # torch.compile may save other tensors in a graph with unread outputs, so a compiled block is repeated unchanged.
    return kept, used if block._compiled_call_impl is not None else _recomputing(block, used)


@contextmanager
def _recomputing(block: Any, context: AbstractContextManager[Any]) -> Iterator[None]:
    block.recomputing = True
    try:
        with context:
            yield
    finally:
        block.recomputing = False


def is_cut(block: nn.Module) -> bool:
    """Return True if calling ``block`` does more than its ``forward``, because the block has hooks (such as FSDP2's) or
    a compiled form. The block must then be called as a module and must return its complete output."""
    hooks = block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks
    return block._compiled_call_impl is not None or any(hooks)


class FinalLayer(nn.Module):
    """adaLN and a linear layer that maps each token to its patch: (B, N, D) to (B, N, out_features).

    Args:
        values: names of the modulation's vectors, in order. Without "shift" the shift is 0.
        table: True if the modulation is c plus a learned table.
        condition: width of c; None for D.
        rank: rank of the correction to the blocks' shared modulation; None for a separate full-rank modulation.
    """

    def __init__(
        self,
        dim: int,
        out_features: int,
        values: tuple[str, ...] = ("shift", "scale"),
        table: bool = False,
        condition: int | None = None,
        rank: int | None = None,
    ):
        super().__init__()
        self.values = values
        self.linear: nn.Linear = nn.Linear(dim, out_features)
        self.adaLN_modulation: nn.Module = (
            TableModulation(dim, len(values))
            if table
            else modulation(dim, len(values), Options(adaln_lora=rank, shared_modulation=rank is not None), condition)
        )
        self.ops: BlockOps = BlockOps()

    def modulate(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return the modulation vectors, concatenated to (B, len(values) * D), for the condition c (B, D). shared: the
        shared modulation to correct, if any."""
        return self.adaLN_modulation(c, shared)

    def forward(self, x: Tensor, m: Tensor, of_rows: tuple[Tensor, ...] = ()) -> Tensor:
        """Return the patches' values (B, N, out_features) for x (B, N, D). m: the result of :meth:`modulate`. of_rows:
        the result of :func:`of_rows`."""
        found = dict(zip(self.values, m.chunk(len(self.values), dim=1), strict=True))
        shift = found["shift"] if "shift" in found else torch.zeros_like(found["scale"])
        return self.linear(self.ops.layernorm_modulate(x, shift, found["scale"], *of_rows))
