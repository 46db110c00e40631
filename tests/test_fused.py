"""opendit.fused, and the change of docs/api.md: a plain DiT computes the same with five lines changed."""

import pytest
import torch

from benchmarks.fused_dit import changes, fused_dit
from benchmarks.plain_dit import PlainDiT
from opendit import fused
from opendit.kernels.gate_residual import gate_residual_reference
from opendit.kernels.layernorm_modulate import layernorm_modulate_reference
from tests.models.test_dit import randomised

SHAPE = ((6, 4), 2, 3, 24, 2, 3, 5)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 3, 6, 4, generator=generator), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 5])


def gradients(model):
    output = model(*inputs())
    output.float().square().mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_five_lines():
    assert sum(new.count("\n") for _, new in changes()) == 5


@pytest.mark.parametrize(("stream", "bound"), (("float32", 1e-5), ("bfloat16", 3e-2)))
def test_the_changed_model_is_the_model(stream, bound):
    plain = randomised(PlainDiT(*SHAPE))
    changed = fused_dit(stream).PlainDiT(*SHAPE)
    changed.load_state_dict(plain.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=stream == "bfloat16"):
        (want, want_grads), (got, got_grads) = gradients(plain), gradients(changed)
    assert (got - want).norm() <= bound * want.norm()
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= bound * grad.norm() + 1e-7, name


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_functions_keep_the_dtype(dtype):
    torch.manual_seed(0)
    x, branch = torch.randn(2, 2, 5, 24, dtype=torch.float64).to(dtype)
    a, b = torch.randn(2, 2, 24)
    for got, want in (
        (fused.layernorm_modulate(x, a, b), layernorm_modulate_reference(x.double(), a.double(), b.double())),
        (fused.gate_residual(x, a, branch), gate_residual_reference(x.double(), a.double(), branch.double())),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)
