"""Test representation alignment: its loss against numpy, which parameters it trains, and routed tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opendit.config.components import TokenRoute
from opendit.diffusion.random import draw_kept_tokens
from opendit.models.auxiliary import Alignment, AlignmentConfig, without_mean
from opendit.models.blocks import run_blocks
from opendit.models.dit import DiTConfig
from opendit.models.zoo import build_model, config_from_dict
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs

PLAIN = DiTConfig((6, 10), 2, 2, 48, 4, 2, num_classes=3)


def aligned(projector: str = "mlp", block: int = 2) -> DiTConfig:
    return replace(PLAIN, alignment=AlignmentConfig(block, 20, projector))


def model_of(config: DiTConfig):
    return randomised(build_model(config, 0)).double()


@pytest.mark.parametrize("projector", ["mlp", "conv"])
def test_the_gradient_reaches_the_blocks_before_it_and_the_projector_only(projector):
    model, (x, t, y) = model_of(aligned(projector)), inputs(PLAIN, 3, torch.float64)
    output, projected = model(x, t, y, aligned=True)
    assert torch.equal(output, model(x, t, y)) and projected.shape == (3, 15, 20)
    features = torch.randn(3, 15, 20, dtype=torch.float64)
    Alignment(features, 0.5).losses(projected).sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    for name, _ in model.named_parameters():
        above = name.startswith(("final_layer", "blocks.2.", "blocks.3."))
        assert (name in reached) != above, name


def test_projected_tokens_are_those_after_the_block_in_their_places():
    model, (x, t, y) = model_of(aligned("conv")), inputs(PLAIN, 3, torch.float64)
    c, _ = model.condition(t, y)
    tokens, grid = model.embed(x)
    tokens = run_blocks(model.blocks[:2], tokens, list(model.modulations(c))[:2], None, grid)
    picture = tokens.transpose(1, 2).view(3, 48, 3, 5)
    layer = model.projector.layers[0]
    wanted = torch.nn.functional.conv2d(picture, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(model(x, t, y, aligned=True)[1], wanted.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("block", [1, 3])
def test_it_stands_before_or_after_a_route(block):
    model, (x, t, y) = model_of(aligned(block=block)), inputs(PLAIN, 3, torch.float64)
    route, model.route = TokenRoute(1, 3, 0.4), (1, 3)
    kept = draw_kept_tokens(route, 15, 0, 1, torch.arange(3))
    output, projected = model(x, t, y, kept=kept, aligned=True)
    torch.testing.assert_close(output, model(x, t, y, kept=kept), rtol=1e-12, atol=1e-12)
    whole = model(x, t, y, aligned=True)[1]
    assert torch.allclose(projected, whole) == (block == 1)


def test_the_term_and_the_normalisation_are_those_of_the_papers():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 3, 7, 5))
    cosine = (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    found = Alignment(torch.from_numpy(b), 0.5).losses(torch.from_numpy(a))
    np.testing.assert_allclose(found.numpy(), 0.5 * (1 - cosine).mean(1), rtol=1e-5)
    centred = b - 0.7 * b.mean(1, keepdims=True)
    wanted = centred / (centred.std(1, keepdims=True, ddof=1) + 1e-6)
    np.testing.assert_allclose(without_mean(torch.from_numpy(b)).numpy(), wanted)


@pytest.mark.parametrize("projector", ["mlp", "conv"])
def test_configurations_count_it_and_survive_a_checkpoint(projector):
    config = aligned(projector)
    assert config_from_dict(config.to_dict()) == config and "alignment" not in PLAIN.to_dict()
    assert sum(p.numel() for p in build_model(config).parameters()) == config.parameters() > PLAIN.parameters()
