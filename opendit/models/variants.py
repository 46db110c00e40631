"""The architectures besides DiT: vDiT (clips), ST-DiT (attention along axes), MovieGen (Llama's blocks), EC-DiT
(experts).

To add an architecture, write a configuration and a network, and add a row to ``CLASSES`` in opendit/models/zoo.py and
to ``KINDS`` in opendit/config/architectures.py.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from opendit.models.blocks import MLP, BlockSpec, Branch
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.experts import Experts, chosen_tokens
from opendit.models.plan import PLAN, stages


@dataclass(frozen=True)
class VDiTConfig(DiTConfig):
    """The configuration of a vDiT: patches have frames, rows and columns, and tokens attend to the tokens of all
    frames."""

    kind: ClassVar[str] = "vdit"

    input_size: tuple[int, int, int]  # (frames, height, width) of the latents
    patch_size: tuple[int, int, int]  # (frames, rows, columns)


class VDiT(DiT):
    """Diffusion Transformer on latents (B, C, T, H, W), in which every token attends to the tokens of all frames."""


@dataclass(frozen=True)
class STDiTConfig(VDiTConfig):
    """The configuration of an ST-DiT: blocks with attention within frames, then along time. For T frames of S tokens,
    attention costs T S^2 + S T^2 instead of (T S)^2. The blocks follow Latte (Ma et al. 2024) and Open-Sora; each
    branch is modulated, as in NeMo's ST-DiT."""

    kind: ClassVar[str] = "stdit"
    axial_attention: ClassVar[bool] = True
    why_no_packs: ClassVar[str] = "they attend along the axes of one grid, and each segment has its own"

    full_attention: bool = False  # True for a third self-attention, over all tokens of the clip

    @property
    def branches(self) -> tuple[Branch, ...]:
        """A block's branches: attention within frames, attention along time, attention to all tokens (if configured),
        attention to the caption, and the MLP. Each branch has a separate shift, scale and gate."""
        full = (Branch("full_attn", "all"),) if self.full_attention else ()
        caption = (Branch("cross_attn", "caption"),) if self.cross_attention else ()
        return (Branch("spatial_attn", "frame"), Branch("temporal_attn", "time"), *full, *caption, MLP)

    @property
    def sequence_types(self) -> tuple[str, ...]:
        return super().sequence_types if self.full_attention else ("axial",)


class STDiT(DiT):
    """Spatio-temporal Diffusion Transformer on latents (B, C, T, H, W); a picture is a clip with T = 1."""

    config: STDiTConfig


@dataclass(frozen=True)
class MovieGenConfig(DiTConfig):
    """The configuration of a MovieGen for clips or pictures (Polyak et al., "Movie Gen: A Cast of Media Foundation
    Models", 2024, sec. 3.1.3): Llama's blocks with bidirectional attention, modulation by the time, and cross-attention
    to the caption between attention and MLP.

    The details follow NVIDIA NeMo (24.12 and 25.02, collections/diffusion, DiTLlama*): learned positions (one table per
    axis, shared by all blocks) are added before every block. In all of NeMo's sizes, query heads share 8 heads of keys
    and values. Unlike in NeMo, cross-attention's output is added to the residual before the MLP, as in the paper.
    """

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
MOVIEGEN_PLAN = replace(PLAN, stages=stages("learned_positions"))


@dataclass(frozen=True)
class ECDiTConfig(DiTConfig):
    """The configuration of an EC-DiT: blocks with a shared MLP and many small experts that choose their tokens (Sun et
    al., "EC-DiT: Scaling Diffusion Transformers with Adaptive Expert-Choice Routing", 2024). ``mlp_ratio`` is the
    shared MLP's ratio.

    The routing follows the paper; the sizes are OpenDiT's (docs/models.md). In the paper, an expert is as large as an
    MLP.
    """

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
