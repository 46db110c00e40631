"""The weight averages of full runs match the EMA formula, computed in float64 from every checkpoint's weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from tests.training.test_resume_finds import list_anew

ARGV = (
    "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --log_every 1 --sample_every 0 --batch_size 4 "
    "--mixed_precision fp32 --ckpt_every 1 --lr 1e-2 --ema_decay 0.9999 0.05"
).split()
AVERAGES = {0.9999: "ema.safetensors", 0.05: "ema_0.05.safetensors"}


def train_to(steps: int, outputs: Path, *more: str) -> Path:
    """Train and return the folder of the checkpoints."""
    train.main([*ARGV, "--max_steps", str(steps), "--outputs", str(outputs), *more])
    return outputs / "000-DiT-Ti-2" / "checkpoints"


def check(checkpoints: Path, decay_of, first: int, last: int) -> None:
    """Check that averages ``first`` to ``last`` follow from earlier ones. ``decay_of(n, decay)`` is the
    decay after n updates."""
    for decay, file in AVERAGES.items():
        average = {n: t.double() for n, t in load_file(at(checkpoints, first - 1) / file).items()}
        for step in range(first, last + 1):
            masters = load_file(at(checkpoints, step) / "model.safetensors")
            d = decay_of(step - 1, decay)
            average = {n: d * old + (1 - d) * masters[n].double() for n, old in average.items()}
        found = load_file(at(checkpoints, last) / file)
        assert all((found[n] - value).abs().max() < 1e-6 for n, value in average.items()), (decay, last)


def at(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:07d}"


def warmed_up(n: int, decay: float) -> float:
    return min(decay, 1 - 10 / (n + 10))


def constant(n: int, decay: float) -> float:
    return decay


def warmed_up_before(n: int, decay: float) -> float:
    return min(decay, (1 + n) / (10 + n))


def test_a_new_run_warms_up_and_says_so(tmp_path, no_ranks, capsys):
    checkpoints = train_to(4, tmp_path)
    assert "EMA decay 0.9999, 0.05, warm-up" in " ".join(capsys.readouterr().out.split())
    one = [load_file(at(checkpoints, 1) / name) for name in ("model.safetensors", "ema.safetensors")]
    # The first update copies the weights.
    assert all((one[0][name] - one[1][name]).abs().max() < 1e-7 for name in one[0])
    check(checkpoints, warmed_up, 2, 4)
    starts = json.loads((checkpoints.parent / "config.json").read_text())
    assert '"ema_warmup": true' in json.dumps(starts)


def rewrite_fingerprint(folder: Path, **values) -> None:
    """Rewrite a checkpoint's fingerprint as an earlier version did. None removes a setting."""
    state = json.loads((folder / "state.json").read_text())
    for name, value in values.items():
        del state["fingerprint"][name]
        if value is not None:
            state["fingerprint"][name] = value
    (folder / "state.json").write_text(json.dumps(state))
    list_anew(folder)


@pytest.mark.parametrize(
    ("stored", "given", "rule", "told"),
    [
        (10, "", warmed_up, ""),
        (10, "--no_ema_warmup", constant, "--ema_warmup True -> False"),
        (None, "", constant, ""),
        (False, "", constant, ""),
        (False, "--ema_warmup", warmed_up, "--ema_warmup False -> True"),
        (True, "", warmed_up_before, ""),
        (True, "--ema_warmup", warmed_up_before, ""),
        (True, "--no_ema_warmup", constant, "--ema_warmup True -> False"),
    ],
)
def test_a_resume_keeps_its_own_rule(stored, given, rule, told, tmp_path, no_ranks, capsys):
    checkpoints = train_to(3, tmp_path)
    rewrite_fingerprint(at(checkpoints, 3), ema_warmup=stored)
    capsys.readouterr()
    train_to(5, tmp_path, "--load", "latest", *given.split())
    said = [line for line in capsys.readouterr().out.splitlines() if "resume" in line and "ema_warmup" in line]
    assert [told in line for line in said] == ([True] if told else []), said
    check(checkpoints, rule, 4, 5)
    train_to(6, tmp_path, "--load", "latest")  # again, without the flag
    check(checkpoints, rule, 6, 6)


def test_skipped_steps_do_not_count(tmp_path, no_ranks, monkeypatch):
    from opendit.diffusion.objectives.ddpm import DDPMObjective

    loss, calls = DDPMObjective.loss, []

    def spoilt(self, output, prepared):
        calls.append(len(calls))
        return loss(self, output, prepared) * (float("nan") if len(calls) == 2 else 1)

    monkeypatch.setattr(DDPMObjective, "loss", spoilt)
    checkpoints = train_to(4, tmp_path)
    steps = sorted(folder.name for folder in checkpoints.glob("step_*"))
    state = json.loads((checkpoints / "latest" / "state.json").read_text())
    assert state["step"] == 4 and state["ema"]["updates"] == 3, steps
    for n, (before, step) in enumerate(((1, 3), (3, 4)), start=1):  # the second step is skipped
        old, new = (load_file(at(checkpoints, s) / "ema.safetensors") for s in (before, step))
        masters = load_file(at(checkpoints, step) / "model.safetensors")
        d = warmed_up(n, 0.9999)
        for name, value in new.items():
            wanted = d * old[name].double() + (1 - d) * masters[name].double()
            assert torch.allclose(value.double(), wanted, atol=1e-6), (name, step)


def test_published_settings_stay_and_demos_warm_up():
    for recipe, warmup in (("dit_xl_imagenet256", False), ("digits", True), ("digits_video", True)):
        assert parse(TrainConfig, ["--recipe", recipe]).ema_warmup == warmup
