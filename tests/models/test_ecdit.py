"""Test expert-choice routing against a loop over samples and experts."""

import math
from decimal import Decimal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from opendit.models.experts import ExpertMlp, Experts, chosen_tokens
from opendit.models.variants import ECDiT, ECDiTConfig
from tests.models import plain
from tests.models.test_attention import randomised


def reference(mlp: ExpertMlp, y: torch.Tensor, capacity: float) -> torch.Tensor:
    """Return the experts' output for y (B, N, D)."""
    samples = []
    for tokens in y:
        affinity = torch.exp(tokens @ mlp.router.weight.T)
        affinity = affinity / affinity.sum(1, keepdim=True)  # over the experts
        out = torch.zeros_like(tokens)
        for expert in range(len(mlp.expert_fc1)):
            count = math.ceil(Decimal(str(capacity)) * len(tokens) / len(mlp.expert_fc1))
            ranking = sorted(range(len(tokens)), key=lambda i: -affinity[i, expert].item())  # noqa: B023
            for i in ranking[:count]:
                hidden = plain.gelu(tokens[i] @ mlp.expert_fc1[expert])
                out = out.index_add(
                    0, torch.tensor([i]), (affinity[i, expert] * (hidden @ mlp.expert_fc2[expert]))[None]
                )
        samples.append(out)
    return torch.stack(samples)


@pytest.mark.parametrize(
    "experts,tokens,capacity", [(4, 8, 1.0), (4, 7, 2.0), (5, 9, 0.7), (3, 6, 3.0), (8, 3, 1.0), (5, 50, 1.1)]
)
def test_routing(experts, tokens, capacity):
    mlp = randomised(ExpertMlp(12, 24, True, Experts(experts, 5, capacity)))
    y = torch.randn(3, tokens, 12, dtype=torch.float64)
    plain.compare(mlp, mlp(y), plain.mlp(y, mlp) + reference(mlp, y, capacity))


def test_gradient_of_the_input():
    mlp = randomised(ExpertMlp(12, 24, True, Experts(4, 5, 2.0)))
    y = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp.routed, (y,))


def test_with_all_experts_for_every_token_it_is_a_dense_mixture():
    mlp = randomised(ExpertMlp(12, 24, True, Experts(4, 5, 4.0)))
    y = torch.randn(2, 6, 12, dtype=torch.float64)
    hidden = plain.gelu(torch.einsum("bnd,edf->bnef", y, mlp.expert_fc1))
    expected = torch.einsum("bnef,efd,bne->bnd", hidden, mlp.expert_fc2, (y @ mlp.router.weight.T).softmax(-1))
    torch.testing.assert_close(mlp.routed(y), expected)


def test_every_expert_takes_as_many_tokens():
    assert [chosen_tokens(256, 64, 2.0), chosen_tokens(10, 64, 2.0), chosen_tokens(10, 4, 4.0)] == [8, 1, 10]
    for capacity in (0.0, 9.0):
        with pytest.raises(ValueError, match=f"--expert_capacity {capacity}"):
            ECDiT(ECDiTConfig((8, 8), 2, 2, 24, 1, 2, num_classes=3, experts=8, expert_capacity=capacity))


def test_a_fresh_router_does_not_send_everything_to_one_place():
    torch.manual_seed(0)
    model = ECDiT(ECDiTConfig((8, 8), 2, 2, 24, 1, 2, num_classes=3, experts=8, expert_hidden=6))
    mlp, y = model.blocks[0].mlp, torch.randn(4, 16, 24)
    assert mlp.router.weight.std() > 0.1
    chosen = mlp.router(y).softmax(-1).transpose(1, 2).topk(4, dim=-1).indices
    assert all(len(sample.unique()) > 8 for sample in chosen)
    assert mlp.expert_fc1.std() > 0.1 and mlp.expert_fc2.std() > 0.1


def test_half_precision_routes_as_fp32_does():
    torch.manual_seed(0)
    mlp, y = ExpertMlp(32, 64, True, Experts(8, 16, 2.0)), torch.randn(4, 32, 32)
    half = mlp.bfloat16().routed(y.bfloat16())
    assert half.dtype == torch.bfloat16
    expected = mlp.float().routed(y.bfloat16().float())
    assert (half.float() - expected).norm() / expected.norm() < 0.1  # a near tie may go to another token


@given(st.integers(1, 5000), st.integers(1, 128), st.integers(1, 999), st.integers(0, 3))
@example(100, 10, 11, 1)
@example(100, 10, 110, 2)
@example(1, 1, 3, 1)
def test_places_are_counted_exactly(tokens, experts, digits, point):
    """The number of tokens is the least k with k * experts >= capacity * tokens, in exact decimal arithmetic."""
    k = chosen_tokens(tokens, experts, digits / 10**point)
    assert 1 <= k <= tokens
    assert k == tokens or k * experts * 10**point >= digits * tokens
    assert k == 1 or (k - 1) * experts * 10**point < digits * tokens
