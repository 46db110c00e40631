"""The rules of LoRA's parameters against one process: what ranks compute of their shares is the product of all."""

import pytest
import torch
from torch import Tensor

from opendit.models import build_model, model_config, plan_of
from opendit.models.lora import LAYERS, Lora, add_lora, targets
from opendit.models.plans.lora import with_lora
from opendit.models.plans.terms import Column, Heads, Replicated, Row, Rule, linear
from opendit.parallel.rules import divided_dimension, local_slices, local_tensor, rule_of

RANK = 3
NAMES = ("DiT-Ti/2", "vDiT-Ti/222", "ST-DiT-Ti/222", "MovieGen-Ti/122", "EC-DiT-Ti/2")


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_model_with_lora_has_one_rule(name):
    frames = None if name.endswith("/2") else 4
    config = model_config(name, input_size=(8, 8), in_channels=2, frames=frames, num_classes=5)
    with torch.device("meta"):
        model = build_model(config)
    rules = with_lora(plan_of(config).rules(config), LAYERS)
    before = {name: rule_of(rules, name) for name, _ in model.named_parameters()}
    layers = targets(model)
    add_lora(model, Lora(RANK, RANK, "base"), (), 0)
    for layer in layers:
        w = rule_of(rules, f"{layer}.base_layer.weight")
        a, b = (rule_of(rules, f"{layer}.lora_{which}.default.weight") for which in "AB")
        assert w == before[f"{layer}.weight"]
        assert (a, b) == ((w, Replicated(True)) if isinstance(w, Row) else (Replicated(True), w))
    assert all(rule_of(rules, name) for name, _ in model.named_parameters())


def features(full: Tensor, rule: Rule, rank: int, size: int, dimension: int) -> Tensor:
    """A rank's share of the features of x (tokens, in), or of y (tokens, out), as it has them of a weight."""
    shape = (1, full.shape[1]) if dimension else (full.shape[1], 1)
    parts = local_slices(shape, rule, rank, size)
    return torch.cat([full[:, part[dimension]] for part in parts], dim=1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rule", [Column(), Column(sections=2), Heads((6, 6, 6)), Row(), Row(heads=6)], ids=str)
def test_shares_compute_the_product_and_its_gradients(rule, size):
    """y = W x + B A x in float64, and the gradients of A and B: where they are not divided, the sum of the ranks'."""
    torch.manual_seed(0)
    rules = with_lora(linear("blocks.*.fc1", rule), ("fc1",))
    of_a, of_b = (rule_of(rules, f"blocks.0.fc1.lora_{which}.default.weight") for which in "AB")
    x, w = torch.randn(5, 12, dtype=torch.float64), torch.randn(36, 12, dtype=torch.float64)
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((RANK, 12), (36, RANK)))
    cotangent = torch.randn(5, 36, dtype=torch.float64)
    whole = x @ w.t() + x @ a.t() @ b.t()
    wanted = torch.autograd.grad(whole, (a, b), cotangent)
    row = isinstance(rule, Row)
    total, sums = torch.zeros_like(whole), [torch.zeros_like(p) for p in (a, b)]
    for rank in range(size):
        own_w = local_tensor(w, rule, rank, size)
        own = [local_tensor(p.detach(), r, rank, size).requires_grad_() for p, r in ((a, of_a), (b, of_b))]
        own_x = features(x, rule, rank, size, 1) if row else x
        y = own_x @ own_w.t() + own_x @ own[0].t() @ own[1].t()
        expected = None if row else features(whole, rule, rank, size, 0)
        given = cotangent if row else features(cotangent, rule, rank, size, 0)
        if row:
            total += y.detach()
        else:
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for p, r, grad, found in zip((a, b), (of_a, of_b), torch.autograd.grad(y, own, given), sums, strict=True):
            if divided_dimension(r, p.shape) is None:
                assert r == Replicated(partial_gradient=True)
                found += grad
            else:
                parts = local_slices(p.shape, r, rank, size)
                dimension = divided_dimension(r, p.shape)
                pieces = grad.split([part[dimension].stop - part[dimension].start for part in parts], dim=dimension)
                for part, piece in zip(parts, pieces, strict=True):
                    found[part] += piece
    if row:
        torch.testing.assert_close(total, whole.detach(), rtol=1e-12, atol=1e-12)
    for found, want in zip(sums, wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
