"""The held-out loss matches a plain float64 loop on any number of ranks, and does not change training."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train
from opendit.data import build_dataset
from opendit.data.base import SampleKey
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.ddpm import DDPM, training_loss
from opendit.diffusion.random import Stream, normal
from opendit.models.zoo import build_model, model_config
from opendit.training.monitor import StepLog
from opendit.training.validation import LossHistory, draw_losses, noise_levels
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import TINY, log_of

FLAGS = [*TINY, *"--lr 3e-3 --ema_decay 0.5 --batch_size 4 --sample_every 0 --max_steps 4 --ckpt_every 0".split()]
LOSSES = 23
VALIDATED = f"--validate_path digits --validate_every 1 --validate_samples {LOSSES}".split()
PRODUCTS = {
    "zero2": "",
    "ddp": "--plugin ddp",
    "fsdp": "--plugin fsdp",
    "zero2 bf16": "--mixed_precision bf16",
    "gemini": "--plugin gemini --mixed_precision bf16",
    "sp": "--sequence_parallel_size 2 --sequence_parallel_type ulysses",
    "tp": "--tensor_parallel_size 2",
    "pp": "--pipeline_parallel_size 2 --grad_accumulation 2",
}
BESIDE = ("ddp", "fsdp", "gemini")  # zero2 is trained with and without validation in one process


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the newest checkpoint. Shards are not joined."""
    files = sorted((run / "checkpoints" / "latest").glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def same_bits(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return len(a) > 100 and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return two runs of one process: one validates after every step, the other does not."""
    outputs, before = tmp_path_factory.mktemp("validated"), dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    train.main([*FLAGS, *VALIDATED, "--outputs", str(outputs)])
    train.main([*FLAGS, "--outputs", str(outputs)])
    os.environ.clear()
    os.environ.update(before)
    return outputs / "000-DiT-Ti-2", outputs / "001-DiT-Ti-2"


def fixed_order(count: int, which: int) -> list[int]:
    words = np.random.Philox(key=[0x76616C, 0], counter=[0, 0, which, 1]).random_raw(count).tolist()
    return sorted(range(count), key=words.__getitem__)


@torch.no_grad()
def plain_losses(run: Path) -> list[float]:
    """Return the losses of the run's averaged weights on one sample at a time, in float64."""
    model = build_model(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10), 0).double()
    model.load_state_dict(load_file(run / "checkpoints/latest/ema.safetensors"), strict=False)
    diffusion, dataset = DDPM.linear(), build_dataset("digits", 8, seed=0, split="test")
    rows, strata, losses = fixed_order(len(dataset), 1), fixed_order(LOSSES, 2), []
    for number in range(LOSSES):
        item = dataset[SampleKey(rows[number % len(rows)], 0, 0)]
        x, index = item.x[None].double(), torch.tensor([number])
        t = torch.tensor([int((strata[number] + 0.5) / LOSSES * 1000)])
        noise = normal(0x76616C, 0, index, Stream.NOISE, (1, 8, 8)).double()
        xt = diffusion.q_sample(x, t, noise)
        output = model(xt, t, torch.tensor([item.y]))
        losses.append(training_loss(diffusion, output, x, xt, t, noise).loss.item())
    return losses


def test_the_loss_is_that_of_a_plain_loop_in_float64(runs):
    line, losses = log_of(runs[0])[-1], plain_losses(runs[0])
    assert off_by([line["val_loss"]], [np.mean(losses)]) < 1e-5
    strata = fixed_order(LOSSES, 2)
    levels = [[] for _ in range(10)]
    for stratum, loss in zip(strata, losses, strict=True):
        levels[int((stratum + 0.5) / LOSSES * 10)].append(loss)
    assert off_by(line["val_loss_by_noise"], [np.mean(level) for level in levels]) < 1e-5
    # sigma of timesteps 50, 150, ... in the DiT paper's schedule
    beta = np.linspace(1e-4, 0.02, 1000, dtype=np.float64)
    kept = np.cumprod(1 - beta)[50::100]
    assert off_by(line["val_noise"], np.sqrt((1 - kept) / kept).tolist()) < 1e-5
    assert line["val_s"] > 0
    falling = [line["val_loss"] for line in log_of(runs[0])]
    assert len(falling) == 4 and falling == sorted(falling, reverse=True)


def test_training_is_the_same_to_the_bit_without_it(runs):
    with_it, without = runs
    assert same_bits(with_it, without)
    assert [line["loss"] for line in log_of(with_it)] == [line["loss"] for line in log_of(without)]
    assert not any(key.startswith("val_") for line in log_of(without) for key in line)


def programs(mesh, folder: Path, base: Path) -> None:
    """Validate the weights of ``base`` under every setting, in a run whose one step does not change them. Under some
    settings, also take two real steps with and without validation."""
    several_programs()
    loaded = [*FLAGS, "--max_steps", "5"]
    starts = {name: [*loaded, *VALIDATED, *flags.split(), "--lr", "1e-30"] for name, flags in PRODUCTS.items()}
    for name in BESIDE:
        without = [*FLAGS, "--max_steps", "6", *PRODUCTS[name].split()]
        starts |= {f"{name} without": without, f"{name} with": [*without, *VALIDATED]}
    for name, argv in starts.items():
        if mesh.is_main:
            shutil.copytree(base, folder / name, symlinks=True)
        mesh.barrier()
        train.main([*argv, "--load", str(folder / name), "--outputs", str(folder)])


def test_every_product_of_ranks_finds_the_same_and_trains_on_as_if_nothing_were(runs, tmp_path, no_ranks):
    run_ranks(2, programs, tmp_path, runs[0])
    alone = tmp_path / "alone"
    shutil.copytree(runs[0], alone, symlinks=True)
    argv = [*FLAGS, *VALIDATED, "--max_steps", "5", "--lr", "1e-30", "--load", str(alone), "--outputs", str(tmp_path)]
    train.main(argv)
    expected = log_of(alone)[-1]
    found = {name: log_of(tmp_path / name)[-1] for name in PRODUCTS}
    keys = ("val_loss", "val_loss_by_noise", "val_noise")
    for name in ("zero2", "ddp", "fsdp"):
        assert [found[name][key] for key in keys] == [expected[key] for key in keys], name
    for name in ("sp", "tp", "pp"):
        assert off_by(found[name]["val_loss_by_noise"], expected["val_loss_by_noise"]) < 1e-6, name
    assert found["gemini"]["val_loss_by_noise"] == found["zero2 bf16"]["val_loss_by_noise"]
    assert off_by(found["gemini"]["val_loss_by_noise"], expected["val_loss_by_noise"]) < 0.02
    for name in BESIDE:
        assert same_bits(tmp_path / f"{name} with", tmp_path / f"{name} without"), name
        assert not same_bits(tmp_path / f"{name} with", runs[0])


def test_the_best_checkpoint_is_kept_and_found_again(tmp_path, no_ranks, capsys):
    """--lr 0.03 ruins the weights, so the first checkpoint stays the best."""
    how = [*TINY, *"--ema_decay 0 --batch_size 8 --sample_every 0 --ckpt_every 2 --ckpt_keep 1".split()]
    how += "--validate_share 0.05 --validate_every 0 --ckpt_best val_loss".split()
    train.main([*how, "--max_steps", "2", "--outputs", str(tmp_path)])
    for last in ("6", "8"):  # the second does not resume from the best one, which would keep it anyway
        train.main([*how, "--max_steps", last, "--lr", "0.03", "--load", "latest", "--outputs", str(tmp_path)])
    run = tmp_path / "000-DiT-Ti-2"
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert folders == ["best", "latest", "step_0000002", "step_0000006", "step_0000008"]
    assert os.readlink(run / "checkpoints" / "best") == "step_0000002"
    said = capsys.readouterr().out
    assert "--ckpt_best: so far" in said and "1,366 of them, 72 held out" in said
    validated = {line["step"]: line["val_loss"] for line in log_of(run) if "val_loss" in line}
    assert list(validated) == [2, 4, 6, 8] and all(validated[2] < validated[step] for step in (4, 6, 8))
    state = json.loads((run / "checkpoints/best/state.json").read_text())
    assert state["val_loss"] == validated[2]
    # Another share gives another loss, so the best is chosen anew. The note says that the training samples differ.
    train.main([*how, "--validate_share", "0.1", "--max_steps", "10", "--load", "latest", "--outputs", str(tmp_path)])
    assert os.readlink(run / "checkpoints" / "best") == "step_0000010"
    assert "other data (1366 samples there, 1,294 here)" in capsys.readouterr().out


def test_a_save_after_a_signal_has_no_loss_and_leaves_the_best(tmp_path, no_ranks, monkeypatch):
    """The signal comes in step 3, between the saves of steps 2 and 4."""
    how = [*TINY, *"--ema_decay 0 --batch_size 8 --sample_every 0 --ckpt_every 2 --max_steps 8".split()]
    how += "--validate_share 0.05 --validate_every 0 --ckpt_best val_loss".split()
    kept, write = tmp_path / "000-DiT-Ti-2" / "checkpoints", StepLog.write

    def stop_in_step_3(log, done, *rest):
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # the next step is the last
        return write(log, done, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(StepLog, "write", stop_in_step_3)
        train.main([*how, "--outputs", str(tmp_path)])
    assert os.readlink(kept / "latest") == "step_0000003" and os.readlink(kept / "best") == "step_0000002"
    states = [json.loads((kept / name / "state.json").read_text()) for name in ("best", "latest")]
    assert ["val_loss" in state for state in states] == [True, False]
    train.main([*how, "--load", "latest", "--outputs", str(tmp_path)])
    validated = {line["step"]: line["val_loss"] for line in log_of(kept.parent) if "val_loss" in line}
    assert list(validated) == [2, 4, 6, 8]
    assert os.readlink(kept / "best") == f"step_{min(validated, key=validated.__getitem__):07}"


def test_the_picture_and_the_curves_of_tensorboard(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs[0] / "tensorboard"))
    events.Reload()
    line = log_of(runs[0])[-1]
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2, 3, 4]
    shown = events.Scalars(f"val_loss_by_noise/{line['val_noise'][0]:.3g}")
    assert shown[-1].value == pytest.approx(line["val_loss_by_noise"][0])
    picture = Image.open(runs[0] / "validation.png")
    image = events.Images("held-out loss")[-1]
    assert (image.width, image.height) == picture.size and len(picture.convert("RGB").getcolors(1 << 24)) > 100


def test_a_resumed_run_s_picture_goes_on_and_what_is_not_finite_is_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "val_loss": 0.5, "val_loss_by_noise": [0.25, 0.75], "val_noise": [0.5, 2.0]},
        {"step": 3, "val_loss": 0.5, "val_loss_by_noise": [0.25, 0.75], "val_noise": [0.5, 3.0]},
        {"step": 4, "val_loss": None, "val_loss_by_noise": [None, 0.5], "val_noise": [0.5, 2.0]},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "val')
    history = LossHistory.read(log, [0.5, 2.0])
    assert history.steps == [2, 4] and history.losses == [0.5, None] and history.by_noise[1] == [None, 0.5]
    draw_losses(history, tmp_path / "p.png", "a run")
    assert LossHistory.read(tmp_path / "none", [0.5]).steps == []
    assert Image.open(tmp_path / "p.png").size[0] == 1500


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([3.0, 2.0, 2.1, 2.2], None),
        ([3.0, 2.0, 2.1, 2.2, 2.3], 20),
        ([3.0, 2.0, 2.5, 2.1, 2.2, 2.3], 20),
        ([3.0, 2.0, 2.1, 2.3, 2.2], None),  # not rising at the end
        ([3.0, 2.0, 2.1, None, 2.3], None),
        ([1.0, 2.0, 3.0, 4.0], 10),
        ([], None),
    ],
)
def test_a_loss_that_rises_is_told_from_one_that_is_uneven(losses, since):
    steps = [10 * (number + 1) for number in range(len(losses))]
    assert LossHistory([1.0], steps, losses).rises_since() == since


@pytest.mark.parametrize("objective", [DDPMObjective(), FlowObjective(shift=3.0), EDMObjective()])
def test_quantiles_are_equal_shares_of_what_training_draws(objective):
    drawn = objective.times(5, 0, torch.arange(20_000)).double()
    for u in (0.1, 0.5, 0.9):
        at = objective.times_at(torch.tensor([u], dtype=torch.float64)).double()
        assert abs((drawn <= at).double().mean() - u) < 0.015
    levels = noise_levels(objective)
    assert levels == sorted(levels) and len(set(levels)) == 10


@pytest.mark.parametrize(
    "argv,message",
    [
        (
            "--validate_every 5",
            "--validate_every 5: no samples to validate on; give --validate_path DATA, or --validate_share",
        ),
        ("--ckpt_best val_loss", "--ckpt_best val_loss: no samples to validate on"),
        ("--ckpt_best fid --validate_share 0.1", "--ckpt_best fid: it is a figure of samples; give --evaluate_every N"),
        ("--validate_path digits --validate_share 0.1", "--validate_share: --validate_path names the samples already"),
        ("--validate_share 0.1 --no_save --ckpt_best val_loss", "--ckpt_best val_loss: --no_save keeps no checkpoint"),
        ("--validate_share 0.1 --data_path mock", "--data_path mock has random samples; use --validate_path mock"),
        ("--validate_share 0.9999", "--validate_share 0.9999: of 1,438 samples 1,438 are held out, and none is left"),
        ("--validate_path {tmp}/nowhere", "--validate_path .*/nowhere: doesn't exist"),
        ("--validate_path {tmp}/pictures --data_path {tmp}/pictures --batch_size 1", "samples that are trained on"),
        ("--validate_path {tmp}/pictures", "--validate_path .*: has samples of shape 3x8x8 where .* have 1x8x8"),
        ("--validate_path mock", "--validate_path mock: has latents where --data_path has pixels"),
    ],
)
def test_errors_come_before_any_weight_is_made(argv, message, tmp_path, refusal):
    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "pictures" / name / f"{number}.png")
    error = refusal([*TINY, "--outputs", str(tmp_path / "out"), *argv.format(tmp=tmp_path).split()])
    assert re.search(message, error), error
