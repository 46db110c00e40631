"""Clips with given first frames: the engine is compared with the plain sampler, and files and refusals are tested."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import opendit
import sample
from opendit.data.clips import resize_and_crop
from opendit.data.video_files import write_mp4
from opendit.diffusion.objectives import DDPMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.encoders.video_vae import VideoCodec
from opendit.models.conditioning import TextConfig, give, with_given
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model
from opendit.sampling.conditioning_frames import encode_frames, frames_of_samples
from opendit.sampling.fused_steps import fits_kernels
from opendit.sampling.output_files import VideoClip
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_dit import randomised
from tests.sampling.small import BYTES, write
from tests.sampling.tape import TapeRecorder

CLIP = VDiTConfig((4, 4, 6), (2, 2, 2), 2, 24, 2, 3, num_classes=5, learn_sigma=False, given_frames="random")
FLOW = FlowObjective(2.0)


def made(config=CLIP):
    torch.manual_seed(0)
    return randomised(build_model(config)).eval().double()


def a_batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(3, 2, 4, 4, 6, generator=generator)
    lengths = torch.randint(1, 4, (3,), generator=generator)
    return torch.tensor([1, 4, 0]), torch.tensor([5]), torch.arange(3) + seed, give(latents, lengths), lengths


def reference(model, y, null, index, given, **settings) -> Tensor:
    """Sample with the same frames given to both halves of guidance, calling the model as in training."""

    def forward(x, t, conditions):
        return model(torch.cat([x, torch.cat([given] * (len(x) // len(given)))], dim=1), t, conditions)

    return sample_latents(model, y, null, index, forward=forward, **settings)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"cfg_scale": 3.0},
        {"cfg_scale": 1.0, "sampler": "heun"},
        {"cfg_scale": 2.0, "cfg_interval": (0.2, 2.0)},
    ],
    ids=("guided", "heun", "interval"),
)
def test_the_engine_draws_as_the_sampler_says(settings, record):
    """The frames are recorded with one batch and replayed with others."""
    model, settings = made(), {"steps": 5, **settings}
    recorder = TapeRecorder() if record else None
    engine = SamplingEngine(model, FLOW, **settings, recorder=recorder, record=record)
    for seed in (1, 2, 3):
        y, null, index, given, lengths = a_batch(seed)
        got = engine.sample(y, null, index, seed, conditioning_frames=given)
        want = reference(model, y, null, index, given, objective=FLOW, seed=seed, **settings)
        for i, count in enumerate(lengths.tolist()):
            assert torch.equal(got[i, :, :count], given[i, 1:, :count])  # given frames are kept bit for bit
            torch.testing.assert_close(got[i, :, count:], want[i, :, count:], rtol=1e-5, atol=1e-5)
        plain = engine.sample(y, null, index, seed)
        assert (plain - got).abs().amax() > 1e-2
        torch.testing.assert_close(
            plain,
            sample_latents(model, y, null, index, objective=FLOW, seed=seed, **settings),
            rtol=1e-5,
            atol=1e-5,
        )
    assert not record or recorder.replayed > 0


def test_approximations_and_another_objective_take_them():
    model = made(replace(CLIP, learn_sigma=True))
    y, null, index, given, lengths = a_batch(4)
    for how in ({"cache": "taylor:2:1"}, {"guidance_every": 2}, {"cache": "first_block:0.05"}):
        engine = SamplingEngine(model, DDPMObjective(), steps=6, cfg_scale=2.0, record=False, **how)
        got = engine.sample(y, null, index, 0, conditioning_frames=given)
        assert got.isfinite().all() and torch.equal(got[0, :, : lengths[0]], given[0, 1:, : lengths[0]])


def test_kernels_of_whole_steps_leave_such_models_alone():
    assert fits_kernels(made(replace(CLIP, given_frames=None)), (4, 4, 6)) and not fits_kernels(made(), (4, 4, 6))


def test_a_model_without_given_frames_refuses_them():
    y, null, index, given, _ = a_batch(1)
    engine = SamplingEngine(made(replace(CLIP, given_frames=None)), FLOW, steps=2)
    with pytest.raises(ValueError, match="trained without --given_frames"):
        engine.sample(y, null, index, 0, conditioning_frames=given)


# ------------------------------------------------------------------------------------------ files


class Causal(VideoCodec):
    """A miniature causal video VAE: the first frame, then means of four frames."""

    name, latent_channels, downscale, temporal_downscale = "causal", 3, 1, 4

    def moments(self, pixels: Tensor) -> Tensor:
        latents = [pixels[:, :, i : i + 4].mean(2, keepdim=True) for i in range(1, pixels.shape[2], 4)]
        latents = [pixels[:, :, :1], *latents]
        return torch.cat([torch.cat(latents, 2), torch.ones(len(pixels), 3, len(latents), *pixels.shape[3:])], 1)

    def encode(self, pixels: Tensor, noise: Tensor) -> Tensor:
        return self.sample(self.moments(pixels), noise)

    def decode(self, latents: Tensor) -> Tensor:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return "causal"


def config_of(mode):
    return VDiTConfig((5, 8, 8), (1, 2, 2), 3, 24, 2, 3, num_classes=5, given_frames=mode)


def given_of(mode, **what):
    return encode_frames(config_of(mode), Causal(), (5, 8, 8), torch.device("cpu"), path="RUN", **what)


@pytest.fixture(scope="module")
def frames():
    return np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), dtype=np.uint8)


def test_the_last_frames_of_a_clip_through_a_causal_vae(frames):
    given = given_of("prefix:3", clip=frames)
    want = resize_and_crop(torch.from_numpy(frames[-9:]), 8)  # 9 frames are 3 latent frames
    assert given.shape == (1, 4, 5, 8, 8) and given[0, 0, :, 0, 0].tolist() == [1, 1, 1, 0, 0]
    assert torch.equal(given[0, 1:, 0], want[:, 0])
    torch.testing.assert_close(given[0, 1:, 2], want[:, 5:9].mean(1))
    assert not given[0, 1:, 3:].any()


def test_how_many_frames_are_taken(frames):
    def count(mode, **what):
        return int(given_of(mode, **what)[0, 0, :, 0, 0].sum())

    assert count("first", image=frames[0]) == count("random", image=frames[0]) == count("first", clip=frames) == 1
    assert count("random", clip=frames) == 2  # half of the five latent frames
    assert count("random", clip=frames, frames=13) == 4
    for mode, message, what in (
        ("prefix:3", "trained with 9 given frames; give --clip", {"image": frames[0]}),
        ("first", "trained with 1 given frame; leave --clip_frames out", {"clip": frames, "frames": 9}),
        ("random", "no whole latents of the VAE; give 5 or 9", {"clip": frames, "frames": 7}),
        ("random", "all frames would be given, and none drawn; give --clip_frames 13", {"clip": frames, "frames": 17}),
        ("random", "too short: 8 frames, 9 at interval 1 need 9", {"clip": frames[:8], "frames": 9}),
        ("random", "--clip_frames: does nothing without --clip", {"image": frames[0], "frames": 1}),
        ("random", "--image: --clip gives frames already", {"image": frames[0], "clip": frames}),
        ("random", "is no picture; give uint8 of height x width x 3", {"image": frames[0].astype(float)}),
        (None, "RUN was trained without --given_frames; leave it out, or fine-tune", {"image": frames[0]}),
    ):
        with pytest.raises(ValueError, match=message):
            given_of(mode, **what)
    assert given_of(None) is None


def test_files_pictures_and_clips_in_memory_are_the_same(frames, tmp_path):
    picture = Image.fromarray(frames[0])
    picture.save(tmp_path / "a.png")
    first = given_of("first", image=frames[0])
    for same in (tmp_path / "a.png", str(tmp_path / "a.png"), picture):
        assert torch.equal(given_of("first", image=same), first)
    clip = VideoClip(frames, 8)
    assert torch.equal(given_of("prefix:2", clip=clip), given_of("prefix:2", clip=frames))
    path = tmp_path / "a.mp4"
    write_mp4(path, np.repeat(np.arange(0, 240, 12, dtype=np.uint8), 8 * 8 * 3).reshape(20, 8, 8, 3), 8)
    every = given_of("prefix:2", clip=path)[0, 1]
    third = given_of("prefix:2", clip=path, interval=3)[0, 1]
    # Frames 15 to 19, or 7, 10, 13, 16 and 19; grey increases by 12 per frame, in units of 127.5.
    for got, (one, mean) in ((every, (15, 17.5)), (third, (7, 14.5))):
        assert got[0].mean() == pytest.approx(one * 12 / 127.5 - 1, abs=0.03)
        assert got[1].mean() == pytest.approx(mean * 12 / 127.5 - 1, abs=0.03)
    several = given_of("first", image=[frames[0], frames[1]])
    turns = frames_of_samples(several, torch.tensor([0, 1, 2, 5]))
    assert torch.equal(turns, several[[0, 1, 0, 1]]) and frames_of_samples(None, torch.tensor([0])) is None
    with pytest.raises(ValueError, match=r"--image: .*a.mp4: not a picture.*; give another file"):
        given_of("first", image=path)
    with pytest.raises(ValueError, match=r"--clip: .*a.png: .*; give another file"):
        given_of("first", clip=tmp_path / "a.png")


# ------------------------------------------------------------------------------------------ programs


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    kind = dict(info={"objective": FLOW.to_dict(), "frame_interval": 2}, frames=4, text=BYTES, in_channels=3)
    kind |= dict(learn_sigma=False)
    return {
        "random": write(folder / "random.safetensors", "vDiT-Ti/222", given_frames="random", **kind),
        "none": write(folder / "none.safetensors", "vDiT-Ti/222", **kind),
        "pictures": write(folder / "pictures.safetensors", in_channels=3),
    }


def test_sample_py_and_python_draw_the_same_clips(weights, frames, tmp_path, no_ranks, capsys):
    write_mp4(tmp_path / "a.mp4", frames, 8)
    flags = f"--ckpt {weights['random']} --num_sampling_steps 4 --seed 7 --prompt a b c --cfg_scale 2 --batch_size 2"
    flags += f" --output {tmp_path}/s --npz {tmp_path}/s.npz"
    pipe = opendit.load(weights["random"], device="cpu")
    how = dict(steps=4, seed=7, guidance=2, batch_size=2, progress=False)
    for words, what in (
        (f"--clip {tmp_path}/a.mp4 --clip_frames 2", {"clip": tmp_path / "a.mp4", "clip_frames": 2}),
        (f"--clip {tmp_path}/a.mp4 --clip_frames 3", {"clip": tmp_path / "a.mp4", "clip_frames": 3}),
        ("", {}),
    ):
        sample.main(shlex.split(f"{flags} {words}"))
        told = capsys.readouterr().out
        assert f"given      {what.get('clip_frames')} of 4 latent frames, by {tmp_path}/a.mp4" in told or not what
        assert what or "latent frames" not in told
        drawn = np.load(tmp_path / "s.npz")["arr_0"]
        samples = np.stack([clip.frames for clip in pipe(["a", "b", "c"], **how, **what)])
        assert np.array_equal(samples, drawn) and drawn.std() > 1
    longer = pipe(["a"], **how, clip=pipe(["a"], **how)[0], clip_frames=1)  # continues the drawn clip
    assert np.array_equal(longer[0].frames[0], samples[0, -1]) and len(longer[0].frames) == 4


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("none", "--image {root}/a.png", "was trained without --given_frames"),
        ("pictures", "--image {root}/a.png", "draws pictures; leave it out"),
        ("random", "--image {root}/no.png", "--image {root}/no.png"),
        ("random", "--clip {root}", "--clip {root}: "),
        ("random", "--clip {root}/a.png", "--clip: {root}/a.png: "),
        ("random", "--clip_frames 2", "--clip_frames: does nothing without --clip"),
    ],
)
def test_what_can_not_be_is_one_line(kind, words, message, weights, tmp_path, no_ranks, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    words = f"--ckpt {weights[kind]} --output {tmp_path}/out " + words.format(root=tmp_path)
    with pytest.raises(SystemExit):
        sample.main(shlex.split(words))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message.format(root=tmp_path) in said


def test_arguments_are_named_as_python_has_them(weights):
    pipe = opendit.load(weights["none"], device="cpu")
    with pytest.raises(
        ValueError, match="^image: .* was trained without given_frames; leave it out, or fine-tune the model with it"
    ):
        pipe(["a"], image=np.zeros((8, 8, 3), np.uint8))


def test_a_job_that_did_not_end_is_told_from_one_with_other_frames(weights, frames, tmp_path, no_ranks):
    from opendit.common.stages import Stages
    from opendit.config.command_line import parse
    from opendit.config.sample import SampleConfig
    from opendit.parallel.mesh import init_mesh
    from opendit.sampling.sample_output import settings_of
    from opendit.sampling.sampling_run import load_run

    found = []
    for number in range(2):
        Image.fromarray(frames[number]).save(tmp_path / f"{number}.png")
        words = f"--ckpt {weights['random']} --prompt a --output {tmp_path}/{number} --image {tmp_path}/{number}.png"
        run = load_run(parse(SampleConfig, words.split()), init_mesh(), Stages("flags"))
        found.append(settings_of(run)["given frames"])
        run.lock.__exit__(None, None, None)
    assert found[0] != found[1]


def test_text_models_attend_to_captions_as_before():
    config = replace(CLIP, num_classes=None, text=TextConfig("bytes", 16, 8, cross_attention=True))
    model = made(config)
    x = torch.randn(2, 2, 4, 4, 6).double()
    given = give(x, torch.tensor([1, 2]))
    y = torch.randint(0, 255, (2, 8))
    assert model(with_given(x, given), torch.tensor([1.0, 2.0]), y).shape == x.shape
