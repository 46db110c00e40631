"""MovieGen's Transformer (Polyak et al., "Movie Gen: A Cast of Media Foundation Models", 2024, sec. 3.1.3): Llama's
blocks with attention in both directions, modulated by the time, with cross-attention to the caption in the middle.

As NVIDIA NeMo has it (24.12 and 25.02, collections/diffusion, DiTLlama*): learned positions, one table an axis for all
blocks, are added before every block, and 8 heads of keys and values serve all heads of queries at every size. Unlike
there, cross-attention's output is added to the residual stream before the MLP, as in the paper.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from opendit.models.attention import Attention, CrossAttention, TokenGrid, of_rows
from opendit.models.blocks import Block, Context, Deferred
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.initialization import Constant, Distribution
from opendit.models.layers import RMSNorm, SwiGlu, modulation


@dataclass(frozen=True)
class MovieGenConfig(DiTConfig):
    """Everything needed to build a MovieGen, of clips or pictures."""

    kind: ClassVar[str] = "moviegen"
    float8: ClassVar[bool] = False  # nothing writes RMSNorm + modulate and SwiGLU in FP8
    recompute: ClassVar[bool] = False  # nor recomputes them

    bias: bool = False
    positions: str = "learned"
    kv_heads: int | None = None  # heads of keys and values; None: as many as of queries

    @property
    def key_value_width(self) -> int:
        return (self.kv_heads or self.num_heads) * self.head_dim

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

    def block_parameters(self) -> int:
        d, hidden, bias = self.hidden_size, self.mlp_hidden, self.bias
        shared = 2 * (d - self.key_value_width) * (d + bias)  # what grouped queries save
        mlp = 3 * d * hidden + (2 * hidden + d) * bias
        norms = (2 + self.cross_attention) * d
        return self.attention_parameters() - shared + mlp + norms


class MovieGenBlock(Block):
    """Grouped-query attention, cross-attention and SwiGLU, each after an RMSNorm; the first and the last with shift,
    scale and gate from the condition."""

    def __init__(self, config: MovieGenConfig):
        super().__init__()
        dim, heads, options = config.hidden_size, config.num_heads, config.options
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = Attention(dim, heads, options, config.kv_heads)
        self.cross_norm = RMSNorm(dim) if config.cross_attention else None
        self.cross_attn = CrossAttention(dim, heads, options) if config.cross_attention else None
        self.mlp = SwiGlu(dim, config.mlp_hidden, options.bias)
        self.adaLN_modulation = modulation(dim, 6, options)

    def deferred(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Deferred:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = m.chunk(6, dim=1)
        rows = of_rows(grid)
        if grid is not None and grid.learned is not None:
            start = [self.take(start, rows) + grid.learned]
        x, y = self.begin(start, shift_a, scale_a, self.attn_norm, rows)
        y = self.attn.output(y, self.ops, grid)
        if self.cross_attn is None:
            x, y = self.ops.residual_then_norm(x, gate_a, y, self.attn.proj, shift_m, scale_m, self.mlp_norm, rows)
        else:
            x = self.ops.linear_gate_residual(x, gate_a, y, self.attn.proj, *rows)
            assert self.cross_norm is not None and context is not None, "cross-attention is of models with a text"
            x = x + self.cross_attn(self.cross_norm(x), *context, grid=grid)
            x, y = self.ops.residual_and_norm(x, shift_m, scale_m, self.mlp_norm, rows)
        return self.mlp.deferred(x, gate_m, y, self.ops)


class MovieGen(DiT):
    """MovieGen on latents (B, C, T, H, W), or of pictures (B, C, H, W)."""

    config: MovieGenConfig

    def make_block(self) -> MovieGenBlock:
        return MovieGenBlock(self.config)

    def initial_distributions(self) -> dict[str, Distribution]:
        norms = ("attn_norm", "cross_norm", "mlp_norm")
        return super().initial_distributions() | {f"blocks.*.{norm}.weight": Constant(1) for norm in norms}


ARCHITECTURE = MovieGenConfig, MovieGen
