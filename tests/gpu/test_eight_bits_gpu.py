"""Test 8-bit moments on a GPU: the kernels have the bits of the CPU reference, and a step does not wait."""

import pytest
import torch

from opendit.kernels.adamw_ema import BLOCK, FusedStep
from opendit.kernels.common import interpreting, kernels_available
from opendit.kernels.eight_bit_moments import DecodedMoments, EightBits
from tests.kernels.test_eight_bit_moments import moment_of, wide

AVAILABLE, REASON = kernels_available("cuda", torch.float32)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
SIZES = (5000, 4096, 1152 * 6912, 1152 * 1152 + 3)


def test_kernels_have_the_bits_of_the_reference():
    moments = [[EightBits.zeros(size, signed, torch.device("cuda")) for signed in (True, False)] for size in SIZES]
    decoded, taken = DecodedMoments(moments, BLOCK), torch.ones(4, device="cuda")
    assert decoded.kernels
    for start, stop in decoded.groups(0, len(SIZES)):
        for i in range(start, stop):
            for signed, view in zip((True, False), decoded.views[i], strict=True):
                view.copy_(wide(SIZES[i], signed))
        decoded.encode(start, stop, taken)
        for i in range(start, stop):
            for view in decoded.views[i]:
                view.zero_()
        decoded.decode(start, stop, taken)
        for i in range(start, stop):
            for signed, moment, view in zip((True, False), moments[i], decoded.views[i], strict=True):
                want = moment_of(wide(SIZES[i], signed), signed)
                assert torch.equal(moment.codes.cpu(), want.codes) and torch.equal(moment.scales.cpu(), want.scales)
                assert torch.equal(view.cpu(), want.decode()) and torch.equal(moment.decode().cpu(), want.decode())
                again = EightBits.zeros(SIZES[i], signed, torch.device("cuda"))
                again.encode(moment.saved().cpu())  # as when a checkpoint is loaded
                assert torch.equal(again.codes, moment.codes) and torch.equal(again.scales, moment.scales)


def test_the_host_does_not_wait():
    device = torch.device("cuda")
    masters = [torch.randn(size, device=device) for size in SIZES]
    moments = [[EightBits.zeros(size, signed, device) for signed in (True, False)] for size in SIZES]
    step = FusedStep(masters, *zip(*moments, strict=True), count=torch.zeros((), device=device))
    gradients = [torch.randn(size, device=device) for size in SIZES]
    step.decide(step.square_sum(gradients))
    step.update(lr=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.decide(step.square_sum(gradients))
        step.update(lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(moment.codes.unique().numel() > 100 for pair in moments for moment in pair)
