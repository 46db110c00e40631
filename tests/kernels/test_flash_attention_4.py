"""Test FlashAttention 4 with padded heads only in the backward pass, using a stand-in for the package."""

import sys
import types

import pytest
import torch

from opendit.kernels import attention, flash_attention_4
from opendit.kernels.attention import VarlenAttention
from tests.memory import kept_bytes

D, WIDE = 24, 32


def formula(q, k, v, scale, offsets=None):
    """Return attention and its log-sum-exp, for (B, N, H, d), or for (N, H, d) with offsets."""
    if offsets is not None:
        parts = [x.split(offsets.diff().tolist()) for x in (q, k, v)]
        found = [formula(*(x[None] for x in part), scale) for part in zip(*parts, strict=True)]
        return torch.cat([out[0] for out, _ in found]), torch.cat([sums[0] for _, sums in found], dim=1)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture
def package(monkeypatch):
    """Install a fake package and yield a list of its calls. Each entry has the pass and the head sizes; for the
    backward pass, also the ``deterministic`` flag."""
    given = []

    def forward(q, k, v, *, softmax_scale, return_lse=False, cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False,
                max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        given.append(("forward", *(x.shape[-1] for x in (q, k, v))))
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        assert cu_seqlens_q is None or max_seqlen_q == cu_seqlens_q.diff().max()
        return formula(q, k, v, softmax_scale, cu_seqlens_q)

    def backward(q, k, v, out, dout, lse, *, softmax_scale, deterministic, cu_seqlens_q=None, cu_seqlens_k=None,
                 max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        given.append(("backward", *(x.shape[-1] for x in (q, k, v, out, dout)), deterministic))
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            again, sums = formula(*leaves, softmax_scale, cu_seqlens_q)
        torch.testing.assert_close((out, lse), (again.detach(), sums.detach()))
        return torch.autograd.grad(again, leaves, dout)

    made = types.ModuleType("flash_attn.cute")
    made.flash_attn_func = made.flash_attn_varlen_func = forward
    interface = types.ModuleType("flash_attn.cute.interface")
    setattr(interface, flash_attention_4.BACKWARD, backward)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", made)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    attention.flash_attn.cache_clear(), flash_attention_4.backward_pass.cache_clear()
    yield given
    attention.flash_attn.cache_clear(), flash_attention_4.backward_pass.cache_clear()


@pytest.mark.parametrize("deterministic", (False, True))
def test_dense(package, deterministic):
    x = torch.randn(2, 7, 3, 3, D, dtype=torch.float64, requires_grad=True)  # qkv, laid out as by a block's projection
    weight = torch.randn(2, 3, 7, D, dtype=torch.float64)
    want = formula(*x.unbind(2), D**-0.5)[0].transpose(1, 2)
    torch.use_deterministic_algorithms(deterministic)
    try:
        got = attention.package_attention(*x.permute(2, 0, 3, 1, 4).unbind(), WIDE)
        found = torch.autograd.grad(got, x, weight)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found, torch.autograd.grad(want, x, weight)[0])
    assert package == [("forward", D, D, D), ("backward", *[WIDE] * 5, deterministic)]


def test_unequal_lengths(package):
    offsets = torch.tensor([0, 4, 5, 16], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in torch.randn(3, 16, 2, D, dtype=torch.float64).unbind()]
    want, _ = formula(*leaves, D**-0.5, offsets)
    got, grad = VarlenAttention(flash_attention_4.CUTE, WIDE)(*leaves, offsets, 11), torch.randn_like(want)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, grad) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    assert package == [("forward", D, D, D), ("backward", *[WIDE] * 5, False)]


def test_what_is_kept_has_no_zeros(package):
    x = torch.randn(2, 7, 3, 3, D, dtype=torch.float64, requires_grad=True)
    q, k, v = x.unbind(2)
    kept = kept_bytes(lambda: flash_attention_4.attend(q, k, v, WIDE))
    assert 0 < kept <= 8 * (2 * 7 * 3 * D + 2 * 7 * 3)  # the output and the log-sum-exp; q, k and v exist anyway


def test_without_its_backward_pass_heads_are_filled_up_in_both(package, monkeypatch):
    monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], flash_attention_4.BACKWARD)
    flash_attention_4.backward_pass.cache_clear()
    q, k, v = torch.randn(3, 2, 3, 7, D, dtype=torch.float64).unbind()
    want = formula(*(x.transpose(1, 2) for x in (q, k, v)), D**-0.5)[0].transpose(1, 2)
    torch.testing.assert_close(attention.package_attention(q, k, v, WIDE), want)
    assert package == [("forward", WIDE, WIDE, WIDE)]
