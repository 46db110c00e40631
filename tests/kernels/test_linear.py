"""Test the linear layer with its custom weight gradient against torch."""

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels.linear import linear


@pytest.mark.parametrize("shape", ((7,), (3, 5), (2, 3, 4)))
@pytest.mark.parametrize(("inside", "outside"), ((12, 5), (5, 12), (6, 6)))
@pytest.mark.parametrize("needs", ((True, True), (True, False), (False, True)))
def test_results_and_gradients_are_torchs(shape, inside, outside, needs):
    torch.manual_seed(0)
    x = torch.randn(*shape, inside, dtype=torch.float64).transpose(0, -2).requires_grad_(needs[0])
    weight = torch.randn(outside, inside, dtype=torch.float64, requires_grad=needs[1])
    out, want = linear(x, weight), F.linear(x, weight)
    weights = torch.randn_like(want)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
    grads, wanted = (torch.autograd.grad(o, leaves, weights) for o in (out, want))
    torch.testing.assert_close(out, want)
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, expected)
    assert all(grad.is_contiguous() for leaf, grad in zip(leaves, grads, strict=True) if leaf is weight)


def test_autocast_and_compile():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 12), torch.randn(5, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(x, weight).square().sum(), weight)
    (want,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight)
    torch.testing.assert_close(grad, want)
