"""Test products by cuBLASLt's proposals on a GPU: they have torch's bits, also in CUDA graphs and on threads."""

import threading

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels import cublaslt
from opendit.kernels.cublaslt import FastestProducts
from opendit.kernels.linear import product_and_gelu as gelu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def operands(rows, columns, inner, bias, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(rows)
    made = [
        torch.randn(*size, generator=generator, device="cuda") for size in ((2, rows // 2, inner), (columns, inner))
    ]
    made.append(torch.randn(columns, generator=generator, device="cuda") if bias else None)
    return [None if x is None else x.to(dtype) for x in made]


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Accept slower proposals too, so that one with the same bits is used if there is any."""
    monkeypatch.setattr(cublaslt, "GAIN", 100.0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 226, 512, 4096])
@pytest.mark.parametrize(("columns", "inner", "bias", "activation"), [
    (3456, 1152, True, None), (1152, 1152, False, None), (4608, 1152, True, gelu), (1152, 4608, False, None),
    (136, 72, True, None),
])  # fmt: skip
def test_torchs_bits(rows, columns, inner, bias, activation, dtype):
    products, torchs = FastestProducts(), activation or F.linear
    x, weight, b = operands(rows, columns, inner, bias, dtype)
    for factor in (1, 3):  # also with other inputs than those used for the choice
        got = products(factor * x, weight, b, torchs, gelu=activation is not None)
        want = torchs(factor * x, weight, b)
        assert torch.equal(got, want) and got.shape == want.shape and not products.failed
    found = next(iter(products.found.values()))
    assert found is not None or rows == 2 or columns == 136  # for all other shapes, some proposal rounds as torch does


@torch.inference_mode()
def test_in_a_recording_and_on_threads():
    products = FastestProducts()
    x, weight, bias = operands(512, 1152, 1152, True)
    other = torch.randn_like(bias)
    first, second = products(x, weight, bias, F.linear), products(x, weight, other, F.linear)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = products(x, weight, bias, F.linear)
    recorded.zero_()
    graph.replay()
    assert torch.equal(recorded, first) and not torch.equal(first, second)
    wrong = []

    @torch.inference_mode()
    def work(bias, want):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(products(x, weight, bias, F.linear), want):
                    wrong.append(1)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in ((bias, first), (other, second)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.inference_mode()
def test_what_is_not_taken_is_torchs():
    products = FastestProducts()
    x, weight, bias = operands(512, 1152, 1152, True)
    shifted = torch.empty(weight.numel() + 8, device="cuda", dtype=weight.dtype)[8:].view_as(weight).copy_(weight)
    for given in ((x, shifted, bias), (x.transpose(0, 1), weight, bias), (x.float(), weight.float(), bias.float())):
        assert torch.equal(products(*given, F.linear), F.linear(*given))
    with torch.inference_mode(False):
        leaf = x.clone().requires_grad_()
        assert products(leaf, weight.clone(), bias.clone(), F.linear).requires_grad
    assert not products.found
    before = torch.cuda.get_rng_state()
    products(x, weight, bias, F.linear)
    assert products.found and torch.equal(torch.cuda.get_rng_state(), before)
