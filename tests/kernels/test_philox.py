"""Test the Philox kernel in Triton's interpreter: it gives the bits of opendit.diffusion.random's torch operations.
Known answers are tested in tests/diffusion/test_random.py."""

import pytest
import torch

from opendit.diffusion.random import Stream, random_bits
from opendit.kernels.philox import BLOCK, philox_bits
from tests.kernels.cases import poisoned_memory

DEVICE = "cpu"
INDEX = [0, 5, 2**31 + 1, 2**32 - 1, 7]


@pytest.mark.parametrize(
    ("seed", "step"),
    ((0, 0), (0, 1), (42, 16), (2**31, 2**31 + 3), (0x0123456789ABCDEF, 1), (2**64 - 1, 2**32 - 1), (42, 2**32 - 1)),
)
def test_bits(seed, step):
    for count in (1, 3, 4, 9, 4 * BLOCK, 4 * BLOCK + 5):
        with poisoned_memory():
            got = philox_bits(seed, step, torch.tensor(INDEX, device=DEVICE), Stream.CONDITION_DROP, count)
        assert got.dtype == torch.int64
        assert torch.equal(got.cpu(), random_bits(seed, step, torch.tensor(INDEX), Stream.CONDITION_DROP, count))
