"""Stable Diffusion's autoencoder, with the parameter names and the exact outputs of diffusers' ``AutoencoderKL``.

This class replaces diffusers' class, because importing diffusers takes longer than importing torch. Pixels are (B, 3,
H, W) and latents (B, C, h, w), where H = h * 2 ** (levels - 1). Paper: Rombach et al., "High-Resolution Image Synthesis
with Latent Diffusion Models", CVPR 2022.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6  # epsilon of the group norms
# diffusers' defaults for missing keys.
DEFAULTS: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "scaling_factor": 0.18215,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}
# Name of an attention layer in older files -> current name.
OLDER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def describes(config: Mapping[str, Any]) -> bool:
    """Return True if :class:`AutoencoderKL` supports a configuration's blocks and activation."""
    config, levels = DEFAULTS | dict(config), len(config["block_out_channels"])
    return (
        config["act_fn"] in ("silu", "swish")
        and list(config["down_block_types"]) == ["DownEncoderBlock2D"] * levels
        and list(config["up_block_types"]) == ["UpDecoderBlock2D"] * levels
    )


class AutoencoderKL(nn.Module):
    """The autoencoder for a configuration that :func:`describes` accepts, with default initialisation. DEFAULTS fills
    in missing keys."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.config = config = DEFAULTS | dict(config)
        channels = config["latent_channels"]
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1) if config["use_quant_conv"] else None
        self.post_quant_conv = nn.Conv2d(channels, channels, 1) if config["use_post_quant_conv"] else None

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the mean and the log variance of the latents, concatenated: (B, 2 C, h, w)."""
        moments = self.encoder(pixels)
        return moments if self.quant_conv is None else self.quant_conv(moments)

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(latents))


def canonical_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the attention layers of older files to the current names."""
    renamed = {}
    for name, tensor in state.items():
        path, layer, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", name)
        if layer in OLDER and ".attentions." in path:
            name = f"{path}.{OLDER[layer]}.{kind}"
        renamed[name] = tensor
    return renamed


class Encoder(nn.Module):
    """Network from pixels (B, 3, H, W) to moments (B, 2 C, h, w)."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        widths, groups = config["block_out_channels"], config["norm_num_groups"]
        self.conv_in = _conv(config["in_channels"], widths[0])
        self.down_blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            before, sampler = widths[max(0, level - 1)], Downsample if level + 1 < len(widths) else None
            layers = config["layers_per_block"]
            self.down_blocks.append(Level(before, width, layers, groups, "downsamplers", sampler))
        self.mid_block = Middle(widths[-1], groups, config["mid_block_add_attention"])
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = _conv(widths[-1], 2 * config["latent_channels"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nn.Module):
    """Network from latents (B, C, h, w) to pixels (B, 3, H, W)."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        widths, groups = list(reversed(config["block_out_channels"])), config["norm_num_groups"]
        self.conv_in = _conv(config["latent_channels"], widths[0])
        self.mid_block = Middle(widths[0], groups, config["mid_block_add_attention"])
        self.up_blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            before, sampler = widths[max(0, level - 1)], Upsample if level + 1 < len(widths) else None
            layers = config["layers_per_block"] + 1
            self.up_blocks.append(Level(before, width, layers, groups, "upsamplers", sampler))
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = _conv(widths[-1], config["out_channels"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class Level(nn.Module):
    """Residual blocks at one resolution. sampler: class of a last module that changes the resolution, or None.
    samplers: name of this module's attribute."""

    def __init__(self, inputs: int, width: int, layers: int, groups: int, samplers: str, sampler: type[Any] | None):
        super().__init__()
        self.resnets = nn.ModuleList(Residual(inputs if i == 0 else width, width, groups) for i in range(layers))
        self._samplers = samplers
        if sampler is not None:
            self.add_module(samplers, nn.ModuleList([sampler(width)]))

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        for sampler in getattr(self, self._samplers, ()):
            x = sampler(x)
        return x


class Middle(nn.Module):
    """Two residual blocks, optionally with attention between them."""

    def __init__(self, width: int, groups: int, attention: bool):
        super().__init__()
        self.attentions = nn.ModuleList([SpatialAttention(width, groups)] if attention else [])
        self.resnets = nn.ModuleList(Residual(width, width, groups) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class Residual(nn.Module):
    """Two convolutions with group norms, and a residual connection."""

    def __init__(self, inputs: int, width: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs, EPS), _conv(inputs, width)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width, EPS), _conv(width, width)
        self.conv_shortcut = nn.Conv2d(inputs, width, 1) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class SpatialAttention(nn.Module):
    """Self-attention over all positions, with one head."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.group_norm(x.flatten(2)).transpose(1, 2)  # (B, h w, width)
        q, k, v = (layer(tokens).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        attended = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        # Keep diffusers' order of terms. The first term sets the sum's memory format (channels last), and the format
        # changes the rounding of later convolutions.
        return self.to_out[0](attended).transpose(1, 2).reshape(x.shape) + x


class Downsample(nn.Module):
    """Halve height and width. The convolution needs odd sides, so pad with zeros at the bottom and the right."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double height and width: repeat every value in a 2 x 2 square, then convolve."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)
