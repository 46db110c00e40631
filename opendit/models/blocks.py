"""The base of every architecture's blocks, the function that runs a stack of them, and the layer after them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opendit.models.attention import TokenGrid, of_rows
from opendit.models.layers import BlockOps, Mlp, Projection, RMSNorm, modulation

# What blocks attend to: tokens (B, L, D) and their mask (B, L) bool; or, of one block, the keys and values (B, L, H, d)
# that it makes of them, and the mask.
Context = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
# Of a block: shifts, scales and gates side by side (B, chunks * D); or what they are made of, c (B, D) and what all
# blocks share of them, if they do.
Modulation = Tensor | tuple[Tensor, Tensor | None]
Deferred = tuple[Tensor, Tensor, Tensor]  # h (B, N, D), gate (B, D), z (B, N, H) of a block's h + gate * fc2(z)


class Block(nn.Module):
    """x (B, N, D) to x: branches one after the other, each added to x through a gate, the last of them an MLP.

    Only tensors cross a block's border: ``m = block.modulate(c)``, ``x = block(x, m, context, grid)``. So a stack of
    blocks can be cut between any two of them, by shard units, pipeline stages, checkpoints or compiled regions, and the
    modulation can be made beforehand; or, for a shard unit, which reaches what a call of the block uses, by that call
    itself, ``block(x, (c, shared), context, grid)``.

    Subclasses have ``mlp`` and ``adaLN_modulation``, and say in :meth:`deferred` what they do.
    """

    mlp: Mlp
    adaLN_modulation: nn.Module

    def __init__(self):
        super().__init__()
        self.ops: BlockOps = BlockOps()

    def modulate(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Shifts, scales and gates side by side, (B, chunks * D), of the condition c (B, D); ``shared``: the modulation
        that all blocks share, of a model that has one."""
        return self.adaLN_modulation(c, shared)

    def keys_values(self, context: Context | None) -> Context | None:
        """Return the context with this block's keys and values instead of the tokens, for a caption that several calls
        attend to; as it is, in a block that has no cross-attention."""
        attention = getattr(self, "cross_attn", None)
        if attention is None or context is None:
            return context
        assert len(context) == 2, "keys and values are made of tokens, once"
        tokens, mask = context
        return *attention.keys_values(tokens), mask

    def forward(
        self, x: Tensor, m: Modulation, context: Context | None = None, grid: TokenGrid | None = None
    ) -> Tensor:
        """x (B, N, D) to (B, N, D).

        m: what :meth:`modulate` gives, or the pair that it takes. context: what cross-attention attends to. grid: where
        the tokens are, the same for all blocks of a stack.
        """
        return self.complete([x], self.modulate(*m) if isinstance(m, tuple) else m, context, grid)

    def complete(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Tensor:
        """All of a block that is cut from the next one; arguments as of :meth:`deferred`."""
        return self.materialize(*self.deferred(start, m, context, grid), of_rows(grid))

    def deferred(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Deferred:
        """All of :meth:`forward` but its last residual connection, which :meth:`materialize` makes of the result.

        start: see :meth:`begin`.
        """
        raise NotImplementedError

    def materialize(self, h: Tensor, gate: Tensor, z: Tensor, of_rows: tuple[Tensor, ...] = ()) -> Tensor:
        """h + gate * fc2(z): the deferred residual connection. of_rows: of a pack, see ``TokenGrid``."""
        return self.ops.linear_gate_residual(h, gate, z, self.mlp.fc2, *of_rows)

    def begin(
        self,
        start: list[Any],
        shift: Tensor,
        scale: Tensor,
        norm: RMSNorm | None = None,
        of_rows: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """x, and norm(x) * (1 + scale) + shift (by LayerNorm, or by ``norm``).

        start: [x]; or the deferred residual of the block before and its last layer, [h, gate, z, fc2], with which
        x = h + gate * fc2(z) is made in one pass with its norm, where there is such an operation. It is emptied, so
        that nobody holds its tensors, z above all, which is wider than x, until the block has ended.
        of_rows: of a pack, see ``TokenGrid``.
        """
        if len(start) == 1:
            return self.ops.residual_and_norm(start.pop(), shift, scale, norm, of_rows)
        return self.ops.residual_then_norm(*_emptied(start), shift, scale, norm, of_rows)

    def take(self, start: list[Any], of_rows: tuple[Tensor, ...] = ()) -> Tensor:
        """x alone of what :meth:`begin` is given, for a block that does something else with it first."""
        return start.pop() if len(start) == 1 else self.ops.linear_gate_residual(*_emptied(start), *of_rows)


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """A stack of blocks, which to checkers a ModuleList is not."""

        def __iter__(self) -> Iterator[Block]: ...
        def __getitem__(self, index: int) -> Block: ...


def _emptied(start: list[Any]) -> tuple[Tensor, Tensor, Tensor, Projection]:
    h, gate, z, fc2 = start
    start.clear()
    return h, gate, z, fc2


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    modulations: Iterable[Modulation],
    context: Context | list[Context] | None = None,
    grid: TokenGrid | None = None,
    *,
    checkpointed: bool = False,
) -> Tensor:
    """x (B, N, D) through all blocks.

    Where nothing cuts the stack this is the cross-block residual + norm fusion: every block's last residual connection
    is deferred to the next block, whose first norm takes it up. At each border x is not read back from memory then, nor
    in the backward pass its gradient (DiT-XL/2 on an H200: 65 us each).

    modulations: m of every block, in their order; each is taken when its block begins. context: one for all blocks, or
        a list of every block's own. checkpointed: blocks are recomputed in the backward pass (``--grad_checkpoint``),
        which keeps x and m. A stack that nothing cuts takes modulations that are made, and no pairs.
    """
    modulations = iter(modulations)  # (zip would take one more than there are blocks)
    contexts = context if isinstance(context, list) else [context] * len(blocks)
    if checkpointed or not blocks or any(map(is_cut, blocks)):
        for block, context in zip(blocks, contexts, strict=True):
            given = x, next(modulations), context, grid
            if checkpointed:
                # (Nothing in a block is random; asking for the random state would break a CUDA graph's recording.)
                x = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*given)
        return x
    start: list[Any] = [x]
    del x  # the first block lets go of it
    for block, context in zip(blocks, contexts, strict=True):
        start = [*block.deferred(start, cast(Tensor, next(modulations)), context, grid), block.mlp.fc2]
    return blocks[-1].materialize(*start[:3], of_rows=of_rows(grid))


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
        """Shift and scale side by side, (B, 2 D), of the condition c (B, D)."""
        return self.adaLN_modulation(c)

    def forward(self, x: Tensor, m: Tensor, of_rows: tuple[Tensor, ...] = ()) -> Tensor:
        """x (B, N, D), m (B, 2 D) of :meth:`modulate`; of_rows: of a pack, see ``TokenGrid``."""
        return self.linear(self.ops.layernorm_modulate(x, *m.chunk(2, dim=1), *of_rows))
