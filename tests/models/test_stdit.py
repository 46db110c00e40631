"""Test ST-DiT against loops over frames and places."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from opendit.models.attention import TokenGrid
from opendit.models.blocks import Block
from opendit.models.conditioning import TextConfig
from opendit.models.positions import grid_coordinates, rotary_table
from opendit.models.variants import STDiT, STDiTConfig
from tests.models import plain
from tests.models.test_attention import EXACT_TABLE, randomised

TEXT = TextConfig("t5", 8, 5, True)


def within(x: Tensor, layer, groups: list[list[int]], places) -> Tensor:
    """Compute attention within each group of tokens, for x (N, D) of one sample."""
    out = torch.zeros_like(x)
    for group in groups:
        own = None if places is None else [places[i] for i in group]
        out = out.index_add(0, torch.tensor(group), plain.self_attention(x[group], layer, own))
    return out


def reference(block: Block, x: Tensor, c: Tensor, context, grid, places) -> Tensor:
    """Compute the block for one sample, x (N, D) and c (D,)."""
    frames, tokens = grid[0], len(x)
    by_frame = [[i for i in range(tokens) if i * frames // tokens == f] for f in range(frames)]
    by_place = [list(place) for place in zip(*by_frame, strict=True)]
    chunks = plain.linear(plain.silu(c), block.adaLN_modulation[-1]).split(len(c))
    branches = [
        lambda y: within(y, block.spatial_attn, by_frame, places),
        lambda y: within(y, block.temporal_attn, by_place, places),
    ]
    if hasattr(block, "full_attn"):
        branches.append(lambda y: plain.self_attention(y, block.full_attn, places))
    if context is not None:
        branches.append(lambda y: plain.cross_attention(y, block.cross_attn, *context))
    branches.append(lambda y: plain.mlp(y, block.mlp))
    assert len(chunks) == 3 * len(branches)
    for i, branch in enumerate(branches):
        shift, scale, gate = chunks[3 * i : 3 * i + 3]
        x = x + gate * branch(plain.layer_norm(x) * (1 + scale) + shift)
    return x


@pytest.mark.parametrize("grid", [(3, 2, 2), (2, 1, 3), (4, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("more", [{}, {"full_attention": True, "qk_norm": True, "positions": "rope", "bias": False}])
def test_block_equals_loops_over_frames_and_places(grid, text, more):
    config = STDiTConfig(grid, (1, 1, 1), 2, 20, 1, 2, num_classes=None if text else 3, text=text, **more)
    block = randomised(Block(config.block))
    places = list(itertools.product(*map(range, grid))) if config.positions == "rope" else None
    tokens = TokenGrid(grid, rotary_table(grid_coordinates(*grid), 10) if places else None)
    x, c = torch.randn(2, config.tokens, 20, dtype=torch.float64), torch.randn(2, 20, dtype=torch.float64)
    context = None
    if text:
        context = torch.randn(2, 5, 20, dtype=torch.float64), torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    samples = zip(x, c, zip(*context, strict=True) if context else (None, None), strict=True)
    expected = torch.stack([reference(block, *sample, grid, places) for sample in samples])
    ours = block(x, block.modulate(c), context, tokens)
    tolerance = EXACT_TABLE if places else 1e-9
    if grid in ((1, 2, 3), (4, 1, 1)):  # with one key, queries and keys have only rounding errors as gradients
        assert (ours - expected).norm() / expected.norm() < tolerance
    else:
        plain.compare(block, ours, expected, tolerance)


def test_only_frames_and_places_talk():
    """Spatial attention connects the tokens of a frame, temporal attention those of a place, and both connect all."""
    config = STDiTConfig((3, 2, 2), (1, 1, 1), 2, 24, 1, 2, num_classes=3)
    block, clip = Block(config.block).double(), TokenGrid((3, 2, 2))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    x, c = torch.randn(1, 12, 24, dtype=torch.float64), torch.randn(1, 24, dtype=torch.float64)
    other = x.clone()
    other[0, 0] *= -1  # frame 0, place 0
    moved = (block.spatial_attn.output(x, grid=clip) != block.spatial_attn.output(other, grid=clip)).any(-1)
    assert moved[0].tolist() == [True] * 4 + [False] * 8
    moved = (block.temporal_attn.output(x, grid=clip) != block.temporal_attn.output(other, grid=clip)).any(-1)
    assert moved[0].tolist() == [True, False, False, False] * 3
    seen, otherwise = (block(tokens, block.modulate(c), grid=clip) for tokens in (x, other))
    assert (seen != otherwise).any(-1).all()


def test_a_picture_is_a_clip_of_one_frame():
    """A patch of several frames repeats the picture, as in a vDiT."""
    model = randomised(STDiT(STDiTConfig((4, 4, 4), (2, 2, 2), 2, 24, 2, 2, num_classes=3)))
    x, t, y = torch.randn(2, 2, 1, 4, 4).double(), torch.tensor([3, 700]), torch.tensor([0, 1])
    picture, clip = model(x, t, y), model(x.repeat(1, 1, 2, 1, 1), t, y)
    assert picture.shape == (2, 4, 1, 4, 4)
    torch.testing.assert_close(picture, clip.mean(dim=2, keepdim=True))
    assert model(torch.randn(2, 2, 6, 2, 8).double(), t, y).shape == (2, 4, 6, 2, 8)  # another T, H, W
