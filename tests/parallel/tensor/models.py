"""Tiny models of every architecture, with 15 tokens: a grid of 3 x 5, or 3 frames of 5 tokens.

Ranks can divide the widths evenly, but not the tokens.
"""

from dataclasses import replace

from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.models.variants import ECDiTConfig, MovieGenConfig, STDiTConfig, VDiTConfig

PICTURE = {"input_size": (6, 10), "patch_size": 2, "in_channels": 3, "hidden_size": 48, "depth": 2, "num_heads": 4}
CLIP = PICTURE | {"input_size": (3, 2, 10), "patch_size": (1, 2, 2)}
T5 = TextConfig("t5", 24, 7, True)
BYTES = TextConfig("bytes", 32, 7, True)
DIT = DiTConfig(**PICTURE, num_classes=5)
MODELS = {
    "DiT": DIT,
    "DiT, every option": replace(DIT, qk_norm=True, adaln_lora=6, positions="rope"),
    "DiT, mixed": replace(DIT, norm="rms", mlp="swiglu", qk_norm=True, positions="rope"),
    "DiT of text": DiTConfig(**PICTURE, text=BYTES, positions="learned"),
    "vDiT": VDiTConfig(**CLIP, text=T5, qk_norm=True),
    "vDiT, no bias": VDiTConfig(**CLIP, num_classes=5, bias=False, adaln_lora=5),
    "vDiT, mixed": VDiTConfig(**CLIP, text=T5, norm="rms", mlp="swiglu", positions="learned", mlp_ratio=2.0),
    "ST-DiT": STDiTConfig(**CLIP, text=T5, full_attention=True, qk_norm=True),
    "Latte": STDiTConfig(**CLIP, num_classes=5),
    "MovieGen": MovieGenConfig(**CLIP, text=T5, kv_heads=2, qk_norm=True),
    "MovieGen, bias": MovieGenConfig(**CLIP, text=BYTES, bias=True, mlp_ratio=2.5),
    "EC-DiT": ECDiTConfig(**PICTURE, num_classes=5, experts=8, expert_hidden=10, mlp_ratio=2.0),
    "EC-DiT of text": ECDiTConfig(**CLIP, text=T5, experts=4, expert_hidden=6, expert_capacity=1.3),
}
