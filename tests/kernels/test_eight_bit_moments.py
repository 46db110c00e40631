"""Test 8-bit moments against torchao: codes, scales, decoded values and steps; and their checkpoints.
tests/kernels/test_adamw_ema.py runs the same tests again in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from opendit.kernels import eight_bit_moments
from opendit.kernels.adamw_ema import FusedStep
from opendit.kernels.eight_bit_moments import UNIT, DecodedMoments, EightBits, by_size, levels, new_moment, set_values

LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.99), 1e-8
SIZES = (5000, 7, 4096, 20224, 1024, 0, 4100)  # sizes below 4096 stay in fp32


def wide(numel: int, signed: bool) -> Tensor:
    """Return values of many magnitudes, with blocks of zeros and of tiny values, and a block whose largest value is
    negative."""
    torch.manual_seed(numel)
    values = torch.randn(numel) * 10 ** torch.randn(numel)
    values[:256] = 0
    values[256:512] *= 1e-14
    values[700:701], values[1100:1101] = -1e6, 1e6
    return values if signed else values.square()


def moment_of(values: Tensor, signed: bool) -> EightBits:
    moment = EightBits.zeros(values.numel(), signed, values.device)
    moment.encode(values)
    return moment


@pytest.mark.parametrize("signed", [True, False])
def test_codes_scales_and_values_have_torchaos_bits(signed):
    theirs = pytest.importorskip("torchao.optim.quant_utils")
    numbers, values = torch.tensor(theirs.create_dynamic_map(signed)), wide(40 * UNIT, signed)
    shares, scales = theirs.scale_tensor(values, UNIT)
    codes = theirs.quantize_8bit_with_qmap(shares, numbers)
    ours = moment_of(values, signed)
    assert torch.equal(levels(signed), numbers)
    assert torch.equal(ours.codes, codes) and torch.equal(ours.scales, scales)
    assert torch.equal(ours.decode(), theirs.dequant_with_qmap(codes, numbers, scales))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [4096, 5000, 20 * UNIT + 1])
def test_a_checkpoints_values_become_the_same_bits(signed, numel):
    values = wide(numel, signed)
    moment = moment_of(values, signed)
    again = moment_of(moment.saved(), signed)
    assert torch.equal(again.codes, moment.codes) and torch.equal(again.scales, moment.scales)
    scales = moment.scales.repeat_interleave(UNIT)[:numel]
    interval = 0.9 / (64 if signed else 128)  # of the highest decade
    assert ((moment.saved() - values).abs() <= 1.01 * interval * scales).all()
    if signed:  # decoded values would lose the scale of a block whose largest value is negative
        assert not torch.equal(moment_of(moment.decode(), signed).scales, moment.scales)


@pytest.mark.parametrize("numel", (12, 2 * eight_bit_moments.LEAST))
def test_values_may_be_no_dense_tensor(numel):
    """Use tensors that are not contiguous, as when a checkpoint is read for another number of ranks."""
    values = torch.randn(numel // 2, 2).square().t()
    moments = [new_moment(torch.empty(2, numel // 2), False) for _ in range(2)]
    for moment, given in zip(moments, (values, values.contiguous()), strict=True):
        set_values(moment, given)
    assert torch.equal(*map(eight_bit_moments.to_values, moments))
    assert numel > eight_bit_moments.LEAST or torch.equal(moments[0], values)


def test_zeros_are_zeros_and_stay_them():
    for signed in (True, False):
        moment = new_moment(torch.zeros(64, 64), signed)
        assert isinstance(moment, EightBits) and torch.equal(moment.decode(), torch.zeros(4096))
        assert torch.equal(moment_of(moment.saved(), signed).codes, moment.codes)
    assert torch.equal(new_moment(torch.ones(4095), True), torch.zeros(4095))


def both(sizes=SIZES) -> list[list[Tensor | EightBits]]:
    return [[new_moment(torch.zeros(size), signed) for signed in (True, False)] for size in sizes]


def test_groups_share_memory_and_have_the_bits_of_the_reference(monkeypatch):
    monkeypatch.setattr(eight_bit_moments, "ELEMENTS", 9000)
    moments, taken, skipped = both(), torch.ones(4), torch.zeros(4)
    for i, pair in enumerate(moments):
        for signed, moment in zip((True, False), pair, strict=True):
            set_values(moment, wide(SIZES[i], signed))
    decoded = DecodedMoments(moments, block=2048)
    assert list(decoded.groups(0, len(SIZES))) == [(0, 3), (3, 4), (4, 7)]
    assert list(decoded.groups(1, 5)) == [(1, 3), (3, 4), (4, 5)]
    for start, stop in decoded.groups(0, len(SIZES)):
        decoded.decode(start, stop, taken)
        for i in range(start, stop):
            for signed, moment, view in zip((True, False), moments[i], decoded.views[i], strict=True):
                assert view.numel() == SIZES[i]
                if isinstance(moment, Tensor):
                    assert view is moment
                    continue
                assert torch.equal(view, moment.decode())
                view.copy_(3 * wide(SIZES[i] + 1, signed)[1:])
        before = [moment.codes.clone() for moment, _ in moments[start:stop] if isinstance(moment, EightBits)]
        decoded.encode(start, stop, skipped)
        now = [moment.codes for moment, _ in moments[start:stop] if isinstance(moment, EightBits)]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        decoded.encode(start, stop, taken)
        for i in range(start, stop):
            for signed, moment in zip((True, False), moments[i], strict=True):
                if isinstance(moment, EightBits):
                    want = moment_of(3 * wide(SIZES[i] + 1, signed)[1:], signed)
                    assert torch.equal(moment.codes, want.codes) and torch.equal(moment.scales, want.scales)


def test_ranges_of_neighbours():
    assert by_size([3, 3, 5, 1], 6) == [(0, 2), (2, 4)]
    assert by_size([9, 1], 6) == [(0, 1), (1, 2)] and by_size([], 6) == []


def step_of(masters: list[Tensor], moments: list[list[Tensor | EightBits]]) -> FusedStep:
    firsts, seconds = zip(*moments, strict=True)
    return FusedStep(masters, firsts, seconds, count=torch.zeros(()), betas=BETAS, eps=EPS)


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(size) * 10 ** torch.randn(size) for size in SIZES]


def test_steps_are_torchaos(monkeypatch):
    """Compare with torchao's uncompiled step. Sizes that are no multiple of its block are skipped."""
    theirs = pytest.importorskip("torchao.optim.adam")
    monkeypatch.setattr(eight_bit_moments, "ELEMENTS", 9000)
    torch.manual_seed(9)
    masters, moments = [torch.randn(size) for size in SIZES], both()
    weights = [master.clone() for master in masters]
    states = [
        [
            theirs.OptimState8bit.zeros(w.shape, s, UNIT, w.device) if w.numel() % UNIT == 0 else None
            for s in (True, False)
        ]
        if w.numel() >= 4096
        else [torch.zeros_like(w), torch.zeros_like(w)]
        for w in weights
    ]
    fused = step_of(masters, moments)
    for number in range(4):
        found = gradients(number)
        fused.decide(fused.square_sum(found))
        fused.update(lr=LR, weight_decay=DECAY)
        for weight, gradient, state in zip(weights, found, states, strict=True):
            if state[0] is not None:
                theirs.single_param_adam(
                    weight, gradient, torch.tensor(number + 1.0), *state, None, torch.tensor(LR), *BETAS, DECAY, EPS,
                    True, False,
                )  # fmt: skip
    for i, (master, weight, state) in enumerate(zip(masters, weights, states, strict=True)):
        if state[0] is None:
            assert not torch.equal(master, weight)
            continue
        # The order of operations differs, so a code may be off by one, which changes the weight's step.
        off = (master - weight).abs() > 1e-6 + 1e-5 * weight.abs()
        assert off.sum() <= 2e-3 * max(SIZES[i], 1)
        for ours, own in zip(moments[i], state, strict=True):
            if isinstance(ours, EightBits):
                assert (ours.codes != own.codes).sum() <= 2e-3 * SIZES[i]
                torch.testing.assert_close(ours.scales, own.scale, rtol=1e-6, atol=0)


def test_a_step_that_is_not_finite_changes_nothing():
    masters, moments = [torch.ones(size) for size in SIZES], both()
    fused = step_of(masters, moments)
    found = gradients(0)
    fused.decide(fused.square_sum(found))
    fused.update(lr=LR)
    before = (
        [m.clone() for m in masters],
        [(m.codes.clone(), m.scales.clone()) for m, _ in moments if isinstance(m, EightBits)],
    )
    found = gradients(1)
    found[3][5] = torch.inf
    fused.decide(fused.square_sum(found))
    fused.update(lr=LR)
    assert all(torch.equal(a, b) for a, b in zip(masters, before[0], strict=True))
    kept = [m for m, _ in moments if isinstance(m, EightBits)]
    assert any(m.codes.eq(0).any() for m in kept)  # the decoded value of code 0 would be encoded differently
    for moment, (codes, scales) in zip(kept, before[1], strict=True):
        assert torch.equal(moment.codes, codes) and torch.equal(moment.scales, scales)
