"""DiT: a Transformer that denoises latent patches (Peebles & Xie, "Scalable Diffusion Models with
Transformers", ICCV 2023), with adaLN-Zero conditioning on timestep and class or caption.

Parameter names are those of Meta's release, so its checkpoints load strictly.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opendit.models import bytes_text
from opendit.models.bytes_text import BytesEncoder
from opendit.models.conditioning import CaptionEmbedder, Condition, TextConfig
from opendit.models.layers import (
    TIME_FREQUENCIES,
    Attention,
    BlockOps,
    CrossAttention,
    LabelEmbedder,
    Mlp,
    PatchEmbed,
    Shards,
    TimestepEmbedder,
    add_table,
    layer_norm,
    local_attention,
    sincos_position_table,
)

Context = tuple[Tensor, Tensor]  # what blocks attend to: tokens (B, L, D) and their mask (B, L) bool


@dataclass(frozen=True)
class DiTConfig:
    """Everything needed to build a DiT; it travels inside checkpoints.

    Conditioned on ``num_classes`` labels, or on captions when ``text`` is given (then num_classes is None).
    """

    kind: ClassVar[str] = "dit"

    input_size: tuple[int, ...]  # height, width of the latent
    patch_size: int
    in_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int | None = None
    mlp_ratio: float = 4.0
    learn_sigma: bool = True
    text: TextConfig | None = None

    @property
    def patch(self) -> tuple[int, ...]:
        """Sides of a patch, one per dimension of the input."""
        return (self.patch_size,) * 2

    @property
    def grid(self) -> tuple[int, ...]:
        return self.grid_of(self.input_size)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Patches along each side of an input of ``size``. Raises ValueError if the patch does not divide it."""
        if len(size) != len(self.patch) or any(s < 1 or s % p for s, p in zip(size, self.patch, strict=False)):
            raise ValueError(f"an input of {_times(size)} does not divide by patch size {_times(self.patch)}")
        return tuple(s // p for s, p in zip(size, self.patch, strict=True))

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    def to_dict(self) -> dict:
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict) -> "DiTConfig":
        """The inverse of to_dict, also after a trip through JSON (see opendit.models.config_from_dict)."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "kind"}
        if values.get("text") is not None:
            values["text"] = TextConfig(**values["text"])
        return cls(**values)

    def forward_flops(self) -> int:
        """FLOPs of one sample's forward pass in its matrix products (2 a multiply-add); training is 3x."""
        n, d = self.tokens, self.hidden_size
        hidden = int(d * self.mlp_ratio)
        patch = math.prod(self.patch)
        block = 2 * n * d * (3 * d) + 4 * n * n * d + 2 * n * d * d + 4 * n * d * hidden + 2 * d * 6 * d
        embed = 2 * n * patch * self.in_channels * d + 2 * TIME_FREQUENCIES * d + 2 * d * d
        final = 2 * n * d * patch * self.out_channels + 2 * d * 2 * d
        if self.text is not None:
            m, width = self.text.max_tokens, self.text.width
            embed += 2 * width * d + 2 * d * d
            if self.text.cross_attention:
                embed += 2 * m * width * d
                block += 2 * n * d * d + 2 * m * d * (2 * d) + 4 * n * m * d + 2 * n * d * d
            if self.text.inside:
                embed += bytes_text.forward_flops(self.text)
        return self.depth * block + embed + final

    def parameters(self) -> int:
        """Number of trainable weights, without building the model."""
        d, hidden, patch = self.hidden_size, int(self.hidden_size * self.mlp_ratio), math.prod(self.patch)
        block = 4 * d * d + 4 * d + 2 * d * hidden + hidden + d + 6 * d * d + 6 * d
        embed = (patch * self.in_channels + 1) * d + (TIME_FREQUENCIES + 1 + d + 1) * d
        final = 2 * d * d + 2 * d + (d + 1) * patch * self.out_channels
        if self.text is None:
            embed += (self.num_classes + 1) * d
        else:
            embed += (self.text.width + 1 + d + 1) * d
            if self.text.cross_attention:
                embed += (self.text.width + 1) * d
                block += 4 * d * d + 4 * d
            if self.text.inside:
                embed += bytes_text.parameters(self.text)
        return self.depth * block + embed + final


class DiTBlock(nn.Module):
    """Attention and MLP, each with its own shift, scale and gate from the condition (adaLN-Zero).

    With ``cross_attention``, a text model's block attends to the caption's tokens between the two, as PixArt-alpha
    does (Chen et al. 2024, sec. 2.3); its zero-initialised output projection is its gate.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, cross_attention: bool = False):
        super().__init__()
        self.attn = Attention(dim, num_heads)
        self.cross_attn = CrossAttention(dim, num_heads) if cross_attention else None
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.ops = BlockOps()

    def forward(self, x: Tensor, c: Tensor, context: Context | None = None, shards: Shards | None = None) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x, y = self.ops.residual_and_norm(x, shift_a, scale_a)
        heads = self.attn.heads(y, self.ops, shards)
        if self.cross_attn is None:
            x, y = self.ops.residual_then_norm(x, gate_a, heads, self.attn.proj, shift_m, scale_m)
        else:
            x = self.ops.linear_gate_residual(x, gate_a, heads, self.attn.proj)
            x = x + self.cross_attn(layer_norm(x), *context)
            y = self.ops.layernorm_modulate(x, shift_m, scale_m)
        return self.ops.linear_gate_residual(x, gate_m, self.mlp.hidden(y, self.ops), self.mlp.fc2)


class FinalLayer(nn.Module):
    """adaLN, then each token to its patch: (B, N, D) to (B, N, out_features)."""

    def __init__(self, dim: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(dim, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.ops = BlockOps()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(self.ops.layernorm_modulate(x, shift, scale))


class DiT(nn.Module):
    """Diffusion Transformer on latents (B, C, H, W), of the configured height and width or any that divides.

    Weights may be fp32, bf16 or fp16; activations follow them, timesteps and positions stay fp32.
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        if (config.num_classes is None) == (config.text is None):
            raise ValueError("a model is conditioned on num_classes or on text: give one of them")
        self.config = config
        dim, text = config.hidden_size, config.text
        self.x_embedder = PatchEmbed(config.patch, config.in_channels, dim)
        self.t_embedder = TimestepEmbedder(dim)
        self.text_encoder = BytesEncoder(text) if text and text.inside else None
        self.y_embedder = CaptionEmbedder(text, dim) if text else LabelEmbedder(config.num_classes, dim)
        self.register_positions()
        cross_attention = bool(text and text.cross_attention)
        self.blocks = nn.ModuleList(
            DiTBlock(dim, config.num_heads, config.mlp_ratio, cross_attention) for _ in range(config.depth)
        )
        self.final_layer = FinalLayer(dim, math.prod(config.patch) * config.out_channels)
        self.grad_checkpoint = False
        self.sequence: Callable[[int], Shards] | None = None  # N tokens as the ranks of a group share them
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Meta's initialisation: Xavier everywhere, N(0, 0.02) embedders, zero modulation and output.

        The output of cross-attention starts at zero too, so that a block with it starts as one without.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        projection = self.x_embedder.proj
        nn.init.xavier_uniform_(projection.weight.view(projection.weight.shape[0], -1))
        nn.init.zeros_(projection.bias)
        if self.config.text is None:
            nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for i in (0, 2):
            nn.init.normal_(self.t_embedder.mlp[i].weight, std=0.02)
        for layer in [block.adaLN_modulation[-1] for block in self.blocks] + [
            *(block.cross_attn.proj for block in self.blocks if block.cross_attn is not None),
            self.final_layer.adaLN_modulation[-1],
            self.final_layer.linear,
        ]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def use(
        self, *, ops: BlockOps | None = None, attend=None, sequence: Callable[[int], Shards] | None = None
    ) -> "DiT":
        """Puts kernels or a parallel strategy in the place of the torch expressions; returns self.

        With ``sequence`` (opendit.parallel.sequence) several ranks share every sample: all of them call the model with
        the same arguments, and all get the whole result. Gradients are those of their own tokens, times their number.
        """
        self.sequence = sequence
        for block in self.blocks:
            block.ops = ops or BlockOps()
            block.attn.attend = attend or local_attention
        self.final_layer.ops = ops or BlockOps()
        return self

    def compile_blocks(self, **options) -> None:
        """torch.compile for blocks and final layer, in place; options as of torch.compile.

        They share one graph for each shape they meet. The rest is small, and differs in every model.
        """
        for part in (*self.blocks, self.final_layer):
            part.compile(dynamic=False, **options)

    def place(self, device: torch.device | str, dtype: torch.dtype) -> "DiT":
        """Moves the model: weights become ``dtype``, position tables stay fp32; returns self."""
        tables = {name: table.to(device) for name, table in self.named_buffers()}
        self.to(device, dtype)
        for name, table in tables.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, table)
        return self

    def forward(self, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """Predicts noise (and, with learned sigma, the variance fraction) of noised latents.

        Args:
            x: (B, C, H, W) noised latents, any float dtype.
            t: (B,) timesteps.
            y: (B,) int64 labels, ``num_classes`` being the null class; of a text model a TextCondition, or with the
                bytes encoder the ids (B, L) int64.

        Returns:
            (B, out_channels, H, W) in the weights' dtype.

        Raises:
            ValueError: the patch does not divide H or W.
        """
        grid = self.config.grid_of(tuple(x.shape[2:]))
        patches, positions = self.x_embedder.patches(x), self.positions(grid)
        shards = self.sequence and self.sequence(patches.shape[1])
        if shards:
            patches, positions = shards.take(patches), shards.take(positions)
        x = self.x_embedder.project(patches)
        x = add_table(x, positions)  # in fp32: bf16 positions of neighbours would coincide
        c, context = self.condition(t, y)
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                # (Nothing in a block is random; asking for the random state would break a CUDA graph's recording.)
                x = checkpoint(block, x, c, context, shards, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, c, context, shards)
        x = self.final_layer(x, c)
        return self.unpatchify(shards.gather(x) if shards else x, grid)

    def condition(self, t: Tensor, y: Condition) -> tuple[Tensor, Context | None]:
        """The vector (B, D) of adaLN, and what blocks with cross-attention attend to."""
        if self.config.text is None:
            return self.t_embedder(t) + self.y_embedder(y), None
        vector, context = self.y_embedder(y if self.text_encoder is None else self.text_encoder(y))
        return self.t_embedder(t) + vector, context

    def register_positions(self) -> None:
        """Makes the fixed tables of the configured size."""
        # A buffer under the name of Meta's frozen parameter: saved and loaded, never trained or sharded.
        table = sincos_position_table(self.config.hidden_size, *self.config.grid)
        self.register_buffer("pos_embed", table.unsqueeze(0))

    def positions(self, grid: tuple[int, ...]) -> Tensor:
        """(1, N, D) fp32 positions of a grid of patches."""
        return self.table("pos_embed", grid, self.config.grid)

    def table(self, name: str, sizes: tuple[int, ...], configured: tuple[int, ...]) -> Tensor:
        """The buffer ``name`` (1, N, D), or its like for other sizes than the configured ones, made once."""
        buffer = self.get_buffer(name)
        if sizes == configured:
            return buffer
        cache = self.__dict__.setdefault("_other_tables", {})
        key = (sizes, buffer.device)
        if key not in cache:
            with torch.inference_mode(False):  # it may serve training after a first call in inference mode
                made = sincos_position_table(self.config.hidden_size, *sizes, device=buffer.device)
                cache[key] = made.to(buffer.dtype).unsqueeze(0)
        return cache[key]

    def unpatchify(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Tokens (B, N, p * p * C) to (B, C, H, W), for any number of dimensions."""
        patch, axes = self.config.patch, len(grid)
        x = x.view(x.shape[0], *grid, *patch, self.config.out_channels)
        order = [axis for i in range(axes) for axis in (1 + i, 1 + axes + i)]  # row, row in patch, column, ...
        sides = (g * p for g, p in zip(grid, patch, strict=True))
        return x.permute(0, 1 + 2 * axes, *order).reshape(x.shape[0], self.config.out_channels, *sides)


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
