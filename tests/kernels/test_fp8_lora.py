"""Test LoRA with FP8: products with frozen weights use float8, and LoRA's use the activations' dtype. The tests run in
Triton's interpreter; tests/gpu/test_lora_gpu.py runs the same on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels import fp8
from opendit.kernels.fp8 import E4M3
from opendit.models.finetuning import A, B, Lora, add_lora, targets
from tests.kernels import conftest  # noqa: F401
from tests.kernels import test_public_fp8 as cases

LORA = Lora(3, 6.0, "")


def with_lora(family: str, lora: Lora = LORA):
    """Return a public model with nonzero LoRA, by default in all layers of attention and MLP."""
    model = cases.model_of(family)
    add_lora(model, lora, (), seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith(B):
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.3 * drawn / parameter.shape[1] ** 0.5)
    return model.to(cases.DEVICE)


def gradients(model, dtype):
    """Return the output, and every gradient of A and B."""
    model.zero_grad()
    output = model(*cases.given(model.config.family, dtype))
    torch.manual_seed(2)
    (output.float() * torch.randn(output.shape).to(output.device)).sum().backward()
    assert all((p.grad is None) == (not name.endswith((A, B))) for name, p in model.named_parameters())
    return output.detach().float(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ("flux",))
def test_output_and_gradients_are_those_of_rounded_factors_beside_exact_thin_ones(family, monkeypatch):
    weights = []
    product = fp8.product
    monkeypatch.setattr(fp8, "product", lambda x, w, *a, **k: weights.append(tuple(w.shape)) or product(x, w, *a, **k))
    got, found = gradients(cases.in_float8(with_lora(family), cases.ACTIVATIONS), cases.ACTIVATIONS)
    monkeypatch.undo()
    model = with_lora(family)
    layers = {name: model.get_submodule(name) for name in targets(model, LORA) if not name.endswith("cross_attn.kv")}
    in_fp8 = cases.linears(model)
    # Products of the forward pass and for the input gradients, except for inputs without a gradient. Frozen weights
    # have none.
    first = len(model.config.spec.blocks[0].streams) or 1
    assert len(weights) == len(in_fp8) + len(layers) - first
    for name, layer in in_fp8.items():

        def multiplied(x, bias=None, _=None, layer=layer, name=name):
            y = cases.RoundedLinear.apply(x, layer.weight, bias)
            if name not in layers:
                return y
            low_rank = layer.low_rank
            # These inputs exist only in float8.
            alone = name.endswith(("attn.qkv", "fc1", *["fc2"] * (model.config.spec.block.mlp == "gelu")))
            known = x + (cases.rounded(x, E4M3, fp8.SAMPLED) - x).detach() if alone else x
            return y + low_rank.scale * F.linear(F.linear(known, low_rank.a), low_rank.b)

        monkeypatch.setattr(layer, "product", multiplied)
        monkeypatch.setattr(layer, "forward", lambda x, layer=layer: layer.product(x, layer.bias))
    want, wanted = gradients(model, torch.float32)
    assert cases.error(got, want) < 1e-3
    assert not {name: e for name, g in wanted.items() if (e := cases.error(found[name], g)) > 5e-3}


def test_lora_beside_the_blocks_is_near_fp32():
    """The final layer's norm is computed in the activations' dtype."""
    lora = replace(LORA, targets=("text_refiner.**", "media_refiner.**", "final_layer.linear"))
    got, found = gradients(cases.in_float8(with_lora("z_image", lora), cases.ACTIVATIONS), cases.ACTIVATIONS)
    want, wanted = gradients(with_lora("z_image", lora), torch.float32)
    assert cases.error(got, want) < 0.1 and any(name.startswith("final_layer.") for name in wanted)
    assert not {name: e for name, g in wanted.items() if (e := cases.error(found[name], g)) > 0.3}


@pytest.mark.parametrize("how", [True, "but_attention"])
def test_recomputed_blocks_do_not_repeat_their_last_products(how, monkeypatch):
    outputs = []
    product = fp8.product
    monkeypatch.setattr(fp8, "product", lambda x, w, *a, **k: outputs.append(len(w)) or product(x, w, *a, **k))
    model = cases.in_float8(with_lora("flux"), cases.ACTIVATIONS)
    output, kept = gradients(model, cases.ACTIVATIONS)
    every, model.grad_checkpoint = len(outputs), how
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    try:
        for _ in range(2):  # the second forward pass follows a recomputation
            outputs.clear()
            again, recomputed = gradients(model, cases.ACTIVATIONS)
            assert torch.equal(again, output)
            assert all(torch.equal(gradient, recomputed[name]) for name, gradient in kept.items())
    finally:
        torch.use_deterministic_algorithms(False)
    # The last layer of each MLP is not repeated, and in blocks with one stream neither is that of attention.
    blocks = [len(block.spec.streams) or 2 for block in model.blocks]
    layers = len(targets(model, LORA))
    assert len(outputs) - every == layers - sum(blocks)
