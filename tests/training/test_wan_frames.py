"""Wan 2.2 TI2V, whose clips may begin with a picture: sampling, training losses and exports match diffusers."""

import json

import numpy as np
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan_i2v
from PIL import Image
from safetensors.torch import load_file

import opendit
import preprocess
import sample
import train
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from opendit.diffusion.random import initial_noise
from opendit.export.__main__ import main as export
from opendit.sampling.sampling_engine import SamplingEngine
from tests.encoders.published_folders import write_pipeline
from tests.models.families.oracles import networks
from tests.numbers import off_by
from train import EagerPasses

SIZE, FRAMES, STEPS = (64, 96), 9, 3
PROMPTS = ["a seven", "fog over the sea in the evening"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with the tiny pipeline, clips and a picture."""
    root, random = tmp_path_factory.mktemp("ti2v"), np.random.default_rng(0)
    write_pipeline(root / "wan", "wan_ti2v")
    rows = ["path,text"]
    for number in range(4):
        write_mp4(root / f"{number}.mp4", random.integers(0, 256, (FRAMES, 64, 64, 3), np.uint8), 8)
        rows.append(f"{number}.mp4,{PROMPTS[number % 2]}")
    (root / "clips.csv").write_text("\n".join(rows) + "\n")
    Image.fromarray(random.integers(0, 256, (*SIZE, 3), np.uint8)).save(root / "first.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("sizes")))
        yield root


def drawn(draw):
    """Return the latents that ``draw`` makes in one batch."""
    found, draw_batch = [], SamplingEngine.sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SamplingEngine, "sample", lambda *args, **how: found.append(draw_batch(*args, **how)) or found[-1]
        )
        draw()
    return found[0]


def theirs(folder, noise, **given):
    """Draw latents with diffusers' pipeline from this noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_wan_i2v, "prompt_clean", lambda text: " ".join(text.split()))  # without ftfy
        name = "WanImageToVideoPipeline" if given else "WanPipeline"
        pipeline = getattr(networks(), name).from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        how = dict(height=SIZE[0], width=SIZE[1], num_frames=FRAMES, num_inference_steps=STEPS, guidance_scale=2.5)
        return pipeline(prompt=PROMPTS, latents=noise, output_type="latent", **how, **given)[0]


@pytest.mark.parametrize("image", [False, True])
def test_latents_are_those_of_diffusers(root, image):
    picture = {"image": Image.open(root / "first.png")} if image else {}
    pipe = opendit.load(root / "wan")
    assert pipe.config.input_size == (31, 44, 80)  # 121 frames of 704 x 1280
    how = dict(steps=STEPS, guidance=2.5, seed=3, size=SIZE, frames=FRAMES, progress=False)
    found = drawn(lambda: pipe(PROMPTS, **how, **picture))
    expected = theirs(root / "wan", initial_noise(3, torch.arange(2), tuple(found.shape[1:])), **picture)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def flags_of(root, *more):
    found = f"--pretrained {root}/wan --data_path {root}/clips.csv --use_video --num_frames {FRAMES} --image_size 64"
    found += " --batch_size 4 --num_workers 0 --log_every 1 --warmup_steps 0 --lr 1e-3 --sample_every 0 --ckpt_every 0"
    return [*found.split(), "--mixed_precision", "fp32", "--label_drop", "0", "--max_steps", "2", *more]


def losses(folder):
    (run,) = folder.glob("0*")
    return [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    """Return the run with given frames, and its first micro-batch with the samples' losses."""
    seen, true_losses = [], EagerPasses.losses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EagerPasses, "losses", lambda self, batch: seen.append((batch, true_losses(self, batch))) or seen[-1][1]
        )
        output = tmp_path_factory.mktemp("out")
        train.main(flags_of(root, "--given_frames", "first", "--outputs", str(output), "--global_seed", "3"))
    return output, *seen[0]


def test_a_loss_is_that_of_the_frames_that_are_not_given(root, trained):
    """The reference is diffusers' network, with time 0 for tokens of given frames as in diffusers' pipeline."""
    _, batch, found = trained
    given = batch.given[:, :1]
    counts = given[:, 0, :, 0, 0].sum(1).tolist()
    assert set(counts) == {0.0, 1.0}, counts  # some samples have no given frame
    t = batch.t.float().view(-1, 1, 1, 1, 1)
    noisy = (1 - t) * batch.x0 + t * batch.noise
    network = networks().WanTransformer3DModel.from_pretrained(root / "wan", subfolder="transformer")
    times = (1000 * batch.t.float()[:, None] * (1 - given[:, 0, :, ::2, ::2].flatten(1))).float()
    with torch.no_grad():
        x = torch.where(given > 0, batch.x0, noisy)
        output = network(x, timestep=times, encoder_hidden_states=batch.condition.tokens, return_dict=False)[0]
    error = (output - (batch.noise - batch.x0)).square()
    expected = [error[i, :, int(count) :].mean() for i, count in enumerate(counts)]
    assert torch.allclose(found, torch.stack(expected), rtol=1e-4)


def test_the_curve_is_that_of_cached_latents(root, trained, tmp_path):
    argv = ["latents", "--data_path", f"{root}/clips.csv", "--output", str(tmp_path / "cache"), "--num_workers", "0"]
    preprocess.main([*argv, "--pretrained", f"{root}/wan", "--use_video", *f"--num_frames {FRAMES}".split(),
                     "--image_size", "64"])  # fmt: skip
    cached = ["--data_path", str(tmp_path / "cache"), "--given_frames", "first", "--global_seed", "3"]
    train.main(flags_of(root, *cached, "--outputs", str(tmp_path / "out")))
    assert off_by(losses(tmp_path / "out"), losses(trained[0])) < 1e-2  # latents are cached in fp16


def test_a_run_begins_with_a_picture_and_is_exported(root, trained, tmp_path):
    (run,) = trained[0].glob("0*")
    argv = f"--ckpt {run} --vae {root}/wan/vae --text_encoder {root}/wan --image {root}/first.png --num_frames {FRAMES}"
    argv += f" --num_sampling_steps 2 --prompt fog --output {tmp_path}/drawn"
    found = drawn(lambda: sample.main([*argv.split(), "--image_size", "64"]))
    without = drawn(lambda: sample.main([*argv.replace(f"--image {root}/first.png", "").split(), "--image_size", "64"]))
    assert found.shape == (1, 4, 3, 4, 4) and (found - without).abs().amax() > 0.01
    export(f"diffusers --ckpt {run} --base {root}/wan --output {tmp_path}/tuned".split())
    index = json.loads((tmp_path / "tuned/model_index.json").read_text())
    state = load_file(tmp_path / "tuned/transformer/diffusion_pytorch_model.safetensors")
    network = networks().WanTransformer3DModel.from_pretrained(tmp_path / "tuned", subfolder="transformer").state_dict()
    before = load_file(root / "wan/transformer/diffusion_pytorch_model.safetensors")
    assert index["expand_timesteps"] and all(torch.equal(state[name], network[name]) for name in before)
    assert any(not torch.equal(state[name], before[name]) for name in before)


REFUSED = {
    "--given_frames random": "--given_frames random: wan/wan takes the first frame alone; give first",
    "--given_frames first --pack_tokens 64": "takes given frames in batches alone; leave one of them out",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_does_not_work_is_refused_in_one_line(root, more, refusal, tmp_path):
    argv = [flag for flag in flags_of(root, *more.split(), "--outputs", str(tmp_path))]
    if "pack" in more:
        argv = [flag for flag in argv if flag not in ("--batch_size", "4")]
    assert REFUSED[more] in refusal(argv)


def test_a_clip_of_the_usual_size_is_refused_on_a_cpu(root, capsys):
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", str(root / "wan"), "--output", str(root / "drawn")])
    assert (
        "31 x 44 x 80 latents by default, which takes hours without a GPU; give --num_frames" in capsys.readouterr().err
    )
