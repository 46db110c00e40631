"""Sweeps over guidance and steps: figures equal those of single evaluations, sweeps resume, and mistakes are told
early."""

import csv
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import opendit
from opendit.config.command_line import parse
from opendit.config.evaluate import EvaluateConfig
from opendit.evaluation.results import read_results
from tests.ranks import run_ranks
from tests.sampling.small import write

ROOT = Path(__file__).resolve().parents[2]
SWEEP = dict(ckpt="run.safetensors", features="digits", num_samples=23, metrics=["fid", "accuracy"], intervals=False)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.safetensors", num_classes=10)


def evaluate(**flags):
    return opendit.evaluate(EvaluateConfig(**SWEEP, **flags))


def values(rows) -> dict[tuple, float]:
    return {(row.metric, row.steps, row.guidance): row.value for row in rows}


def sweep_of_ranks(mesh, folder: Path, expected: dict[tuple, float]) -> None:
    """Two ranks share the samples of each pair, and only the main rank returns figures."""
    os.chdir(folder)
    found = values(evaluate(output="of ranks", num_sampling_steps=[2, 3], cfg_scale=[1.0, 1.5]))
    if not mesh.is_main:
        assert found == {}
        return
    assert list(found) == list(expected)
    assert all(found[key] == pytest.approx(value, rel=1e-6) for key, value in expected.items())
    assert Path("of ranks", "sweep.csv").is_file()


def test_a_sweep_is_the_evaluations_of_its_pairs(capsys, caplog):
    caplog.set_level(logging.INFO, logger="opendit")
    found = values(evaluate(output="sweep", num_sampling_steps=[2, 3], cfg_scale=[1.0, 1.5, 1.5]))
    said = capsys.readouterr().out
    pairs = [(steps, scale) for steps in (2, 3) for scale in (1.0, 1.5)]
    assert list(found) == [(m, *pair) for pair in pairs for m in ("frechet_distance", "accuracy")]
    alone = {}
    for steps, scale in pairs:
        alone |= values(evaluate(output="alone", num_sampling_steps=steps, cfg_scale=scale))
    assert found == alone and len(set(found.values())) > 4
    with open("sweep/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["metric"], int(r["steps"]), float(r["guidance"])): float(r["value"]) for r in rows} == found
    table = said[said.rindex("frechet_distance  2 steps") :].splitlines()
    assert table[0].split() == ["frechet_distance", "2", "steps", "3", "steps"]
    for line, scale in zip(table[1:3], (1.0, 1.5), strict=True):
        shown = [float(word) for word in line.split()[2:]]
        assert shown == pytest.approx([found["frechet_distance", steps, scale] for steps in (2, 3)], rel=1e-4)

    capsys.readouterr()
    caplog.clear()
    run_ranks(2, sweep_of_ranks, Path.cwd(), found)

    again = values(evaluate(output="sweep", num_sampling_steps=[3], cfg_scale=[1.5, 1.0]))  # nothing is drawn
    assert again == {key: value for key, value in found.items() if key[1] == 3}
    assert caplog.text.count("features of 23 of 23 samples are there") == 2
    assert " samples in " not in capsys.readouterr().out
    assert len(read_results(Path("sweep/results.jsonl"))) == len(found)


def test_what_was_killed_goes_on():
    flags = "--ckpt run.safetensors --features digits --num_samples 23 --metrics fid accuracy --no_intervals".split()
    flags += "--output killed --num_sampling_steps 2 3 4 --cfg_scale 1.5 --mixed_precision fp32".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-m", "opendit.evaluation", *flags], env=environment)
    results, deadline = Path("killed/results.jsonl"), time.monotonic() + 120
    while not (results.exists() and results.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    found = evaluate(output="killed", num_sampling_steps=[2, 3, 4], cfg_scale=1.5)
    rows = read_results(results)
    assert values(rows) == values(found) and len(rows) == len(found) == 6
    assert values(found) == values(evaluate(output="whole", num_sampling_steps=[2, 3, 4], cfg_scale=1.5))


def test_flags_of_guidance_are_for_the_pairs_that_have_some():
    words = ["--ckpt", "run.safetensors", "--features", "digits", "--cfg_channels", "1", "--cfg_scale", "1", "2"]
    flags = parse(EvaluateConfig, [*words, "--num_sampling_steps", "5"])
    assert flags.cfg_scale == [1, 2] and flags.num_sampling_steps == 5
    assert [(p.cfg_scale, p.num_sampling_steps, "cfg_channels" in p.given) for p in flags.points()] == [
        (1, 5, False),
        (2, 5, True),
    ]
    flags.resolve(1, False)
    with pytest.raises(ValueError, match="--cfg_channels: does nothing with --cfg_scale 1"):
        parse(EvaluateConfig, words[:-1]).resolve(1, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (dict(cfg_scale=[1.5, -1.0]), "--cfg_scale -1"),
        (dict(num_sampling_steps=[2, 0]), "--num_sampling_steps 0"),
        (dict(num_sampling_steps=[2, 3], save_features="kept"), "leave it out of a sweep"),
        (dict(cfg_scale=[2.0, 1.0], cfg_parallel=True), "--cfg_parallel"),
    ],
)
def test_mistakes_come_before_the_first_evaluation(flags, said):
    with pytest.raises(ValueError, match=said):
        evaluate(output="out", **flags)
    assert not Path("out/features").exists()
