"""Test what needs no kernel: the split of widths, launch shapes and availability, without importing triton."""

import subprocess
import sys

import pytest
import torch

from opendit.kernels import common
from opendit.kernels.common import Launch, choose_launch, forced_launch, kernels_available, split_width


@pytest.mark.parametrize(
    ("width", "blocks"),
    [
        (64, (64, 0)), (72, (64, 8)), (65, (64, 8)), (384, (256, 128)), (1000, (1024, 0)), (1024, (1024, 0)),
        (1152, (1024, 128)), (1408, (1024, 512)), (1792, (2048, 0)), (3072, (2048, 1024)), (8192, (8192, 0)),
    ],
)  # fmt: skip
def test_split_of_known_widths(width, blocks):
    assert split_width(width) == blocks


def test_every_width_is_covered_by_powers_of_two():
    for width in range(common.MIN_WIDTH, common.MAX_WIDTH + 1):
        main, tail = split_width(width)
        assert all(block & (block - 1) == 0 for block in (main, tail))
        assert width <= main + tail < 2 * width
        assert tail == 0 or main < width  # only the last block is masked


def test_launch_shrinks_for_few_rows_and_short_samples():
    default = Launch(rows=1, tiles=64, warps=2)
    assert choose_launch("k", default, rows=131_072, longest=256) == default
    assert choose_launch("k", default, rows=131_072, longest=7).chunk == 8
    assert choose_launch("k", default, rows=2048, longest=256).chunk == 2
    assert choose_launch("k", default, rows=2048, longest=256, columns=8).chunk == 16
    with forced_launch(k=Launch(2, 2, 1)):
        assert choose_launch("k", default, rows=1, longest=1).chunk == 4
    assert choose_launch("k", default, rows=131_072, longest=256) == default


def test_says_why_kernels_are_not_available(monkeypatch):
    monkeypatch.setattr(common, "interpreting", lambda: False)
    monkeypatch.setattr(common, "TRITON", True)
    assert kernels_available("cpu", torch.bfloat16) == (False, "kernels need a CUDA GPU, not cpu")
    assert kernels_available("cuda", torch.float64) == (False, "kernels take bf16, fp16 and fp32, not float64")
    monkeypatch.setattr(common, "TRITON", False)
    assert kernels_available("cuda", torch.bfloat16) == (False, "triton is not installed")


def test_imports_without_triton():
    """Without triton, the references work and kernels_available reports the reason."""
    program = """
import sys
sys.modules["triton"] = None  # makes `import triton` fail
import torch
from opendit.kernels.common import kernels_available
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate_reference as joined
import opendit.kernels.attention
x, m = torch.ones(2, 3, 64), torch.ones(2, 64)
assert joined(x, m, x, m, m)[0].eq(2).all()
assert kernels_available("cuda", torch.bfloat16) == (False, "triton is not installed")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
