"""train.py with --pipeline_parallel_size: the curve of one process, grids, checkpoints that others go on from; and what
it refuses."""

import re

import numpy as np
import pytest

import train
from tests.numbers import off_by
from tests.parallel.tensor.test_training import drawn_in, losses_in, programs
from tests.ranks import run_ranks
from tests.training.test_train import QUIET, TINY, plain_losses

STEPS = 8


def test_train_py_gives_the_single_process_curve_and_goes_on_without(tmp_path):
    half = STEPS // 2
    common = [*TINY, *QUIET, "--ckpt_every", str(half)]
    saved = tmp_path / "two" / "000-DiT-Ti-2" / "checkpoints" / f"step_{half:07d}"
    by_two = "--pipeline_parallel_size 2 --grad_accumulation 2 --batch_size 2"
    runs = [
        f"--batch_size 2 --max_steps {STEPS} --outputs {tmp_path}/two --load {saved}",
        f"--pipeline_parallel_size 4 --grad_accumulation 4 --batch_size 2 --max_steps {half} --plugin ddp "
        f"--outputs {tmp_path}/four",
        f"{by_two} --pipeline_schedule interleaved --max_steps {half} --plugin fsdp --outputs {tmp_path}/cut",
        f"{by_two} --max_steps {STEPS} --plugin fsdp --outputs {tmp_path}/two --load {saved}",
    ]
    run_ranks(4, programs, [[*common, *f"{by_two} --max_steps {STEPS} --outputs {tmp_path}/two".split()]])
    losses, drawn = {"two": losses_in(tmp_path / "two")}, {"two": drawn_in(tmp_path / "two", half)}
    end = drawn_in(tmp_path / "two", STEPS)
    run_ranks(4, programs, [[*common, *argv.split()] for argv in runs])
    for name in ("four", "cut"):
        losses[name], drawn[name] = losses_in(tmp_path / name), drawn_in(tmp_path / name, half)
    losses["went on"] = losses_in(tmp_path / "two")
    wanted = plain_losses(STEPS, 8)
    assert {name: len(curve) for name, curve in losses.items()} == {"two": 8, "four": 4, "cut": 4, "went on": 8}
    for name, curve in losses.items():
        assert off_by(curve, wanted[: len(curve)]) < 1e-5, name
    for name, picture in drawn.items():
        assert picture.std() > 10 and np.abs(picture - drawn["two"]).max() <= 1, name
    assert np.abs(drawn_in(tmp_path / "two", STEPS) - end).max() <= 1


@pytest.mark.parametrize(
    "argv,message",
    [
        ("4 --pipeline_parallel_size 3", "--pipeline_parallel_size 3: does not divide the 4 processes"),
        ("4 --pipeline_parallel_size 2 --tensor_parallel_size 4", "2 with --tensor_parallel_size 4: does not divide"),
        ("4 --pipeline_parallel_size 2 --plugin gemini", "does not work with --plugin gemini"),
        ("4 --pipeline_parallel_size 2 --lora 2 --pretrained x", "does not work with --lora"),
        ("4 --pipeline_parallel_size 2 --checkpoint_format whole", "does not work with --checkpoint_format whole"),
        ("8 --pipeline_parallel_size 8", "the model's 4 blocks make at most 4 stages; use 4 or less"),
        ("4 --pipeline_parallel_size 4 --pipeline_schedule interleaved", "use 2 or less, or 1f1b"),
        ("4 --pipeline_parallel_size 2 --pipeline_schedule interleaved --grad_accumulation 3", "use 4, or 1f1b"),
        ("4 --pipeline_schedule interleaved", "does nothing without --pipeline_parallel_size above 1"),
        ("8 --pipeline_parallel_size 4 --plugin fsdp --data_parallel_replicate 4", "in groups of 4 that share samples"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_by_name(argv, message, capsys):
    with pytest.raises(SystemExit):
        train.main(["--dry_run", *argv.split(), *TINY])
    assert re.search(message, capsys.readouterr().err), message


def test_a_dry_run_knows_stages(capsys):
    run = [*TINY, "--dry_run", "8", "--batch_size", "8", "--pipeline_parallel_size", "2"]
    train.main(run), train.main([*run, "--grad_accumulation", "16", "--pipeline_schedule", "interleaved"])
    few, many = capsys.readouterr().out.split("nothing was built")[1:]
    assert "8 x 4 ranks x 1 micro-batches = 32" in few and "8 x 4 ranks x 16 micro-batches = 512" in many
    assert "2 stages of 2 + 2 blocks on 2 ranks, 1f1b" in few and "4 stages of 1 + 1 + 1 + 1 blocks on 2 ranks" in many
    assert "every process idles for 50% of a step; with 16 for 6%" in few and "idles" not in many
    assert "pipeline rank 0" in few and "pipeline rank 1" in many
