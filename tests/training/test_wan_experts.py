"""Wan 2.2 A14B has two networks for different times. Sampling and exports match diffusers."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import opendit
import sample
import train
from opendit.checkpoint.pretrained import read_info
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.diffusion.random import initial_noise
from opendit.export.__main__ import main as export
from tests.encoders.published_folders import write_pipeline
from tests.models.families.oracles import networks

SIZE, FRAMES, STEPS, BOUNDARY = (32, 48), 5, 4, 0.875
PROMPTS = ["a seven", "fog over the sea in the evening"]
WEIGHTS = "diffusion_pytorch_model.safetensors"
INSIDE = {"high": "transformer", "low": "transformer_2"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with the tiny pipeline and clips."""
    root, random = tmp_path_factory.mktemp("a14b"), np.random.default_rng(0)
    write_pipeline(root / "wan", "wan_a14b")
    rows = ["path,text"]
    for number in range(4):
        write_mp4(root / f"{number}.mp4", random.integers(0, 256, (FRAMES, 32, 32, 3), np.uint8), 8)
        rows.append(f"{number}.mp4,{PROMPTS[number % 2]}")
    (root / "clips.csv").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("sizes")))
        yield root


def drawn(pipe, **how):
    seen = []
    how = dict(steps=STEPS, guidance=2.5, seed=3, size=SIZE, frames=FRAMES, progress=False) | how
    pipe(PROMPTS, **how, callback=lambda step, x: seen.append(x.clone()))
    return seen[-1]


def theirs(folder, shape, **change):
    pipeline = networks().WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    for name, network in change.items():
        setattr(pipeline, name, network)
    how = dict(height=SIZE[0], width=SIZE[1], num_frames=FRAMES, num_inference_steps=STEPS, guidance_scale=2.5)
    noise = initial_noise(3, torch.arange(2), tuple(shape))
    return pipeline(prompt=PROMPTS, latents=noise, output_type="latent", **how)[0]


def near(found, expected):
    return (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_latents_are_those_of_diffusers(root):
    """The first network makes two of the four steps. Without the second network the latents differ."""
    pipe = opendit.load(root / "wan")
    found = drawn(pipe)
    assert near(found, theirs(root / "wan", found.shape[1:]))
    cached = drawn(pipe, cache="taylor:2")  # the cache is not shared between the networks
    assert not torch.equal(cached, found) and (cached - found).abs().mean() < 0.5 * found.abs().mean()
    alone = opendit.load(root / "wan")
    alone.model.second = None
    assert not near(drawn(alone), found)


def flags_of(root, outputs, expert, *more):
    found = f"--pretrained {root}/wan --data_path {root}/clips.csv --use_video --num_frames {FRAMES} --image_size 32"
    found += " --batch_size 4 --num_workers 0 --log_every 1 --warmup_steps 0 --lr 1e-2 --ckpt_every 0 --ema_decay 0"
    found += f" --mixed_precision fp32 --max_steps 2 --outputs {outputs}"
    return [*found.split(), *(["--expert", expert] if expert else []), *more]


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """Return the run of each network."""
    found = {}
    for expert in INSIDE:
        outputs = tmp_path_factory.mktemp(expert)
        train.main(flags_of(root, outputs, expert))
        (found[expert],) = outputs.glob("0*")
    return found


def test_both_are_trained_in_their_times_and_exported_into_one_folder(root, runs, tmp_path):
    base = root / "wan"
    for expert, run in runs.items():
        info = read_info(run / "checkpoints/latest/model.safetensors")
        assert info["config"]["index"] == {"boundary_ratio": BOUNDARY, "expert": expert}
        times = objective_from_dict(info["objective"]).times(0, 0, torch.arange(10_000))
        least, most = (BOUNDARY, 1.0) if expert == "high" else (0.0, BOUNDARY)
        assert least <= times.min() < least + 0.01 and most - 0.01 < times.max() <= most
        assert json.loads((run / "log.jsonl").read_text().splitlines()[-1])["loss"] < 10
        output = tmp_path / expert
        export(f"diffusers --ckpt {run} --base {base} --output {output}".split())
        trained = load_file(run / "checkpoints/latest/ema.safetensors")
        network = networks().WanTransformer3DModel.from_pretrained(output, subfolder=INSIDE[expert]).state_dict()
        assert torch.equal(trained["final_layer.linear.weight"], network["proj_out.weight"])
        other = next(inside for name, inside in INSIDE.items() if name != expert)
        for inside in INSIDE.values():  # the other network did not change
            same = [load_file(each / inside / WEIGHTS) for each in (root / "wan", base, output)]
            assert torch.equal(same[2]["proj_out.weight"], same[1]["proj_out.weight"]) == (inside == other)
        base = output
    found = drawn(opendit.load(base))
    assert near(found, theirs(base, found.shape[1:])) and not near(found, drawn(opendit.load(root / "wan")))
    around = dict(vae=str(base / "vae"), text_encoder=str(base))
    for first, second in ((0, 1), (1, 0)):  # the runs themselves, in either order
        paths = list(runs.values())
        assert torch.equal(drawn(opendit.load(paths[first], second=paths[second], **around), sampler="unipc"), found)


def test_lora_of_each_is_merged_and_exported(root, tmp_path, capsys):
    """Sampling with both LoRAs matches diffusers with both files, each loaded into its network."""
    argv = []
    for expert in INSIDE:
        train.main(flags_of(root, tmp_path / expert, expert, "--lora", "2", "--lora_targets", "attn.*"))
        (run,) = (tmp_path / expert).glob("0*")
        argv.append(run)
        assert f"sample.py --use_video --ckpt {root}/wan --lora {run} " in capsys.readouterr().out
        export(f"lora --ckpt {run} --output {tmp_path}/{expert}.safetensors".split())
        where = ", load_into_transformer_2=True" if expert == "low" else ""
        assert capsys.readouterr().out.endswith(f"load_lora_weights('{tmp_path}/{expert}.safetensors'{where})\n")
    found = drawn(opendit.load(root / "wan", lora=argv))
    # The files say which network they are for.
    files = [tmp_path / f"{expert}.safetensors" for expert in ("low", "high")]
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata()["modelspec.architecture"] == "wan2.2/lora"
    assert near(drawn(opendit.load(root / "wan", lora=files)), found)
    save_file(load_file(files[0]), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="lora .*other.safetensors: does not say which of the two networks it is for"):
        opendit.load(root / "wan", lora=tmp_path / "other.safetensors")
    pipeline = networks().WanPipeline.from_pretrained(root / "wan")
    for expert, inside in INSIDE.items():
        pipeline.load_lora_weights(tmp_path / f"{expert}.safetensors", load_into_transformer_2=expert == "low",
                                   adapter_name=expert)  # fmt: skip
        getattr(pipeline, inside).fuse_lora()
    networks_of = {inside: getattr(pipeline, inside) for inside in INSIDE.values()}
    expected = theirs(root / "wan", found.shape[1:], **networks_of)
    assert near(found, expected) and not near(found, drawn(opendit.load(root / "wan")))


def test_clips_have_a_number_of_frames_that_the_vae_takes(root, tmp_path):
    argv = flags_of(root, tmp_path, "high")
    at = argv.index("--num_frames")
    for given, frames in ((argv, FRAMES), (argv[:at] + argv[at + 2 :], 17)):
        flags, notes = parse(TrainConfig, given).resolve(1, has_gpu=False)
        assert flags.num_frames == frames
        assert any(note.startswith("--num_frames 17 ") for note in notes) == (frames == 17)


@pytest.mark.parametrize("mode", ["uniform", "logit_normal", "mode"])
def test_times_of_a_range_are_those_of_all_that_lie_in_it(mode):
    whole = FlowObjective(3.0, times_are=mode).times(1, 0, torch.arange(40_000))
    for least, most in ((0.7, None), (None, 0.7), (0.2, 0.7)):
        part = FlowObjective(3.0, times_are=mode, least=least, most=most).times(2, 0, torch.arange(20_000))
        low, high = least or 0.0, 1.0 if most is None else most
        inside = whole[(whole >= low) & (whole <= high)]
        assert low <= part.min() and part.max() <= high
        for share in (0.1, 0.5, 0.9):
            assert abs(part.quantile(share) - inside.quantile(share)) < 0.02 * (high - low), (least, most, share)


def test_what_does_not_work_is_refused_in_one_line(root, runs, refusal, tmp_path, capsys):
    assert "wan has two networks; say which to train, high, low or both" in refusal(flags_of(root, tmp_path, None))
    for expert, other in (("high", "transformer_2"), ("low", "transformer")):
        told = refusal(flags_of(root, tmp_path, expert, "--pretrained", f"{root}/wan/{other}"))
        assert told.endswith(f"--expert {expert}: {root}/wan/{other} is the other network; give {root}/wan")
    assert "--evaluate_every: a run of wan/wan is of one network of two" in refusal(
        flags_of(root, tmp_path, "low", "--evaluate_every", "1")
    )
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", str(runs["low"]), "--output", str(tmp_path), "--prompt", "fog"])
    assert "holds the low-noise network alone; give the other one's run to --second_ckpt" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="second .*: is not the other network than .*, which holds the low-noise one; give"
    ):
        opendit.load(runs["low"], second=runs["low"])
    with pytest.raises(ValueError, match="second .*wan: .*wan is no run of one network of two; leave it out"):
        opendit.load(root / "wan", second=root / "wan")
