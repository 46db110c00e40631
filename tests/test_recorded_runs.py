"""Short runs and samples give the recorded results (tests/recorded_runs.py)."""

import json

import pytest
import torch

from tests.recorded_runs import RECORDED, machine, record_case, record_sampling, training_cases

CONTENT = json.loads(RECORDED.read_text())
# Other processors and versions add in another order, and Adam's steps amplify the difference. Between processors with
# the same instruction set we saw up to 2e-5, and 1e-7 in the first steps.
FIRST, ALL = (1e-6, 1e-4) if machine() == CONTENT["machine"] else (1e-3, 1e-3)
FEW = 5  # steps


def close(now: list[float], then: list[float], tolerance: float = FIRST) -> bool:
    largest = max(map(abs, then))
    return len(now) == len(then) and all(abs(a - b) <= tolerance * largest for a, b in zip(now, then, strict=True))


@pytest.mark.parametrize("name", training_cases())
def test_a_run_is_what_it_was(name):
    now, then = record_case(name), CONTENT["training"][name]
    assert now["files"] == then["files"] and now["checkpoint"] == then["checkpoint"]
    for figure in ("loss", "grad_norm"):
        assert close(now[figure][:FEW], then[figure][:FEW]), f"{figure} of the first steps"
        assert close(now[figure], then[figure], ALL), [a - b for a, b in zip(now[figure], then[figure], strict=True)]
    assert now["first_gradients"].keys() == then["first_gradients"].keys()
    assert close(list(now["first_gradients"].values()), list(then["first_gradients"].values()))


def test_samples_are_what_they_were():
    torch.set_num_threads(1)
    now = record_sampling()
    assert now.keys() == CONTENT["sampling"].keys()
    for name, latents in now.items():
        assert close(latents, CONTENT["sampling"][name]), name
