"""Test MovieGen's block against Llama's formulas."""

import itertools

import pytest
import torch

from opendit.models.attention import TokenGrid
from opendit.models.blocks import Block
from opendit.models.conditioning import TextConfig
from opendit.models.positions import grid_coordinates, rotary_table
from opendit.models.variants import MovieGenConfig
from tests.models import plain
from tests.models.test_attention import EXACT_TABLE, randomised


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("text", [None, TextConfig("t5", 8, 5, True)])
@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "positions": "rope", "bias": True}])
def test_block(kv_heads, text, more):
    grid = (2, 1, 3)
    classes = None if text else 3
    config = MovieGenConfig(
        grid, (1, 1, 1), 2, 40, 1, 4, num_classes=classes, text=text, mlp_ratio=1.5, kv_heads=kv_heads, **more
    )
    block = randomised(Block(config.block))
    places = list(itertools.product(*map(range, grid))) if config.positions == "rope" else None
    tokens = TokenGrid(grid, rotary_table(grid_coordinates(*grid), 10) if places else None)
    x, c = torch.randn(2, 6, 40, dtype=torch.float64), torch.randn(2, 40, dtype=torch.float64)
    context = torch.randn(2, 5, 40, dtype=torch.float64), torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()

    def reference(x, c, *words):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = plain.linear(
            plain.silu(c), block.adaLN_modulation[-1]
        ).split(40)
        y = plain.rms(x, block.attn_norm) * (1 + scale_a) + shift_a
        x = x + gate_a * plain.self_attention(y, block.attn, places)
        if text:
            x = x + plain.cross_attention(plain.rms(x, block.cross_norm), block.cross_attn, *words)
        y = plain.rms(x, block.mlp_norm) * (1 + scale_m) + shift_m
        gate, value = plain.linear(y, block.mlp.fc1).split(60, dim=-1)
        return x + gate_m * plain.linear(plain.silu(gate) * value, block.mlp.fc2)

    expected = torch.stack([reference(*sample) for sample in zip(x, c, *context, strict=True)])
    plain.compare(
        block,
        block(x, block.modulate(c), context if text else None, tokens),
        expected,
        EXACT_TABLE if places else 1e-9,
    )


def test_heads_that_can_not_share():
    with pytest.raises(ValueError, match="4 heads can't share 3"):
        MovieGenConfig((2, 1, 3), (1, 1, 1), 2, 40, 1, 4, num_classes=3, kv_heads=3).check()
