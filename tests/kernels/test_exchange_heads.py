"""Test exchange_heads in Triton's interpreter, with the memory of all ranks in this process."""

import pytest
import torch

from opendit.kernels.exchange_heads import (
    exchange_heads,
    exchange_heads_reference,
    new_heads,
    send_rows,
    send_rows_reference,
)

# Ranks, samples, tokens per rank, tensors (3 for q, k, v), heads, head size, all tokens. Some cases have padding, or a
# rank with padding only.
CASES = [
    (4, 1, 5, 3, 8, 8, 20),
    (3, 2, 5, 3, 6, 8, 13),
    (3, 2, 5, 1, 6, 12, 11),
    (4, 1, 2, 3, 4, 8, 5),
    (2, 3, 7, 1, 4, 72, 14),
]


def heads_like(rows: torch.Tensor, number: int, length: int, tokens_first: bool) -> tuple[torch.Tensor, ...]:
    B, _, parts, _, d = rows.shape
    if tokens_first:
        heads = new_heads(parts, B, number, length, d, rows)
    else:
        heads = tuple(rows.new_empty(B, number, length, d) for _ in range(parts))
    return tuple(part.normal_() for part in heads)


@pytest.mark.parametrize(("tokens_first", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_reference(case, push, tokens_first, dtype):
    ranks, B, n, parts, all_heads, d, length = case
    torch.manual_seed(0)
    share = all_heads // ranks
    for rank in (0, ranks - 1):
        for first, number in ((rank * share, share), (rank * share + share // 2, share - share // 2)):
            rows = [torch.randn(B, n, parts, all_heads, d).to(dtype) for _ in range(ranks)]
            heads = heads_like(rows[0], number, length, tokens_first)
            want_rows, want_heads = [r.clone() for r in rows], tuple(part.clone() for part in heads)
            addresses, offset = torch.tensor([r.data_ptr() for r in rows]) - 32, 32
            for own in (True, False):  # first only the rank's own share, then everything
                exchange_heads(heads, addresses, tuple(rows[0].shape), rank, first, push, own, offset)
                peers = [want_rows[p] if p == rank or not own else want_rows[p].clone() for p in range(ranks)]
                if own and not push:
                    whole = tuple(part.clone() for part in want_heads)
                    exchange_heads_reference(whole, peers, first, push)
                    mine = slice(rank * n, (rank + 1) * n)
                    for part, filled in zip(want_heads, whole, strict=True):
                        part[:, :, mine] = filled[:, :, mine]
                else:
                    exchange_heads_reference(want_heads, peers, first, push)
                for got, want in zip((*rows, *heads), (*want_rows, *want_heads), strict=True):
                    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_sent_where_heads_would_have_read_them(case, dtype):
    ranks, B, n, _, all_heads, d, length = case
    torch.manual_seed(0)
    share = all_heads // ranks
    rows = [torch.randn(B, n, all_heads, d).to(dtype) for _ in range(ranks)]
    heads = [torch.full((B, length, share, d), torch.nan, dtype=dtype) for _ in range(ranks)]
    reference = [torch.full_like(part, torch.nan) for part in heads]
    addresses = torch.tensor([part.data_ptr() for part in heads])
    for rank in range(ranks):
        send_rows(rows[rank], addresses, rank, length)
        send_rows_reference(rows[rank], reference, rank)
    for rank, (got, same) in enumerate(zip(heads, reference, strict=True)):
        want = new_heads(1, B, share, length, d, got)
        exchange_heads_reference(want, [r.unsqueeze(2) for r in rows], rank * share, push=False)
        assert torch.equal(got, want[0].transpose(1, 2)) and torch.equal(same, got)


def test_bad_input():
    rows, addresses = (1, 5, 3, 4, 8), torch.zeros(2, dtype=torch.int64)
    heads = new_heads(3, 1, 2, 10, 8, torch.empty(0))
    for wrong in (heads[:1], new_heads(3, 1, 2, 11, 8, heads[0]), new_heads(3, 2, 2, 10, 8, heads[0])):
        with pytest.raises(ValueError, match="don't fit rows"):
            exchange_heads(wrong, addresses, rows, 0, 0, False)
    for heads_and_tokens in ((3, 10), (4, 11)):
        with pytest.raises(ValueError, match="can't go to 2 ranks"):
            send_rows(torch.empty(1, 5, heads_and_tokens[0], 8), addresses, 0, heads_and_tokens[1])
    with pytest.raises(ValueError, match="one shape and layout"):
        exchange_heads((*heads[:2], heads[2].contiguous()), addresses, rows, 0, 0, False)
