"""Representation alignment: tokens of a block in the middle, projected, should point where a frozen vision encoder's
features of the clean picture point.

    [R] Yu et al., "Representation Alignment for Generation: Training Diffusion Transformers Is Easier Than You Think"
        (REPA), 2024
    [I] Singh et al., "What Matters for Representation Alignment: Global Information or Spatial Structure?" (iREPA),
        2025

The projector is trained with the model and saved with it, and sampling does not use it. Its gradient reaches the blocks
before it only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

PROJECTED = 2048  # hidden width of [R]'s projector
CENTRED = 0.7  # share of the mean over places that [I] takes off the encoder's features; its appendix has 0.6 to 0.8


@dataclass(frozen=True)
class AlignmentConfig:
    """Align the tokens after ``block`` blocks with features of ``width`` numbers. projector: "mlp" ([R]) or "conv"
    ([I])."""

    block: int
    width: int
    projector: str = "mlp"

    def parameters(self, dim: int) -> int:
        """Count the projector's parameters for tokens of width ``dim``."""
        if self.projector == "conv":
            return (9 * dim + 1) * self.width
        return (dim + 1) * PROJECTED + (PROJECTED + 1) * PROJECTED + (PROJECTED + 1) * self.width


class Projector(nn.Module):
    """Tokens (B, N, D) in a grid (H, W) to (B, N, width)."""

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
    """An encoder's features of a micro-batch's pictures, (B, N, width), and the weight of their term in the loss."""

    features: Tensor
    weight: float

    def losses(self, projected: Tensor) -> Tensor:
        """Return the term of each sample, (B,) fp32: 1 - cosine, averaged over its tokens ([R] eq. 8, plus 1)."""
        cosine = F.cosine_similarity(projected.float(), self.features.float(), dim=-1)
        return self.weight * (1 - cosine).mean(dim=1)


def without_mean(features: Tensor) -> Tensor:
    """Return features (B, N, width) less a part of their mean over places, by their deviation there ([I] sec. 4)."""
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
    """Run all blocks on x (B, N, D) as ``run_blocks`` does: the first ``at`` by ``below``, the others by ``above``; in
    between, ``take`` gets the tokens."""
    blocks, modulations = list(blocks), iter(modulations)
    contexts = context if isinstance(context, list) else [cast(Any, context)] * len(blocks)
    x = below(blocks[:at], x, modulations, contexts[:at], grid, checkpointed=checkpointed)
    take(x)
    return above(blocks[at:], x, modulations, contexts[at:], grid, checkpointed=checkpointed)
