"""A plain DiT for pictures and one for clips, with timm's layers and torch operations instead of custom kernels.

They are the benchmarks' baseline and the tests' independent reference, and share no code with opendit/models. PlainDiT
has the parameter names of Meta's release."""

import math
from typing import Any

import numpy as np
import torch
from einops import rearrange
from timm.layers import Mlp, PatchEmbed
from timm.models.vision_transformer import Attention
from torch import Tensor, nn


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_embedding_size=256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.size = frequency_embedding_size

    def forward(self, t):
        half = self.size // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        args = t[:, None].float() * freqs[None]
        weight: Any = self.mlp[0].weight
        return self.mlp(torch.cat([torch.cos(args), torch.sin(args)], dim=-1).to(weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes, hidden_size):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, labels):
        return self.embedding_table(labels)


class Block(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads=num_heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        gelu: Any = lambda: nn.GELU(approximate="tanh")  # noqa: E731 (Any: timm's annotation allows only classes)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=gelu)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


def position_table(dim, height, width):
    """Return MAE's 2D sine-cosine table, (height * width, dim), in float64."""

    def one_axis(positions):
        omega = 1.0 / 10000 ** (np.arange(dim // 4, dtype=np.float64) / (dim / 4.0))
        angles = np.einsum("m,d->md", positions.reshape(-1), omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    across, down = np.meshgrid(np.arange(width, dtype=np.float64), np.arange(height, dtype=np.float64))
    return np.concatenate([one_axis(across), one_axis(down)], axis=1)


def line_table(dim, length):
    """Return the 1D sine-cosine table, (length, dim), in float64."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim / 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class PlainDiT(nn.Module):
    """forward(x (B, C, H, W), t (B,), y (B,)) -> (B, 2C, H, W)."""

    def __init__(self, input_size, patch_size, in_channels, hidden_size, depth, num_heads, num_classes):
        super().__init__()
        self.grid = (input_size[0] // patch_size, input_size[1] // patch_size)
        self.patch_size, self.out_channels = patch_size, in_channels * 2
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size, bias=True)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size)
        table = torch.from_numpy(position_table(hidden_size, *self.grid)).float().unsqueeze(0)
        self.pos_embed = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList([Block(hidden_size, num_heads) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)

    def forward(self, x, t, y):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        (h, w), p, c = self.grid, self.patch_size, self.out_channels
        x = x.reshape(x.shape[0], h, w, p, p, c)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], c, h * p, w * p)


class PlainVDiT(nn.Module):
    """forward(x (B, C, T, H, W), t (B,), y (B,)) -> (B, 2C, T, H, W). All tokens attend to each other."""

    temporal: Tensor
    spatial: Tensor

    def __init__(self, input_size, patch_size, in_channels, hidden_size, depth, num_heads, num_classes, block=Block):
        super().__init__()
        volume, grid = math.prod(patch_size), [size // p for size, p in zip(input_size, patch_size, strict=True)]
        self.patch = dict(zip("pqr", patch_size, strict=True))
        self.grid = dict(zip("thw", grid, strict=True))
        self.embed = nn.Linear(in_channels * volume, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        for name, table in (
            ("temporal", line_table(hidden_size, grid[0])),
            ("spatial", position_table(hidden_size, *grid[1:])),
        ):
            self.register_buffer(name, torch.from_numpy(table).float(), persistent=False)
        self.blocks = nn.ModuleList(block(hidden_size, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, 1, volume * in_channels * 2)

    def condition(self, t, y):
        """Return (the vector for adaLN, further inputs of the blocks)."""
        assert self.y_embedder is not None
        return self.t_embedder(t) + self.y_embedder(y), ()

    def forward(self, x, t, y):
        x = self.embed(rearrange(x, "b c (t p) (h q) (w r) -> b (t h w) (c p q r)", **self.patch))
        x = x + (self.temporal[:, None] + self.spatial).flatten(0, 1)
        c, more = self.condition(t, y)
        for block in self.blocks:
            x = block(x, c, *more)
        x = self.final_layer(x, c)
        return rearrange(x, "b (t h w) (p q r c) -> b c (t p) (h q) (w r)", **self.grid, **self.patch)
