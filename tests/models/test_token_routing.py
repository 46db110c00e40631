"""Test token routing against blocks that mask dropped tokens, in float64, with and without SPRINT's fusion. Also test
which tokens are drawn, and the FLOPs."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from opendit.config.components import TokenRoute, parse_route
from opendit.diffusion.random import draw_dropped, draw_kept_tokens
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.variants import MovieGenConfig
from opendit.models.zoo import build_model, config_from_dict
from opendit.training.step_cost import training_flops
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs

TEXT = TextConfig("t5", 8, 16, True)
SHAPE = {"in_channels": 2, "hidden_size": 48, "depth": 4, "num_heads": 2}
PICTURE = SHAPE | {"input_size": (6, 10), "patch_size": 2}
MODERN = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}
CASES = {
    "plain": DiTConfig(**PICTURE, num_classes=3),
    "modern": DiTConfig(**PICTURE, text=TEXT, **MODERN),
    "sprint": DiTConfig(**PICTURE, num_classes=3, sprint=(1, 3)),
    "modern sprint": DiTConfig(**PICTURE, text=TEXT, **MODERN, sprint=(1, 3)),
    "clips": MovieGenConfig(**SHAPE, input_size=(2, 6, 6), patch_size=(1, 2, 2), text=TEXT, kv_heads=1),
}
ROUTE = TokenRoute(1, 3, 0.4)


def masked(model, x, t, y, kept, dropped):
    """Compute the routed model with all tokens, as a reference. Routed blocks attend only to kept tokens and change no
    others. The fusion replaces all others by the mask token."""
    mask = torch.zeros(len(x), model.config.tokens, dtype=torch.bool)
    for sample, own in enumerate(kept.tolist()):
        mask[sample, own] = True

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])

    def where_kept(forward, x, *rest):
        return torch.where(mask[..., None], forward(x, *rest), x)

    for number in range(ROUTE.first, ROUTE.last):
        block = model.blocks[number]
        block.attn.attend, block.forward = attend, partial(where_kept, block.forward)
    if model.fusion is not None:
        linear, token = model.fusion.linear, model.fusion.mask_token
        left = mask if dropped is None else mask & ~dropped[:, None]

        def fuse(deep, shallow, _):
            after, before = linear.weight.chunk(2, dim=1)
            return torch.where(left[..., None], deep, token) @ after.T + shallow @ before.T + linear.bias

        model.fusion.forward = fuse
    model.grad_checkpoint = True  # so that blocks are called separately
    return model(x, t, y)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_output_and_every_gradient_equal_those_of_masked_blocks(name, checkpointed):
    config = CASES[name]
    x, t, y = inputs(config, 3, torch.float64)
    kept = draw_kept_tokens(ROUTE, config.tokens, 0, 1, torch.arange(3))
    more = {} if config.sprint is None else {"dropped": torch.tensor([False, True, False])}
    weights, results = torch.randn(3, config.out_channels, *config.input_size, dtype=torch.float64), []
    for way in ("routed", "masked", "whole"):
        model, leaf = randomised(build_model(config, 0)).double(), x.clone().requires_grad_()
        model.route, model.grad_checkpoint = (ROUTE.first, ROUTE.last), checkpointed
        if way == "masked":
            found = masked(model, leaf, t, y, kept, more.get("dropped"))
        else:
            found = model(leaf, t, y, kept=kept if way == "routed" else None, **more)
        (found * weights).sum().backward()
        results.append([found, leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    for routed, wanted in zip(*results[:2], strict=True):
        torch.testing.assert_close(routed, wanted, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(results[0][0], results[2][0])


@pytest.mark.parametrize("name", ["modern", "modern sprint"])
def test_all_tokens_kept_are_the_whole_model_to_the_bit(name):
    config = CASES[name]
    model, (x, t, y) = randomised(build_model(config, 0)), inputs(config, 2, torch.float32)
    model.route = config.sprint or (0, config.depth)
    more = {} if config.sprint is None else {"dropped": torch.zeros(2, dtype=torch.bool)}
    kept = torch.arange(config.tokens).expand(2, -1)
    assert torch.equal(model(x, t, y, kept=kept, **more), model(x, t, y))


def test_without_its_deep_blocks_a_sample_depends_on_the_others_alone():
    config, dropped = CASES["sprint"], torch.tensor([True, False, True])
    model, (x, t, y) = randomised(build_model(config, 0)).double(), inputs(config, 3, torch.float64)
    before = model(x, t, y, dropped=dropped)
    for parameter in model.blocks[1:3].parameters():
        parameter.data += 0.1
    after = model(x, t, y, dropped=dropped)
    assert torch.equal(before[dropped], after[dropped]) and not torch.allclose(before[1], after[1])


def test_draws_depend_on_the_sample_alone_and_choose_all_tokens_equally_often():
    route, index = TokenRoute(0, 1, 0.75), torch.tensor([5, 0, 11])
    found = draw_kept_tokens(route, 15, 3, 7, index)
    assert found.shape == (3, 4) and (found.diff(dim=1) > 0).all()
    assert torch.equal(draw_kept_tokens(route, 15, 3, 7, index[1:2]), found[1:2])
    assert not torch.equal(draw_kept_tokens(route, 15, 3, 8, index), found)
    assert not torch.equal(draw_kept_tokens(route, 15, 4, 7, index), found)
    assert draw_kept_tokens(TokenRoute(0, 1, 0.0), 15, 3, 7, index) is None
    count = draw_kept_tokens(route, 15, 3, 7, torch.arange(3000)).flatten().bincount(minlength=15)
    assert (count - 800).abs().max() < 5 * 800**0.5


def test_a_fusion_is_counted_and_survives_a_checkpoint():
    config, plain = CASES["sprint"], CASES["plain"]
    model, dim = build_model(config), config.hidden_size
    assert sum(p.numel() for p in model.parameters()) == config.parameters() == plain.parameters() + 2 * dim * (dim + 1)
    assert config.forward_flops() - plain.forward_flops() == 2 * 15 * dim * 2 * dim
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config and "sprint" not in plain.to_dict()
    for wrong in ((0, 2), (2, 2), (2, 5)):
        with pytest.raises(ValueError, match=f"--route {wrong[0]}:{wrong[1]}: .*end at 4"):
            build_model(DiTConfig(**PICTURE, num_classes=3, sprint=wrong))


def test_dropped_samples_depend_on_the_sample_alone_and_are_of_fused_routes():
    fused, index = TokenRoute(1, 2, 0.75, True), torch.arange(10_000)
    found = draw_dropped(fused, 0.1, 3, 7, index)
    assert torch.equal(draw_dropped(fused, 0.1, 3, 7, index[5:9]), found[5:9]) and abs(found.sum() - 1000) < 150
    assert (
        not draw_dropped(fused, 0.0, 3, 7, index).any()
        and draw_dropped(TokenRoute(1, 2, 0.5), 0.1, 3, 7, index) is None
    )


def test_flops_are_those_of_models_with_fewer_tokens_in_routed_blocks():
    whole = DiTConfig(**SHAPE | {"input_size": (8, 8), "patch_size": 2}, text=TEXT)
    half = DiTConfig(**SHAPE | {"input_size": (4, 8), "patch_size": 2}, text=TEXT)
    route = TokenRoute(1, 3, 0.5)
    one = [
        (config.forward_flops() - DiTConfig(**vars(config) | {"depth": 3}).forward_flops()) for config in (whole, half)
    ]
    assert one[0] > one[1] and training_flops(whole) == 3 * whole.forward_flops()
    assert training_flops(whole, route=route) == training_flops(whole) - 3 * 2 * (one[0] - one[1])


def test_routes_are_read_and_wrong_ones_named():
    assert parse_route("2:8:0.5") == TokenRoute(2, 8, 0.5) and TokenRoute(2, 8, 0.99).kept(10) == 1
    assert parse_route("2:8:0:sprint") == TokenRoute(2, 8, 0.0, True)
    with pytest.raises(ValueError, match="--route 0:8:0.5:sprint: .*begin at 1"):
        parse_route("0:8:0.5:sprint")
    for text in (
        "2:8:0.5:tread",
        "2:8:0.5:sprint:",
        "2:8",
        "8:2:0.5",
        "2:2:0.5",
        "0:3:1",
        "-1:3:0.5",
        "a:b:c",
        "0:3:nan",
        "0:3:-0.1",
    ):
        with pytest.raises(ValueError, match=f"^--route {text}: .*give FIRST:LAST:SHARE"):
            parse_route(text)
