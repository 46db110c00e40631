"""Test sum_parts in Triton's interpreter against float64."""

import pytest
import torch

from opendit.kernels.linear import sum_parts, sum_parts_reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 2, 17, 48), (1, 5), (7, 1, 64, 33)])
def test_it_is_the_sum_in_fp64(shape, dtype):
    torch.manual_seed(0)
    parts = torch.randn(shape).to(dtype)
    want = parts.double().sum(0)
    one_rounding, of_the_sum = torch.finfo(dtype).eps, len(parts) * torch.finfo(torch.float32).eps
    bound = (one_rounding + of_the_sum) * parts.double().abs().sum(0)
    for got in (sum_parts(parts), sum_parts_reference(parts)):
        assert got.dtype == dtype and got.shape == want.shape
        assert ((got.double() - want).abs() <= bound).all()
