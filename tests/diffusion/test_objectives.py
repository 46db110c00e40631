"""Objectives in checkpoints, in train.py and in sample.py."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

import sample
import train
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config.command_line import parse
from opendit.config.names import ALL_SAMPLERS
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, build_dataset, build_loader
from opendit.diffusion.objectives import (
    OBJECTIVES,
    DDPMObjective,
    EDMObjective,
    FlowObjective,
    edm,
    objective_from_dict,
    objective_from_flags,
)
from opendit.diffusion.objectives.ddpm import DDPM, training_loss
from opendit.diffusion.random import Stream, integers, normal, uniform
from opendit.models.zoo import build_model, model_config
from tests.training.test_train import QUIET, TINY, log_of

EVERY = [
    DDPMObjective(),
    DDPMObjective("v"),
    DDPMObjective("eps", 5.0),
    DDPMObjective("v", 1.5),
    DDPMObjective("v", shift=6.0),
    FlowObjective(),
    FlowObjective(6.0, "mode"),
    FlowObjective(times_are="logit_normal", mean=0.8, std=0.8, prediction="x", noise_scale=2.0, contrast=0.05),
    EDMObjective(),
    EDMObjective(-0.4, 1.0, 0.75),
]


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_every_objective_survives_a_checkpoint(objective):
    stored = json.loads(json.dumps(objective.to_dict()))
    assert objective_from_dict(stored) == objective and stored["name"] in OBJECTIVES
    assert objective.choose(None) == objective.samplers[0] and objective.preview_sampler in objective.samplers


def test_checkpoints_from_before_there_was_a_choice_load_and_resume_unnoted():
    for old in (None, {"name": "ddpm"}):
        assert objective_from_dict(old) == DDPMObjective()
    assert DDPMObjective().to_dict() == {"name": "ddpm"}  # a resumed run compares with this
    flow = {"name": "flow", "shift": 3.0, "times_are": "uniform"}
    assert objective_from_dict(flow).to_dict() == flow


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"name": "edm2"}, "'edm2': this version knows ddpm, edm, flow"),
        ({"name": "ddpm", "prediction": "x0"}, "--prediction x0: not known to this version; give one of eps, v"),
        ({"name": "ddpm", "min_snr": 0.0}, "--min_snr 0.0: out of range; give a number above 0"),
        ({"name": "ddpm", "shift": 0.0}, "--ddpm_shift 0.0: out of range; give a number above 0"),
        (
            {"name": "flow", "times_are": "beta"},
            "--flow_times beta: not known to this version; give one of uniform, logit_normal, mode",
        ),
        ({"name": "flow", "shift": -1.0}, "--flow_shift -1.0: out of range; give a number above 0"),
        ({"name": "edm", "std": 0.0}, "--edm_std 0.0: out of range; give a number above 0"),
        ({"name": "edm", "sigma_data": float("nan")}, "--edm_sigma_data nan: out of range; give a number above 0"),
        ({"name": "edm", "rho": 7.0}, "edm has no rho: this version knows mean, std, sigma_data"),
    ],
)
def test_what_this_version_does_not_know_is_named_with_what_it_does(stored, message):
    with pytest.raises(ValueError, match=message):
        objective_from_dict(stored)


def test_every_sampler_can_be_asked_for_and_is_refused_to_the_wrong_objective():
    for objective in EVERY:
        for name in ALL_SAMPLERS:
            if name in objective.samplers:
                assert objective.choose(name) == name
            else:
                with pytest.raises(ValueError, match=f"--sampler {name}.*{' or '.join(objective.samplers)}"):
                    objective.choose(name)


def plain_losses(argv: list[str], steps: int) -> list[float]:
    """Return the losses of a training loop with the objective's formulas written out."""
    flags = parse(TrainConfig, argv)
    dataset = build_dataset("digits", 8, seed=flags.global_seed)
    schedule = BatchSchedule(len(dataset), flags.batch_size, flags.global_seed)
    loader = build_loader(dataset, schedule, dp_rank=0, dp_size=1, batch_size=flags.batch_size, num_workers=0)
    is_edm = flags.objective == "edm"
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10, learn_sigma=not is_edm)
    model = build_model(config, flags.global_seed)
    adam = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0)
    schedule, losses = DDPM.linear(shift=flags.ddpm_shift), []
    ac = schedule.alphas_cumprod
    for _, item in zip(range(steps), loader, strict=False):
        key = (flags.global_seed, item.step, item.index)
        noise = normal(*key, Stream.NOISE, (1, 8, 8))
        y = torch.where(uniform(*key, Stream.CONDITION_DROP) < 0.1, 10, item.y)
        if is_edm:  # [K] table 1 and eq. 2
            z = torch.special.ndtri(uniform(*key, Stream.TIMESTEP))
            sigma = torch.exp(flags.edm_mean + flags.edm_std * z).float()
            s, data = sigma.view(-1, 1, 1, 1), flags.edm_sigma_data
            x = item.x + s * noise
            output = model(x / (s**2 + data**2).sqrt(), 1000 * sigma.log() / 4, y)
            denoised = data**2 / (s**2 + data**2) * x + s * data / (s**2 + data**2).sqrt() * output
            loss = ((s**2 + data**2) / (s * data) ** 2 * (denoised - item.x) ** 2).mean()
        else:
            t = integers(*key, Stream.TIMESTEP, 1000)
            xt = schedule.q_sample(item.x, t, noise)
            seen = training_loss(schedule, model(xt, t, y), item.x, xt, t, noise, prediction=flags.prediction)
            snr = (ac / (1 - ac))[t].float()
            loss = (snr.clamp(max=flags.min_snr) / (snr + 1) * seen.mse + seen.vb).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def draw(run, folder, name: str, *flags: str) -> np.ndarray:
    options = "--num_sampling_steps 4 --num_samples 4 --mixed_precision fp32 --weights model --cfg_scale 30".split()
    archive = folder / f"{name}.npz"
    sample.main(["--ckpt", str(run), *options, *flags, "--npz", str(archive), "--output", str(folder / name)])
    return np.load(archive)["arr_0"].astype(int)


@pytest.mark.parametrize(
    ("argv", "stored"),
    [
        (
            ["--objective", "edm", "--edm_mean", "-0.8", "--edm_sigma_data", "0.75"],
            {"name": "edm", "mean": -0.8, "std": 1.2, "sigma_data": 0.75},
        ),
        (
            ["--prediction", "v", "--min_snr", "5", "--ddpm_shift", "2"],
            {"name": "ddpm", "prediction": "v", "min_snr": 5.0, "shift": 2.0},
        ),
    ],
    ids=["edm", "v"],
)
def test_training_follows_the_plain_loop_and_the_checkpoint_draws(argv, stored, tmp_path, no_ranks, capsys):
    argv = [*TINY, *argv, "--lr", "3e-3", "--max_steps", "4", "--batch_size", "16"]
    train.main([*argv, *QUIET, "--outputs", str(tmp_path)])
    run = tmp_path / "000-DiT-Ti-2"
    torch.testing.assert_close([line["loss"] for line in log_of(run)], plain_losses(argv, 4), rtol=1e-5, atol=0)
    with safe_open(run / "checkpoints" / "latest" / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()[METADATA_KEY])["objective"] == stored
    objective = objective_from_dict(stored)
    drawn = {name: draw(run, tmp_path, name, "--sampler", name) for name in objective.samplers}
    assert len({pictures.tobytes() for pictures in drawn.values()}) == len(drawn)
    first = objective.samplers[0]
    assert np.array_equal(draw(run, tmp_path, "default"), drawn[first])
    assert np.array_equal(draw(run, tmp_path, "everywhere", "--cfg_interval", "0", "inf"), drawn[first])
    part = draw(run, tmp_path, "part", "--cfg_interval", "0.3", "3")
    plain = draw(run, tmp_path, "plain", "--cfg_scale", "1")
    assert not np.array_equal(part, drawn[first]) and not np.array_equal(part, plain)
    with pytest.raises(SystemExit):
        draw(run, tmp_path, "wrong", "--sampler", "ddim" if stored["name"] == "edm" else "heun")
    assert f"; give {' or '.join(objective.samplers)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--edm_mean", "0"], "--edm_mean: belongs to --objective edm"),
        (["--objective", "flow", "--edm_sigma_data", "1"], "--edm_sigma_data: belongs to --objective edm"),
        (["--objective", "edm", "--prediction", "v"], "--prediction: belongs to --objective ddpm"),
        (["--objective", "flow", "--min_snr", "5"], "--min_snr: belongs to --objective ddpm"),
        (["--objective", "edm", "--edm_std", "0"], "--edm_std 0.0: out of range; give a number from"),
        (["--min_snr", "-5"], "--min_snr -5.0: out of range; give a number from"),
        (["--objective", "flow", "--ddpm_shift", "2"], "--ddpm_shift: belongs to --objective ddpm"),
    ],
)
def test_flags_that_do_not_fit(argv, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse(TrainConfig, [*argv, "--outputs", str(tmp_path)]).resolve(1, False)


@pytest.mark.parametrize("levels", [["1"], ["1", "2", "3"], ["2", "1"], ["nan", "1"]])
def test_an_interval_is_two_levels(levels, tmp_path):
    flags = parse(SampleConfig, ["--cfg_interval", *levels, "--output", str(tmp_path)])
    with pytest.raises(ValueError, match=f"--cfg_interval {' '.join(levels)}: no two noise levels; give LOW HIGH"):
        flags.resolve(1, False)


@pytest.mark.parametrize(
    ("sampler", "even"), [("ddpm", "respaced"), ("ddim", "respaced"), ("dpmpp", "respaced_by_noise")]
)
def test_the_timesteps_of_ddpm_suit_the_sampler(sampler, even):
    seen = []

    def model(x, t):
        seen.append(int(t[0]))
        return torch.cat((x, x), 1)

    objective = DDPMObjective()
    objective.sample(model, torch.arange(2), (1, 2, 2), seed=0, steps=12, sampler=sampler, progress=None)
    assert seen == getattr(objective.schedule, even)(12).timestep_map.flip(0).tolist()


def test_defaults_are_those_of_the_papers(tmp_path):
    """The defaults are Karras et al. 2022 table 1, uniform unshifted times for flow, and plain DDPM."""
    defaults = {
        "edm": {"mean": -1.2, "std": 1.2, "sigma_data": 0.5},
        "flow": {
            "shift": 1.0,
            "times_are": "uniform",
            "shift_tokens": None,
            "mean": 0.0,
            "std": 1.0,
            "prediction": "v",
            "noise_scale": 1.0,
            "min_snr": None,
            "contrast": 0.0,
            "shift_growth": None,
            "shift_terminal": None,
            "shifted_end": False,
            "discrete_times": False,
            "least": None,
            "most": None,
            "empirical_tokens": None,
            "karras": False,
        },
        "ddpm": {"prediction": "eps", "min_snr": None, "shift": 1.0},
    }
    for name, expected in defaults.items():
        flags = parse(TrainConfig, ["--objective", name, "--outputs", str(tmp_path)])
        for objective in (OBJECTIVES[name](), objective_from_flags(flags)):
            assert dataclasses.asdict(objective) == expected
    assert (edm.SIGMA_MIN, edm.SIGMA_MAX, edm.RHO) == (0.002, 80.0, 7.0)
    u = torch.tensor([0.5, 0.8413447460685429], dtype=torch.float64)
    assert edm.log_normal_sigmas(u, -1.2, 1.2).log().tolist() == pytest.approx([-1.2, 0.0])
    many = EDMObjective().times(0, 0, torch.arange(20_000)).double().log()
    assert many.mean().item() == pytest.approx(-1.2, abs=0.03) and many.std().item() == pytest.approx(1.2, abs=0.03)
