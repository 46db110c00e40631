"""MovieGen's Transformer (Polyak et al., "Movie Gen: A Cast of Media Foundation Models", 2024, sec. 3.1.3): Llama's
blocks with attention in both directions, modulated by the time, with cross-attention to the caption in the middle.

As NVIDIA NeMo has it (24.12 and 25.02, collections/diffusion, DiTLlama*): learned positions, one table an axis for all
blocks, are added before every block, and 8 heads of keys and values serve all heads of queries at every size. Unlike
there, cross-attention's output is added to the residual stream before the MLP, as in the paper.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from opendit.models import plan
from opendit.models.blocks import BlockSpec
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT


@dataclass(frozen=True)
class MovieGenConfig(DiTConfig):
    """Everything needed to build a MovieGen, of clips or pictures."""

    kind: ClassVar[str] = "moviegen"
    bias: bool = False
    positions: str = "learned"
    norm: str = "rms"
    mlp: str = "swiglu"
    kv_heads: int | None = None  # heads of keys and values; None: as many as of queries

    @property
    def block(self) -> BlockSpec:
        return replace(super().block, kv_heads=self.kv_heads)

    @property
    def positions_in_blocks(self) -> bool:
        return self.positions == "learned" and self.revision >= 2

    @property
    def depends_on_revision(self) -> bool:
        return True  # whatever its positions: by name, another number of heads of keys and values goes with it

    def check(self) -> None:
        super().check()
        if self.num_heads % (self.kv_heads or self.num_heads):
            raise ValueError(f"{self.num_heads} heads can't share {self.kv_heads} heads of keys and values evenly")


class MovieGen(DiT):
    """MovieGen on latents (B, C, T, H, W), or of pictures (B, C, H, W)."""

    config: MovieGenConfig


PLAN = replace(plan.PLAN, stages=plan.stages("learned_positions"))  # which are added before every block
ARCHITECTURE = MovieGenConfig, MovieGen, PLAN
