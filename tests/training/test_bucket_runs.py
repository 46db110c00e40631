"""Training with --bucket_tokens: resuming continues with the same samples, and bad flags are refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train
from opendit.data.row_arrays import FOLDER

FLAGS = (
    "--model DiT-Ti/2 --image_size 8 --vae none --bucket_tokens 64 --num_workers 0 --log_every 1 --lr 1e-3 "
    "--sample_every 0 --ckpt_every 0 --global_seed 5"
).split()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for number, size in enumerate([(8, 8), (6, 12), (14, 8), (5, 5), (30, 16), (9, 9)] * 3):
            Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(root / label / f"{number}.png")
    return root


def run(data, outputs, steps, *more):
    train.main([*FLAGS, "--data_path", str(data), "--outputs", str(outputs), "--max_steps", str(steps), *more])
    return sorted(outputs.glob("0*"))[-1]


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [(), ("--grad_accumulation", "2", "--positions", "rope")])
def test_a_resume_goes_on_with_the_same_samples(pictures, tmp_path, no_ranks, monkeypatch, capsys, more):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    whole = run(pictures, tmp_path / "whole", 6, *more)
    out = capsys.readouterr().out
    assert "note: batch size: 1; it counts groups of one shape of 64 tokens" in out
    assert "groups of one shape of up to 64 tokens" in out and " tokens, most often 8 x 8" in out
    run(pictures, tmp_path / "parts", 3, *more)
    resumed = run(pictures, tmp_path / "parts", 6, "--load", "latest", *more)
    one, other = (load_file(path / "checkpoints" / "latest" / "ema.safetensors") for path in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["loss"] for line in lines(whole)][-3:] == [line["loss"] for line in lines(resumed)][-3:]
    assert "note: resume: --bucket_tokens" not in capsys.readouterr().out


@pytest.mark.parametrize("first, then", [("4 1", "2 2"), ("4 1", "1 4"), ("1 4", "4 1"), ("2 2", "1 4")])
def test_other_micro_batches_go_on_with_the_same_samples(
    pictures, tmp_path, no_ranks, monkeypatch, capsys, first, then
):
    """The groups of one shape stay as they were at the start of the run if the new micro-batches fit within them."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    monkeypatch.chdir(tmp_path)

    def flags(split):
        batch, micro_batches = split.split()
        return "--bucket_tokens", "32", "--batch_size", batch, "--grad_accumulation", micro_batches

    whole = run(pictures, tmp_path / "whole", 6, *flags(first))
    run(pictures, tmp_path / "parts", 3, *flags(first))
    capsys.readouterr()
    resumed = run(pictures, tmp_path / "parts", 6, "--load", "latest", *flags(then))
    out, losses = capsys.readouterr().out, [[line["loss"] for line in lines(each)][-3:] for each in (whole, resumed)]
    # A micro-batch of four groups does not fit where each group may have another shape.
    if (first, then) == ("1 4", "4 1"):
        assert "the parts of one shape in a step 4 -> 1: the curve is another from here on" in out
        assert not np.allclose(*losses, rtol=1e-4)
    else:
        assert "the curve is another" not in out and np.allclose(*losses, rtol=1e-5)
        again = run(pictures, tmp_path / "parts", 7, "--load", "latest", *flags(first))  # back to the first split
        assert "the curve is another" not in capsys.readouterr().out and len(lines(again)) == 7


def test_another_budget_is_another_curve(pictures, tmp_path, no_ranks, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    run(pictures, tmp_path, 2)
    run(pictures, tmp_path, 3, "--load", "latest", "--bucket_tokens", "32")
    assert "note: resume: --bucket_tokens 64 -> 32: the curve is another from here on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--positions", "learned"), "--bucket_tokens 64: this model has learned positions"),
        (("--bucket_tokens", "15"), "--bucket_tokens 15: a picture of --image_size 8 has 16 tokens"),
        (("--pack_tokens", "64"), "--pack_tokens: --bucket_tokens makes micro-batches of one shape"),
        (("--parallel", "auto"), "--parallel auto: counts with samples of one size"),
        (("--batch_size", "4096"), "smaller than one global batch of 4,096"),
    ],
)
def test_what_is_refused(pictures, tmp_path, no_ranks, monkeypatch, capsys, flags, message):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    with pytest.raises(SystemExit):
        run(pictures, tmp_path, 1, *flags)
    found = capsys.readouterr()
    assert message in found.err + found.out


def test_the_dry_run_counts_lots(pictures, tmp_path, no_ranks, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    run_flags = [*FLAGS, "--data_path", str(pictures), "--outputs", str(tmp_path), "--max_steps", "5", "--dry_run", "2"]
    train.main(run_flags)
    out = capsys.readouterr().out
    assert "64 tokens" in out and "16 a sample, 128 a step" in out
