"""Test the kernel that pads heads with zeros or cuts them, in Triton's interpreter."""

import pytest
import torch

from opendit.kernels.flash_attention_4 import resize_heads


def expected(x: torch.Tensor, size: int) -> torch.Tensor:
    made = torch.zeros(*x.shape[:-1], size, dtype=x.dtype)
    both = min(size, x.shape[-1])
    made[..., :both] = x[..., :both]
    return made


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(("heads", "d", "size"), ((3, 72, 96), (3, 96, 72), (1, 8, 32), (5, 9, 7)))
def test_numbers_stay_and_the_rest_is_zero(dtype, heads, d, size):
    torch.manual_seed(0)
    qkv = torch.randn(2, 11, 3, heads, d).to(dtype)
    for x in qkv.unbind(2):  # laid out as by a projection: by sample and token
        assert torch.equal(resize_heads(x, size), expected(x, size))
    for x in qkv[0].unbind(1):  # laid out as in a pack
        assert torch.equal(resize_heads(x, size), expected(x, size))
    strange = torch.randn(2, d, heads, 6).to(dtype).transpose(1, 3)
    found = resize_heads(strange, size)
    assert torch.equal(found, expected(strange, size)) and found.is_contiguous()
