"""Token routing (TREAD; Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training",
2025): in training, some blocks see a part of each sample's tokens. The others skip these blocks, unchanged, and come
back to their places after the last of them. Sampling runs the whole model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from opendit.config.token_routing import TokenRoute
from opendit.models.attention import SequenceShards, TokenGrid
from opendit.models.blocks import Block, Context, Modulation, run_blocks


class RoutedShards(SequenceShards, Protocol):
    """Shares of a sequence of which other ranks may need any token."""

    def join(self, x: Tensor) -> Tensor:
        """Return all tokens (B, N, F) of this rank's (B, n, F), where ranks then do different things with them."""
        ...

    def of_length(self, length: int) -> "RoutedShards":
        """Return the shares of a sequence of another length by the same ranks."""
        ...


class _KeptTokens(torch.autograd.Function):
    """x.gather(1, index) of distinct places, so that the gradient is a copy, where that of ``gather`` is a sum."""

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
    route: TokenRoute,
    kept: Tensor,
    checkpointed: bool | str = False,
) -> Tensor:
    """Run all blocks on x (B, N, D) as :func:`run_blocks` does; those of the route on the tokens ``kept`` alone.

    kept: (B, n) int64, distinct places of each sample's tokens, rising. Where ranks share a sequence, as ``grid`` says,
    x are this rank's tokens. All ranks gather those of all, before the route and after it, so that each has as many of
    the kept ones.
    """
    blocks, modulations, first, last = list(blocks), iter(modulations), route.first, route.last
    contexts = context if isinstance(context, list) else [cast(Context, context)] * len(blocks)

    def part(x: Tensor, which: slice, grid: TokenGrid | None) -> Tensor:
        return run_blocks(blocks[which], x, modulations, contexts[which], grid, checkpointed=checkpointed)

    x = part(x, slice(first), grid) if first else x
    index = kept.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    places = None if grid is None else grid_of(grid, kept)
    shards = None if grid is None else cast(RoutedShards | None, grid.shards)
    if shards is None:
        y = part(cast(Tensor, _KeptTokens.apply(x, index)), slice(first, last), places)
        x = x.scatter(1, index, y)
    else:
        few, all_tokens = shards.of_length(kept.shape[1]), shards.join(x)
        own = few.take(cast(Tensor, _KeptTokens.apply(all_tokens, index)))
        y = part(own, slice(first, last), places)
        x = shards.take(all_tokens.scatter(1, index, few.join(y)))
    return part(x, slice(last, None), grid) if last < len(blocks) else x


def grid_of(grid: TokenGrid, kept: Tensor) -> TokenGrid:
    """Return the places of the tokens ``kept`` (B, n): tables of positions have rows for each sample."""
    rotary = None if grid.rotary is None else grid.rotary[kept]
    learned, shards = grid.learned, cast(RoutedShards | None, grid.shards)
    few = None if shards is None else shards.of_length(kept.shape[1])
    if learned is not None:
        learned = (learned if shards is None else shards.join(learned))[0][kept]
        learned = learned if few is None else few.take(learned)
    return replace(grid, sizes=(kept.shape[1],), rotary=rotary, learned=learned, shards=few)
