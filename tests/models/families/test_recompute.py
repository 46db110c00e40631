"""--recompute on public models."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.parallel.apply import apply_parallel
from tests.models.families.oracles import (
    COSMOS2,
    FLUX,
    FLUX2,
    LUMINA2,
    QWEN_IMAGE,
    SD3,
    WAN,
    Z_IMAGE,
    captions,
    is_read,
    randomise,
)

MODELS = {
    "flux": (FLUX, (6, 10)),
    "wan": (WAN, (3, 6, 10)),
    "z_image": (Z_IMAGE, (6, 10)),
    "qwen_image": (QWEN_IMAGE, (6, 10)),
    "flux2": (FLUX2, (3, 5)),
    "lumina2": (LUMINA2, (6, 10)),
    "sd3": (SD3, (6, 10)),
    "cosmos2": (COSMOS2, (6, 10)),
}


def gradients(family: str, level: str, **how) -> dict[str, torch.Tensor]:
    values, size = MODELS[family]
    torch.manual_seed(0)
    model = PublicDiT(public_config(family, values, size))
    randomise(model)
    apply_parallel(model, recompute=level, **how)
    torch.manual_seed(1)
    y = captions(family, values, [5, 7, 2], torch.float32)
    model(
        torch.randn(3, model.config.in_channels, *size), torch.tensor([300.0, 700.0, 900.0]), y
    ).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Attentions(TorchDispatchMode):
    """Counts attention kernels, forward and backward, by their numbers of queries and keys."""

    def __init__(self):
        super().__init__()
        self.found: Counter[tuple[bool, int, int]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_scaled_dot_product" in (name := function.name()):
            q, k = args[1:3] if (backward := "backward" in name) else args[:2]
            self.found[backward, q.shape[-2], k.shape[-2]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", MODELS)
def test_attention_among_all_tokens_is_kept_and_every_gradient_has_the_same_bits(family):
    kept, attentions = gradients(family, "none"), Attentions()
    with attentions:
        recomputed = gradients(family, "but_attention")
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in kept.items())
    forward = {(q, k): count for (backward, q, k), count in attentions.found.items() if not backward}
    for (q, k), count in forward.items():
        assert count == attentions.found[True, q, k] * (1 if k >= q else 2)
    some = gradients(family, "but_attention", recompute_blocks=1)
    assert all(torch.equal(gradient, some[name]) for name, gradient in kept.items())
    assert any(k >= q for q, k in forward) and any(k < q for q, k in forward) == (family in ("wan", "cosmos2"))


# Those that know its norms and MLPs.
@pytest.mark.parametrize("level", ["norms", "cheap", "half", "mlp"])
@pytest.mark.parametrize("family", ["flux", "wan", "qwen_image", "sd3"])
def test_every_gradient_has_the_same_bits(family, level):
    kept, recomputed = gradients(family, "none"), gradients(family, level)
    assert all(bool(gradient.any()) == is_read(family, name) for name, gradient in kept.items())
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in kept.items())
