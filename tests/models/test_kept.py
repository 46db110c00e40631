"""Test the memory that each architecture's blocks save for the backward pass against opendit.training.memory."""

import pytest
import torch

from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.variants import ECDiTConfig, MovieGenConfig, STDiTConfig
from opendit.models.zoo import build_model, plan_of
from opendit.training.memory import Setup
from tests.memory import kept_bytes
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs

TEXT = TextConfig("t5", 8, 16, True)
SHAPE = {"in_channels": 2, "hidden_size": 96, "depth": 3, "num_heads": 3}
PICTURE = SHAPE | {"input_size": (16, 16), "patch_size": 2, "mlp_ratio": 3.0}
CLIP = SHAPE | {"input_size": (8, 16, 16), "patch_size": (2, 2, 2)}
TURNED = {"qk_norm": True, "positions": "rope"}
CASES = [
    DiTConfig(**PICTURE, text=TEXT, qk_norm=True),
    DiTConfig(**PICTURE, num_classes=3, positions="rope", bias=False),
    STDiTConfig(**CLIP, num_classes=3),
    STDiTConfig(**CLIP, text=TEXT, full_attention=True, **TURNED),
    MovieGenConfig(**CLIP, num_classes=3),
    MovieGenConfig(**CLIP, text=TEXT, kv_heads=1, **TURNED),
    ECDiTConfig(**PICTURE, num_classes=3, experts=8, expert_hidden=48),
    ECDiTConfig(**PICTURE, text=TEXT, experts=8, expert_hidden=24, expert_capacity=4.0),
    DiTConfig(**PICTURE, text=TEXT, norm="rms", mlp="swiglu", **TURNED),
    DiTConfig(**PICTURE, num_classes=3, norm="rms"),
    DiTConfig(**PICTURE, num_classes=3, mlp="swiglu"),
    STDiTConfig(**CLIP, text=TEXT, norm="rms", mlp="swiglu"),
    MovieGenConfig(**CLIP, text=TEXT, norm="layer", mlp="gelu"),
]


@pytest.mark.parametrize("config", CASES, ids=lambda config: config.kind)
def test_units(config):
    model, arguments = randomised(build_model(config)), inputs(config, 3, torch.float32)
    kept = kept_bytes(lambda: model(*arguments))
    model.blocks = torch.nn.ModuleList()  # what remains is outside the blocks
    kept -= kept_bytes(lambda: model(*arguments))
    unit = 3 * config.tokens * config.hidden_size * 4
    small = 4 * 3 * config.tokens * (4 + config.num_heads) + 4 * 3 * (config.modulation_width + config.hidden_size)
    setup = Setup(precision="fp32", fused=False)
    expected = plan_of(config).kept(config, setup.execution).units + small / unit
    assert kept / unit / config.depth == pytest.approx(expected, rel=0.02)
