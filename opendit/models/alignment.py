"""Representation alignment: a loss that maximises the cosine similarity between projected tokens of an intermediate
block and a frozen vision encoder's features of the clean picture.

    [R] Yu et al., "Representation Alignment for Generation: Training Diffusion Transformers Is Easier Than You Think"
        (REPA), 2024
    [I] Singh et al., "What Matters for Representation Alignment: Global Information or Spatial Structure?" (iREPA),
        2025

The projector is trained and saved with the model; sampling does not use it. Only the projector and the blocks before it
get gradients from this loss.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

PROJECTED = 2048  # hidden width of [R]'s projector
# [I] subtracts this fraction of the mean over tokens from the encoder's features. The paper's appendix uses 0.6 to 0.8.
CENTRED = 0.7


@dataclass(frozen=True)
class AlignmentConfig:
    """Settings of representation alignment.

    Attributes:
        block: Number of blocks after which the tokens are aligned.
        width: Width of the encoder's features.
        projector: "mlp" ([R]) or "conv" ([I]).
    """

    block: int
    width: int
    projector: str = "mlp"

    def parameters(self, dim: int) -> int:
        """Count the projector's parameters for tokens of width ``dim``."""
        if self.projector == "conv":
            return (9 * dim + 1) * self.width
        return (dim + 1) * PROJECTED + (PROJECTED + 1) * PROJECTED + (PROJECTED + 1) * self.width


class Projector(nn.Module):
    """Projection of tokens (B, N, D) in a grid (H, W) to the width of the encoder's features, (B, N, width)."""

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
    """An encoder's features of a micro-batch's pictures, (B, N, width), and the weight of the alignment term in the
    loss."""

    features: Tensor
    weight: float

    def losses(self, projected: Tensor) -> Tensor:
        """Return the weighted alignment term of each sample, (B,) fp32: the mean over tokens of 1 - cosine similarity
        ([R] eq. 8, plus 1)."""
        cosine = F.cosine_similarity(projected.float(), self.features.float(), dim=-1)
        return self.weight * (1 - cosine).mean(dim=1)


def without_mean(features: Tensor) -> Tensor:
    """Subtract the fraction ``CENTRED`` of the mean over tokens from features (B, N, width), and divide by the standard
    deviation over tokens ([I] sec. 4)."""
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
    """Run all blocks on x (B, N, D), like ``run_blocks``, and call ``take`` with the tokens after the first ``at``
    blocks. ``below`` runs the first ``at`` blocks, and ``above`` the others."""
    blocks, modulations = list(blocks), iter(modulations)
    contexts = context if isinstance(context, list) else [cast(Any, context)] * len(blocks)
    x = below(blocks[:at], x, modulations, contexts[:at], grid, checkpointed=checkpointed)
    take(x)
    return above(blocks[at:], x, modulations, contexts[at:], grid, checkpointed=checkpointed)
