"""Test uncertainty weighting: its optimum, its effect on gradients, and predictions without it."""

from dataclasses import replace

import pytest
import torch

from opendit.models.auxiliary import Uncertainty, weighted
from opendit.models.zoo import build_model, config_from_dict
from tests.models.test_token_routing import CASES
from tests.models.test_zoo import inputs, model_of

PLAIN = CASES["modern"]
LEARNED = replace(PLAIN, uncertainty=True)


def test_with_a_constant_loss_the_optimum_is_its_logarithm():
    loss = torch.tensor([0.01, 0.3, 1.0, 20.0], dtype=torch.float64)
    u = loss.log().requires_grad_()
    found = weighted(loss, u)
    torch.testing.assert_close(found, 1 + loss.log())
    (gradient,) = torch.autograd.grad(found.sum(), u)
    assert gradient.abs().max() < 1e-12
    assert all((weighted(loss, u + by) > found).all() for by in (-0.1, 0.1))


def test_it_learns_the_logarithm_of_the_mean_loss_at_each_time():
    torch.manual_seed(0)
    module, t = Uncertainty(), torch.tensor([30.0, 500.0, 900.0]).repeat_interleave(2)
    losses = torch.tensor([0.2, 0.6, 0.01, 0.03, 5.0, 1.0])  # two losses for each time
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(800):
        optimizer.zero_grad()
        weighted(losses, module(t)).mean().backward()
        optimizer.step()
    torch.testing.assert_close(module(t)[::2], losses.view(3, 2).mean(1).log(), rtol=0, atol=1e-2)


def test_a_prediction_does_without_it_and_gradients_are_divided_by_what_is_expected():
    model, (x, t, y) = model_of(LEARNED), inputs(PLAIN, 1, torch.float64)
    output, u = model(x, t, y, uncertain=True)
    assert torch.equal(output, model(x, t, y)) and u.shape == (1,) and abs(u.item()) > 1e-3
    plain, learned = output.square().mean(), weighted(output.square().mean().view(1), u).sum()
    for name, parameter in model.named_parameters():
        (got,) = torch.autograd.grad(learned, parameter, retain_graph=True)
        if name.startswith("uncertainty"):
            ((of_u,),) = torch.autograd.grad(u, parameter, retain_graph=True)
            torch.testing.assert_close(got[0], of_u * (1 - plain.float() / u.exp()).item(), rtol=1e-5, atol=1e-7)
            continue
        (wanted,) = torch.autograd.grad(plain, parameter, retain_graph=True)
        torch.testing.assert_close(got, wanted / u.double().exp(), rtol=1e-5, atol=1e-9)


def test_it_is_counted_and_survives_a_checkpoint():
    assert sum(p.numel() for p in build_model(LEARNED).parameters()) == LEARNED.parameters() == PLAIN.parameters() + 257
    assert config_from_dict(LEARNED.to_dict()) == LEARNED and "uncertainty" not in PLAIN.to_dict()
    with pytest.raises(AssertionError, match="--uncertainty_weighting"):
        model_of(PLAIN)(*inputs(PLAIN), uncertain=True)
