"""The grammar of blocks: a block is built from its specification, and every architecture is a row of it.

A block is a sequence of branches, each added to the residual stream x (B, N, D):

    x = x + gate * branch(norm(x) * (1 + scale) + shift)

with shift, scale and gate made of the condition (adaLN-Zero; Peebles & Xie 2023), or ``x + branch(norm(x))`` where a
branch is not modulated.

              branches                                                norm    MLP
    DiT       attention, [caption, not modulated], MLP                layer   GELU
    EC-DiT    the same                                                layer   GELU, with experts beside it
    ST-DiT    in frames, along time, [to all], [caption], MLP         layer   GELU
    MovieGen  attention, [caption, not modulated], MLP                rms     SwiGLU

Norm and MLP may be exchanged in each row (``--norm``, ``--mlp``). What parallelises a block, casts it to FP8 or counts
it reads the specification.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opendit.models.attention import Attention, CrossAttention, FrameAttention, TemporalAttention, TokenGrid, of_rows
from opendit.models.experts import ExpertMlp, Experts, Routing
from opendit.models.layers import (
    PLAIN,
    BlockOps,
    Mlp,
    Options,
    Projection,
    RMSNorm,
    SwiGlu,
    layer_norm,
    modulation,
)

# What blocks attend to: tokens (B, L, D) and their mask (B, L) bool; or, of one block, the keys and values (B, L, H, d)
# that it makes of them, and the mask.
Context = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
# A block's shifts, scales and gates side by side (B, chunks * D); or what they are made of: c (B, D), and what all
# blocks share of them, if they do.
Modulation = Tensor | tuple[Tensor, Tensor | None]
Sum = tuple[Tensor, Tensor, Tensor, Projection]  # x, gate, z, last of x + gate * last(z)

# ------------------------------------------------------------------------------------------------------ specification

ATTENTIONS = {"all": Attention, "frame": FrameAttention, "time": TemporalAttention}
MLPS = {"gelu": Mlp, "swiglu": SwiGlu}


@dataclass(frozen=True)
class Branch:
    """A branch of a block.

    name: name of its module. sees: the tokens that each token attends to (all, those of its frame, those at its place
    in all frames, or the caption's); None: the branch is the MLP. modulated: it has a shift, a scale and a gate.
    """

    name: str
    sees: Literal["all", "frame", "time", "caption"] | None
    modulated: bool = True

    @property
    def norm(self) -> str:
        """Name of the norm before it, if norms have weights."""
        return f"{self.name.removesuffix('_attn')}_norm"


ATTENTION = Branch("attn", "all")
CAPTION = Branch("cross_attn", "caption", modulated=False)  # its output projection, which begins at zero, is its gate
MLP = Branch("mlp", None)


@dataclass(frozen=True)
class BlockSpec:
    """The specification of a block.

    width: D. heads, kv_heads: number of heads of queries, and of keys and values (None: the same). mlp_hidden: width of
    the MLP's hidden layer. norm: the norm before every branch, "layer" (without weights) or "rms" (with one weight per
    channel). mlp: "gelu" or "swiglu". experts: experts beside the MLP.
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

    @property
    def chunks(self) -> int:
        """Number of vectors in the block's modulation."""
        return 3 * sum(branch.modulated for branch in self.branches)

    def layer(self, branch: Branch) -> nn.Module:
        """Make the module of a branch."""
        if branch.sees == "caption":
            return CrossAttention(self.width, self.heads, self.options)
        if branch.sees is not None:
            return ATTENTIONS[branch.sees](self.width, self.heads, self.options, self.kv_heads)
        if self.experts is not None:
            return ExpertMlp(self.width, self.mlp_hidden, self.options.bias, self.experts)
        return MLPS[self.mlp](self.width, self.mlp_hidden, self.options.bias)


# ---------------------------------------------------------------------------------------------------- residual stream


class ResidualStream:
    """The residual stream of one block, or of a stack of blocks that nothing cuts: x (B, N, D), and its last branch,
    which is added when x is asked for.

    So the sum can be made in one pass with the norm that follows, where there is an operation for both. At each border
    of two blocks x is not read back from memory then, nor in the backward pass its gradient (DiT-XL/2 on an H200: 65 us
    each). Nothing else holds these tensors while a branch runs: their memory is free as soon as they are added.

    rows: the last arguments of operations on packs, see :func:`of_rows`. stack: whether it is that of several blocks.
    """

    def __init__(self, x: Tensor, rows: tuple[Tensor, ...] = (), stack: bool = False):
        self._parts: tuple[Any, ...] = (x,)  # or x, gate, z, last of x + gate * last(z)
        self._routing: tuple[Tensor, Routing] | None = None
        self._rows, self._stack, self._outside = rows, stack, True

    def norm(
        self, ops: BlockOps, shift: Tensor, scale: Tensor, norm: RMSNorm | None = None, joined: bool = True
    ) -> Tensor:
        """Return norm(x) * (1 + scale) + shift, by LayerNorm where ``norm`` is None. joined: the sum before it may be
        made in the same pass, whose result in FP8 only the linear layers of ``BlockOps`` can read."""
        if joined and len(self._parts) > 1:
            x, y = ops.residual_then_norm(*cast(Sum, self._taken()), shift, scale, norm, self._rows)
        elif self._outside or norm is not None:  # its backward pass adds up the two gradients of x
            x, y = ops.residual_and_norm(self.take(ops), shift, scale, norm, self._rows)
        else:
            x = self.take(ops)
            y = ops.layernorm_modulate(x, shift, scale, *self._rows)
        self._parts, self._outside = (x,), False
        return y

    def add(self, gate: Tensor, z: Tensor, last: Projection, routing: Routing | None = None) -> None:
        """x + gate * (last(z) + routing.result()), the last layer and, if there are experts, what they add.

        At the end of a block that is cut from the next one tokens may be on their way back from other ranks' experts
        while the last layer computes."""
        (x,) = self._taken()
        if routing is not None and routing.travels and not self._stack:
            self._routing = gate, routing
        elif routing is not None:
            x = x + gate.unsqueeze(1) * routing.result()
        self._parts = x, gate, z, last

    def put(self, x: Tensor) -> None:
        """Set x, which was made of what :meth:`take` returned."""
        self._parts = (x,)

    def take(self, ops: BlockOps) -> Tensor:
        """Return x with everything added to it, and empty the stream."""
        x = self._taken()[0] if len(self._parts) == 1 else ops.linear_gate_residual(*self._taken(), *self._rows)
        if self._routing is not None:
            (gate, routing), self._routing = self._routing, None
            x = x + gate.unsqueeze(1) * routing.result()
        return x

    def _taken(self) -> tuple[Any, ...]:
        parts, self._parts = self._parts, ()
        return parts


# -------------------------------------------------------------------------------------------------------------- blocks


class Block(nn.Module):
    """A block of any specification: x (B, N, D) to x.

    Only tensors cross a block's border: ``m = block.modulate(c)``, ``x = block(x, m, context, grid)``. So a stack of
    blocks can be cut between any two of them, by shard units, pipeline stages, checkpoints or compiled regions, and the
    modulation can be made beforehand; or, for a shard unit, which reaches what a call of the block uses, by that call
    itself, ``block(x, (c, shared), context, grid)``.
    """

    mlp: Mlp
    cross_attn: nn.Module  # of blocks with a caption branch
    adaLN_modulation: nn.Module

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.spec = spec
        self.ops: BlockOps = BlockOps()
        self.branches: list[tuple[Branch, str | None]] = [
            (branch, branch.norm if spec.norm == "rms" else None) for branch in spec.branches
        ]
        for branch, norm in self.branches:
            if norm is not None and branch.modulated:
                setattr(self, norm, RMSNorm(spec.width))
        for branch, norm in self.branches:
            if norm is not None and not branch.modulated:
                setattr(self, norm, RMSNorm(spec.width))
            setattr(self, branch.name, spec.layer(branch))
        self.adaLN_modulation = modulation(spec.width, spec.chunks, spec.options)

    def modulate(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return shifts, scales and gates side by side, (B, chunks * D), for the condition c (B, D). shared: the
        modulation that all blocks of the model share, if they do."""
        return self.adaLN_modulation(c, shared)

    def forward(
        self, x: Tensor, m: Modulation, context: Context | None = None, grid: TokenGrid | None = None
    ) -> Tensor:
        """x (B, N, D) to (B, N, D).

        m: the result of :meth:`modulate`, or its two arguments. context: what cross-attention attends to. grid: where
        the tokens are, the same for all blocks of a stack.
        """
        residual = ResidualStream(x, of_rows(grid))
        del x
        self.add_branches(residual, self.modulate(*m) if isinstance(m, tuple) else m, context, grid)
        return residual.take(self.ops)

    def add_branches(self, x: ResidualStream, m: Tensor, context: Context | None, grid: TokenGrid | None) -> None:
        """x + gate * branch(norm(x) * (1 + scale) + shift) for every branch; arguments as of :meth:`forward`."""
        vectors = iter(m.chunk(self.spec.chunks, dim=1))
        if grid is not None and grid.learned is not None:
            x.put(x.take(self.ops) + grid.learned)
        for branch, name in self.branches:
            norm = None if name is None else getattr(self, name)
            if branch.modulated:
                shift, scale, gate = next(vectors), next(vectors), next(vectors)
                joined = branch.sees != "caption"
                x.add(gate, *self._but_last(branch, x.norm(self.ops, shift, scale, norm, joined), context, grid))
            else:
                x.put(self._add_caption(x.take(self.ops), norm or layer_norm, context, grid))

    def _but_last(
        self, branch: Branch, y: Tensor, context: Context | None, grid: TokenGrid | None
    ) -> tuple[Tensor, Projection, Routing | None]:
        """All of a branch of y but its last layer: that layer's input and the layer; and, of an MLP with experts, what
        they add to its output."""
        layer: Any = getattr(self, branch.name)
        if branch.sees == "caption":
            assert context is not None, "cross-attention is of models with a text"
            return layer.output(y, *context, grid=grid), layer.proj, None
        if branch.sees is not None:
            return layer.output(y, self.ops, grid), layer.proj, None
        routing = layer.start(y, grid and grid.shards) if self.spec.experts else None
        z = layer.hidden(y, self.ops)  # while tokens travel to their experts
        if routing is not None:
            routing.compute()
        return z, layer.fc2, routing

    def _add_caption(
        self, x: Tensor, norm: Callable[[Tensor], Tensor], context: Context | None, grid: TokenGrid | None
    ) -> Tensor:
        """x + cross_attn(norm(x)), as PixArt-alpha has it (Chen et al. 2024, sec. 2.3)."""
        assert context is not None, "cross-attention is of models with a text"
        return x + self.cross_attn(norm(x), *context, grid=grid)

    def keys_values(self, context: Context | None) -> Context | None:
        """Return the context with this block's keys and values instead of the tokens, for a caption that several calls
        attend to; as it is, in a block that has no cross-attention."""
        attention = getattr(self, "cross_attn", None)
        if attention is None or context is None:
            return context
        assert len(context) == 2, "keys and values are made of tokens, once"
        tokens, mask = context
        return *attention.keys_values(tokens), mask


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """A stack of blocks, which to checkers a ModuleList is not."""

        def __iter__(self) -> Iterator[Block]: ...
        def __getitem__(self, index: int) -> Block: ...


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    modulations: Iterable[Modulation],
    context: Context | list[Context] | None = None,
    grid: TokenGrid | None = None,
    *,
    checkpointed: bool = False,
) -> Tensor:
    """x (B, N, D) through all blocks; where nothing cuts the stack, in one :class:`ResidualStream`.

    modulations: m of every block, in their order; each is taken when its block begins. context: one for all blocks, or
        a list of every block's own. checkpointed: blocks are recomputed in the backward pass (``--grad_checkpoint``),
        which keeps x and m. A stack that nothing cuts takes modulations that are made, and no pairs.
    """
    modulations = iter(modulations)  # (zip would take one more than there are blocks)
    contexts = context if isinstance(context, list) else [context] * len(blocks)
    if checkpointed or not blocks or any(map(is_cut, blocks)):
        for block, context in zip(blocks, contexts, strict=True):
            arguments = x, next(modulations), context, grid
            if checkpointed:
                # (Nothing in a block is random; asking for the random state would break a CUDA graph's recording.)
                x = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*arguments)
        return x
    residual = ResidualStream(x, of_rows(grid), stack=True)
    del x  # so that the first block can free it
    for block, context in zip(blocks, contexts, strict=True):
        block.add_branches(residual, cast(Tensor, next(modulations)), context, grid)
    return residual.take(blocks[-1].ops)


def is_cut(block: nn.Module) -> bool:
    """Return True if calling ``block`` does more than its ``forward``, because of hooks (such as those of FSDP2's shard
    units) or a compiled form, so that its output must be complete at its border."""
    hooks = block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks
    return block._compiled_call_impl is not None or any(hooks)


class FinalLayer(nn.Module):
    """adaLN, then each token to its patch: (B, N, D) to (B, N, out_features)."""

    def __init__(self, dim: int, out_features: int):
        super().__init__()
        self.linear: nn.Linear = nn.Linear(dim, out_features)
        self.adaLN_modulation: nn.Sequential = modulation(dim, 2)
        self.ops: BlockOps = BlockOps()

    def modulate(self, c: Tensor) -> Tensor:
        """Return shift and scale side by side, (B, 2 D), for the condition c (B, D)."""
        return self.adaLN_modulation(c)

    def forward(self, x: Tensor, m: Tensor, of_rows: tuple[Tensor, ...] = ()) -> Tensor:
        """x (B, N, D), m (B, 2 D) of :meth:`modulate`; of_rows: of a pack, see ``TokenGrid``."""
        return self.linear(self.ops.layernorm_modulate(x, *m.chunk(2, dim=1), *of_rows))
