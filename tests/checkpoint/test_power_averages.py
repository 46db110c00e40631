"""Power averages are compared with their profile, and averages made from snapshots with those kept in training."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sample
from opendit.checkpoint.ema import EMA, Profile, coefficients, exponent_of, reconstruct
from opendit.checkpoint.tensor_set import open_set
from tests.checkpoint.test_resume import ARGV, assert_same_bits, run_of, trainings
from tests.ranks import run_ranks


@pytest.mark.parametrize(("width", "exponent"), [(0.05, 16.97), (0.10, 6.94)])
def test_exponents_are_the_papers(width, exponent):
    found = exponent_of(width)
    assert found == pytest.approx(exponent, abs=5e-3)
    assert (found + 1) ** 0.5 / (found + 2) / (found + 3) ** 0.5 == pytest.approx(width, rel=1e-9)  # eq. 126


def walk(steps: int) -> np.ndarray:
    """Return weights that drift and jitter, of shape (steps, 50)."""
    random = np.random.default_rng(0)
    return random.standard_normal((steps, 50)).cumsum(0) / steps**0.5 + 0.2 * random.standard_normal((steps, 50))


def direct(weights: np.ndarray, width: float) -> np.ndarray:
    """Average all weights directly: update i has the share (i / t)^(g + 1) - ((i - 1) / t)^(g + 1)."""
    edges = (np.arange(len(weights) + 1) / len(weights)) ** (exponent_of(width) + 1)
    return np.diff(edges) @ weights


class Engine:
    """One parameter, which the test sets."""

    def __init__(self, weights: np.ndarray):
        self.weights = torch.from_numpy(weights).clone()

    def masters(self):
        return {"w": self.weights}

    def new_averages(self, count):
        return [{"w": torch.empty_like(self.weights)} for _ in range(count)]

    def attach_averages(self, *_):
        return False

    def wait_for_averages(self):
        return None


def test_updates_give_the_profile():
    weights, widths = walk(300), (0.05, 0.10, 0.25)
    engine = Engine(np.full(50, 1e3))  # initial values, which must not remain in the average
    ema = EMA(engine, widths, power=True)
    for now in weights:
        engine.weights.copy_(torch.from_numpy(now))
        ema.update(torch.tensor(True))
    for which, width in enumerate(widths):
        np.testing.assert_allclose(ema.averages[which]["w"].numpy(), direct(weights, width), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wanted", [Profile(2000, 0.07), Profile(2000, 0.15), Profile(2000, 0.03), Profile(1400, 0.08)])
def test_an_average_made_of_snapshots_is_nearly_the_one_kept_in_training(wanted):
    weights = walk(2000)
    stored = [Profile(step, width) for step in range(100, 2001, 100) for width in (0.05, 0.10)]
    averages = np.stack([direct(weights[: one.updates], one.width) for one in stored])
    factors = coefficients(stored, wanted)
    assert factors.sum() == pytest.approx(1)
    want = direct(weights[: wanted.updates], wanted.width)
    near = min(np.linalg.norm(average - want) for average in averages)
    error = np.linalg.norm(factors @ averages - want)
    assert error < 0.1 * near and error < 0.01 * np.linalg.norm(want)


def test_a_stored_average_is_made_of_itself():
    stored = [Profile(step, width) for step in (100, 250, 300) for width in (0.05, 0.10)]
    np.testing.assert_allclose(coefficients(stored, stored[3]), np.eye(6)[3], atol=1e-9)


def test_runs_keep_snapshots_resume_and_are_drawn_from(tmp_path, capfd):
    argv = [*(word for word in ARGV if word not in ("--ema_decay", "0.9", "0.99", "--ema_warmup")), "--vae", "none"]
    argv += ["--average", "power:0.05,0.10", "--plugin", "fsdp", "--mixed_precision", "fp32", "--batch_size", "2"]
    argv += ["--warmup_steps", "1", "--ckpt_every", "2", "--ckpt_keep", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = [[*argv, "--max_steps", "6", "--outputs", str(whole)], [*argv, "--max_steps", "4", "--outputs", str(parts)]]
    runs.append([*argv, "--max_steps", "6", "--outputs", str(parts), "--load", "latest"])
    run_ranks(2, trainings, runs)
    run, other = run_of(whole), run_of(parts)
    assert_same_bits(run / "checkpoints/step_0000006", other / "checkpoints/step_0000006")
    assert [path.name for path in run.glob("checkpoints/step_*")] == ["step_0000006"]
    assert {path.name for path in run.glob("averages/*")} == {"step_0000002", "step_0000004"}
    assert {path.name for path in other.glob("averages/*")} == {"step_0000002"}  # step 4, resumed from, is kept
    names = {path.name for path in (run / "averages/step_0000002").iterdir()}
    assert names >= {"ema.shards.json", "ema_0.1.shards.json", "state.json"} and not any("model" in n for n in names)
    assert json.loads((run / "checkpoints/latest/state.json").read_text())["ema"]["snapshots"] == [2, 4, 6]

    stored = [Profile(step, width) for step in (2, 4, 6) for width in (0.05, 0.10)]
    made, name = load_file(reconstruct(run, 0.07)), "blocks.1.mlp.fc1.weight"
    total = 0
    for factor, one in zip(coefficients(stored, Profile(6, 0.07)), stored, strict=True):
        folder = run / ("checkpoints" if one.updates == 6 else "averages") / f"step_{one.updates:07d}"
        with open_set(folder / ("ema.shards.json" if one.width == 0.05 else "ema_0.1.shards.json")) as tensors:
            total = total + factor * tensors.read(name).double()
    torch.testing.assert_close(made[name].double(), total, rtol=0, atol=1e-6)
    assert reconstruct(run, 0.1).name == "ema_0.1.shards.json"

    drawn = tmp_path / "drawn"
    flags = ["--ckpt", str(run), "--num_sampling_steps", "2", "--num_samples", "2", "--cfg_scale", "1"]
    sample.main([*flags, "--ema", "0.07", "--output", str(drawn)])
    assert list(drawn.glob("*.png"))
