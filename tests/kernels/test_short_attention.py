"""Test the attention kernel for short sequences in Triton's interpreter, against float64.
tests/gpu/test_sampling_gpu.py runs the same on a GPU."""

import pytest
import torch

from opendit.kernels.short_attention import (
    FEW,
    HEADS,
    LONGEST,
    MANY,
    ShortAttention,
    short_attention,
    short_attention_reference,
    split_head,
    takes,
)

DEVICE, BOUND = "cpu", 3e-3


def made(batch: int, heads: int, tokens: int, size: int, packed: bool, dtype=torch.float16) -> list[torch.Tensor]:
    """Return q, k and v (B, H, N, d): views of one packed tensor, or separate tensors in another memory order."""
    generator = torch.Generator().manual_seed(0)
    if packed:
        qkv = torch.randn(batch, tokens, 3, heads, size, generator=generator).to(DEVICE, dtype)
        return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return [torch.randn(batch, heads, tokens, size, generator=generator).to(DEVICE, dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("size", "tokens", "packed"),
    [(size, tokens, (i + j) % 2 == 0) for i, size in enumerate((16, 24, 64, 72, 80, 96, 128))
     for j, tokens in enumerate((1, 37, 128, 130))],
)  # fmt: skip
def test_it_is_attention(size, tokens, packed):
    q, k, v = made(2, 3, tokens, size, packed)
    q, k = 3 * q, k + 0.5  # scores that differ clearly
    assert takes(q, k)
    got, want = short_attention(q, k, v), short_attention_reference(q.double(), k.double(), v.double())
    assert got.shape == want.shape and got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
    assert (got - want).norm() < BOUND * want.norm()


def test_large_scores_do_not_overflow():
    q, k, v = made(1, 2, 70, 72, True)
    q = 60 * q
    got, want = short_attention(q, k, v), short_attention_reference(q.double(), k.double(), v.double())
    assert got.isfinite().all() and (got - want).norm() < 0.05 * want.norm()


def test_heads_are_covered():
    assert [split_head(size) for size in (8, 16, 24, 64, 72, 88, 96, 128)] == [
        (16, 0), (16, 0), (16, 16), (64, 0), (64, 16), (64, 32), (64, 32), (128, 0),
    ]  # fmt: skip
    for tokens, size, dtype in ((LONGEST + 1, 72, torch.bfloat16), (8, 76, torch.bfloat16), (8, 200, torch.bfloat16),
                                (8, 72, torch.float32)):  # fmt: skip
        assert not takes(*[torch.empty(1, 1, tokens, size, dtype=dtype)] * 2)
    assert LONGEST == 4 * 256
    assert takes(*[torch.empty(2, HEADS // 8, LONGEST, 72, dtype=torch.bfloat16)] * 2)
    assert not takes(*[torch.empty(1, HEADS // 4 + 1, LONGEST, 72, dtype=torch.bfloat16)] * 2)


def test_tiles_for_few_heads_and_for_many_give_the_same_bits():
    q, k, v = made(2, 3, 200, 72, True)
    few, many = short_attention(q, k, v, FEW), short_attention(q, k, v, MANY)
    if DEVICE == "cpu":  # BLAS may add in an order that depends on the number of rows
        torch.testing.assert_close(few, many, rtol=2**-9, atol=2**-13)
    else:
        assert torch.equal(few, many)
    assert FEW.keys == MANY.keys


def test_what_it_does_not_take_goes_elsewhere():
    given = made(1, 2, 5, 72, True)
    attend = ShortAttention(lambda *qkv: "elsewhere")
    assert attend(*(x.float() for x in given)) == "elsewhere" and torch.equal(attend(*given), short_attention(*given))
    caption = made(1, 2, 7, 72, True)
    assert attend(given[0], *caption[1:]) == "elsewhere"
