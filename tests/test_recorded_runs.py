"""Short runs and samples are what they were when they were recorded (tests/recorded_runs.py)."""

import json

import pytest
import torch

from tests.recorded_runs import RECORDED, machine, record_case, record_sampling, training_cases

CONTENT = json.loads(RECORDED.read_text())
# Elsewhere sums are added in another order, and 20 steps of Adam make more of it.
TOLERANCE = 1e-6 if machine() == CONTENT["machine"] else 1e-3


def close(now: list[float], then: list[float]) -> bool:
    largest = max(map(abs, then))
    return len(now) == len(then) and all(abs(a - b) <= TOLERANCE * largest for a, b in zip(now, then, strict=True))


@pytest.mark.parametrize("name", training_cases())
def test_a_run_is_what_it_was(name):
    now, then = record_case(name), CONTENT["training"][name]
    assert now["files"] == then["files"] and now["checkpoint"] == then["checkpoint"]
    assert close(now["loss"], then["loss"]), [a - b for a, b in zip(now["loss"], then["loss"], strict=True)]
    assert close(now["grad_norm"], then["grad_norm"])
    assert now["first_gradients"].keys() == then["first_gradients"].keys()
    assert close(list(now["first_gradients"].values()), list(then["first_gradients"].values()))


def test_samples_are_what_they_were():
    torch.set_num_threads(1)
    now = record_sampling()
    assert now.keys() == CONTENT["sampling"].keys()
    for name, latents in now.items():
        assert close(latents, CONTENT["sampling"][name]), name
