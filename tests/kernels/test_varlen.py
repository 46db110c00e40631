"""Test the choice of a kernel for short runs in a pack: one with wrong results is rejected, with the reason."""

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels import attention
from opendit.kernels.attention import LONG, TOGETHER, VarlenAttention, resolve_varlen
from opendit.kernels.flash_attention_4 import CUTE
from opendit.models.segments import SegmentRun

CUDA = torch.device("cuda")


def right(q, k, v, offsets, longest, scale):
    lengths = offsets.diff().tolist()
    assert longest == max(lengths)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*p, scale=scale).transpose(0, 1) for p in parts])


def to_all(q, k, v, offsets, longest, scale):
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), scale=scale).transpose(0, 1)


def without_gradient_of_k(q, k, v, offsets, longest, scale):
    return right(q, k.detach() + 0 * k, v, offsets, longest, scale)


def multiples_of_32(q, k, v, offsets, longest, scale):
    if q.shape[-1] % 32:
        raise RuntimeError("head size")
    return right(q, k, v, offsets, longest, scale)


def missing():
    raise ImportError("not installed")


@pytest.fixture
def packages(monkeypatch):
    """Return a function that replaces the packages by test functions, and pretends that there is a Hopper GPU."""
    resolved = attention.right_size

    def use(**functions):
        made = {name: (lambda f=f: f) if f is not missing else missing for name, f in functions.items()}
        monkeypatch.setattr(attention, "PACKAGES", made)
        monkeypatch.setattr(attention, "compute_capability", lambda device: (9, 0))
        monkeypatch.setattr(
            attention, "right_size", lambda package, device, dtype, size: resolved(package, "cpu", dtype, size)
        )
        resolved.cache_clear()

    yield use
    resolved.cache_clear()


def test_the_first_that_is_right_is_taken(packages):
    packages(absent=missing, all_tokens=to_all, no_gradient=without_gradient_of_k, good=right, other=right)
    found, why = resolve_varlen(CUDA, torch.bfloat16, 24)
    assert found == VarlenAttention("good", 24)
    assert why == "good for runs that don't fill the GPU"
    packages(absent=missing, all_tokens=to_all)
    found, why = resolve_varlen(CUDA, torch.bfloat16, 24)
    assert found is None and why == "one call a run: absent and all_tokens are missing, or wrong here"


def test_heads_are_filled_up_where_that_is_right(packages):
    packages(picky=multiples_of_32)
    found, why = resolve_varlen(CUDA, torch.bfloat16, 72)
    assert found.head_size == 96 and why.endswith("picky for runs that don't fill the GPU, heads filled up to 96")
    q, k, v = torch.randn(3, 9, 2, 72, dtype=torch.float64).unbind()
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.testing.assert_close(found(q, k, v, offsets, 5), right(q, k, v, offsets, 5, 72**-0.5))


def test_where_there_is_none_the_reason_is_said(packages):
    packages(good=right)
    for device, dtype, asked, why in (
        ("cpu", torch.bfloat16, "auto", "need a CUDA GPU, not cpu"),
        ("cuda", torch.float32, "auto", "take bf16 and fp16"),
        ("cuda", torch.bfloat16, "cudnn", "by cudnn, as asked for"),
    ):
        found, said = resolve_varlen(device, dtype, 24, asked)
        assert found is None and why in said and said.startswith("one call a run")
    attention.compute_capability = lambda device: (7, 5)  # the fixture restores it
    assert "too old" in resolve_varlen("cuda", torch.float16, 24)[1]


def test_runs_that_fill_the_gpu_stay_dense():
    kernel = VarlenAttention("any", 64)
    assert kernel.takes(SegmentRun(0, 1, LONG - 1)) and not kernel.takes(SegmentRun(0, 1, LONG))
    assert kernel.takes(SegmentRun(3, 8, TOGETHER // 8 - 1)) and not kernel.takes(SegmentRun(3, 8, TOGETHER // 8))


def test_flash_attention_4_takes_them_all():
    kernel = VarlenAttention(CUTE, 64)
    assert kernel.takes(SegmentRun(0, 1, 7)) and kernel.takes(SegmentRun(0, 8, 1 << 16))


def test_what_is_kept_for_the_backward_pass_has_no_zeros(packages):
    packages(picky=multiples_of_32)
    kernel, offsets = VarlenAttention("picky", 32), torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = leaves = [x.requires_grad_() for x in torch.randn(3, 9, 2, 24, dtype=torch.float64).unbind()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = kernel(q, k, v, offsets, 5)
    assert not any(x.shape[-1] == 32 for x in kept if x.dim() > 1)
    wanted = right(q, k, v, offsets, 5, 24**-0.5)
    grad = torch.randn_like(out)
    for got, want in zip(
        (out, *torch.autograd.grad(out, leaves, grad)),
        (wanted, *torch.autograd.grad(wanted, leaves, grad)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
