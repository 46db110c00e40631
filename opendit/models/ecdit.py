"""EC-DiT: a DiT whose blocks have a shared MLP and many small experts, which choose their tokens (Sun et al., "EC-DiT:
Scaling Diffusion Transformers with Adaptive Expert-Choice Routing", 2024).

The routing follows the paper; the sizes are OpenDiT's (docs/models.md). In the paper, an expert is as large as an MLP.
NVIDIA NeMo adds experts of width 1024 with a capacity factor of 8 to MovieGen-1B.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from opendit.models.blocks import BlockSpec
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.experts import Experts, chosen_tokens


@dataclass(frozen=True)
class ECDiTConfig(DiTConfig):
    """The configuration of an EC-DiT. ``mlp_ratio`` is the ratio of the shared MLP."""

    kind: ClassVar[str] = "ecdit"
    why_no_packs: ClassVar[str] = "experts choose among the tokens of whole samples"

    experts: int = 64
    expert_hidden: int = 144  # width of an expert's hidden layer
    expert_capacity: float = 2.0  # average number of experts per token

    @property
    def block(self) -> BlockSpec:
        return replace(super().block, experts=Experts(self.experts, self.expert_hidden, self.expert_capacity))

    @property
    def chosen(self) -> int:
        """Number of a sample's tokens that an expert chooses."""
        return chosen_tokens(self.tokens, self.experts, self.expert_capacity)

    def check(self) -> None:
        super().check()
        if self.mlp != "gelu":
            raise ValueError(f"--mlp {self.mlp}: not for EC-DiT, whose experts and shared MLP are GELU's; leave it out")
        if not 0 < self.expert_capacity <= self.experts:
            raise ValueError(
                f"--expert_capacity {self.expert_capacity}: out of range; give more than 0 and at most the "
                f"{self.experts} experts"
            )


class ECDiT(DiT):
    """DiT with experts, for pictures or clips."""

    config: ECDiTConfig


ARCHITECTURE = ECDiTConfig, ECDiT
