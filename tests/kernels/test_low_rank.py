"""Test LoRA's products in Triton's interpreter, alone and in a layer."""

import pytest
import torch

from opendit.kernels import fp8, linear, lora
from opendit.models.layers import Projection
from tests.kernels.cases import BOUNDS, poisoned_memory


@pytest.mark.parametrize(
    ("rows", "width", "rank", "programs"),
    # Cases: partial tiles, ranks that are not powers of 2, one or several programs.
    [(1, 64, 1, 264), (300, 200, 3, 1), (300, 200, 16, 4), (257, 72, 20, 264), (512, 128, 64, 2), (40, 1152, 16, 5)],
)
def test_gradients_are_those_of_fp64(rows, width, rank, programs, monkeypatch):
    monkeypatch.setattr(lora, "PROGRAMS", programs)
    torch.manual_seed(0)
    dy, b, thin = (torch.randn(shape).add(0.3).half() for shape in ((rows, width), (width, rank), (rows, rank)))
    with poisoned_memory():
        found = lora.low_rank_gradients(dy, b, thin, 0.5)
    exact = 0.5 * (dy.double() @ b.double()), 0.5 * (dy.double().t() @ thin.double())
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.float16 and got.shape == want.shape
        assert (got.double() - want).norm() <= BOUNDS[torch.float16] * want.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_lora_has_the_gradients_of_its_formula(bias, monkeypatch):
    called = []
    kernels = lora.LORA_PRODUCTS
    counted = kernels._replace(gradients=lambda *args: called.append(1) or kernels.gradients(*args))
    monkeypatch.setattr(linear, "LORA_PRODUCTS", counted)
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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "rank", "scale"),
    # Cases: partial tiles, several rows of tiles per program, a small rank, a scale.
    [(130, 72, 264, 8, 0.5), (300, 136, 520, 16, 2.0), (1153, 64, 256, 24, 1.0), (128, 200, 1032, 64, 3.0)],
)
def test_product_and_thin_term_are_those_of_fp64(rows, depth, columns, rank, scale, turned, monkeypatch):
    monkeypatch.setattr(lora, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(lora, "SMALLEST_OUTPUT", 0)
    monkeypatch.setattr(lora, "low_rank_product_reference", None)  # only the kernel can be called
    torch.manual_seed(0)
    shapes = (rows, depth), (columns, depth), (rows, rank), (columns, rank), (columns,)
    x, weight, thin, factor, bias = (torch.randn(shape).add(0.1).half() for shape in shapes)
    matrices = [matrix.t() if turned else matrix.t().contiguous() for matrix in (weight, factor)]
    for given in (bias, None):
        with poisoned_memory():
            got = lora.low_rank_product(x, matrices[0], thin, matrices[1], scale, given)
        want = x.double() @ weight.double().t() + scale * (thin.double() @ factor.double().t())
        want = want if given is None else want + given.double()
        assert got.dtype == torch.float16 and got.shape == want.shape
        assert (got.double() - want).norm() <= 2 * BOUNDS[torch.float16] * want.norm()


@pytest.mark.parametrize("what", ["output", "depth", "rank", "strides", "dtype"])
def test_what_the_kernel_can_not_read_is_left_to_torch(what, monkeypatch):
    monkeypatch.setattr(lora, "_product_op", None)
    monkeypatch.setattr(lora, "SMALLEST_OUTPUT", 2**20 if what == "output" else 0)
    rows, depth, rank = 256, 60 if what == "depth" else 64, 5 if what == "rank" else 8
    dtype = torch.float32 if what == "dtype" else torch.float16
    torch.manual_seed(0)
    x, weight, thin, factor = (
        torch.randn(shape, dtype=dtype) for shape in ((rows, 2 * depth), (depth, 264), (rows, rank), (rank, 264))
    )
    x = x[:, ::2] if what == "strides" else x[:, :depth].contiguous()
    got = lora.low_rank_product(x, weight, thin, factor, 2.0)
    want = x.double() @ weight.double() + 2 * thin.double() @ factor.double()
    assert (got.double() - want).norm() <= BOUNDS[torch.float16] * want.norm()


def test_a_large_layer_with_lora_has_the_gradients_of_its_formula(monkeypatch):
    """The kernel computes the output with LoRA's scale. The input's gradient is not scaled a second time."""
    monkeypatch.setattr(lora, "low_rank_product_reference", None)
    monkeypatch.setattr(lora, "SMALLEST_OUTPUT", 0)
    torch.manual_seed(0)
    layer = Projection(256, 264).to(torch.float16)
    layer.add_low_rank(8, 0.25)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.2)
    layer.weight.requires_grad_(False)
    x, dy = torch.randn(2, 67, 256, dtype=torch.float16, requires_grad=True), torch.randn(2, 67, 264).half()
    factors = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    got = layer.product(x, layer.bias, linear.linear)
    got = got, *torch.autograd.grad(got, [x, *factors], dy)
    exact, a, b = (t.detach().double().requires_grad_() for t in (x, *factors))
    want = exact @ layer.weight.double().t() + 0.25 * (exact @ a.t() @ b.t()) + layer.bias.double()
    wanted = torch.autograd.grad(want, [exact, a, b], dy.double())
    for one, other in zip(got, (want, *wanted), strict=True):
        assert (one.double() - other).norm() <= 3 * BOUNDS[torch.float16] * other.norm()


@pytest.mark.parametrize(
    ("rows", "width", "rank", "programs"),
    [(1, 64, 1, 264), (300, 200, 3, 1), (300, 200, 16, 4), (257, 72, 20, 264), (130, 640, 64, 2)],
)
def test_thin_products_of_a_float8_activation_are_those_of_fp64(rows, width, rank, programs, monkeypatch):
    monkeypatch.setattr(lora, "PROGRAMS", programs)
    torch.manual_seed(0)
    x = (8 * torch.randn(rows, width)).to(torch.float8_e4m3fn)
    descale = torch.tensor([0.25])
    a, dthin = (torch.randn(shape).add(0.3).half() for shape in ((rank, width), (rows, rank)))
    with poisoned_memory():
        found = lora.thin_product(x, descale, a), lora.thin_gradient(dthin, x, descale)
    exact = 0.25 * (x.double() @ a.double().t()), 0.25 * (dthin.double().t() @ x.double())
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.float16 and got.shape == want.shape
        assert (got.double() - want).norm() <= BOUNDS[torch.float16] * want.norm()


@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 64, 1), (300, 200, 3), (257, 72, 20)])
def test_the_gradients_kernel_also_casts(rows, width, rank):
    torch.manual_seed(0)
    dy, b, thin = (torch.randn(shape).half() for shape in ((rows, width), (width, rank), (rows, rank)))
    with poisoned_memory():
        dy8 = fp8.Float8.empty(dy.shape, fp8.E5M2, dy.device)
        arguments = fp8.kernel_arguments(dy8, fp8.amax(dy), fp8.SAMPLED_GRADIENT)
        found = lora.low_rank_gradients_and_cast(dy, b, thin, 0.5, *arguments)
    want = fp8.cast(dy, fp8.E5M2)
    assert torch.equal(dy8.data.float(), want.data.float()) and torch.equal(dy8.descale, want.descale)
    assert all(map(torch.equal, found, lora.low_rank_gradients(dy, b, thin, 0.5)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 64, 1), (70, 200, 3), (129, 136, 64)])
def test_a_thin_term_is_added_in_place(rows, width, rank, turned):
    torch.manual_seed(0)
    y, thin, factor = (torch.randn(shape).half() for shape in ((rows, width), (rows, rank), (width, rank)))
    factor = factor.t() if turned else factor.t().contiguous()
    want = y.double() + 0.5 * thin.double() @ factor.double()
    with poisoned_memory():
        lora.add_low_rank(y, thin, factor, 0.5)
    assert (y.double() - want).norm() <= BOUNDS[torch.float16] * want.norm()
