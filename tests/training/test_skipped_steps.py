"""Skipped steps are explained once, fp16's search for its loss scale is no fault, and too many end the run."""

from types import SimpleNamespace

import pytest
import torch

from opendit.parallel.engines import StepResult
from opendit.training.diagnosis import SkippedSteps
from tests.messages import logged


class Looks:
    """A fake Diagnosis that records its calls."""

    def __init__(self, harmless: bool = True):
        self.harmless, self.asked = harmless, []

    def find(self, gradients: bool) -> str:
        self.asked.append(gradients)
        return "the noise was not finite"


def look(in_a_row: list[int], scale: float = 1.0, harmless: bool = True, most: int = 4):
    """Return the messages, and (skipping, failing) after each look at a number of steps skipped in a row."""
    engine = SimpleNamespace(mesh=SimpleNamespace(is_main=True))
    diagnosis, found = Looks(harmless), []
    skipped = SkippedSteps(engine, diagnosis, most)
    with logged() as said:
        for done, count in enumerate(in_a_row, 1):
            engine.skipped_in_a_row = torch.tensor(count)
            skipped.look(done, StepResult(torch.tensor(1.0), torch.tensor(count == 0), torch.tensor(scale)))
            found.append((skipped.skipping, skipped.failing))
    return said, found, diagnosis.asked


def test_steps_skipped_in_a_row_are_explained_once():
    said, found, asked = look([0, 1, 2, 0, 1])
    text = "skipped, its gradients were not finite: the noise was not finite"
    assert said == [f"step 2: {text}", f"step 5: {text}"] and asked == [False, False]
    assert found == [(bad, bad) for bad in (False, True, True, False, True)]


def test_fp16_lowering_its_scale_is_no_fault():
    said, found, asked = look([0, 1, 2, 0], scale=2.0**16)
    assert said == [] == asked and found == [(False, False), (True, False), (True, False), (False, False)]
    said, found, _ = look([1], scale=1.0)  # nothing is left to lower
    assert len(said) == 1 and found == [(True, True)]


def test_nobody_looks_where_a_rank_could_keep_the_others_waiting():
    said, found, asked = look([1, 2], harmless=False)
    assert said == [] == asked and found == [(True, True)] * 2


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_too_many_in_a_row_end_the_run(scale):
    assert look([3, 3], scale)[1][-1][0]
    with pytest.raises(FloatingPointError, match="4 steps in a row .*: the noise was not finite; try a lower --lr"):
        look([3, 4], scale)
