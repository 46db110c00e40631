"""Token routing: in training, consecutive blocks (the route) process only some of each sample's tokens. Sampling uses
all tokens in all blocks.

    [T] Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training", 2025
    [S] Park et al., "Sprint: Sparse-Dense Residual Fusion for Efficient Diffusion Transformers", 2025

In [T] the other tokens skip the route unchanged. After its last block, all tokens are again in their positions. In [S]
a learned mask token takes the place of each skipped token after the route. A projection then fuses this sequence with
the sequence of all tokens from before the route.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from opendit.models.attention import SequenceShards, TokenGrid
from opendit.models.blocks import Block, Context, Modulation, run_blocks


class RoutedShards(SequenceShards, Protocol):
    """Division of a sequence over ranks, for routes whose kept tokens may be on any rank."""

    def join(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, n, F) of all ranks and return (B, N, F). Ranks may use the result differently, so the
        backward pass sums the gradients of all ranks."""
        ...

    def of_length(self, length: int) -> "RoutedShards":
        """Return the division of a sequence of another length over the same ranks."""
        ...


class Fusion(nn.Module):
    """[S] eq. 5: a linear projection of each token's features after a route, concatenated with those before it.

    Args:
        dim: Width D of the tokens.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.mask_token: nn.Parameter = nn.Parameter(torch.zeros(dim))
        self.linear: nn.Linear = nn.Linear(2 * dim, dim)

    def forward(self, deep: Tensor, shallow: Tensor, dropped: Tensor | None = None) -> Tensor:
        """Fuse the tokens ``deep`` after a route with the tokens ``shallow`` before it, both (B, N, D).

        dropped: (B,) bool, True for samples whose ``deep`` tokens are all replaced by mask tokens; (N,) for the tokens
        of a pack; None for no sample."""
        if dropped is not None:
            deep = torch.where(dropped.view(len(deep), -1, 1), self.mask_token.to(deep.dtype), deep)
        return self.linear(torch.cat((deep, shallow), dim=-1))

    def masks(self, like: Tensor, tokens: int) -> Tensor:
        """Return mask tokens (B, tokens, D), with the batch size and dtype of ``like``."""
        return self.mask_token.to(like.dtype).expand(len(like), tokens, -1)


class _KeptTokens(torch.autograd.Function):
    """x.gather(1, index) for distinct indices. Its backward pass copies gradients; that of ``gather`` would add them,
    which is slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = x.shape[1]
        return x.gather(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        whole = gradient.new_zeros(len(gradient), ctx.tokens, gradient.shape[2])
        return whole.scatter_(1, index, gradient), None


def run_routed(
    blocks: Sequence[Block],
    x: Tensor,
    modulations: Iterable[Modulation],
    context: Context | list[Context] | None = None,
    grid: TokenGrid | None = None,
    *,
    route: tuple[int, int],
    kept: Tensor | None = None,
    fusion: Fusion | None = None,
    dropped: Tensor | None = None,
    checkpointed: bool | str = False,
) -> Tensor:
    """Run all blocks on x (B, N, D) like :func:`run_blocks`. The blocks of a route process only the tokens ``kept``.

    If ``grid`` divides the sequence over ranks, x has this rank's tokens. Before and after the route, ranks gather all
    tokens, because each rank must get an equal number of kept tokens.

    Args:
        route: First block of the route, and first block after it.
        kept: (B, n) int64, distinct token indices of each sample in ascending order; None for all tokens. For a pack,
            (1, n), the indices of all segments.
        fusion: Fuses the tokens after the route with those before it; None to put the kept tokens back among the
            skipped ones.
        dropped: (B,) bool, True for samples that do without the route's result; (S,) for the segments of a pack.
    """
    blocks, modulations, (first, last) = list(blocks), iter(modulations), route
    contexts = context if isinstance(context, list) else [cast(Context, context)] * len(blocks)

    def part(x: Tensor, which: slice, grid: TokenGrid | None) -> Tensor:
        return run_blocks(blocks[which], x, modulations, contexts[which], grid, checkpointed=checkpointed)

    x = part(x, slice(first), grid) if first else x
    deep = run_on_kept(partial(part, which=slice(first, last)), x, grid, kept, fusion)
    if fusion is None:
        x = deep
    else:
        packed = None if grid is None else grid.packed
        x = fusion(deep, x, dropped if packed is None or dropped is None else dropped[packed.sample_of_row])
    return part(x, slice(last, None), grid) if last < len(blocks) else x


def run_on_kept(
    run: Callable[..., Tensor], x: Tensor, grid: TokenGrid | None, kept: Tensor | None, fusion: Fusion | None = None
) -> Tensor:
    """Replace the tokens ``kept`` of x (B, N, D) by run(tokens, grid=grid of these tokens), and return this rank's
    tokens. The other tokens stay; with a ``fusion`` they become mask tokens. Other arguments: see
    :func:`run_routed`."""
    if kept is None:
        return run(x, grid=grid)
    index = kept.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    places = None if grid is None else grid_of(grid, kept)
    shards = None if grid is None else cast(RoutedShards | None, grid.shards)
    every = x if shards is None else shards.join(x)
    own = cast(Tensor, _KeptTokens.apply(every, index))
    few = None if shards is None else shards.of_length(kept.shape[1])
    y = run(own if few is None else few.take(own), grid=places)
    y = y if few is None else few.join(y)
    beside = every if fusion is None else fusion.masks(y, every.shape[1])
    found = beside.scatter(1, index, y)
    return found if shards is None else shards.take(found)


def grid_of(grid: TokenGrid, kept: Tensor) -> TokenGrid:
    """Return the grid of the tokens ``kept`` (B, n). Its position tables have one entry per sample, because samples
    keep different tokens; those of a pack have one entry per token."""
    rotary = None if grid.rotary is None else grid.rotary[kept if grid.packed is None else kept[0]]
    learned, shards = grid.learned, cast(RoutedShards | None, grid.shards)
    few = None if shards is None else shards.of_length(kept.shape[1])
    packed = grid.packed
    if packed is not None:
        packed = packed.segments.of_kept(0 if few is None else few.first + few.rows).place(kept.device)
        packed = packed if few is None else packed.part(few.first, few.rows)
    if learned is not None:
        learned = (learned if shards is None else shards.join(learned))[0][kept]
        learned = learned if few is None else few.take(learned)
    return replace(grid, sizes=(kept.shape[1],), rotary=rotary, learned=learned, shards=few, packed=packed)
