"""ST-DiT: attention within frames and along time in turn, whose work grows with T S^2 + S T^2 in place of (T S)^2.

As in Latte (Ma et al. 2024) and Open-Sora, with a modulation for each part of a block as in NeMo's ST-DiT.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from opendit.models.attention import Attention, CrossAttention, FrameAttention, TemporalAttention, TokenGrid
from opendit.models.blocks import Block, Context, Deferred
from opendit.models.dit import DiT
from opendit.models.initialization import Distribution, initial_attention
from opendit.models.layers import Mlp, modulation
from opendit.models.vdit import VDiTConfig


@dataclass(frozen=True)
class STDiTConfig(VDiTConfig):
    """Everything needed to build an ST-DiT."""

    kind: ClassVar[str] = "stdit"
    axial_attention: ClassVar[bool] = True
    why_no_packs: ClassVar[str] = "they attend along the axes of one grid, and each segment has its own"
    cross_modulations: ClassVar[int] = 3

    full_attention: bool = False  # a third self-attention, over all tokens of the clip

    @property
    def modulations(self) -> int:
        return 12 if self.full_attention else 9

    @property
    def sequence_types(self) -> tuple[str, ...]:
        """The types of the attention to all tokens, or only "axial" if there is none."""
        return super().sequence_types if self.full_attention else ("axial",)

    def block_parameters(self) -> int:
        return (2 + self.full_attention) * self.attention_parameters() + self.mlp_parameters()


class STDiTBlock(Block):
    """Attention within frames, along time and, if asked for, to all tokens; then to the caption; then the MLP. Each has
    its own shift, scale and gate from the condition."""

    def __init__(self, config: STDiTConfig):
        super().__init__()
        dim, heads, options = config.hidden_size, config.num_heads, config.options
        self.spatial_attn = FrameAttention(dim, heads, options)
        self.temporal_attn = TemporalAttention(dim, heads, options)
        self.full_attn = Attention(dim, heads, options) if config.full_attention else None
        self.cross_attn = CrossAttention(dim, heads, options) if config.cross_attention else None
        self.mlp = Mlp(dim, config.mlp_hidden, options.bias)
        self.parts = config.modulations // 3 + config.cross_attention
        self.adaLN_modulation = modulation(dim, 3 * self.parts, options)

    @property
    def attentions(self) -> list[Attention]:
        """Those between the clip's own tokens, in their order."""
        return [part for part in (self.spatial_attn, self.temporal_attn, self.full_attn) if part is not None]

    def deferred(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Deferred:
        modulations = iter(m.unflatten(1, (self.parts, 3, -1)).unbind(1))
        shift, scale, gate = next(modulations).unbind(1)
        x, y = self.begin(start, shift, scale)
        for attention in self.attentions:
            y, last_gate = attention.output(y, self.ops, grid), gate
            shift, scale, gate = next(modulations).unbind(1)
            if attention is self.attentions[-1] and self.cross_attn is not None:
                # Apart, because FP8's joined operation gives what only a linear layer of BlockOps can read.
                x = self.ops.linear_gate_residual(x, last_gate, y, attention.proj)
                y = self.ops.layernorm_modulate(x, shift, scale)
            else:
                x, y = self.ops.residual_then_norm(x, last_gate, y, attention.proj, shift, scale)
        if self.cross_attn is not None:
            assert context is not None, "cross-attention is of models with a text"
            y, last_gate = self.cross_attn.output(y, *context), gate
            shift, scale, gate = next(modulations).unbind(1)
            x, y = self.ops.residual_then_norm(x, last_gate, y, self.cross_attn.proj, shift, scale)
        return self.mlp.deferred(x, gate, y, self.ops)


class STDiT(DiT):
    """Spatio-temporal Diffusion Transformer on latents (B, C, T, H, W); a picture is a clip with T = 1."""

    config: STDiTConfig

    def make_block(self) -> STDiTBlock:
        return STDiTBlock(self.config)

    def initial_distributions(self) -> dict[str, Distribution]:
        distributions = super().initial_distributions()
        # All parts have gates, which are zero: cross-attention's output, zero too, would stop its own gate's gradient.
        for name in ("spatial_attn", "temporal_attn", "full_attn", "cross_attn"):
            distributions |= initial_attention(f"blocks.*.{name}")
        return distributions


ARCHITECTURE = STDiTConfig, STDiT
