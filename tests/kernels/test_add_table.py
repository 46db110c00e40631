"""Test the kernel that adds position embeddings in Triton's interpreter, against a float64 sum."""

import pytest
import torch

from opendit.kernels.add_table import SAMPLES, add_table, add_table_reference
from opendit.models import positions
from tests.kernels.cases import BOUNDS, poisoned_memory


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((1, 1, 64), (SAMPLES + 1, 7, 72), (2 * SAMPLES, 16, 384), (3, 257, 1152)), ids=str)
def test_sum_and_gradient(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    table = torch.randn(1, *shape[1:], generator=generator)
    with poisoned_memory():
        y = add_table(x, table)
    want = add_table_reference(x.double(), table)
    assert y.dtype == dtype and (y - want).norm() <= BOUNDS[dtype] * want.norm()
    assert (y - want).abs().max() <= 2 * BOUNDS[dtype] * want.abs().max()
    dy = torch.randn(shape, generator=generator).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy)


def test_it_is_the_models_own_but_for_the_pass():
    x, table = torch.randn(3, 5, 72), torch.randn(5, 72)
    assert torch.equal(add_table(x, table), positions.add_table(x, table))
    strided = torch.randn(5, 3, 72).transpose(0, 1)
    assert torch.equal(add_table(strided, table[None]), strided + table)


def test_shapes_that_do_not_fit_are_named():
    for table in (torch.zeros(4, 64), torch.zeros(2, 5, 64), torch.zeros(64)):
        with pytest.raises(ValueError, match=r"\(N, D\)"):
            add_table(torch.zeros(2, 5, 64), table)
    with pytest.raises(ValueError, match="float64"):
        add_table(torch.zeros(2, 5, 64), torch.zeros(5, 64, dtype=torch.float64))
