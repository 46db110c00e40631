"""Test split_heads in Triton's interpreter: it returns views, and one pass gives the gradients of qkv and its bias."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from opendit.kernels.attention import LocalAttention
from opendit.kernels.common import Launch, forced_launch
from opendit.kernels.split_heads import split_heads, split_heads_reference
from tests.kernels.cases import DTYPES, check_split_heads, pairwise

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim", "dtype", "tokens_first", "bias_dtype"),
    pairwise((1, 2, 9), (1, 7, 37), (1, 3, 6), (20, 64, 72), DTYPES, (True, False), (None, BFLOAT16, FLOAT32)),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_forward_and_gradients(batch, length, heads, head_dim, dtype, tokens_first, bias_dtype):
    with forced_launch(split_heads_backward=Launch(rows=16, tiles=4, warps=1)):
        check_split_heads(batch, length, heads, head_dim, dtype, tokens_first=tokens_first, bias_dtype=bias_dtype)


def test_default_launch():
    check_split_heads(2, 50, 4, 72, BFLOAT16, bias_dtype=FLOAT32)


def qkv_and_bias() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 3 * 48, requires_grad=True), torch.randn(3 * 48, requires_grad=True)]


def attention(qkv, bias, split=split_heads):
    return LocalAttention()(*split(qkv * 1.5, 4, bias)) * 0.5


@pytest.mark.parametrize("mode", ("eager", "checkpoint", "compile eager", "compile aot_eager"))
def test_attention_on_it(mode):
    leaves = qkv_and_bias()
    run = attention
    if mode == "checkpoint":
        run = lambda *args: checkpoint(attention, *args, use_reentrant=False)  # noqa: E731
    elif mode.startswith("compile"):
        run = torch.compile(attention, backend=mode.split()[1], fullgraph=True)
    got, want = run(*leaves), attention(*leaves, split_heads_reference)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, weight) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_outputs_that_are_not_used_and_gradients_that_differ_in_strides():
    qkv, bias = qkv_and_bias()
    for pick in (lambda q, k, v: v.sum(), lambda q, k, v: (q * k.transpose(-1, -2).contiguous().mT).sum() + v.mean()):
        got, want = (
            torch.autograd.grad(pick(*split(qkv, 4, bias)), (qkv, bias))
            for split in (split_heads, split_heads_reference)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_without_gradients_it_is_a_view():
    qkv, bias = qkv_and_bias()
    with torch.no_grad():
        qkv = qkv * 1.5
        q, k, v = split_heads(qkv, 4, bias)
    assert q.data_ptr() == qkv.data_ptr() and not q.requires_grad


def test_registered_as_torch_wants_it():
    grads = [torch.randn(2, 3, 4, 8).transpose(1, 2) for _ in range(3)]
    for sums in (None, FLOAT32):
        torch.library.opcheck(torch.ops.opendit.gather_heads.default, (*grads, sums))


def test_wrong_inputs_are_refused():
    qkv, bias = (leaf.detach() for leaf in qkv_and_bias())
    for arguments in ((qkv, 5), (qkv[0], 4), (qkv, 4, bias[:1]), (qkv.double(), 4), (qkv, 4, bias.double())):
        with pytest.raises(ValueError):
            split_heads(*arguments)
