"""Stored weights made dense by the kernel, and read in float8, in Triton's interpreter."""

import pytest
import torch

from opendit.kernels import base_precision as stored
from tests.kernels import test_public_fp8 as cases
from tests.kernels.cases import poisoned_memory
from tests.kernels.test_base_precision import fill, normal
from tests.kernels.test_fp8_lora import gradients, with_lora


@pytest.mark.parametrize("kind", ("int8", "nf4"))
@pytest.mark.parametrize("shape", ((3, 64), (2, 37), (2, 2050), (1, 129)), ids=str)
def test_the_kernel_has_the_references_bits(kind, shape):
    rows = stored.quantise(normal(*shape), kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with poisoned_memory():
            found = stored.dense(rows, kind, shape[1], dtype)
        assert torch.equal(found, stored.dense_reference(rows, kind, shape[1], dtype))


def test_products_in_float8_read_what_is_stored(monkeypatch):
    """--fp8 has the same bits with stored weights as with those that it casts; of nf4 it casts what is stored."""
    monkeypatch.setitem(cases.VALUES, "flux", cases.VALUES["flux"] | {"num_single_layers": 1})
    monkeypatch.setattr(stored, "dense", stored.dense_reference)  # which is the kernel bit for bit, and sooner here
    for kind in ("fp8", "nf4"):
        model, plain = with_lora("flux"), with_lora("flux")
        stored.store_base(model, kind, torch.float32, torch.device("cpu"))
        fill(model, plain)
        for name, layer in stored.base_layers(model):
            if kind == "fp8" and "adaLN_modulation" not in name:
                continue  # products in float8 cast it to the same
            plain.get_parameter(name).data.copy_(layer.matrix.dense())
        wanted = gradients(cases.in_float8(plain, cases.ACTIVATIONS), cases.ACTIVATIONS)
        output, found = gradients(cases.in_float8(model, cases.ACTIVATIONS), cases.ACTIVATIONS)
        assert torch.equal(output, wanted[0]) and found.keys() == wanted[1].keys()
        assert all(torch.equal(found[name], wanted[1][name]) for name in found)
