"""train.py as users run it: losses match a plain loop, runs resume on other rank counts, bad input is refused."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, build_dataset, build_loader
from opendit.diffusion.objectives.ddpm import DDPM, training_loss
from opendit.diffusion.random import Stream, integers, normal, uniform
from opendit.models.dit import DiT
from opendit.models.zoo import build_model, model_config
from opendit.training.run import LearningRate
from tests.numbers import off_by
from tests.ranks import run_ranks

TINY = "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --num_workers 0 --log_every 1 --lr 3e-4".split()
QUIET = "--sample_steps 2 --sample_cfg_scale 1".split()


def start(mesh, argv: list[str]) -> None:
    train.main(argv)


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def plain_losses(steps: int, batch: int) -> list[float]:
    """Return losses of a plain PyTorch loop over the same samples and noise."""
    flags = parse(TrainConfig, TINY)
    dataset = build_dataset("digits", 8, seed=flags.global_seed)
    schedule = BatchSchedule(len(dataset), batch, flags.global_seed)
    loader = build_loader(dataset, schedule, dp_rank=0, dp_size=1, batch_size=batch, num_workers=0)
    model = build_model(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10), flags.global_seed)
    adam = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0)
    diffusion, losses = DDPM.linear(), []
    for _, item in zip(range(steps), loader, strict=False):
        key = (flags.global_seed, item.step, item.index)
        t, noise = integers(*key, Stream.TIMESTEP, 1000), normal(*key, Stream.NOISE, (1, 8, 8))
        y = torch.where(uniform(*key, Stream.CONDITION_DROP) < 0.1, 10, item.y)
        xt = diffusion.q_sample(item.x, t, noise)
        loss = training_loss(diffusion, model(xt, t, y), item.x, xt, t, noise).loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def test_two_ranks_follow_the_plain_loop_and_resume_exactly(tmp_path):
    common = [*TINY, *QUIET, "--batch_size", "8", "--ckpt_every", "6"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, start, [*common, "--max_steps", "12", "--outputs", str(whole)])
    losses = [line["loss"] for line in log_of(whole / "000-DiT-Ti-2")]
    reference = plain_losses(12, 16)
    assert off_by(losses, reference) < 1e-5

    run_ranks(2, start, [*common, "--max_steps", "6", "--outputs", str(parts)])
    run_ranks(2, start, [*common, "--max_steps", "12", "--outputs", str(parts), "--load", "latest"])
    run = parts / "000-DiT-Ti-2"
    assert sorted(p.name for p in parts.iterdir()) == ["000-DiT-Ti-2"]  # the run resumed in the same folder
    assert [line["loss"] for line in log_of(run)] == losses  # bit for bit
    for name in ("model", "ema", "optimizer_000", "optimizer_001"):
        a = load_file(whole / "000-DiT-Ti-2" / "checkpoints" / "latest" / f"{name}.safetensors")
        b = load_file(run / "checkpoints" / "latest" / f"{name}.safetensors")
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), name

    # Another plugin and another number of ranks see the same samples, and losses match up to rounding.
    run_ranks(
        1,
        start,
        [*common[:-4], "--batch_size", "4", "--grad_accumulation", "4", "--plugin", "ddp", "--ckpt_every", "6",
         "--max_steps", "12", "--outputs", str(parts), "--load", str(whole / "000-DiT-Ti-2/checkpoints/step_0000006")],
    )  # fmt: skip
    resumed = [line["loss"] for line in log_of(whole / "000-DiT-Ti-2")][6:]  # no line is there twice
    assert off_by(resumed, losses[6:]) < 1e-5

    # Check the files of the run.
    run = whole / "000-DiT-Ti-2"
    config = json.loads((run / "config.json").read_text())
    assert config["flags"]["model"] == "DiT-Ti/2" and config["model_config"]["num_classes"] == 10
    keys = "step epoch loss lr grad_norm samples_per_s tflops mfu memory_gib data_wait_s".split()
    assert all(key in line for line in log_of(run) for key in keys)
    assert os.readlink(run / "checkpoints" / "latest") == "step_0000012"
    assert (run / "samples" / "0000012.png").stat().st_size > 1000
    assert any((run / "tensorboard").iterdir())


def test_load_latest_without_a_run_starts_afresh(tmp_path, no_ranks, capsys):
    argv = [*TINY, *QUIET, "--batch_size", "4", "--max_steps", "1", "--outputs", str(tmp_path), "--load", "latest"]
    train.main(argv)
    assert f"no checkpoint of DiT-Ti/2 under {tmp_path}, starting afresh" in capsys.readouterr().out
    assert len(log_of(tmp_path / "000-DiT-Ti-2")) == 1


def test_a_run_that_saves_nothing_ends_as_done(tmp_path, no_ranks, capsys):
    flags = "--batch_size 2 --max_steps 2 --log_every 100 --no_save --sample_every 0 --outputs".split()
    train.main([*TINY, *QUIET, *flags, str(tmp_path)])
    said = capsys.readouterr().out
    assert "Done: step 2" in said and "none (--no_save)" in said
    assert [line["step"] for line in log_of(tmp_path / "000-DiT-Ti-2")] == [2]
    assert not any((tmp_path / "000-DiT-Ti-2").glob("samples/*"))


def test_a_diverging_run_stops_and_keeps_its_weights_finite(tmp_path, no_ranks, capsys):
    argv = [*TINY, *QUIET, "--batch_size", "4", "--max_steps", "9", "--outputs", str(tmp_path), "--ckpt_every", "1"]
    with pytest.raises(SystemExit) as stop:
        train.main([*argv, "--lr", "1e30", "--max_bad_steps", "3"])
    assert stop.value.code == 1 and "try a lower --lr" in capsys.readouterr().err.splitlines()[-1]
    weights = load_file(tmp_path / "000-DiT-Ti-2" / "checkpoints" / "latest" / "model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())
    assert [line["skipped"] for line in log_of(tmp_path / "000-DiT-Ti-2")][-1] >= 1


@pytest.mark.parametrize(
    "argv,message",
    [
        ("--model DiT-Q/2", "did you mean"),
        ("--image_size 10 --model DiT-Ti/4", "--image_size 10: does not divide by 4.*use 8"),
        ("--vae ema --image_size 100", "--image_size 100: does not divide by 16"),
        ("--num_classes 5", "--num_classes 5: .*10 classes"),
        ("--data_path {tmp}/empty", "--data_path"),
        ("--data_path {tmp}/nowhere", "doesn't exist"),
        ("--batch_size 2000", "smaller than one global batch"),
        ("--mixed_precision fp16", "needs a GPU"),
        ("--plugin gemini --mixed_precision fp32", "gemini"),
        ("--outputs {tmp}/file/x", "--outputs"),
        ("--load {tmp}/nowhere", "--load .*/nowhere: doesn't exist; give latest, a run folder"),
        ("--load {tmp}/empty", "--load .*no checkpoint there"),
        ("--pretrained {tmp}/nowhere.pt", "--pretrained .*/nowhere.pt: doesn't exist; give a .safetensors"),
        ("--pretrained {tmp}/empty", "no checkpoint there"),
        ("--vae {tmp}/empty", "--vae none"),
    ],
)
def test_bad_input_is_answered_before_any_weight_is_made(argv, message, tmp_path, no_ranks, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(DiT, "__init__", lambda *args: pytest.fail("weights were made before the check"))
    words = [*TINY, "--batch_size", "4", "--outputs", str(tmp_path / "out"), *argv.format(tmp=tmp_path).split()]
    with pytest.raises(SystemExit) as stop:
        train.main(words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.match(r"(train\.py: )?error: ", error), error
    assert re.search(message, error), error


def test_a_checkpoint_of_another_model_is_refused(tmp_path, no_ranks, capsys):
    common = [*TINY, *QUIET, "--batch_size", "4", "--max_steps", "1", "--outputs", str(tmp_path)]
    train.main(common)
    run = str(tmp_path / "000-DiT-Ti-2")
    for argv, message in (
        (["--model", "DiT-S/2", "--load", run], "is a checkpoint of DiT-Ti/2"),
        (["--image_size", "16", "--load", run], "input_size"),
        (["--num_classes", "12", "--load", run], "num_classes 10 there, 12 here"),
    ):
        with pytest.raises(SystemExit):
            train.main([*common, *argv])
        assert message in capsys.readouterr().err


def test_learning_rate_schedule():
    flags = parse(TrainConfig, ["--lr", "2", "--warmup_steps", "4", "--lr_schedule", "cosine"])
    rate = LearningRate(flags.lr, flags.warmup_steps, flags.lr_schedule, last_step=104)
    rates = [rate.at(step) for step in range(104)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[54] == pytest.approx(1.0) and 0 < rates[-1] < 0.01
