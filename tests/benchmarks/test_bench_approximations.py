"""benchmarks/bench_approximations.py on a CPU with random weights: its table and its rows."""

import csv

import pytest
import torch

import opendit
from benchmarks.bench_approximations import Clips, Digits, Row, line, main, records, whole
from opendit.data import digits_split
from opendit.data.digits import DIRECTIONS
from opendit.diffusion.objectives import FlowObjective
from opendit.evaluation.digits import real_clips
from opendit.evaluation.metrics import Moments, frechet_distance
from tests.sampling.small import BYTES, write

SETTINGS = ["steps:3", "taylor:2:1", "first_block:10", "guidance_every:2", "cfg_interval:0.3:5", "fp8"]
EXACT = Row("exact", 1.0, 4.0, 0.0, 0.95, 2.0)
HALF = Row("taylor:2", 1.96, 2.0, 0.0123, 0.944, 2.05)


@pytest.fixture
def digits(tmp_path):
    return write(tmp_path / "digits.safetensors", num_classes=10)


@pytest.fixture
def clips(tmp_path):
    info = {"objective": FlowObjective().to_dict(), "frame_interval": 6}
    text = {"text": BYTES, "frames": 4, "input_size": (12, 12)}
    return write(tmp_path / "clips.safetensors", "vDiT-Ti/222", info=info, learn_sigma=False, **text)


def test_every_setting_has_a_row(digits, clips, tmp_path, capsys):
    argv = ["--samples", "6", "--batch_size", "4", "--steps", "6", "--device", "cpu", "--settings", *SETTINGS]
    main(["--ckpt", str(digits), str(clips), *argv, "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert out.count("fp8 is left out: ") == 2
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    for model in ("DiT-Ti/2", "vDiT-Ti/222"):
        found = {row["case"].rpartition(", ")[2]: row for row in rows if row["case"].startswith(model)}
        assert list(found) == ["exact", *SETTINGS[:-1]]
        of = {(row["case"].rpartition(", ")[2], row["metric"]): float(row["value"]) for row in rows
              if row["case"].startswith(model)}  # fmt: skip
        assert of["exact", "relative error of latents"] == 0
        assert all(of[name, "relative error of latents"] > 1e-4 for name in SETTINGS[:-1])
        assert of["taylor:2:1", "fewer block evaluations"] == of["steps:3", "fewer block evaluations"] == 2
        assert of["guidance_every:2", "fewer block evaluations"] == pytest.approx(12 / 9, abs=1e-3)
        assert of["first_block:10", "fewer block evaluations"] == pytest.approx(24 / 9, abs=1e-3)  # of four blocks


def test_real_digits_and_clips_are_judged_right(digits, clips):
    """Real held-out samples are recognised as their classes and are close to the training samples."""
    pixels, labels = digits_split("test")
    task = Digits(opendit.load(digits, device="cpu"), len(labels))
    task.labels = labels.numpy()
    right, features = task.judge(pixels)
    assert right.double().mean() > 0.95
    noise = task.judge(torch.randn_like(pixels))[1]
    near, far = (frechet_distance(Moments.of(f).gaussian(), task.real) for f in (features, noise))
    assert 0 < near < far / 10

    task = Clips(opendit.load(clips, device="cpu"), 40)
    held_out = real_clips("test", task.shape, 40)
    real = whole(held_out.media)[:, :1].float() / 127.5 - 1
    task.wanted = [(int(d), list(DIRECTIONS)[i % len(DIRECTIONS)]) for i, d in enumerate(held_out.asked.digits)]
    right, features = task.judge(real)
    assert right.double().mean() > 0.8 and features.shape[0] == 40
    task.wanted = [(d, list(DIRECTIONS)[(i + 1) % len(DIRECTIONS)]) for i, (d, _) in enumerate(task.wanted)]
    assert not task.judge(real)[0].any()


def test_a_line_and_its_records():
    assert line(HALF, EXACT) == "| taylor:2 | 1.96 x | 2.00 | 1.23% | 94.40% (-0.60) | 2.050 (+2.5%) |"
    found = {record["metric"]: record for record in records("DiT", [EXACT, HALF]) if "taylor" in record["case"]}
    nothing = records("DiT", [Row("exact", 1.0, 4.0, 0.0, 0.0, 2.0), HALF])
    assert all(float(record.get("baseline_value", 1)) for record in nothing)
    assert found["accuracy"]["value"] == "0.9440" and found["accuracy"]["baseline_value"] == "0.9500"
    assert found["relative error of latents"]["value"] == "0.01230"


def test_another_model_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="draws neither"):
        main(["--ckpt", str(write(tmp_path / "other.safetensors", num_classes=5)), "--samples", "4", "--device", "cpu"])
