"""low_rank_gradients in Triton's interpreter, and that LoRA's layers use it beside every fused operation."""

import pytest
import torch

from opendit.kernels import linear
from opendit.models.layers import Projection
from tests.kernels.cases import BOUNDS, poisoned_memory


@pytest.mark.parametrize(
    ("rows", "width", "rank", "programs"),
    # Rows and columns that fill no tile; ranks that are no power of 2; columns of one program, and of several.
    [(1, 64, 1, 264), (300, 200, 3, 1), (300, 200, 16, 4), (257, 72, 20, 264), (512, 128, 64, 2), (40, 1152, 16, 5)],
)
def test_gradients_are_those_of_fp64(rows, width, rank, programs, monkeypatch):
    monkeypatch.setattr(linear, "PROGRAMS", programs)
    torch.manual_seed(0)
    dy, b, thin = (torch.randn(shape).add(0.3).half() for shape in ((rows, width), (width, rank), (rows, rank)))
    with poisoned_memory():
        found = linear.low_rank_gradients(dy, b, thin, 0.5)
    exact = 0.5 * (dy.double() @ b.double()), 0.5 * (dy.double().t() @ thin.double())
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.float16 and got.shape == want.shape
        assert (got.double() - want).norm() <= BOUNDS[torch.float16] * want.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_lora_has_the_gradients_of_its_formula(bias, monkeypatch):
    called = []
    kernel = linear.low_rank_gradients
    monkeypatch.setattr(linear, "low_rank_gradients", lambda *args: called.append(1) or kernel(*args))
    torch.manual_seed(0)
    layer = Projection(48, 80, bias).to(torch.float16)
    layer.add_low_rank(3, 2.0)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.2)
    layer.weight.requires_grad_(False)
    x, dy = torch.randn(2, 7, 48, dtype=torch.float16, requires_grad=True), torch.randn(2, 7, 80, dtype=torch.float16)
    factors = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    y = layer.product(x, layer.bias, linear.linear)
    got = torch.autograd.grad(y, [x, *factors], dy)
    exact, a, b = (t.detach().double().requires_grad_() for t in (x, *factors))
    want = exact @ layer.weight.double().t() + 2 * (exact @ a.t() @ b.t()) + (layer.bias.double() if bias else 0)
    wanted = torch.autograd.grad(want, [exact, a, b], dy.double())
    assert called == [1]
    for one, other in zip((y, *got), (want, *wanted), strict=True):
        assert (one.double() - other).norm() <= 2 * BOUNDS[torch.float16] * other.norm()
