"""Additions to a DiT for training: representation alignment, token routes, and the learned uncertainty of the loss.

[K] Kendall et al., "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and Semantics", 2018
[E] Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), 2024, sec. 2.1
[R] Yu et al., "Representation Alignment for Generation: Training Diffusion Transformers Is Easier Than You Think"
    (REPA), 2024
[I] Singh et al., "What Matters for Representation Alignment: Global Information or Spatial Structure?" (iREPA),
    2025
[T] Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training", 2025
[S] Park et al., "Sprint: Sparse-Dense Residual Fusion for Efficient Diffusion Transformers", 2025
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.attention import TokenGrid
from opendit.models.blocks import Block, Context, Modulation, run_blocks
from opendit.models.layers import TIME_FREQUENCIES, timestep_embedding

# ------------------------------------------------------------------------------------------ representation alignment
#
# The tokens after an intermediate block are projected. The loss raises their cosine similarity to a frozen vision
# encoder's features of the clean picture. It trains only the projector and the earlier blocks. The projector is saved
# with the model.

PROJECTED = 2048  # hidden width of [R]'s projector
# [I] subtracts this fraction of the mean over tokens from the encoder's features. The paper's appendix uses 0.6 to 0.8.
CENTRED = 0.7


@dataclass(frozen=True)
class AlignmentConfig:
    """Settings of representation alignment."""

    block: int  # number of blocks after which tokens are aligned
    width: int  # width of the encoder's features
    projector: str = "mlp"  # mlp ([R]) or conv ([I])

    def parameters(self, dim: int) -> int:
        if self.projector == "conv":
            return (9 * dim + 1) * self.width
        return (dim + 1) * PROJECTED + (PROJECTED + 1) * PROJECTED + (PROJECTED + 1) * self.width


class Projector(nn.Module):
    """Projection of tokens (B, N, D) to the width of the encoder's features, (B, N, width). grid: (H, W)."""

    def __init__(self, dim: int, config: AlignmentConfig):
        super().__init__()
        self.conv: bool = config.projector == "conv"
        layers: list[nn.Module] = [nn.Conv2d(dim, config.width, 3, padding=1)]
        if not self.conv:
            first, second = nn.Linear(dim, PROJECTED), nn.Linear(PROJECTED, PROJECTED)
            layers = [first, nn.SiLU(), second, nn.SiLU(), nn.Linear(PROJECTED, config.width)]
        self.layers: nn.Sequential = nn.Sequential(*layers)

    def forward(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        if not self.conv:
            return self.layers(x)
        return self.layers(x.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)


class Alignment(NamedTuple):
    """The encoder's features (B, N, width) for a micro-batch, and the weight of the alignment loss."""

    features: Tensor
    weight: float

    def losses(self, projected: Tensor) -> Tensor:
        """Return each sample's weighted loss, (B,) fp32: the mean over tokens of 1 - cosine similarity ([R] eq. 8, plus
        1)."""
        cosine = F.cosine_similarity(projected.float(), self.features.float(), dim=-1)
        return self.weight * (1 - cosine).mean(dim=1)


def without_mean(features: Tensor) -> Tensor:
    """Normalise features (B, N, width) over the tokens: subtract ``CENTRED`` times the mean, then divide by the
    standard deviation ([I] sec. 4)."""
    centred = features - CENTRED * features.mean(dim=1, keepdim=True)
    return centred / (centred.std(dim=1, keepdim=True) + 1e-6)


def run_tapped(
    blocks: Sequence[Any],
    x: Tensor,
    modulations: Iterable[Any],
    context: Any = None,
    grid: Any = None,
    *,
    at: int,
    take: Callable[[Tensor], None],
    below: Callable[..., Tensor],
    above: Callable[..., Tensor],
    checkpointed: bool | str = False,
) -> Tensor:
    """Run all blocks on x (B, N, D), like ``run_blocks``. ``below`` runs the first ``at`` blocks, then ``take`` is
    called with the tokens, then ``above`` runs the remaining blocks."""
    blocks, modulations = list(blocks), iter(modulations)
    contexts = context if isinstance(context, list) else [cast(Any, context)] * len(blocks)
    x = below(blocks[:at], x, modulations, contexts[:at], grid, checkpointed=checkpointed)
    take(x)
    return above(blocks[at:], x, modulations, contexts[at:], grid, checkpointed=checkpointed)


# ------------------------------------------------------------------------------------------ uncertainty of the loss


class Uncertainty(nn.Module):
    """The learned uncertainty u(t) of a loss L(t): a linear layer on sinusoids of t ([E]). Maps times (B,) to (B,)
    fp32. Training minimises L(t) / exp(u(t)) + u(t) ([K]). At the minimum, exp(u(t)) is the mean of L(t), so all times
    count equally."""

    def __init__(self):
        super().__init__()
        self.linear: nn.Linear = nn.Linear(TIME_FREQUENCIES, 1)

    def forward(self, t: Tensor) -> Tensor:
        sinusoids = timestep_embedding(t, TIME_FREQUENCIES).float()
        return (sinusoids * self.linear.weight.float()).sum(dim=1) + self.linear.bias.float()


def weighted(losses: Tensor, u: Tensor) -> Tensor:
    """Return the weighted losses (B,). u: (B,), the result of :class:`Uncertainty` for the samples' times."""
    return losses / u.exp() + u


# ------------------------------------------------------------------------------------------ token routes
#
# In training, consecutive blocks (the route) process only some of each sample's tokens. In [T] the remaining tokens
# skip the route unchanged. In [S] a learned mask token replaces each skipped token. Then a projection fuses the
# sequence after the route with the sequence before it.


class Fusion(nn.Module):
    """Linear layer on each token's features after and before a route, concatenated ([S] eq. 5)."""

    def __init__(self, dim: int):
        super().__init__()
        self.mask_token: nn.Parameter = nn.Parameter(torch.zeros(dim))
        self.linear: nn.Linear = nn.Linear(2 * dim, dim)

    def forward(self, deep: Tensor, shallow: Tensor, dropped: Tensor | None = None) -> Tensor:
        """Fuse the tokens after a route (``deep``) with the tokens before it (``shallow``), both (B, N, D). dropped:
        True to replace ``deep`` by mask tokens, (B,) bool, or (N,) for a pack."""
        if dropped is not None:
            deep = torch.where(dropped.view(len(deep), -1, 1), self.mask_token.to(deep.dtype), deep)
        return self.linear(torch.cat((deep, shallow), dim=-1))

    def masks(self, like: Tensor, tokens: int) -> Tensor:
        return self.mask_token.to(like.dtype).expand(len(like), tokens, -1)


class _KeptTokens(torch.autograd.Function):
    """x.gather(1, index) for distinct indices, with a faster backward pass: gradients are copied instead of added."""

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
    """Run all blocks on x (B, N, D) like :func:`run_blocks`. A route's blocks process only the tokens ``kept``.

    With sequence parallelism, x holds this rank's tokens. All tokens are gathered at both ends of the route, so that
    ranks can divide the kept tokens evenly.

    Args:
        route: First block of the route, and first block after it.
        kept: (B, n) int64, each sample's distinct token indices in ascending order; None for all tokens. For a pack,
            (1, n) indices into the pack.
        fusion: Fuses the tokens before and after the route; None to return the kept tokens to their places.
        dropped: (B,) bool, or (S,) for the segments of a pack: True to replace the route's result by mask tokens.
            Unused without ``fusion``.
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
    """Apply ``run`` to the tokens ``kept`` of x (B, N, D) and return all of this rank's tokens. Skipped tokens stay
    unchanged, or become mask tokens if there is a ``fusion``. Arguments: see :func:`run_routed`."""
    if kept is None:
        return run(x, grid=grid)
    index = kept.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    places = None if grid is None else grid_of(grid, kept)
    shards = None if grid is None else grid.shards
    every = x if shards is None else shards.join(x)
    own = cast(Tensor, _KeptTokens.apply(every, index))
    few = None if shards is None else shards.of_length(kept.shape[1])
    y = run(own if few is None else few.take(own), grid=places)
    y = y if few is None else few.join(y)
    beside = every if fusion is None else fusion.masks(y, every.shape[1])
    found = beside.scatter(1, index, y)
    return found if shards is None else shards.take(found)


def grid_of(grid: TokenGrid, kept: Tensor) -> TokenGrid:
    """Return the grid of the tokens ``kept`` (B, n). Position tables get a batch dimension, because samples keep
    different tokens. A pack's rotary table has no batch dimension."""
    rotary = None if grid.rotary is None else grid.rotary[kept if grid.packed is None else kept[0]]
    learned, shards = grid.learned, grid.shards
    few = None if shards is None else shards.of_length(kept.shape[1])
    packed = grid.packed
    if packed is not None:
        packed = packed.segments.of_kept(0 if few is None else few.first + few.rows).place(kept.device)
        packed = packed if few is None else packed.part(few.first, few.rows)
    if learned is not None:
        learned = (learned if shards is None else shards.join(learned))[0][kept]
        learned = learned if few is None else few.take(learned)
    return replace(grid, sizes=(kept.shape[1],), rotary=rotary, learned=learned, shards=few, packed=packed)
