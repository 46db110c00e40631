"""Test grouped queries, rotary positions and QK-norm against loops over heads and tokens, in float64."""

import itertools
import math

import pytest
import torch

from opendit.models.attention import Attention, CrossAttention, TokenGrid
from opendit.models.layers import Options, RMSNorm
from opendit.models.positions import (
    LearnedPositions,
    grid_coordinates,
    rotary_shares,
    rotary_table,
    rotate,
    sincos_positions,
)
from tests.models import plain

EXACT_TABLE = 1e-6  # rotations are rounded to fp32


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Randomise all parameters, so that softmaxes have peaks and norm weights are not 1."""
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1)
    return module


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (6, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("grid", [None, (3, 5), (2, 3, 2), (1, 2, 3)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention(heads, kv_heads, grid, norm, bias):
    layer = randomised(Attention(heads * 10, heads, Options(bias=bias, qk_norm=norm), kv_heads))
    places = None if grid is None else list(itertools.product(*map(range, grid)))
    length = 7 if grid is None else len(places)
    tokens = None if grid is None else TokenGrid(grid, rotary_table(grid_coordinates(*grid), 10))
    x = torch.randn(3, length, heads * 10, dtype=torch.float64)
    ours = layer.proj(layer.output(x, grid=tokens))
    expected = torch.stack([plain.self_attention(sample, layer, places) for sample in x])
    plain.compare(layer, ours, expected, 1e-9 if grid is None else EXACT_TABLE)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_attention(norm, bias):
    layer = randomised(CrossAttention(24, 3, Options(bias=bias, qk_norm=norm)))
    x, tokens = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 4, 24, dtype=torch.float64)
    mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
    expected = [plain.cross_attention(*sample[:1], layer, *sample[1:]) for sample in zip(x, tokens, mask, strict=True)]
    plain.compare(layer, layer(x, tokens, mask), torch.stack(expected))


def test_scores_depend_on_distances_only():
    """Moving query and key by the same (t, h, w) changes nothing."""
    q, k = torch.randn(2, 1, 1, 1, 20, dtype=torch.float64)

    def score(at, to):
        coordinates = torch.tensor([at, to])
        turned = [rotate(x, rotary_table(coordinates[i : i + 1], 20).double()) for i, x in enumerate((q, k))]
        return (turned[0] * turned[1]).sum().item()

    base = score((1, 2, 3), (4, 0, 5))
    assert score((11, 32, 8), (14, 30, 10)) == pytest.approx(base, abs=1e-5)
    others = [score((1, 2, 3), to) for to in ((5, 0, 5), (4, 1, 5), (4, 0, 6))]  # every axis matters
    assert all(abs(other - base) > 1e-3 for other in others)
    assert score((6, 6, 6), (6, 6, 6)) == pytest.approx((q * k).sum().item(), abs=1e-5)


def test_every_pair_of_channels_is_rotated():
    for head_dim, axes in ((10, 2), (10, 3), (72, 3), (128, 3), (64, 2), (4, 2)):
        table = rotary_table(torch.ones(1, axes, dtype=torch.int64), head_dim)
        assert table.shape == (1, head_dim // 2, 2) and (table[..., 1] > 0).all()
    for head_dim, axes in ((9, 2), (4, 3)):
        with pytest.raises(ValueError, match="--positions rope: a head size"):
            rotary_table(torch.ones(1, axes, dtype=torch.int64), head_dim)


def test_rotation_is_computed_in_fp32_at_least():
    x, table = torch.randn(1, 50, 2, 8), rotary_table(200 + grid_coordinates(50, 1), 8)
    assert rotate(x.double(), table).dtype == torch.float64
    expected = rotate(x.bfloat16().float(), table)
    assert torch.equal(rotate(x.bfloat16(), table), expected.bfloat16())
    assert rotate(x, table).norm() == pytest.approx(x.norm().item(), rel=1e-6)


def test_rms_norm_in_half_precision_keeps_its_dtype():
    norm, x = RMSNorm(16).bfloat16(), torch.randn(3, 16).bfloat16()
    y = norm(100 * x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.float(), x.float() / x.float().square().mean(-1, keepdim=True).sqrt(), rtol=1e-2, atol=1e-2
    )


def test_positions_are_of_coordinates_in_any_order():
    """Packed sequences need this: a token's position must not depend on its neighbours."""
    coordinates = grid_coordinates(3, 4, 5)
    order = torch.randperm(60)
    table = LearnedPositions((3, 4, 5), 24)
    for positions in (lambda c: sincos_positions(c, 24), lambda c: rotary_table(c, 24), table):
        assert torch.equal(positions(coordinates)[order], positions(coordinates[order]))
        assert len(torch.unique(positions(coordinates).detach().flatten(1), dim=0)) == 60
    expected = [sum(axis.weight[i] for axis, i in zip(table.axes, c, strict=True)) for c in coordinates.tolist()]
    assert torch.equal(table(coordinates), torch.stack(expected))


@pytest.mark.parametrize(
    ("head", "axes", "shares"),
    [
        (64, 1, [32]), (64, 2, [16, 16]), (72, 2, [18, 18]), (70, 2, [18, 17]), (64, 3, [12, 10, 10]),
        (72, 3, [12, 12, 12]), (128, 3, [22, 21, 21]), (10, 3, [3, 1, 1]), (6, 3, [1, 1, 1]), (4, 2, [1, 1]),
    ],
)  # fmt: skip
def test_pairs_of_a_head_are_shared_by_the_axes(head, axes, shares):
    assert rotary_shares(head, axes) == shares
    table = rotary_table(torch.eye(axes).long(), head)  # token i is one step along axis i
    for axis, row in enumerate(table):
        turned = (row[:, 1] != 0).nonzero().flatten().tolist()
        first = sum(shares[:axis])
        assert turned == list(range(first, first + shares[axis]))
        # the fastest pair of every axis turns by one radian per step
        assert row[first, 0].item() == pytest.approx(math.cos(1))


@pytest.mark.parametrize(("head", "axes"), [(7, 1), (9, 2), (2, 2), (4, 3)])
def test_heads_too_small_or_odd_to_rotate(head, axes):
    with pytest.raises(
        ValueError, match=f"a head size of {head} can't .* among {axes} axes; take an even one from {2 * axes}"
    ):
        rotary_shares(head, axes)
