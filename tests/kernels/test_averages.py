"""Test averages that are updated apart from the step: they match those of the fused step bit for bit, and float64. The
tests run twice: here with torch, and by tests/kernels/test_adamw_ema.py in Triton's interpreter."""

import math

import pytest
import torch

from opendit.kernels.adamw_ema import FusedStep
from opendit.kernels.averages import SeparateAverages
from tests.kernels.test_adamw_ema import BETAS, EPS, LR, SIZES, Case


def pair(device="cpu", decays=(0.5, 0.99), **kind) -> tuple[Case, Case, SeparateAverages]:
    """Return a case whose step updates the averages, an equal case whose step does not, and the separate averages."""
    within, apart = (Case(device, decays=decays, **kind) for _ in range(2))
    apart.step.attach([], apart.step.decays, apart.updates)
    return within, apart, SeparateAverages(apart.masters, apart.averages, block=1024)


def check_the_bits_of_one_pass(device="cpu", **kind):
    """Take four steps, the third with an infinite gradient, and compare all bits with those of the fused step."""
    within, apart, averages = pair(device, **kind)
    for number in range(4):
        gradients = within.gradients()
        if number == 2:
            gradients[5][-1] = math.inf
        for case in (within, apart):
            _, finite = case.run(gradients, clip=0.5)
        before = [average.clone() for average in apart.averages[0]]
        averages.move(apart.step.scalars)
        moved = not all(torch.equal(a, b) for a, b in zip(before, apart.averages[0], strict=True))
        assert moved == finite.item() == (number != 2)
        for ours, theirs in zip(apart.everything(), within.everything(), strict=True):
            assert torch.equal(ours, theirs)
    assert apart.updates == 3


@pytest.mark.parametrize("odd", (False, True))
@pytest.mark.parametrize("decays", ((0.9,), (0.5, 0.99, 0.9999)), ids=len)
def test_the_bits_of_one_pass(odd, decays):
    check_the_bits_of_one_pass(odd=odd, decays=decays)


def check_staged(device="cpu", pin=False):
    """Check averages and moments in host memory that pass in parts through a smaller ring buffer."""
    within, apart, averages = pair(device, odd=False)
    padded = [-(-size // 1024) * 1024 for size in apart.sizes]

    def moved(states: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Copy the tensors to rows in host memory, padded to blocks, and return the rows and the views."""
        rows, views = torch.zeros(len(states), sum(padded)), []
        rows = rows.pin_memory() if pin else rows
        for row, tensors in zip(rows, states, strict=True):
            parts = [part[: t.numel()] for part, t in zip(row.split(padded), tensors, strict=True)]
            views.append([part.copy_(t) for part, t in zip(parts, tensors, strict=True)])
        return rows, views

    rows, apart.averages = moved(apart.averages)
    averages = SeparateAverages(apart.masters, apart.averages, block=1024)
    averages.stage(rows, part=2, depth=2)
    rows, (apart.exp_avgs, apart.exp_avg_sqs) = moved([apart.exp_avgs, apart.exp_avg_sqs])
    step = FusedStep(
        apart.masters, apart.exp_avgs, apart.exp_avg_sqs, apart.working, count=apart.count, betas=BETAS, eps=EPS,
        block=1024,
    )  # fmt: skip
    step.attach([], apart.step.decays, apart.updates)
    step.stage(rows, part=3, depth=2)
    apart.step = step
    for number in range(4):
        gradients = within.gradients()
        if number == 2:
            gradients[5][-1] = math.inf
        for case in (within, apart):
            case.run(gradients, clip=0.5)
        averages.move(step.scalars)
        for access in (averages.access, step.access):
            access.finish()
        for ours, theirs in zip(apart.everything(), within.everything(), strict=True):
            assert torch.equal(ours.to(device), theirs)


def test_the_same_bits_through_a_ring_buffer():
    check_staged()


def test_tensors_that_lie_elsewhere_are_not_staged():
    case = Case(decays=(0.9,))
    averages = SeparateAverages(case.masters, case.averages, block=1024)
    with pytest.raises(ValueError, match="does not lie where its first block is"):
        averages.stage(torch.zeros(1, 20 * 1024))


def test_against_float64():
    _, case, averages = pair(decays=(0.5, 0.99))
    for number in range(1, 4):
        gradients = case.gradients()
        case.run(gradients)
        averages.move(case.step.scalars)
        case.run_in_float64(gradients, number, lr=LR)
        case.compare()


def test_what_does_not_fit_is_refused():
    case = Case()
    with pytest.raises(ValueError, match=f"averages: 1 tensors for {len(SIZES)} masters"):
        SeparateAverages(case.masters, [case.averages[0][:1]])
    with pytest.raises(ValueError, match="expected torch.float32"):
        SeparateAverages(case.masters, [case.working])
