"""sample.py: equal pictures for any batch size and number of processes, its files, and bad input."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.common.stages import process_seconds
from opendit.diffusion.objectives import DDPMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.encoders.conditioner import preview_labels
from opendit.models.dit import DiT
from opendit.models.zoo import build_model, model_config
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

NAMES = ["zero", "one", "two", "a name that is far too long for its picture", "four"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ckpt")
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5)
    torch.manual_seed(0)
    model = randomised(DiT(config))
    info = {"model": "DiT-Ti/2", "config": config.to_dict(), "class_names": NAMES, "vae": "none", "image_size": 8}
    for name in ("ema", "model"):
        save_file(model.state_dict(), folder / f"{name}.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    return folder


@pytest.mark.parametrize(
    ("sampler", "objective"), [(s, o) for o in (DDPMObjective(), FlowObjective(3.0)) for s in o.samplers]
)
def test_a_sample_does_not_depend_on_its_batch(sampler, objective):
    sizes = dict(input_size=(8, 8), in_channels=1, num_classes=5)
    config = model_config("DiT-Ti/2", **sizes, learn_sigma=objective.learn_sigma)
    torch.manual_seed(0)
    model = randomised(DiT(config)).eval()
    labels, index, null = torch.arange(7) % 5, torch.arange(7), torch.tensor([5])
    settings = dict(objective=objective, seed=3, steps=6, sampler=sampler, cfg_scale=1.5)
    whole = sample_latents(model, labels, null, index, **settings)
    scale = whole.abs().max()
    for size in (1, 3):
        cuts = [slice(i, i + size) for i in range(0, 7, size)]
        parts = [sample_latents(model, labels[cut], null, index[cut], **settings) for cut in cuts]
        assert (torch.cat(parts) - whole).abs().max() < 1e-4 * max(1, scale)
    assert (whole[0] - whole[5]).abs().max() > 1e-2  # same label, other noise
    half = sample_latents(model.bfloat16(), labels, null, index, **settings)
    rows = [slice(i, i + 1) for i in range(7)]
    alone = torch.cat([sample_latents(model, labels[row], null, index[row], **settings) for row in rows])
    assert half.isfinite().all() and (half - alone).norm() / alone.norm() < 0.05  # bf16 products of other shapes


def start(mesh, argv):
    sample.main(argv)


def test_one_and_three_processes_write_the_same_pictures(tmp_path, ckpt):
    argv = ["--ckpt", str(ckpt), "--num_samples", "7", "--num_sampling_steps", "6", "--seed", "5", "--cfg_scale", "2"]
    archives = []
    for world, batch in ((1, 4), (3, 2)):
        folder = tmp_path / str(world)
        folder.mkdir()
        output = ["--output", str(folder), "--npz", str(folder / "s.npz"), "--batch_size", str(batch)]
        run_ranks(world, start, [*argv, *output])
        archives.append(np.load(folder / "s.npz"))
        pictures = sorted(p.name for p in folder.glob("0*.png"))
        assert len(pictures) == 7 and pictures[0] == "000000-zero.png"
        assert Image.open(folder / "grid.png").width > 64
        assert not list(folder.glob(".part*"))
    one, three = archives
    assert one["arr_0"].shape == (7, 8, 8, 3) and one["arr_0"].dtype == np.uint8 and one["arr_0"].std() > 1
    assert np.array_equal(one["arr_1"], three["arr_1"]) and one["arr_1"].tolist() == preview_labels(5, 7).tolist()
    # an error of 1e-4 in [-1, 1] can move a rounded byte by one
    assert np.abs(one["arr_0"].astype(int) - three["arr_0"].astype(int)).max() <= 1
    first = np.asarray(Image.open(tmp_path / "3" / "000006-one.png"))
    assert np.array_equal(first, three["arr_0"][6])


def test_more_processes_than_samples(tmp_path, ckpt):
    argv = f"--ckpt {ckpt} --num_sampling_steps 3 --output {tmp_path} --npz {tmp_path}/s.npz --class_labels 1"
    run_ranks(3, start, [*argv.split(), "A name that is far too long for its picture"])  # class 3
    archive = np.load(tmp_path / "s.npz")
    assert archive["arr_0"].shape == (2, 8, 8, 3) and archive["arr_1"].tolist() == [1, 3]
    assert not list(tmp_path.glob(".part*"))


@pytest.mark.parametrize(
    "argv,message",
    [
        ("--class_labels 1 5", "--class_labels 5: no class of the model; give labels from 0 to 4"),
        ("--class_labels -1", "--class_labels -1: no class of the model; give labels from 0 to 4"),
        ("--class_labels 1 cot", "--class_labels 'cot': no such class; did you mean"),
        ("--image_size 16", "draws 8 x 8"),
        ("--image_size 8 16", "draws 8 x 8"),
        ("--image_size 8 8 8", "--image_size 8 8 8: is no size; give SIDE, or HEIGHT WIDTH"),
        ("--model DiT-S/2", "checkpoint of DiT-Ti/2"),
        ("--num_sampling_steps 2000", "--num_sampling_steps 2000: out of range; give a whole number from 1 to 1,000"),
        ("--mixed_precision fp16", "needs a GPU"),
        ("--npz {tmp}/no/such/s.npz", "--npz"),
        ("--ckpt {tmp}/nowhere", "nowhere: doesn't exist"),
        ("--ckpt latest --outputs {tmp}", "no run with a checkpoint"),
        ("--vae {tmp}", "--vae"),
    ],
)
def test_bad_input(argv, message, tmp_path, ckpt, no_ranks, capsys):
    with pytest.raises(SystemExit) as stop:
        sample.main(["--ckpt", str(ckpt), "--output", str(tmp_path / "o"), *argv.format(tmp=tmp_path).split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("frames", "frames_a_patch"), [(3, 1), (4, 2), (1, 2)])
def test_frames_that_have_no_learned_positions(frames, frames_a_patch, tmp_path, no_ranks, capsys, monkeypatch):
    sizes = dict(input_size=(8, 8), in_channels=1, num_classes=5)
    name = f"MovieGen-Ti/{frames_a_patch}22"
    config = model_config(name, **sizes, frames=frames)
    info = {"model": name, "config": config.to_dict(), "vae": "none", "image_size": 8, "num_frames": frames}
    path = tmp_path / "clips.safetensors"
    save_file(randomised(build_model(config)).state_dict(), path, metadata={METADATA_KEY: json.dumps(info)})
    argv = (
        f"--ckpt {path} --num_samples 1 --num_sampling_steps 2 --no_save_png --output {tmp_path} --num_frames".split()
    )
    known = max(frames, frames_a_patch)
    sample.main([*argv, str(known)])  # all frames of a picture's patch are trained
    monkeypatch.setattr(
        "opendit.sampling.model_loading.load_video_codec", lambda *_, **__: pytest.fail("the VAE was loaded first")
    )
    with pytest.raises(SystemExit) as stop:
        sample.main([*argv, str(known + frames_a_patch)])
    message = f"--num_frames {known + frames_a_patch}: {path} has learned fewer positions; give {known} at most"
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_profile_says_where_the_time_went(tmp_path, ckpt, no_ranks, capsys):
    argv = ["--ckpt", str(ckpt), "--num_samples", "3", "--num_sampling_steps", "4", "--output", str(tmp_path)]
    sample.main([*argv, "--profile"])
    out = capsys.readouterr().out
    said = json.loads((tmp_path / "profile.json").read_text())
    stages = ["imports", "checkpoint: found and verified", "model: built", "model: weights to the device", "drawing"]
    stages += ["drawing: first two steps (compiling, recording)", "decoding", "writing: waited for", "sheet, .npz"]
    assert set(stages) < set(said["stages"]) and said["marks"]["first sample on disk"] > 0
    assert all(f"  {name}\n" in out for name in said["stages"]) and "from the start of the process" in out
    total = sum(said["stages"].values())  # the age of the process
    assert said["marks"]["first sample on disk"] < total and abs(total - process_seconds()) < 10
    sample.main(argv)
    assert not (tmp_path / "profile.json").exists() and "the start of the process" not in capsys.readouterr().out
