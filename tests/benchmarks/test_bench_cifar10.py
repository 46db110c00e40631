"""benchmarks/bench_cifar10.py: reading pictures, the classifier, the metric, and a tiny run of two rows."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import bench_cifar10
from benchmarks.bench_cifar10 import (
    ROWS,
    Classifier,
    InMemory,
    Metric,
    Pictures,
    augmented,
    chosen,
    csv_rows,
    flags_of,
    load_classifier,
    named_rows,
    read_pictures,
    seconds_of,
    share_named,
    train_classifier,
)
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data.base import View

CLASSES = [f"class{number}" for number in range(10)]


def pictures(count: int, seed: int) -> Pictures:
    """Return noisy pictures with one colour per class, which a classifier learns at once."""
    random, labels = np.random.default_rng(seed), np.arange(count) % 10
    colours = np.random.default_rng(0).integers(40, 216, (10, 3))
    pixels = colours[labels][:, None, None] + random.integers(-40, 40, (count, 32, 32, 3))
    return Pictures(pixels.astype(np.uint8), labels, CLASSES)


def write_jpegs(folder: Path, split: str, found: Pictures) -> list[bytes]:
    """Write a .jpegs file and its table; return the JPEGs' bytes."""
    parts = []
    for pixels in found.pixels:
        Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=95)
        parts.append(buffer.getvalue())
    (folder / f"{split}.jpegs").write_bytes(b"".join(parts))
    np.savez(
        folder / f"{split}.npz", ends=np.cumsum([*map(len, parts)]), labels=found.labels, classes=np.array(CLASSES)
    )
    return parts


def test_pictures_are_read_from_one_file_a_prefix_of_it_and_folders(tmp_path: Path):
    made = pictures(20, 1)
    parts = write_jpegs(tmp_path, "train", made)
    found = read_pictures(tmp_path, "train")
    assert found.classes == CLASSES and found.labels.tolist() == made.labels.tolist()
    assert np.abs(found.pixels.astype(int) - made.pixels).mean() < 30
    for number, (part, label) in enumerate(zip(parts, made.labels, strict=True)):
        folder = tmp_path / "test" / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.jpg").write_bytes(part)
    order = np.argsort(made.labels, kind="stable")
    of_folders = read_pictures(tmp_path, "test")
    assert np.array_equal(of_folders.pixels, found.pixels[order]) and of_folders.classes == CLASSES
    (tmp_path / "train.jpegs").write_bytes(b"".join(parts[:7]) + parts[7][:5])
    assert np.array_equal(read_pictures(tmp_path, "train").pixels, found.pixels[:7])
    with pytest.raises(FileNotFoundError, match=r"--data .*neither"):
        read_pictures(tmp_path / "nowhere", "train")


def test_a_data_set_in_memory_gives_bytes_and_the_same_as_floats():
    made = pictures(10, 1)
    data = InMemory(made, 0)
    as_bytes, mirrored = data.read(3, View(as_bytes=True)), data.read(3, View(as_bytes=True, flip=True))
    assert as_bytes.x.dtype == torch.uint8 and np.array_equal(as_bytes.x.movedim(0, -1).numpy(), made.pixels[3])
    assert torch.equal(mirrored.x, as_bytes.x.flip(-1)) and as_bytes.y == 3
    torch.testing.assert_close(data.read(3).x, as_bytes.x / 127.5 - 1)
    large = InMemory(made, 0, 64)
    assert large.describe().sample_shape == large.read(3).x.shape == (3, 64, 64)
    smaller = torch.nn.functional.avg_pool2d(large.read(3).x, 2)
    assert (smaller - data.read(3).x).abs().mean() < 0.1


def test_the_classifier_is_small_and_an_augmented_picture_is_a_crop_of_its_own(tmp_path: Path):
    assert sum(p.numel() for p in Classifier().parameters()) <= 4_000_000
    padded = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 40, 40, 3) + 1
    found = augmented(padded, torch.tensor([2, 0, 2]))
    assert found.shape == (3, 32, 32, 3)
    assert [set(x.unique().tolist()) - {127} for x in found] == [{3}, {1}, {3}]
    assert 0 < (found == 127).float().mean() <= (bench_cifar10.CUTOUT / 32) ** 2


def test_the_metric_is_zero_for_the_test_pictures_and_sees_noise_other_classes_and_copies(tmp_path: Path):
    train, test, file = pictures(200, 1), pictures(100, 2), tmp_path / "classifier.safetensors"
    accuracy = train_classifier(train, test, file, epochs=8, width=4, batch=20)
    classifier = load_classifier(file, torch.device("cpu"))
    assert accuracy == share_named(classifier, test) > 0.5
    metric = Metric.of(classifier, train, test)
    same = metric(test.pixels, test.labels)
    assert abs(same["frechet"]) < 1e-6 and same["accuracy"] == accuracy and same["copies"] <= 0.02
    other = metric(255 - test.pixels, (test.labels + 1) % 10)
    assert other["frechet"] > 1e-3 and other["accuracy"] < accuracy
    assert metric(train.pixels[:50], train.labels[:50])["copies"] == 1
    assert metric(train.pixels[:50, :, ::-1].copy(), train.labels[:50])["copies"] == 1  # mirrored
    grey = np.full((20, 32, 32, 3), 127, np.uint8) + np.random.default_rng(0).integers(0, 3, (20, 32, 32, 3), np.uint8)
    assert metric(grey, train.labels[:20])["copies"] == 0


def test_seconds_are_steps_at_the_median_speed_without_the_first_line():
    lines = [{"step": step, "samples_per_s": rate} for step, rate in ((10, 1.0), (20, 100.0), (30, 300.0), (40, 200.0))]
    assert seconds_of(lines, 20) == 4 and seconds_of(lines, 20, 10) == 1 and seconds_of(lines[:1], 20) == 200
    assert seconds_of([], 20) == 0


def test_checkpoints_nearest_to_equal_parts_are_measured(tmp_path: Path):
    for step in (200, 400, 600, 800, 890):
        (tmp_path / f"step_{step:07d}").mkdir()
    assert [path.name for path in chosen(tmp_path, 3)] == ["step_0000200", "step_0000600", "step_0000890"]
    assert [path.name for path in chosen(tmp_path, 1)] == ["step_0000890"]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_a_run_that_can_be(name: str, tmp_path: Path):
    (tmp_path / bench_cifar10.TEACHER).mkdir()
    args = type("Args", (), {"tiny": False, "more": "", "every": 200, "outputs": tmp_path})
    flags = parse(TrainConfig, flags_of(args, ROWS[name], 1))
    flags.resolve(1, has_gpu=True)
    assert flags.model.startswith("DiT-S/") and flags.vae == "none"


def test_rows_have_names_and_may_be_ones_own():
    assert named_rows(["base", "mine=--lr 1e-3 --norm rms"]) == {"base": "", "mine": "--lr 1e-3 --norm rms"}
    with pytest.raises(ValueError, match="--rows nothing: unknown"):
        named_rows(["nothing"])


def test_a_row_stands_beside_the_base_of_its_seed():
    def row(name, seed, value):
        return {"name": name, "flags": "", "more": "", "seed": seed, "points": [{"seconds": 9.0, "frechet": value}]}

    found = csv_rows([row("base", 1, 2.0), row("base", 2, 3.0), row("other", 2, 1.5)])
    assert [line.get("baseline_value") for line in found] == [None, None, "3.0000"]
    assert found[2]["value"] == "1.5000" and found[2]["metric"] == "frechet after 9 s"


def test_two_tiny_rows_are_trained_and_measured(tmp_path: Path):
    write_jpegs(tmp_path, "train", pictures(60, 1))
    write_jpegs(tmp_path, "test", pictures(40, 2))
    flags = (
        "--tiny --rows irepa mine=--lr=1e-3 --teacher_epochs 1 --seconds 2 --samples 20 --steps 2 --every 2 --epochs 1"
    )
    command = [sys.executable, bench_cifar10.__file__, *flags.split(), "--data", str(tmp_path)]
    outputs = tmp_path / "out"
    subprocess.run([*command, "--outputs", str(outputs), "--results", str(tmp_path / "results.csv")], check=True)
    found = json.loads((outputs / "results.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["irepa", "mine"] and found["floor"]["halves of test"] > 0
    for row in found["rows"]:
        assert row["points"][-1]["step"] > 0 and np.isfinite(row["points"][-1]["frechet"])
    assert (outputs / "recipes.png").exists() and (outputs / "irepa-1.png").exists()
    points = sum(len(row["points"]) for row in found["rows"])
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + points
