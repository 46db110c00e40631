"""Test the kernels that dequantise stored weights, or multiply by them in float8, in Triton's interpreter."""

import pytest
import torch

from opendit.kernels import base_precision as stored
from opendit.models.layers import StoredWeight
from tests.kernels import test_public_fp8 as cases
from tests.kernels.cases import poisoned_memory
from tests.kernels.test_base_precision import fill, normal
from tests.kernels.test_fp8_lora import gradients, with_lora


@pytest.mark.parametrize("kind", ("int8", "nf4"))
@pytest.mark.parametrize("shape", ((3, 64), (2, 37), (2, 2050), (1, 129)), ids=str)
def test_the_kernel_has_the_references_bits(kind, shape):
    rows, descale = stored.quantise(normal(*shape), kind), torch.ones(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with poisoned_memory():
            found = stored.dense(rows, kind, shape[1], dtype, descale)
        assert torch.equal(found, stored.dense_reference(rows, kind, shape[1], dtype, descale))


def test_fp8_is_dequantised_to_its_exact_values():
    """Use all 256 codes except the two NaNs, in rows with padding."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, :127]
    rows, descale = torch.nn.functional.pad(codes, (0, 1)), torch.tensor([2.0**-9])
    for dtype in (torch.float32, torch.bfloat16):
        with poisoned_memory():
            found = stored.dense(rows, "fp8", 127, dtype, descale)
        want = codes.contiguous().view(torch.float8_e4m3fn).double() * 2.0**-9
        assert found.dtype == dtype and torch.equal(found.double(), want)


@pytest.mark.parametrize("rows", (1, 3, 64, 65))
def test_few_rows_are_multiplied_by_the_weight_in_float8(rows, monkeypatch):
    layer = torch.nn.Sequential(torch.nn.Linear(70, 50))
    weight = layer[0].weight.data.half()
    layer[0].requires_grad_(False)
    stored.store_base(layer, "fp8", torch.float16, torch.device("cpu"), lambda *_: True)
    layer[0].weight = torch.nn.Parameter(torch.empty(layer[0].weight.shape, dtype=torch.float16), requires_grad=False)
    layer[0].store(layer[0].weight.data, weight, lambda x: x)
    if rows <= 64:
        monkeypatch.setattr(stored, "dense", None)  # must not be called
    x = normal(rows, 2, 70)[:, :1].half()
    layer.half()
    exact = stored.dense_reference(
        layer[0].weight.view(torch.uint8), "fp8", 70, torch.float64, layer[0].descale.double()
    )
    want = x.double() @ exact.t() + layer[0].bias.double()
    got = layer(x)
    assert got.shape == want.shape and (got.double() - want).norm() < 2e-3 * want.norm()


def test_products_in_float8_read_what_is_stored(monkeypatch):
    """--fp8 gives the same bits with stored weights as with weights that it casts itself. For nf4, it casts the
    dequantised weights."""
    monkeypatch.setitem(cases.VALUES, "flux", cases.VALUES["flux"] | {"num_single_layers": 1})
    monkeypatch.setattr(stored, "dense", stored.dense_reference)  # the same bits as the kernel, and faster here
    # products of few rows would add in another order
    monkeypatch.setattr(stored.BaseWeight, "product", StoredWeight.product)
    for kind in ("fp8", "nf4"):
        model, plain = with_lora("flux"), with_lora("flux")
        stored.store_base(model, kind, torch.float32, torch.device("cpu"))
        fill(model, plain)
        for name, layer in stored.base_layers(model):
            if kind == "fp8" and "adaLN_modulation" not in name:
                continue  # the cast to float8 gives the same weight
            plain.get_parameter(name).data.copy_(layer.matrix.dense())
        wanted = gradients(cases.in_float8(plain, cases.ACTIVATIONS), cases.ACTIVATIONS)
        output, found = gradients(cases.in_float8(model, cases.ACTIVATIONS), cases.ACTIVATIONS)
        assert torch.equal(output, wanted[0]) and found.keys() == wanted[1].keys()
        assert all(torch.equal(found[name], wanted[1][name]) for name in found)
