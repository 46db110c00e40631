"""Test the fused optimizer step on a GPU: shared cases, large tensors, and no host waits."""

import math

import pytest
import torch

from opendit.kernels.common import interpreting, kernels_available
from tests.kernels.test_adamw_ema import (
    Case,
    check_against_float64,
    check_against_torch,
    check_bad_steps_change_nothing,
    check_counted,
    check_directions,
)

AVAILABLE, REASON = kernels_available("cuda", torch.float32)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BFLOAT16, FLOAT16, FLOAT32)


@pytest.mark.parametrize("gradient", DTYPES, ids=str)
@pytest.mark.parametrize("working", (*DTYPES, None), ids=str)
@pytest.mark.parametrize("decays", ((), (0.9,), (0.5, 0.99, 0.9999)), ids=len)
@pytest.mark.parametrize("odd", (False, True))
@pytest.mark.parametrize("clip", (0.0, 0.5))
def test_steps_against_float64(gradient, working, decays, odd, clip):
    check_against_float64(
        device="cuda", gradient=gradient, working=working, decays=decays, odd=odd, clip=clip, scale=8.0
    )


def test_large_tensors():
    """Use many blocks, partial last blocks, and an update in two parts."""
    check_against_float64(device="cuda", sizes=(1152 * 6912, 1152, 7, 1152 * 4608 + 3, 40_000_001), clip=0.5, parts=2)


def test_it_is_torchs_adamw():
    check_against_torch("cuda")


def test_some_squares_are_others_to_count():
    check_counted("cuda")


@pytest.mark.parametrize("gradient", DTYPES, ids=str)
def test_tensors_without_second_moments_go_where_they_are_told(gradient):
    check_directions("cuda", gradient)


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("gradient", DTYPES, ids=str)
def test_bad_steps_change_nothing(bad, gradient):
    check_bad_steps_change_nothing("cuda", bad, gradient)


def test_the_host_never_waits():
    """torch raises if the host would wait for the device."""
    case = Case("cuda", decays=(0.9, 0.99))
    scale = torch.ones(1, device="cuda")
    for _ in range(3):
        gradients = case.gradients()  # at other addresses each time
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.run(gradients, scale=scale, clip=0.5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert case.count.item() == 3
