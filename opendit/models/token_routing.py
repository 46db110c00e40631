"""Token routing (TREAD; Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training",
2025).

In training, consecutive blocks (the route) process only some of each sample's tokens. The other tokens skip the route
unchanged, and return to their positions in the sequence after the route's last block. Sampling uses all tokens in all
blocks.
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
    """Division of a sequence over ranks, for routes whose kept tokens may be on any rank."""

    def join(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, n, F) of all ranks and return (B, N, F). The ranks may use the result differently, so
        the gradient of the result may differ between ranks."""
        ...

    def of_length(self, length: int) -> "RoutedShards":
        """Return the division of a sequence of another length over the same ranks."""
        ...


class _KeptTokens(torch.autograd.Function):
    """x.gather(1, index) for distinct indices. The gradient is a copy, whereas the gradient of ``gather`` is a slower
    sum."""

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
    """Run all blocks on x (B, N, D) like :func:`run_blocks`, but the blocks of ``route`` only on the tokens ``kept``.

    kept: (B, n) int64, distinct token indices of each sample in ascending order.

    If ``grid`` divides the sequence over ranks, x has this rank's tokens. The ranks gather all tokens before and after
    the route to balance the kept tokens between ranks.
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
    """Return the grid of the tokens ``kept`` (B, n). Its position tables have one entry per sample, because samples
    keep different tokens."""
    rotary = None if grid.rotary is None else grid.rotary[kept]
    learned, shards = grid.learned, cast(RoutedShards | None, grid.shards)
    few = None if shards is None else shards.of_length(kept.shape[1])
    if learned is not None:
        learned = (learned if shards is None else shards.join(learned))[0][kept]
        learned = learned if few is None else few.take(learned)
    return replace(grid, sizes=(kept.shape[1],), rotary=rotary, learned=learned, shards=few)
