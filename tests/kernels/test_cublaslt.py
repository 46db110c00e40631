"""Test which of cuBLASLt's proposals is used, and when torch's product is used. Tests on a GPU are in
tests/gpu/test_cublaslt_gpu.py."""

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels import cublaslt
from opendit.kernels.cublaslt import FastestProducts, ProductShape, fastest


@pytest.mark.parametrize(
    ("times", "equal", "taken"),
    [
        ([10, 9, 8], [True, True], 1),
        ([10, 9, 8], [True, False], 0),  # the fastest rounds differently
        ([10, 9, 8], [False, False], None),
        ([10, 9.9, 12], [True, True], None),  # not enough faster
        ([10], [], None),
        ([10, 4, 4], [True, True], 0),
    ],
)
def test_the_fastest_that_rounds_as_torchs(times, equal, taken):
    assert fastest(times, equal) == taken


def test_without_a_gpu_it_is_torchs():
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    with torch.no_grad():
        assert torch.equal(cublaslt.linear(x, weight, bias), F.linear(x, weight, bias))
        assert torch.equal(cublaslt.linear(x, weight), F.linear(x, weight))
        assert cublaslt.linear_gelu(x, weight, bias, lambda *operands: operands) == (x, weight, bias)


@pytest.mark.parametrize("error", [OSError, RuntimeError, AttributeError])
def test_a_library_that_fails_is_asked_once(monkeypatch, error):
    asked = []

    def library(device):
        asked.append(1)
        raise error("no")

    monkeypatch.setattr(cublaslt, "loaded", library)
    products = FastestProducts()
    for columns in (8, 16):
        shape = ProductShape(4, columns, 8, torch.bfloat16, False, False, torch.device("cpu"))
        assert products.search(shape, F.linear) is None
    assert asked == [1]
