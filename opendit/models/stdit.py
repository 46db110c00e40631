"""ST-DiT: blocks with attention within frames, then along time. For T frames of S tokens, the cost of attention grows
with T S^2 + S T^2 instead of (T S)^2.

The blocks are those of Latte (Ma et al. 2024) and Open-Sora, with a modulation for each branch as in NeMo's ST-DiT.
"""

from dataclasses import dataclass
from typing import ClassVar

from opendit.models.blocks import MLP, Branch
from opendit.models.dit import DiT
from opendit.models.vdit import VDiTConfig


@dataclass(frozen=True)
class STDiTConfig(VDiTConfig):
    """The configuration of an ST-DiT."""

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
        """The sequence-parallel strategies: those of a DiT if there is attention to all tokens, otherwise only
        "axial"."""
        return super().sequence_types if self.full_attention else ("axial",)


class STDiT(DiT):
    """Spatio-temporal Diffusion Transformer on latents (B, C, T, H, W); a picture is a clip with T = 1."""

    config: STDiTConfig


ARCHITECTURE = STDiTConfig, STDiT
