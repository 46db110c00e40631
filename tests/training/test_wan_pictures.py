"""Wan's image-to-video models, whose clips always begin with a picture: Wan 2.1, whose blocks attend to the picture's
tokens, and the two networks of Wan 2.2 A14B. Sampling, training and exports match diffusers."""

import json
import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

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
from opendit.checkpoint.pretrained import read_config
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data import build_dataset
from opendit.data.base import BadSample
from opendit.data.clips import decode_frames
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from opendit.diffusion.random import initial_noise
from opendit.encoders.vision import PictureTokens
from opendit.export.__main__ import main as export
from opendit.sampling.sampling_engine import SamplingEngine
from opendit.training.model_plan import _check_first_frames
from tests.encoders.published_folders import CLIP_WIDTH, write_pipeline
from tests.models.families.oracles import networks
from train import EagerPasses

SIZE, FRAMES, STEPS = (64, 48), 9, 3
PROMPTS = ["a seven", "fog over the sea in the evening"]
NAMES = {"wan_i2v": [], "wan_i2v_a14b": ["--expert", "low"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with the tiny pipelines, clips, and two pictures."""
    root, random = tmp_path_factory.mktemp("i2v"), np.random.default_rng(0)
    for name in NAMES:
        write_pipeline(root / name, name)
    rows = ["path,text"]
    for number in range(4):
        write_mp4(root / f"{number}.mp4", random.integers(0, 256, (FRAMES, 32, 32, 3), np.uint8), 8)
        rows.append(f"{number}.mp4,{PROMPTS[number % 2]}")
    (root / "clips.csv").write_text("\n".join(rows) + "\n")
    for number in range(2):
        Image.fromarray(random.integers(0, 256, (*SIZE, 3), np.uint8)).save(root / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("sizes")))
        patch.setattr(pipeline_wan_i2v, "prompt_clean", lambda text: " ".join(text.split()))  # without ftfy
        yield root


def drawn(draw):
    """Return the latents that ``draw`` makes in one batch."""
    found, sample_batch = [], SamplingEngine.sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SamplingEngine, "sample", lambda *args, **how: found.append(sample_batch(*args, **how)) or found[-1]
        )
        draw()
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_latents_are_those_of_diffusers(root, name):
    """Each sample begins with its own picture."""
    pictures = [root / "0.png", root / "1.png"]
    pipe = opendit.load(root / name)
    how = dict(steps=STEPS, guidance=2.5, seed=3, size=SIZE, frames=FRAMES, progress=False)
    found = drawn(lambda: pipe(PROMPTS, **how, image=pictures))
    pipeline = networks().DiffusionPipeline.from_pretrained(root / name)
    pipeline.set_progress_bar_config(disable=True)
    for number, picture in enumerate(pictures):
        noise = initial_noise(3, torch.tensor([number]), tuple(found.shape[1:]))
        expected = pipeline(
            Image.open(picture), PROMPTS[number], height=SIZE[0], width=SIZE[1], num_frames=FRAMES, latents=noise,
            num_inference_steps=STEPS, guidance_scale=2.5, output_type="latent",
        )[0]  # fmt: skip
        assert (found[number] - expected[0]).abs().max() < 1e-4 * expected.abs().max()
    with pytest.raises(ValueError, match="image: .* draws clips that begin with a picture; name one"):
        pipe(PROMPTS, **how)


def flags_of(root, name, outputs, *more):
    found = f"--pretrained {root}/{name} --data_path {root}/clips.csv --use_video --num_frames {FRAMES} --image_size 32"
    found += " --batch_size 4 --num_workers 0 --log_every 1 --warmup_steps 0 --lr 1e-2 --ckpt_every 0 --ema_decay 0"
    found += f" --mixed_precision fp32 --label_drop 0.5 --max_steps 2 --outputs {outputs}"
    return [*found.split(), *NAMES[name], *more]


def first_frame(root, number):
    """Return the decoded first frame of a clip."""
    return Image.fromarray(decode_frames(str(root / f"{number}.mp4"), lambda _: [0], threading.Event())[0])


def beside(pipeline, frame):
    """Return what the pipeline adds to the noisy latents as network input for a clip with this first frame."""
    pixels = pipeline.video_processor.preprocess(frame, height=32, width=32)
    return pipeline.prepare_latents(pixels, 1, 4, 32, 32, FRAMES, torch.float32, torch.device("cpu"))[1]


@cache
def network_and_pipeline(folder):
    inside = "transformer" if folder.name == "wan_i2v" else "transformer_2"
    network = networks().WanTransformer3DModel.from_pretrained(folder, subfolder=inside)
    return network, networks().DiffusionPipeline.from_pretrained(folder)


def check_losses(root, name, batch, found, rtol):
    """Compare a micro-batch's losses with those of diffusers' network, which gets the clips' first frames from its
    pipeline."""
    network, pipeline = network_and_pipeline(root / name)
    t = batch.t.float().view(-1, 1, 1, 1, 1)
    frames = [first_frame(root, number) for number in range(4)]
    for row in range(len(found)):
        differences = [float((batch.given[row, 1:] - beside(pipeline, frame)[0, 4:]).abs().max()) for frame in frames]
        frame = frames[int(np.argmin(differences))]
        given = beside(pipeline, frame)
        assert torch.allclose(torch.cat([batch.given[row, :1]] * 4 + [batch.given[row, 1:]]), given[0], atol=2e-3)
        more = {"encoder_hidden_states_image": pipeline.encode_image(frame)} if name == "wan_i2v" else {}
        x = torch.cat([((1 - t) * batch.x0 + t * batch.noise)[row : row + 1], given], dim=1)
        text = batch.condition.tokens[row : row + 1].float()
        with torch.no_grad():
            output = network(x, 1000 * batch.t[row : row + 1].float(), text, return_dict=False, **more)[0]
        expected = (output[0] - (batch.noise - batch.x0)[row]).square().mean()
        assert torch.allclose(found[row], expected, rtol=rtol)


@pytest.mark.parametrize("name", NAMES)
def test_cached_latents_and_held_out_losses_are_those_of_the_clips(root, name, tmp_path, monkeypatch):
    """With a vanishing learning rate, training and held-out losses match those of the published network."""
    cache = f"latents --data_path {root}/clips.csv --output {tmp_path}/cache --pretrained {root}/{name} --use_video"
    cache += f" --num_frames {FRAMES} --image_size 32"
    assert preprocess.main(cache.split()) == 0
    seen, true_losses = [], EagerPasses.losses
    monkeypatch.setattr(
        EagerPasses, "losses", lambda self, batch: seen.append((batch, true_losses(self, batch))) or seen[-1][1]
    )
    for data in ("cache", "clips.csv"):
        folder = tmp_path if data == "cache" else root
        more = ["--data_path", str(folder / data), "--lr", "1e-12", "--validate_share", "0.5", "--validate_every", "2"]
        more += ["--validate_samples", "10"]
        train.main(flags_of(root, name, tmp_path / data / "out", *more, "--batch_size", "2"))
    kinds = {batch.x0.requires_grad or found.requires_grad for batch, found in seen}
    assert kinds == {True, False}, "both training and held-out losses are seen"
    for batch, found in seen:
        check_losses(root, name, batch, found.detach(), rtol=5e-3)
    index = json.loads((path := tmp_path / "cache/index.json").read_text())
    index["sizes"][0]["first_frames"] = CLIP_WIDTH + 1
    path.write_text(json.dumps(index))
    with pytest.raises((ValueError, BadSample), match="first_tokens"):
        build_dataset(str(path.parent), 32, seed=0, use_video=True, num_frames=FRAMES).read(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_loss_of_diffusers_network_and_is_exported(root, name, tmp_path, capsys):
    seen, true_losses = [], EagerPasses.losses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EagerPasses, "losses", lambda self, batch: seen.append((batch, true_losses(self, batch))) or seen[-1][1]
        )
        train.main(flags_of(root, name, tmp_path / "out"))
    check_losses(root, name, *seen[0], rtol=1e-3)
    told = capsys.readouterr().out
    (run,) = (tmp_path / "out").glob("0*")
    export(f"diffusers --ckpt {run} --base {root}/{name} --output {tmp_path}/tuned".split())
    inside = "transformer" if name == "wan_i2v" else "transformer_2"
    state = networks().WanTransformer3DModel.from_pretrained(tmp_path / "tuned", subfolder=inside).state_dict()
    trained = load_file(run / "checkpoints/latest/ema.safetensors")
    assert torch.equal(trained["x_embedder.proj.weight"], state["patch_embedding.weight"])
    if name == "wan_i2v":
        keys = torch.cat([state[f"blocks.1.attn2.add_{part}_proj.weight"] for part in "kv"])
        assert torch.equal(trained["blocks.1.cross_attn.picture_kv.weight"], keys)
        assert (
            following := f"--ckpt {run} --image FILE --vae {root}/{name}/vae --text_encoder {root}/{name}\n"
        ) in told
        argv = f"{following.replace('FILE', f'{root}/0.png')} --prompt fog --num_sampling_steps 2"
        clip = drawn(lambda: sample.main([*argv.split(), "--output", str(tmp_path / "drawn")]))
        assert clip.shape == (1, 4, 3, 4, 4)  # by default, clips have the size of those in the run


REFUSED = {
    "--data_path mock": "--data_path mock: has no first frames, which wan/wan_i2v takes; give clips",
    "--pack_tokens 64": "--pack_tokens: does not work with a model of image to video; leave it out",
    "--evaluate_every 1": "--evaluate_every: a run of wan/wan_i2v has no pictures to begin clips with",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_does_not_work_is_refused_in_one_line(root, more, refusal, tmp_path):
    argv = flags_of(root, "wan_i2v", tmp_path, *more.split())
    if "pack" in more:
        argv = [flag for flag in argv if flag not in ("--batch_size", "4")]
    assert REFUSED[more] in refusal(argv)


def test_cached_latents_without_first_frames_are_refused(root):
    flags = parse(TrainConfig, ["--data_path", "CACHE", "--model", "wan/wan_i2v"])
    config: Any = read_config(root / "wan_i2v" / "model_index.json")
    for width in (None, 0, CLIP_WIDTH + 1):
        cache: Any = SimpleNamespace(describe=lambda width=width: SimpleNamespace(kind="latents", first_frames=width))
        with pytest.raises(
            ValueError, match="--data_path CACHE: these cached latents lack first frames as wan/wan_i2v"
        ):
            _check_first_frames(flags, config, cache)


def test_an_encoder_of_another_width_is_refused(root):
    with pytest.raises(ValueError, match=f"hidden_size is {CLIP_WIDTH}, and the network takes 7"):
        PictureTokens(root / "wan_i2v", 7, "cpu")
