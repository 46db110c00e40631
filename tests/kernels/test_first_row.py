"""Test the search for a sample's first row, used by sums over packs, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.kernels.common import first_row, tl, triton


@triton.jit
def _first_rows(sample_ptr, out_ptr, rows, WAYS: tl.constexpr):
    sample = tl.program_id(0)
    tl.store(out_ptr + sample, first_row(sample_ptr, rows, sample, WAYS))


def search(sample_of_row: torch.Tensor, samples: int, ways: int) -> torch.Tensor:
    found = torch.full((samples + 1,), -1, dtype=torch.int64)
    _first_rows[(samples + 1,)](sample_of_row, found, len(sample_of_row), WAYS=ways)
    return found


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9), ways=st.sampled_from((2, 4, 16, 256)))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_it_is_where_the_samples_begin(dtype, lengths, ways):
    sample_of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(dtype)
    begins = torch.tensor([0, *lengths]).cumsum(0)
    if len(sample_of_row):
        assert search(sample_of_row, len(lengths), ways).tolist() == begins.tolist()


def test_many_rows():
    lengths = torch.tensor([1, 65_536, 3, 0, 70_001])
    sample_of_row = torch.repeat_interleave(torch.arange(5), lengths).int()
    assert search(sample_of_row, 5, 256).tolist() == [0, 1, 65_537, 65_540, 65_540, 135_541]
