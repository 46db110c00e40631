"""Token routing against blocks that mask what is left out, in float64; its draws; and the FLOPs it saves."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from opendit.config.token_routing import TokenRoute, parse_route
from opendit.diffusion.token_routing import draw_kept_tokens
from opendit.models import DiTConfig, MovieGenConfig, TextConfig, build_model
from opendit.training.step_cost import saved_flops, training_flops
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs

TEXT = TextConfig("t5", 8, 16, True)
SHAPE = {"in_channels": 2, "hidden_size": 48, "depth": 4, "num_heads": 2}
PICTURE = SHAPE | {"input_size": (6, 10), "patch_size": 2}
MODERN = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}
CASES = {
    "plain": DiTConfig(**PICTURE, num_classes=3),
    "modern": DiTConfig(**PICTURE, text=TEXT, **MODERN),
    "clips": MovieGenConfig(**SHAPE, input_size=(2, 6, 6), patch_size=(1, 2, 2), text=TEXT, kv_heads=1),
}
ROUTE = TokenRoute(1, 3, 0.4)


def masked(model, x, t, y, kept):
    """The routed model with all tokens everywhere: routed blocks attend to the kept ones only, and change no others."""
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
    model.grad_checkpoint = True  # so that blocks are called one by one
    return model(x, t, y)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_output_and_every_gradient_equal_those_of_masked_blocks(name, checkpointed):
    config = CASES[name]
    x, t, y = inputs(config, 3, torch.float64)
    kept = draw_kept_tokens(ROUTE, config.tokens, 0, 1, torch.arange(3))
    weights, results = torch.randn(3, config.out_channels, *config.input_size, dtype=torch.float64), []
    for way in ("routed", "masked", "whole"):
        model, leaf = randomised(build_model(config, 0)).double(), x.clone().requires_grad_()
        model.route, model.grad_checkpoint = ROUTE, checkpointed
        if way == "masked":
            found = masked(model, leaf, t, y, kept)
        else:
            found = model(leaf, t, y, kept=kept if way == "routed" else None)
        (found * weights).sum().backward()
        results.append([found, leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for routed, wanted in zip(*results[:2], strict=True):
        torch.testing.assert_close(routed, wanted, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(results[0][0], results[2][0])


def test_all_tokens_kept_are_the_whole_model_to_the_bit():
    config = CASES["modern"]
    model, (x, t, y) = randomised(build_model(config, 0)), inputs(config, 2, torch.float32)
    model.route = TokenRoute(0, config.depth, 0.0)
    kept = torch.arange(config.tokens).expand(2, -1)
    assert torch.equal(model(x, t, y, kept=kept), model(x, t, y))


def test_draws_depend_on_the_sample_alone_and_choose_all_tokens_equally_often():
    route, index = TokenRoute(0, 1, 0.75), torch.tensor([5, 0, 11])
    found = draw_kept_tokens(route, 15, 3, 7, index)
    assert found.shape == (3, 4) and (found.diff(dim=1) > 0).all()
    assert torch.equal(draw_kept_tokens(route, 15, 3, 7, index[1:2]), found[1:2])
    assert not torch.equal(draw_kept_tokens(route, 15, 3, 8, index), found)
    assert not torch.equal(draw_kept_tokens(route, 15, 4, 7, index), found)
    count = draw_kept_tokens(route, 15, 3, 7, torch.arange(3000)).flatten().bincount(minlength=15)
    assert (count - 800).abs().max() < 5 * 800**0.5


def test_flops_are_those_of_models_with_fewer_tokens_in_routed_blocks():
    whole = DiTConfig(**SHAPE | {"input_size": (8, 8), "patch_size": 2}, text=TEXT)
    half = DiTConfig(**SHAPE | {"input_size": (4, 8), "patch_size": 2}, text=TEXT)
    route = TokenRoute(1, 3, 0.5)
    one = [
        (config.forward_flops() - DiTConfig(**vars(config) | {"depth": 3}).forward_flops()) for config in (whole, half)
    ]
    assert saved_flops(whole, route) == 2 * (one[0] - one[1]) > 0
    assert training_flops(whole, route=route) == training_flops(whole) - 3 * saved_flops(whole, route)


def test_routes_are_read_and_wrong_ones_named():
    assert parse_route("2:8:0.5") == TokenRoute(2, 8, 0.5) and TokenRoute(2, 8, 0.99).kept(10) == 1
    for text in ("2:8", "8:2:0.5", "2:2:0.5", "0:3:1", "-1:3:0.5", "a:b:c", "0:3:nan", "0:3:-0.1"):
        with pytest.raises(ValueError, match=f"^--route {text}: .*give FIRST:LAST:SHARE"):
            parse_route(text)
