"""train.py --pack_tokens: losses match training on the samples one by one, runs resume, and bad flags are refused."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import train
from opendit.data.row_arrays import FOLDER
from opendit.training.micro_batch import MicroBatch
from tests.models.packs import unpack_patches
from tests.numbers import off_by
from tests.ranks import run_ranks
from train import EagerPasses

FLAGS = (
    "--model DiT-Ti/2 --image_size 8 --vae none --pack_tokens 64 --num_workers 0 --log_every 1 --lr 1e-3 "
    "--warmup_steps 0 --sample_every 0 --ckpt_every 0 --global_seed 5 --label_drop 0.2 --mixed_precision fp32"
).split()
STEPS = 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("sizes"))
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for number, size in enumerate([(8, 8), (6, 12), (14, 8), (5, 5), (30, 16), (9, 9)] * 6):
            Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(root / label / f"{number}.png")
    yield root
    del os.environ[FOLDER]


def run(data, outputs, *more, steps=STEPS):
    train.main([*FLAGS, "--data_path", str(data), "--outputs", str(outputs), "--max_steps", str(steps), *more])
    return [json.loads(line) for line in (sorted(outputs.glob("0*"))[-1] / "log.jsonl").read_text().splitlines()]


def start(mesh, data, outputs, *more):
    run(data, outputs, *more)


def curve(lines):
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def packed(pictures, tmp_path_factory):
    """Return the log of one process that trains on two packs a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opendit.parallel.supervisor.close_mesh", lambda: None)
        return run(pictures, tmp_path_factory.mktemp("packed"), "--grad_accumulation", "2")


def test_the_curve_is_that_of_the_samples_one_by_one(pictures, packed, tmp_path, no_ranks, monkeypatch):
    """Compare with the same program, calling the model for each sample in a pack separately."""
    sizes = []

    def one_by_one(self, packed):
        found = []
        patches = (unpack_patches(x, packed.segments) for x in (packed.x0, packed.noise))
        for number, (x0, noise) in enumerate(zip(*patches, strict=True)):
            rows = slice(number, number + 1)
            found.append(losses(self, MicroBatch(x0[None], packed.t[rows], noise[None], packed.condition[rows])))
            sizes.append(tuple(x0.shape))
        return torch.cat(found)

    losses = EagerPasses.losses
    monkeypatch.setattr(EagerPasses, "losses", one_by_one)
    alone = run(pictures, tmp_path, "--grad_accumulation", "2")
    assert len(set(sizes)) > 2
    assert off_by(curve(packed), curve(alone)) < 1e-5
    assert [line["samples_per_s"] > 0 and line["tflops"] > 0 for line in packed] == [True] * STEPS


@pytest.mark.parametrize(
    "more",
    (
        ("--plugin", "fsdp"),
        ("--sequence_parallel_size", "2", "--grad_accumulation", "2", "--sequence_parallel_type", "fastseq"),
    ),
    ids=lambda more: " ".join(more[1::2]),
)
def test_two_ranks_have_the_curve_of_one(pictures, packed, tmp_path, more):
    run_ranks(2, start, pictures, tmp_path, *more)
    lines = (tmp_path / "000-DiT-Ti-2" / "log.jsonl").read_text().splitlines()
    assert off_by(curve(map(json.loads, lines)), curve(packed)) < 1e-5


def test_a_resume_goes_on_with_the_same_packs(pictures, packed, tmp_path, no_ranks, capsys):
    run(pictures, tmp_path, "--grad_accumulation", "2", steps=2)
    resumed = run(pictures, tmp_path, "--grad_accumulation", "2", "--load", "latest")
    assert curve(resumed) == curve(packed)
    out = capsys.readouterr().out
    assert "packs of up to 64 tokens" in out and "in packs one call a run: varlen kernels need a CUDA GPU" in out


def test_packs_that_hold_all_samples_several_times(pictures, tmp_path, no_ranks, capsys):
    """An epoch is shorter than a step, which must not cause a division by zero."""
    large = ("--pack_tokens", "4096")
    assert train.main([*FLAGS, "--data_path", str(pictures), "--max_steps", "2", *large, "--dry_run", "1"]) in (0, None)
    told = capsys.readouterr().out
    assert "0.24 an epoch, 2 in all = 8." in told, told
    run(pictures, tmp_path, *large, steps=1)
    assert "; 0.24 steps an epoch" in capsys.readouterr().out


def test_a_held_out_loss_is_that_without_packs(pictures, tmp_path, no_ranks):
    (line,) = run(pictures, tmp_path, "--validate_share", "0.1", "--validate_every", "1", steps=1)
    assert line["val_loss"] > 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--compile",), "--pack_tokens 64: does not work with --compile, as every pack has other lengths"),
        (("--positions", "learned"), "--pack_tokens 64: this model has learned positions"),
        (
            ("--model", "EC-DiT-Ti/2"),
            "--pack_tokens: not ecdit models: experts choose among the tokens",
        ),
    ],
)
def test_what_is_refused(pictures, tmp_path, no_ranks, capsys, flags, message):
    with pytest.raises(SystemExit):
        run(pictures, tmp_path, *flags, steps=1)
    found = capsys.readouterr()
    assert message in found.err + found.out


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--sequence_parallel_type", "ring"), "--sequence_parallel_type ring, as it attends to a part of the keys"),
        (("--pack_tokens", "65"), "--pack_tokens 65: 2 ranks can't share 65 tokens evenly; take a multiple of 2"),
    ],
)
def test_what_two_ranks_can_not(flags, message):
    from opendit.config.command_line import parse
    from opendit.config.train import TrainConfig

    found = parse(TrainConfig, [*FLAGS, "--data_path", "digits", "--sequence_parallel_size", "2", *flags])
    with pytest.raises(ValueError, match=message):
        found.resolve(2, False)
