"""The log names slow ranks and the origin of gradients that are not finite."""

import json
import time

import pytest

from opendit.training import build as building
from tests.checkpoint.test_checkpoint import ARGV
from tests.training.programs import LONG, after
from train import Inputs

# ------------------------------------------------------------------------------------------ what the log says


def weight_spoilt_from_step_3() -> None:
    """From step 3 on, make one weight in rank 1's third block infinite, in the copy that the forward pass reads."""
    true_build, true_inputs, engines = building.build_model_and_engine, Inputs.of, []

    def build(spec):
        engines.append(true_build(spec))
        return engines[0]

    def inputs(self, batch):
        if batch.step >= 3:
            engines[0].module.blocks[2].mlp.fc1.weight.data[0, 0] = float("inf")
        return true_inputs(self, batch)

    building.build_model_and_engine, Inputs.of = build, inputs


@pytest.mark.parametrize("plugin", ["zero2", "ddp", "gemini", "fsdp"])
def test_the_first_module_that_is_not_finite_is_named(start, plugin):
    shared = plugin in ("gemini", "fsdp")  # weights are sharded, so no single rank can have a wrong one
    faults = {0: latents_spoilt_from_step_3} if shared else {1: weight_spoilt_from_step_3}
    argv = [*LONG, "--max_bad_steps", "3", "--plugin", plugin, "--mixed_precision", "bf16"]
    run = start(2, argv, faults)
    run.until(lambda: run.steps() >= 3)
    assert set(run.ended(time.monotonic())) <= {1, 3}
    (line,) = [line for line in map(run.last_line, range(2)) if "3 steps in a row" in line][:1]
    if shared:
        assert "on rank 0 the latents were not finite for 1 of 4 samples (row " in line
    else:
        assert "on rank 1 the output of blocks.2.mlp.fc1 was not finite for 4 of 4 samples (row " in line
        assert "skipped, its gradients were not finite: on rank 1 the output of blocks.2.mlp.fc1" in run.texts()


def latents_spoilt_from_step_3() -> None:
    true_inputs = Inputs.of

    def inputs(self, batch):
        given = true_inputs(self, batch)
        if batch.step >= 3:
            given.x0[2] = float("inf")
        return given

    Inputs.of = inputs


def slow_rank() -> None:
    # Each of the two log lines covers three seconds of delay. The first steps on a busy machine can take ten, and the
    # warning needs a tenth of the time.
    Inputs.of = after(0, lambda: time.sleep(1.5))


def test_a_rank_that_is_slow_is_named_in_the_log(start):
    run = start(2, [*ARGV, "--max_steps", "4", "--log_every", "2", "--ckpt_every", "0"], {1: slow_rank})
    assert run.ended(time.monotonic(), 120) == [0, 0]
    lines = [json.loads(line) for line in (run.outputs / "000-DiT-Ti-2" / "log.jsonl").read_text().splitlines()]
    assert all(line["slowest_rank"] == 1 and line["slowest_x"] > 1.5 for line in lines)
    assert "rank 1 (" in run.logs[0].read_text() and "holds the others up" in run.logs[0].read_text()
