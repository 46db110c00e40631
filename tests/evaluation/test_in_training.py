"""Metrics of samples drawn during training equal those of ``opendit evaluate`` for the checkpoint, on one rank and on
several, and training does not change."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import opendit
import preprocess
import train
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import TINY, log_of
from tests.training.test_validation import same_bits

# The large rate makes the model draw more than noise, and --ema_decay 0.5 makes the averages differ from the weights.
UNSAVED = [*TINY, *"--lr 3e-3 --ema_decay 0.5 --batch_size 4 --sample_every 0 --max_steps 4".split()]
FLAGS = [*UNSAVED, "--ckpt_every", "2"]
COUNT, STEPS = 41, 3
EVALUATED = f"--evaluate_every 2 --evaluate_samples {COUNT} --evaluate_steps {STEPS} --evaluate_features digits".split()
PRODUCTS = {
    "zero2": "",
    "fsdp": "--plugin fsdp",
    "tp": "--tensor_parallel_size 2",
    "pp": "--pipeline_parallel_size 2 --grad_accumulation 2",
}


def figures(run: Path, step: int) -> dict[str, float]:
    """Return the metrics that the log has for a step."""
    (line,) = (line for line in log_of(run) if line["step"] == step)
    left_out = ("eval_of", "eval_s", "eval_samples")
    return {key: value for key, value in line.items() if key.startswith("eval_") and key not in left_out}


def near(found: dict[str, float], expected: dict[str, float]) -> bool:
    """Compare metrics. Shares of 41 samples may differ by one sample, which rounding can move over a border."""
    return found.keys() == expected.keys() and all(
        abs(found[key] - value) <= (1.01 / COUNT if value <= 1 else 1e-4 * abs(value))
        for key, value in expected.items()
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    outputs, before = tmp_path_factory.mktemp("evaluated"), dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    train.main([*FLAGS, *EVALUATED, "--outputs", str(outputs), "--ckpt_best", "frechet_distance"])
    os.environ.clear()
    os.environ.update(before)
    return outputs / "000-DiT-Ti-2"


def test_the_figures_are_those_of_an_evaluation_of_the_checkpoint(run, tmp_path):
    for step in (2, 4):
        rows = opendit.evaluate(
            opendit.EvaluateConfig(
                ckpt=str(run / "checkpoints" / f"step_{step:07d}"),
                features="digits",
                num_samples=COUNT,
                num_sampling_steps=STEPS,
                sampler="ddim",
                cfg_scale=1.5,
                seed=42,
                output=str(tmp_path),
            )
        )
        expected = {f"eval_{row.metric}": row.value for row in rows if row.samples.endswith(f"{step:07d}")}
        assert len(expected) >= 5 and near(figures(run, step), expected)
        assert figures(run, step)["eval_frechet_distance"] == pytest.approx(expected["eval_frechet_distance"], rel=1e-6)
    assert figures(run, 2) != figures(run, 4)


def test_they_are_rows_that_a_plot_finds(run, tmp_path):
    rows = [json.loads(line) for line in (run / "evaluation" / "results.jsonl").read_text().splitlines()]
    assert {row["samples"] for row in rows} == {f"{run.name}/step_000000{step}" for step in (2, 4)}
    assert {row["count"] for row in rows} == {COUNT} and {row["guidance"] for row in rows} == {1.5}
    by_metric = {row["metric"]: row["value"] for row in rows if row["samples"].endswith("4")}
    assert {f"eval_{name}": value for name, value in by_metric.items()} == figures(run, 4)
    from opendit.evaluation.results import plot

    plot([run], tmp_path / "run.png", ["frechet_distance"])
    assert len(Image.open(tmp_path / "run.png").convert("RGB").getcolors(1 << 24)) > 100


def test_training_is_the_same_to_the_bit_without_them(run, tmp_path, no_ranks):
    train.main([*FLAGS, "--outputs", str(tmp_path)])
    assert same_bits(run, tmp_path / run.name)
    assert not any(key.startswith("eval_") for line in log_of(tmp_path / run.name) for key in line)


def test_the_best_checkpoint_is_kept_by_a_figure(run, tmp_path, no_ranks):
    distances = {step: figures(run, step)["eval_frechet_distance"] for step in (2, 4)}
    best = min(distances, key=distances.__getitem__)
    assert os.readlink(run / "checkpoints" / "best") == f"step_000000{best}"
    state = json.loads((run / "checkpoints" / "best" / "state.json").read_text())
    assert state["evaluation"]["figures"]["frechet_distance"] == distances[best]


def test_more_is_better_for_some():
    from opendit.checkpoint.save import BestCheckpoint

    best = BestCheckpoint(Path("nowhere"), "accuracy", "these", 0)
    for step, (accuracy, of) in enumerate([(0.2, "these"), (0.5, "these"), (0.9, "others"), (0.4, "these")], 1):
        best.take(Path(str(step)), {"step": step, "evaluation": {"of": of, "figures": {"accuracy": accuracy}}})
    assert (best.folder, best.figure) == (Path("2"), 0.5)


def one_more_step(folder: Path, *flags: str) -> None:
    """Resume a run at step 4 with weights that do not change, and evaluate."""
    checkpoint = folder / "checkpoints" / "step_0000004"
    start = [*UNSAVED, *EVALUATED, "--max_steps", "5", "--load", str(checkpoint), "--lr", "1e-30", "--no_save"]
    train.main([*start, *flags])


def programs(mesh, folder: Path, base: Path) -> None:
    several_programs()
    for name, flags in PRODUCTS.items():
        if mesh.is_main:
            shutil.copytree(base, folder / name, symlinks=True)
        mesh.barrier()
        one_more_step(folder / name, "--batch_size", "2", *flags.split())


def test_ranks_find_the_figures_of_one(run, tmp_path, no_ranks):
    shutil.copytree(run, tmp_path / "one", symlinks=True)
    one_more_step(tmp_path / "one")
    expected = figures(tmp_path / "one", 5)
    run_ranks(2, programs, tmp_path, run)
    for name in PRODUCTS:
        found = figures(tmp_path / name, 5)
        assert near(found, expected), (name, found, expected)
        assert found["eval_frechet_distance"] == pytest.approx(expected["eval_frechet_distance"], rel=1e-4), name


def test_clips_and_captions(tmp_path, no_ranks):
    """Samples of every digit and direction are drawn, whatever captions the data has."""
    data = tmp_path / "data"
    preprocess.main(["demo", "--output", str(data), "--clips", "4", "--size", "16"])
    flags = "--model vDiT-Ti/122 --use_video --num_frames 4 --image_size 16 --vae none --text_encoder bytes".split()
    flags += "--batch_size 2 --num_workers 0 --mixed_precision fp32 --sample_every 0 --max_steps 1 --no_save".split()
    train.main([*flags, *EVALUATED, "--data_path", str(data / "demo.csv"), "--outputs", str(tmp_path / "o")])
    (folder,) = (tmp_path / "o").iterdir()
    found = figures(folder, 1)
    assert {"eval_accuracy", "eval_direction", "eval_frechet_distance", "eval_copies", "eval_motion"} <= found.keys()
    assert all(np.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    "argv,message",
    [
        ("--evaluate_samples 30", "--evaluate_samples: does nothing without --evaluate_every"),
        ("--ckpt_best fid", "--ckpt_best fid: it is a figure of samples; give --evaluate_every N"),
        ("--evaluate_every 2 --evaluate_metrics kid", "--evaluate_metrics kid: compares samples with others"),
        ("--evaluate_every 2 --evaluate_reference {tmp}/nowhere", "--evaluate_reference .*/nowhere: doesn't exist"),
        ("--evaluate_every 2 --evaluate_reference digits", "--evaluate_reference digits: is for --evaluate_features"),
        ("--evaluate_every 2 --evaluate_features digits --data_path mock", "mock"),
        ("--evaluate_every 2 --evaluate_features digits --evaluate_metrics is", "--evaluate_metrics is: "),
        ("--evaluate_every 2 --evaluate_features digits --ckpt_best fvd", "--ckpt_best fvd: --evaluate_every computes"),
        ("--evaluate_every 2", "--evaluate_features"),
    ],
)
def test_errors_come_before_any_weight_is_made(argv, message, tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    error = refusal([*FLAGS, *argv.format(tmp=tmp_path).split(), "--outputs", str(tmp_path / "o")])
    assert re.search(message, error), error
