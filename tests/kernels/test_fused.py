"""Test opendit.fused: with the five-line change of docs/api.md, a plain DiT computes the same."""

import pytest
import torch

from benchmarks.fused_dit import changes, fused_dit
from benchmarks.plain_dit import PlainDiT
from opendit import fused
from opendit.kernels.common import pretended
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


@pytest.mark.parametrize(("card", "first"), (((9, 0), "CUDNN_ATTENTION"), ((8, 0), "FLASH_ATTENTION")))
def test_the_attention_of_a_card_is_its_fastest_kernel_of_torch_s(monkeypatch, card, first):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    with pretended(card), fused.attention():
        now = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    assert now[0].name == first and now[-1].name == "MATH"
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
def test_no_graph_break_and_another_eps(compiler):
    torch.manual_seed(0)
    x, branch = torch.randn(2, 2, 5, 24, requires_grad=True) * 1e-3  # so small that eps matters
    a, b = torch.randn(2, 2, 24)

    def block(x, branch):
        with fused.attention():
            seen = torch.nn.functional.scaled_dot_product_attention(x, branch, branch)
        return fused.gate_residual(fused.layernorm_modulate(x, a, b, eps=1e-5), a, seen)

    y = torch.nn.functional.layer_norm(x, (24,), eps=1e-5) * (1 + b.unsqueeze(1)) + a.unsqueeze(1)
    weights = torch.softmax(x @ branch.transpose(1, 2) / 24**0.5, -1)
    want = y + a.unsqueeze(1) * (weights @ branch)
    torch.testing.assert_close(torch.compile(block, backend=compiler, fullgraph=True)(x, branch), want)
    torch.testing.assert_close(block(x, branch), want)
    assert not torch.allclose(fused.layernorm_modulate(x, a, b), y)


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
