"""--recompute on public models whose norms and MLPs are the operations that it knows."""

import pytest
import torch

from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.parallel.apply import apply_parallel
from tests.models.families.oracles import FLUX, WAN, captions, randomise

MODELS = {"flux": (FLUX, (6, 10)), "wan": (WAN, (3, 6, 10))}


def gradients(family: str, level: str) -> dict[str, torch.Tensor]:
    values, size = MODELS[family]
    torch.manual_seed(0)
    model = PublicDiT(public_config(family, values, size))
    randomise(model)
    apply_parallel(model, recompute=level)
    torch.manual_seed(1)
    y = captions(family, values, [5, 7, 2], torch.float32)
    model(torch.randn(3, 4, *size), torch.tensor([300.0, 700.0, 900.0]), y).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("level", ["norms", "cheap", "half", "mlp"])
@pytest.mark.parametrize("family", MODELS)
def test_every_gradient_has_the_same_bits(family, level):
    kept, recomputed = gradients(family, "none"), gradients(family, level)
    assert all(gradient is not None and gradient.any() for gradient in kept.values())
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in kept.items())
