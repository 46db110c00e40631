"""Heads filled up with zeros, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from opendit.kernels.filled_heads import fill


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "d", "size"), [(3, 72, 96), (1, 8, 32), (5, 7, 9)])
def test_numbers_stay_and_the_rest_is_zero(dtype, heads, d, size):
    torch.manual_seed(0)
    qkv = torch.randn(2, 11, 3, heads, d).to(dtype)
    for x in qkv.unbind(2):  # as a projection leaves them, by sample and token
        assert torch.equal(fill(x, size), F.pad(x, (0, size - d)))
    for x in qkv[0].unbind(1):  # as a pack's
        assert torch.equal(fill(x, size), F.pad(x, (0, size - d)))
    strange = torch.randn(2, d, heads, 6).to(dtype).transpose(1, 3)
    assert torch.equal(fill(strange, size), F.pad(strange, (0, size - d)))
