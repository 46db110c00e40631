"""MovieGen's Transformer (Polyak et al., "Movie Gen: A Cast of Media Foundation Models", 2024, sec. 3.1.3): Llama's
blocks with bidirectional attention, modulation by the time, and cross-attention to the caption between attention and
MLP.

The details follow NVIDIA NeMo (24.12 and 25.02, collections/diffusion, DiTLlama*): learned positions (one table per
axis, shared by all blocks) are added before every block, and all query heads share 8 heads of keys and values at every
size. Unlike in NeMo, cross-attention's output is added to the residual stream before the MLP, as in the paper.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from opendit.models import plan
from opendit.models.blocks import BlockSpec
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT


@dataclass(frozen=True)
class MovieGenConfig(DiTConfig):
    """The configuration of a MovieGen for clips or pictures."""

    kind: ClassVar[str] = "moviegen"
    bias: bool = False
    positions: str = "learned"
    norm: str = "rms"
    mlp: str = "swiglu"
    kv_heads: int | None = None  # number of heads of keys and values; None for one per query head

    @property
    def block(self) -> BlockSpec:
        return replace(super().block, kv_heads=self.kv_heads)

    @property
    def positions_in_blocks(self) -> bool:
        return self.positions == "learned" and self.revision >= 2

    @property
    def depends_on_revision(self) -> bool:
        return True  # the number of heads of keys and values differs between revisions for named sizes

    def check(self) -> None:
        super().check()
        if self.num_heads % (self.kv_heads or self.num_heads):
            raise ValueError(f"{self.num_heads} heads can't share {self.kv_heads} heads of keys and values evenly")


class MovieGen(DiT):
    """MovieGen on latents of clips (B, C, T, H, W) or pictures (B, C, H, W)."""

    config: MovieGenConfig


# Every pipeline stage needs the learned positions, because every block adds them.
PLAN = replace(plan.PLAN, stages=plan.stages("learned_positions"))
ARCHITECTURE = MovieGenConfig, MovieGen, PLAN
