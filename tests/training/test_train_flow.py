"""--objective flow in train.py and sample.py: losses match a plain loop, and checkpoints record the objective."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

import opendit
import sample
import train
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, build_dataset, build_loader
from opendit.diffusion.random import Stream, normal, uniform
from opendit.models.zoo import build_model, model_config
from tests.ranks import run_ranks
from tests.training.test_train import QUIET, TINY, log_of, start

FLOW = [*TINY, "--objective", "flow", "--flow_shift", "3", "--max_steps", "4"]


def plain_losses(steps: int, batch: int, shift: float) -> list[float]:
    """Return losses of rectified flow: x_t = (1 - t) x_0 + t noise, the target is noise - x_0, and t is shifted."""
    flags = parse(TrainConfig, TINY)
    dataset = build_dataset("digits", 8, seed=flags.global_seed)
    schedule = BatchSchedule(len(dataset), batch, flags.global_seed)
    loader = build_loader(dataset, schedule, dp_rank=0, dp_size=1, batch_size=batch, num_workers=0)
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10, learn_sigma=False)
    model = build_model(config, flags.global_seed)
    adam = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0)
    losses = []
    for _, item in zip(range(steps), loader, strict=False):
        key = (flags.global_seed, item.step, item.index)
        u, noise = uniform(*key, Stream.TIMESTEP), normal(*key, Stream.NOISE, (1, 8, 8))
        t = (shift * u / (1 + (shift - 1) * u)).float().view(-1, 1, 1, 1)
        y = torch.where(uniform(*key, Stream.CONDITION_DROP) < 0.1, 10, item.y)
        velocity = model(item.x + t * (noise - item.x), 1000 * t.flatten(), y)
        loss = (velocity - (noise - item.x)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def test_two_ranks_follow_the_plain_loop_and_the_checkpoint_draws(tmp_path, no_ranks, capsys):
    run_ranks(2, start, [*FLOW, *QUIET, "--batch_size", "8", "--outputs", str(tmp_path)])
    run = tmp_path / "000-DiT-Ti-2"
    seen = [line["loss"] for line in log_of(run)]
    torch.testing.assert_close(seen, plain_losses(4, 16, 3.0), rtol=1e-5, atol=0)
    with safe_open(run / "checkpoints" / "latest" / "ema.safetensors", framework="pt") as file:
        info = json.loads(file.metadata()[METADATA_KEY])
    assert info["objective"] == {"name": "flow", "shift": 3.0, "times_are": "uniform"}
    assert info["config"]["learn_sigma"] is False
    drawn = {}
    for name, flags in {"default": [], "euler": ["--sampler", "euler"], "heun": ["--sampler", "heun"]}.items():
        archive = tmp_path / f"{name}.npz"
        options = "--num_sampling_steps 3 --num_samples 4 --mixed_precision fp32 --weights model --cfg_scale 1".split()
        sample.main(["--ckpt", str(run), *options, *flags, "--npz", str(archive), "--output", str(tmp_path / name)])
        drawn[name] = np.load(archive)["arr_0"].astype(int)
    assert np.array_equal(drawn["default"], drawn["euler"]) and not np.array_equal(drawn["euler"], drawn["heun"])
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", str(run), "--sampler", "ddim", "--output", str(tmp_path / "no")])
    assert "give euler or heun" in capsys.readouterr().err


def test_a_network_that_predicts_the_sample_is_trained_and_draws(tmp_path, no_ranks, capsys):
    """The patches have 16 x 16 pixels and go through a bottleneck, without a VAE."""
    size = "--model DiT-Ti/16 --data_path digits --image_size 32 --vae none --num_workers 0 --sample_every 0".split()
    flags = [*size, *"--objective flow --flow_prediction x --patch_bottleneck 24 --max_steps 2".split()]
    flags += ["--batch_size", "8", "--outputs", str(tmp_path)]
    train.main([*flags, "--flow_noise_scale", "1.5", "--validate_path", "digits", "--validate_samples", "10"])
    pipe = opendit.load(tmp_path / "000-DiT-Ti-16", weights="model")
    heun, euler = (pipe([3, 7], steps=3, guidance=2, sampler=name, progress=False) for name in ("heun", "euler"))
    assert heun[0].size == (32, 32) and heun[0].tobytes() != euler[0].tobytes()
    assert pipe.objective.predicts["flow_noise_scale"] == 1.5 and pipe.config.patch_bottleneck == 24
    with pytest.raises(SystemExit):
        train.main([*flags, "--load", "latest", "--max_steps", "3"])
    assert "repeat its --objective flow --flow_prediction x --flow_noise_scale 1.5" in capsys.readouterr().err


def test_contrast_pairs_the_same_samples_on_any_number_of_ranks(tmp_path, no_ranks):
    flags = [*TINY, *"--objective flow --flow_contrast 0.2 --max_steps 3 --lr 3e-3 --sample_every 0 --no_save".split()]
    run_ranks(2, start, [*flags, "--batch_size", "4", "--grad_accumulation", "2", "--outputs", str(tmp_path / "two")])
    train.main([*flags, "--batch_size", "16", "--outputs", str(tmp_path / "one")])
    two, one = ([line["loss"] for line in log_of(tmp_path / name / "000-DiT-Ti-2")] for name in ("two", "one"))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0)


def test_a_resume_keeps_what_the_network_predicts(tmp_path, no_ranks, capsys):
    """These networks all have one shape. Resuming may change flow_shift, but not what the output means."""
    outputs = ["--outputs", str(tmp_path), "--load", "latest"]
    edm, flow = [*TINY, "--objective", "edm"], [*TINY, "--objective", "flow"]
    train.main([*flow, *outputs, "--max_steps", "1"])
    train.main([*flow, "--flow_shift", "2", *outputs, "--max_steps", "2"])
    assert "note: resume: --flow_shift 1.0 -> 2.0: the curve is another" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main([*edm, *outputs, "--max_steps", "3"])
    assert "repeat its --objective flow, or give it to --pretrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--flow_shift", "2"], "--flow_shift: belongs to --objective flow"),
        (["--objective", "flow", "--flow_shift", "0"], "--flow_shift 0.0: out of range; give a number from 0.01"),
    ],
)
def test_flags_that_do_not_fit(argv, message, tmp_path, no_ranks, capsys):
    with pytest.raises(SystemExit):
        train.main([*TINY, *argv, "--outputs", str(tmp_path)])
    assert message in capsys.readouterr().err
