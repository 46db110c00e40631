"""Test LoRA of public models against peft with diffusers' networks."""

import pytest
import torch

from opendit.checkpoint.lora import PlacedLowRank, as_one, moved
from opendit.models.families import FAMILIES
from opendit.models.finetuning import A, B, Lora, add_lora
from tests.models.families.oracles import ORACLES, difference, in_double_precision, inputs, is_read, ours


@pytest.mark.parametrize("family", ORACLES)
def test_output_and_gradients_are_those_of_peft(family):
    """One of our layers may be several in diffusers that share A, so gradients are mapped back by the chain rule."""
    beside = "media_refiner.**", "text_refiner.**", "final_layer.**:1"
    lora = Lora(3, 6.0, "", ("attn.*", "mlp.*:2", *beside))
    with in_double_precision():
        oracle = ORACLES[family](torch.float64)
        model, given = ours(oracle, torch.float64), inputs(oracle, torch.float64, [5, 7, 2])
        add_lora(model, lora, (), seed=0)
        trained = {name: p for name, p in model.double().named_parameters() if p.requires_grad}
        for p in trained.values():
            torch.nn.init.normal_(p, std=0.1)
        output = model(given.x, given.t, given.y)
        mine = torch.autograd.grad((output * given.weights).sum(), list(trained.values()))

        matches = FAMILIES[family].names(model.config.spec)
        pairs = tuple((*names, match.dim) for match in matches for names in match.names())
        shapes = {name: tuple(p.shape) for name, p in oracle.module.named_parameters()}
        here = {name: tuple(p.shape) for name, p in model.named_parameters()}
        products = {
            f"{name.removesuffix(A)}.weight": [PlacedLowRank(a, trained[name.removesuffix(A) + B], lora.scale)]
            for name, a in trained.items()
            if name.endswith(A)
        }
        published = {
            f"{name.removesuffix('.weight')}.lora_{factor}.weight": part
            for name, parts in moved(products, pairs, here, shapes).items()
            for factor, part in zip("AB", as_one(parts, shapes[name], scaled=True), strict=True)
        }
        oracle.module.load_lora_adapter({name: part.detach() for name, part in published.items()}, prefix=None)
        named = {name.replace(".default_0", ""): p for name, p in oracle.module.named_parameters() if ".lora_" in name}
        assert named.keys() == published.keys()
        assert all(torch.equal(named[name], part) for name, part in published.items())
        expected = oracle.theirs(given.x, given.t, given.y)
        theirs = torch.autograd.grad(
            (expected * given.weights).sum(), [named[name] for name in published], materialize_grads=True
        )
    assert difference(output.detach(), expected.detach()) < 1e-12
    wanted = torch.autograd.grad(list(published.values()), list(trained.values()), theirs)
    errors = [difference(one, other) for one, other in zip(mine, wanted, strict=True)]
    assert max(errors) < 1e-10 and all(
        is_read(family, name) == bool(g.any()) for name, g in zip(trained, mine, strict=True)
    ), errors
