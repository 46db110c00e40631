"""opendit.load and Pipeline: the same samples as sample.py, foreign weights, arguments and errors."""

import shlex

import numpy as np
import pytest
import torch
from PIL import Image

import opendit
import sample
from opendit.data.video_files import write_mp4
from opendit.diffusion.objectives import DDPMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.encoders.pictures import to_uint8
from opendit.export import correct_timesteps
from opendit.models.conditioning import encode_bytes
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.sampling.output_files import VideoClip
from tests.encoders.test_vae import small_vae
from tests.models.test_dit import randomised
from tests.sampling.small import BYTES, write

NAMES = ["zero", "one", "tench, Tinca tinca", "crane", "Crane"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    flow = {"objective": FlowObjective().to_dict(), "frame_interval": 3}
    return {
        "classes": write(folder / "classes.safetensors", info={"class_names": NAMES}),
        "colours": write(folder / "colours.safetensors", in_channels=3),
        "words": write(folder / "words.safetensors", text=BYTES),
        "clips": write(folder / "clips.safetensors", "vDiT-Ti/222", info=flow, frames=4, text=BYTES, learn_sigma=False),
        "one class": write(folder / "one.safetensors", num_classes=1, null_class=False),
        "no null": write(folder / "no.safetensors", null_class=False),
    }


def load(path, **arguments) -> opendit.Pipeline:
    return opendit.load(path, device="cpu", **arguments)


def pixels(samples) -> np.ndarray:
    return np.stack([clip.frames if isinstance(clip, VideoClip) else np.asarray(clip) for clip in samples])


def same(samples, latents) -> bool:
    """Return whether these are the model's samples; rounding of 1e-6 can change a byte by one."""
    reference = to_uint8(latents).astype(int)
    return reference.std() > 1 and np.abs(pixels(samples) - reference).max() <= 1


JOBS = [
    ("classes", [3, 1, 4, 1, 0], {"batch_size": 2}, "--class_labels 3 1 4 1 0 --batch_size 2"),
    ("classes", [2, 2, 0], {"guidance": 1}, "--class_labels 2 2 0 --cfg_scale 1"),
    ("colours", ["1", 0], {"sampler": "ddim", "guided_channels": 2, "interval": (1.5, 20.0), "guidance": 2.5},
     "--class_labels 1 0 --sampler ddim --cfg_channels 2 --cfg_interval 1.5 20 --cfg_scale 2.5"),
    ("words", ["a dog", "a cat", ""], {"negative": "a seven"},
     "--prompt 'a dog' 'a cat' '' --negative_prompt 'a seven'"),
    ("clips", ["left", "up"], {"frames": 6, "sampler": "heun", "guidance": 2},
     "--prompt left up --num_frames 6 --sampler heun --cfg_scale 2"),
    ("classes", [1, 2], {"cache": "taylor:2:1"}, "--class_labels 1 2 --cache taylor:2:1"),
    ("classes", [1, 2], {"guidance_every": 3}, "--class_labels 1 2 --guidance_every 3"),
    ("classes", [1, 2], {"guidance_by": "1:3:0.5"}, "--class_labels 1 2 --guidance_by 1:3:0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "what", "arguments", "flags"), JOBS)
def test_the_samples_are_those_of_sample_py(kind, what, arguments, flags, weights, tmp_path, no_ranks):
    words = f"--ckpt {weights[kind]} --num_sampling_steps 5 --seed 7 --output {tmp_path} --npz {tmp_path}/s.npz {flags}"
    sample.main(shlex.split(words))
    drawn = np.load(tmp_path / "s.npz")["arr_0"]
    pipe = load(weights[kind])
    for _ in range(2):  # the second call reuses the first one's state
        samples = pipe(what, steps=5, seed=7, progress=False, **arguments)
        assert np.array_equal(pixels(samples), drawn) and drawn.std() > 1
    assert not np.array_equal(pixels(pipe(what, steps=5, seed=8, progress=False, **arguments)), drawn)
    if kind == "clips":
        assert samples[0].fps == 8 and len(samples[0].frames) == 6
        theirs = next(tmp_path.glob("000001-*.mp4")).read_bytes()
        assert samples[1].save(tmp_path / "mine.mp4").read_bytes() == theirs
    else:
        assert isinstance(samples[0], Image.Image)


# --------------------------------------------------------------------------------------------------- foreign weights


@torch.no_grad()
def test_a_folder_of_diffusers(tmp_path):
    """Weights from diffusers give the same outputs as its network with Meta's timesteps."""
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(1)
    transformer = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=4, sample_size=6,
        patch_size=2, num_embeds_ada_norm=1000, norm_eps=1e-6,
    ).eval()  # fmt: skip
    embedders = [block.norm1.emb for block in transformer.transformer_blocks]
    for parameter in transformer.parameters():
        parameter.copy_(0.05 * torch.randn_like(parameter))
    for other in embedders[1:]:  # each block has its own copy
        other.load_state_dict(embedders[0].state_dict())
    pipeline = DiTPipeline(transformer, small_vae(), DDIMScheduler())
    pipeline.register_to_config(id2label={str(number): name for number, name in enumerate(NAMES)})
    pipeline.save_pretrained(tmp_path / "folder")

    pipe = load(tmp_path / "folder")
    correct_timesteps(transformer)
    x, t, y = torch.randn(6, 4, 6, 6), torch.tensor([0, 1, 77, 500, 998, 999]), torch.tensor([0, 1, 2, 3, 4, 5])
    theirs = transformer(x, t, torch.where(y == 5, 1000, y)).sample
    assert theirs.std() > 0.1 and (pipe.model(x, t, y) - theirs).norm() < 1e-5 * theirs.norm()
    assert pipe.class_names == ["zero", "one", "tench, Tinca tinca", "crane", "Crane"]
    pictures = pipe(["tinca tinca", 0, 1], steps=2, batch_size=2, progress=False)
    assert [picture.size for picture in pictures] == [(24, 24)] * 3  # by the folder's VAE
    assert load(tmp_path / "folder", vae_tiling=True).codec.tiling and not pipe.codec.tiling


def test_metas_weights(tmp_path, weights):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=4, num_classes=1000)
    torch.manual_seed(2)
    model = randomised(DiT(config)).eval()
    torch.save(model.state_dict(), tmp_path / "metas--ckpt.pt")
    with pytest.raises(
        ValueError, match="metas--ckpt.pt does not say which model it is; name it with model, e.g. DiT-XL/2"
    ):
        load(tmp_path / "metas--ckpt.pt")
    small_vae().save_pretrained(tmp_path / "vae")
    pipe = load(tmp_path / "metas--ckpt.pt", model="DiT-Ti/2", vae=str(tmp_path / "vae"))
    assert pipe.config == config
    settings = dict(objective=DDPMObjective(), seed=0, steps=3, cfg_scale=4.0)
    index = torch.arange(2)
    latents = sample_latents(model, torch.tensor([207, 360]), torch.tensor([1000]), index, **settings)
    assert same(pipe([207, 360], steps=3, progress=False), pipe.codec.decode(latents))


def test_what_is_taken_for_granted_is_a_warning(tmp_path, weights):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=4, num_classes=6)
    torch.save(randomised(DiT(config)).state_dict(), tmp_path / "seven_rows.pt")
    with pytest.warns(UserWarning, match="the last of its 7 rows is taken for the null class") as said:
        pipe = load(tmp_path / "seven_rows.pt", model="DiT-Ti/2", vae="none")
    assert len(said) == 1
    assert pipe.config.num_classes == 6 and any("7 rows" in note for note in pipe.notes)
    with pytest.warns(UserWarning, match="no FP8: "):
        load(weights["classes"], fp8=True)


# --------------------------------------------------------------------------------------------------- what is drawn


def test_classes_by_name(weights):
    pipe = load(weights["classes"])
    same = [pixels(pipe(what, steps=2, progress=False)) for what in ([2], ["tench"], " TINCA tinca", np.array([2]))]
    assert all(np.array_equal(same[0], other) for other in same[1:])
    for what, message in [
        (["tensch"], "class 'tensch': no such class; did you mean 'tench, Tinca tinca'?"),
        (["crane"], "class 'crane': numbers 3, 4 are called so"),
        ([5], "class 5: must be a whole number from 0 to 4"),
        ([-1], "class -1"),
        ([1.5], "class 1.5"),
        ([], "the list is empty"),
        (0, r"a class is \[0\]"),
        (True, "not True"),
    ]:
        with pytest.raises(ValueError, match=message):
            pipe(what, steps=2)
    with pytest.raises(ValueError, match="7: .* is conditioned on captions; give text"):
        load(weights["words"])(["a", 7], steps=2)


def test_a_count_draws_without_condition(weights):
    def reference(pipe, y, scale=1.0, null=None):
        settings = dict(objective=pipe.objective, seed=3, steps=3, cfg_scale=scale)
        return sample_latents(pipe.model, y, null, torch.arange(len(y)), **settings)

    pipe = load(weights["classes"])
    assert same(pipe(3, steps=3, seed=3, progress=False), reference(pipe, torch.full((3,), 5)))
    pipe = load(weights["words"])
    empty = encode_bytes(["", ""], 16)
    assert same(pipe(2, steps=3, seed=3, progress=False), reference(pipe, empty))
    away = pipe(2, steps=3, seed=3, negative="dark", guidance=2, progress=False)
    assert same(away, reference(pipe, empty, 2.0, encode_bytes(["dark"], 16)))
    assert not same(away, reference(pipe, empty))
    pipe = load(weights["one class"])
    assert same(pipe(2, steps=3, seed=3, progress=False), reference(pipe, torch.zeros(2, dtype=int)))
    with pytest.raises(ValueError, match="say which classes to draw"):
        load(weights["no null"])(2, steps=2)


def test_callback_sees_every_step_and_can_end_it(weights, capsys):
    pipe, seen = load(weights["classes"]), []
    samples = pipe([0, 1, 2], steps=4, batch_size=2, callback=lambda *step: seen.append(step))
    assert [step for step, _ in seen] == [1, 2, 3, 4] * 2 and [len(x) for _, x in seen] == [2] * 4 + [1] * 4
    assert np.array_equal(to_uint8(seen[3][1]), pixels(samples)[:2])
    assert all((one - other).abs().max() > 1e-3 for (_, one), (_, other) in zip(seen[:3], seen[1:4], strict=True))
    assert "8/8" in capsys.readouterr().err  # the bar counts steps of all batches

    class Cancelled(Exception):
        pass

    def cancel(step, latents):
        if step == 2:
            raise Cancelled

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(Cancelled):
            pipe([0], steps=4, callback=cancel, progress=False)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert np.array_equal(pixels(pipe([0, 1, 2], steps=4, batch_size=2, progress=False)), pixels(samples))


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("classes", {"steps": 0}, "steps 0: must be a whole number from 1 to 1,000"),
        ("classes", {"steps": True}, "steps True"),
        ("classes", {"guidance": -1}, "guidance -1: must be a number from 0 to 1,000"),
        ("classes", {"guidance": float("nan")}, "guidance nan"),
        ("classes", {"seed": -1}, "seed -1"),
        ("classes", {"batch_size": 0}, "batch_size 0"),
        ("classes", {"guided_channels": 2}, "guided_channels 2: must be a whole number from 1 to 1"),
        ("classes", {"interval": (2, 1)}, "interval 2 1"),
        ("classes", {"interval": (1, 2), "guidance": 1}, "interval does nothing with guidance 1"),
        ("classes", {"guidance_every": 2, "guidance": 1}, "guidance_every does nothing with guidance 1"),
        ("classes", {"guidance_every": 0}, "guidance_every 0: must be a whole number"),
        (
            "classes",
            {"cache": "taylor"},
            r"cache taylor: no such form; give first_block\[:THRESHOLD\] or taylor:K\[:ORDER\]",
        ),
        ("classes", {"sampler": "heun"}, "sampler heun: not for a model of objective ddpm; give ddpm or"),
        ("classes", {"size": 16}, "size 16: .* draws 8 x 8; leave it out"),
        ("classes", {"size": np.int64(16)}, "size 16: .* draws 8 x 8; leave it out"),
        ("classes", {"size": (8, 4)}, r"size \(8, 4\)"),
        ("classes", {"frames": 3}, "frames: .* draws pictures; leave it out"),
        ("classes", {"negative": "x"}, "negative: .* is conditioned on classes"),
        ("no null", {}, "guidance 4: .* no null class to guide away from; use guidance 1"),
    ],
)
def test_errors_name_the_argument(kind, arguments, message, weights):
    with pytest.raises(ValueError, match=message):
        load(weights[kind])([0], **{"steps": 2, **arguments})


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("classes", {"precision": "bf8"}, ValueError, "precision bf8: must be one of"),
        ("classes", {"precision": "fp16"}, ValueError, "precision fp16 needs a GPU"),
        ("classes", {"weights": "best"}, ValueError, "weights best: must be ema or model"),
        ("classes", {"model": "DiT-S/2"}, ValueError, "is a checkpoint of DiT-Ti/2, not of DiT-S/2; give its model"),
        ("classes", {"text_encoder": "clip"}, ValueError, "^text_encoder: .* leave it out"),
        ("words", {"vae": "nowhere"}, FileNotFoundError, "^vae nowhere: "),
        ("nowhere", {}, FileNotFoundError, "nowhere: no checkpoint there"),
    ],
)
def test_errors_of_loading(kind, arguments, error, message, weights):
    with pytest.raises(error, match=message):
        load(weights.get(kind, "nowhere"), **arguments)


def test_latest_is_the_newest_run_that_has_a_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="^path latest: no run with a checkpoint under outputs .*; give a path"):
        load("latest", outputs=tmp_path)
    for number in range(2):
        folder = tmp_path / f"00{number}-DiT-Ti-4" / "checkpoints" / "step_0000003"
        folder.mkdir(parents=True)
        write(folder / "ema.safetensors", info={"class_names": [f"of run {number}", *NAMES[1:]]})
    (tmp_path / "002-DiT-Ti-4").mkdir()  # a run without a checkpoint
    assert load("latest", outputs=tmp_path).class_names[0] == "of run 1"
    monkeypatch.chdir(tmp_path.parent)
    assert load("latest", outputs=tmp_path.name).class_names[0] == "of run 1"


def test_clips_are_saved_whole_or_not_at_all(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (5, 6, 8, 3), dtype=np.uint8)
    clip = VideoClip(frames, 8.0)
    write_mp4(tmp_path / "reference.mp4", frames, 8)
    assert clip.save(tmp_path / "a" / "clip.MP4").read_bytes() == (tmp_path / "reference.mp4").read_bytes()
    with Image.open(clip.save(str(tmp_path / "b" / "clip.gif"))) as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (5, (8, 6), 120)  # hundredths of a second
    with pytest.raises(ValueError, match="saved as .mp4 or .gif"):
        clip.save(tmp_path / "clip.avi")
    assert sorted(path.name for path in tmp_path.rglob("clip*")) == ["clip.MP4", "clip.gif"]
    assert clip._repr_html_().startswith("<video") and "5 frames of 6 x 8, 8 a second" in repr(clip)
