"""Training on several sources: a resumed run sees the samples of an uninterrupted one, or prints that it cannot."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train

FLAGS = (
    "--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --num_workers 0 --log_every 1 --lr 1e-3 "
    "--sample_every 0 --ckpt_every 0 --global_seed 5"
).split()


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for source, count in (("a", 7), ("b", 5)):
        for label in ("cat", "dog"):
            (root / source / label).mkdir(parents=True)
            for i in range(count):
                pixels = np.random.default_rng([count, len(label), i]).integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(root / source / label / f"{i}.png")
    (root / "blend.yaml").write_text(
        "sources: [{path: a, weight: 3}, {path: b, weight: 1}]\nchanges: [{step: 4, weights: {a: 1, b: 3}}]\n"
    )
    return root


def run(data: Path | str, outputs: Path, steps: int, *more: str) -> Path:
    train.main([*FLAGS, "--data_path", str(data), "--outputs", str(outputs), "--max_steps", str(steps), *more])
    return sorted(outputs.glob("0*"))[-1]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_resume_goes_on_with_the_same_samples(sources, tmp_path, no_ranks):
    whole = run(sources / "blend.yaml", tmp_path / "whole", 7)
    run(sources / "blend.yaml", tmp_path / "parts", 3)
    resumed = run(sources / "blend.yaml", tmp_path / "parts", 7, "--load", "latest")
    one, other = (load_file(path / "checkpoints" / "latest" / "ema.safetensors") for path in (whole, resumed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    last, same = lines(whole)[-1], lines(resumed)[-1]
    assert last["step"] == same["step"] == 7 and last["loss"] == same["loss"] and last["sources"] == same["sources"]
    # 16 samples at 3 to 1, then 12 at 1 to 3, each correct to within one sample.
    drawn = {name: source["share"] * 28 for name, source in last["sources"].items()}
    assert abs(drawn["a"] - 15) < 2 and abs(drawn["b"] - 13) < 2 and sum(drawn.values()) == pytest.approx(28, abs=0.01)


def test_a_resume_with_other_weights_from_the_beginning_says_so(sources, tmp_path, no_ranks, capsys):
    a, b = sources / "a", sources / "b"
    run(f"{a}:0.75,{b}:0.25", tmp_path, 2)
    assert "the sources' weights" not in capsys.readouterr().out
    run(f"{a}:0.5,{b}:0.5", tmp_path, 4, "--load", "latest")
    assert f"note: resume: the sources' weights {a} 0.75, {b} 0.25 -> {a} 0.5, {b} 0.5" in capsys.readouterr().out
