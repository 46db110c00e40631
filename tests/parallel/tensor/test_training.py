"""train.py with --tensor_parallel_size: the curve of one process, grids, checkpoints that others go on from; and what
it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from opendit.parallel.tensor import check_tensor_parallel
from tests.numbers import off_by
from tests.parallel.tensor.models import MODELS
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import QUIET, TINY, log_of, plain_losses

STEPS = 12


def programs(mesh, runs: list[list[str]]) -> None:
    several_programs()
    for argv in runs:
        train.main(argv)


def test_train_py_gives_the_single_process_curve_and_goes_on_without(tmp_path):
    common, half = [*TINY, *QUIET, "--ckpt_every", str(STEPS // 2)], STEPS // 2
    saved = tmp_path / "two" / "000-DiT-Ti-2" / "checkpoints" / f"step_{half:07d}"
    runs = [
        f"--tensor_parallel_size 4 --batch_size 8 --max_steps {half} --outputs {tmp_path}/four --plugin ddp",
        f"--tensor_parallel_size 2 --batch_size 4 --max_steps {half} --outputs {tmp_path}/cut --plugin fsdp",
        f"--batch_size 2 --max_steps {STEPS} --outputs {tmp_path}/two --load {saved}",
        f"--tensor_parallel_size 2 --batch_size 4 --max_steps 1 --outputs {tmp_path}/from --pretrained {saved}",
        f"--batch_size 2 --max_steps 1 --outputs {tmp_path}/from_one --pretrained {saved}",
    ]
    first = f"--tensor_parallel_size 2 --batch_size 4 --max_steps {STEPS} --outputs {tmp_path}/two"
    run_ranks(4, programs, [[*common, *first.split()]])
    losses, drawn = {"two": losses_in(tmp_path / "two")}, {"two": drawn_in(tmp_path / "two", half)}
    end = drawn_in(tmp_path / "two", STEPS)
    run_ranks(4, programs, [[*common, *argv.split()] for argv in runs])
    for name in ("four", "cut"):
        losses[name], drawn[name] = losses_in(tmp_path / name), drawn_in(tmp_path / name, half)
    losses["went on"] = losses_in(tmp_path / "two")
    wanted = plain_losses(STEPS, 8)
    assert {name: len(curve) for name, curve in losses.items()} == {"two": 12, "four": 6, "cut": 6, "went on": 12}
    for name, curve in losses.items():
        assert off_by(curve, wanted[: len(curve)]) < 1e-5, name
    for name, picture in drawn.items():
        assert picture.std() > 10 and np.abs(picture - drawn["two"]).max() <= 1, name
    assert np.abs(drawn_in(tmp_path / "two", STEPS) - end).max() <= 1  # by one rank alone
    started = losses_in(tmp_path / "from")
    assert off_by(started, losses_in(tmp_path / "from_one")) < 1e-6 and off_by(started, wanted[:1]) > 1e-5


def losses_in(outputs: Path) -> list[float]:
    return [line["loss"] for line in log_of(outputs / "000-DiT-Ti-2")]


def drawn_in(outputs: Path, step: int) -> np.ndarray:
    return np.asarray(Image.open(outputs / "000-DiT-Ti-2" / "samples" / f"{step:07d}.png")).astype(int)


@pytest.mark.parametrize(
    "argv,message",
    [
        ("4 --tensor_parallel_size 3", "does not divide the 4 processes"),
        ("4 --tensor_parallel_size 2 --sequence_parallel_size 4", "with --sequence_parallel_size 4: does not divide"),
        ("4 --tensor_parallel_size 2 --plugin gemini", "does not work with --plugin gemini"),
        ("4 --tensor_parallel_size 2 --fp8", "does not work with --fp8"),
        ("4 --tensor_parallel_size 2 --compile", "does not work with --compile"),
        ("3 --tensor_parallel_size 3", "number of heads, 4, can't be divided by it; use 2, 4"),
        ("8 --tensor_parallel_size 4 --plugin fsdp --data_parallel_replicate 4", "in groups of 4 that share samples"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(argv, message, capsys):
    with pytest.raises(SystemExit):
        train.main(["--dry_run", *argv.split(), *TINY])
    assert re.search(message, capsys.readouterr().err), message


def test_sizes_that_would_divide_are_named():
    with pytest.raises(ValueError, match="heads of keys and values, 2, can't be divided by it; use 2"):
        check_tensor_parallel(MODELS["MovieGen"], 4)
    six = replace(MODELS["EC-DiT"], experts=6)
    check_tensor_parallel(six, 2)
    with pytest.raises(ValueError, match="number of experts, 6, can't be divided"):
        check_tensor_parallel(six, 4)


def test_a_dry_run_divides_memory_and_batch(capsys):
    run = [*TINY, "--dry_run", "4", "--batch_size", "8"]
    train.main(run), train.main([*run, "--tensor_parallel_size", "2"])
    whole, divided = capsys.readouterr().out.split("nothing was built")[1:]
    assert "8 x 4 ranks x 1 micro-batches = 32" in whole and "8 x 2 ranks x 1 micro-batches = 16" in divided
    assert "layers divided by 2" in divided
