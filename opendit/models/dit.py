"""DiT: a Transformer that denoises latent patches (Peebles & Xie, "Scalable Diffusion Models with
Transformers", ICCV 2023), with adaLN-Zero conditioning on timestep and class.

Parameter names are those of Meta's release, so its checkpoints load strictly.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opendit.models.layers import (
    TIME_FREQUENCIES,
    Attention,
    BlockOps,
    LabelEmbedder,
    Mlp,
    PatchEmbed,
    TimestepEmbedder,
    local_attention,
    sincos_position_table,
)


@dataclass(frozen=True)
class DiTConfig:
    """Everything needed to build a DiT; it travels inside checkpoints."""

    input_size: tuple[int, int]  # height, width of the latent
    patch_size: int
    in_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int
    mlp_ratio: float = 4.0
    learn_sigma: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        return self.input_size[0] // self.patch_size, self.input_size[1] // self.patch_size

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "DiTConfig":
        return cls(**{**values, "input_size": tuple(values["input_size"])})

    def forward_flops(self) -> int:
        """FLOPs of one sample's forward pass in its matrix products (2 a multiply-add); training is 3x."""
        n, d = self.tokens, self.hidden_size
        hidden = int(d * self.mlp_ratio)
        patch = self.patch_size**2
        block = 2 * n * d * (3 * d) + 4 * n * n * d + 2 * n * d * d + 4 * n * d * hidden + 2 * d * 6 * d
        embed = 2 * n * patch * self.in_channels * d + 2 * TIME_FREQUENCIES * d + 2 * d * d
        final = 2 * n * d * patch * self.out_channels + 2 * d * 2 * d
        return self.depth * block + embed + final

    def parameters(self) -> int:
        """Number of trainable weights, without building the model."""
        d, hidden, patch = self.hidden_size, int(self.hidden_size * self.mlp_ratio), self.patch_size**2
        block = 4 * d * d + 4 * d + 2 * d * hidden + hidden + d + 6 * d * d + 6 * d
        embed = (patch * self.in_channels + 1) * d + (self.num_classes + 1) * d + (TIME_FREQUENCIES + 1 + d + 1) * d
        final = 2 * d * d + 2 * d + (d + 1) * patch * self.out_channels
        return self.depth * block + embed + final


class DiTBlock(nn.Module):
    """Attention and MLP, each with its own shift, scale and gate from the condition (adaLN-Zero)."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.attn = Attention(dim, num_heads)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.ops = BlockOps()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        branch = self.attn(self.ops.layernorm_modulate(x, shift_a, scale_a))
        x, y = self.ops.residual_then_norm(x, gate_a, branch, shift_m, scale_m)
        return self.ops.gate_residual(x, gate_m, self.mlp(y))


class FinalLayer(nn.Module):
    """adaLN, then each token to its patch of pixels."""

    def __init__(self, dim: int, patch_size: int, out_channels: int):
        super().__init__()
        self.linear = nn.Linear(dim, patch_size**2 * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.ops = BlockOps()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(self.ops.layernorm_modulate(x, shift, scale))


class DiT(nn.Module):
    """Diffusion Transformer on latents (B, C, H, W).

    Weights may be fp32, bf16 or fp16; activations follow them, timesteps and positions stay fp32.
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        for size in config.input_size:
            if size % config.patch_size:
                raise ValueError(f"an input of {config.input_size} does not divide by patch size {config.patch_size}")
        self.config = config
        dim = config.hidden_size
        self.x_embedder = PatchEmbed(config.patch_size, config.in_channels, dim)
        self.t_embedder = TimestepEmbedder(dim)
        self.y_embedder = LabelEmbedder(config.num_classes, dim)
        # A buffer under the name of Meta's frozen parameter: saved and loaded, never trained or sharded.
        self.register_buffer("pos_embed", sincos_position_table(dim, *config.grid).unsqueeze(0))
        self.blocks = nn.ModuleList(DiTBlock(dim, config.num_heads, config.mlp_ratio) for _ in range(config.depth))
        self.final_layer = FinalLayer(dim, config.patch_size, config.out_channels)
        self.grad_checkpoint = False
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Meta's initialisation: Xavier everywhere, N(0, 0.02) embedders, zero modulation and output."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        projection = self.x_embedder.proj
        nn.init.xavier_uniform_(projection.weight.view(projection.weight.shape[0], -1))
        nn.init.zeros_(projection.bias)
        for weight in (self.y_embedder.embedding_table.weight, *(self.t_embedder.mlp[i].weight for i in (0, 2))):
            nn.init.normal_(weight, std=0.02)
        for layer in [block.adaLN_modulation[-1] for block in self.blocks] + [
            self.final_layer.adaLN_modulation[-1],
            self.final_layer.linear,
        ]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def use(self, *, ops: BlockOps | None = None, attend=None) -> "DiT":
        """Puts kernels or a parallel strategy in the place of the torch expressions; returns self."""
        for block in self.blocks:
            block.ops = ops or BlockOps()
            block.attn.attend = attend or local_attention
        self.final_layer.ops = ops or BlockOps()
        return self

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predicts noise (and, with learned sigma, the variance fraction) of noised latents.

        Args:
            x: (B, C, H, W) noised latents, any float dtype.
            t: (B,) timesteps.
            y: (B,) int64 labels; ``num_classes`` is the null class.

        Returns:
            (B, out_channels, H, W) in the weights' dtype.
        """
        x = self.x_embedder(x)
        x = (x + self.pos_embed).to(x.dtype)  # added in fp32: bf16 positions of neighbours would coincide
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, c, use_reentrant=False)
            else:
                x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))

    def unpatchify(self, x: Tensor) -> Tensor:
        """Tokens (B, N, p * p * C) to (B, C, H, W)."""
        (rows, columns), p = self.config.grid, self.config.patch_size
        x = x.view(x.shape[0], rows, columns, p, p, self.config.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], self.config.out_channels, rows * p, columns * p)
