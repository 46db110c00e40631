"""Public models from diffusers folders draw the same latents and pictures as diffusers' pipelines."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import opendit
import sample
from opendit.diffusion.random import initial_noise
from opendit.encoders.conditioner import PublishedConditioner
from opendit.sampling.pipeline import Pipeline
from tests.encoders.published_folders import open_pipeline, write_index, write_pipeline
from tests.models.families.oracles import networks, packed, unpacked
from tests.ranks import run_ranks, several_programs

PROMPTS = ["a sign that says open", "fog", "a lighthouse above the fog, seen from the sea in the evening"]
SIZES: dict[str, dict[str, Any]] = {
    "flux": {"size": (64, 48)},
    "z_image": {"size": (48, 64)},
    "wan": {"size": (32, 48), "frames": 5},
    "qwen_image": {"size": (64, 48)},
    "lumina2": {"size": (64, 48)},
    "ltx": {"size": (64, 96), "frames": 9},
    "sd3": {"size": (64, 48)},
    "cosmos2": {"size": (64, 48)},
}
SIZES |= dict.fromkeys(("flux2", "flux2_klein"), {"size": (64, 48)})
PACKED = ("flux", "qwen_image")  # these pipelines use latents as tokens
STEPS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("public")
    divisible = {"dim": 48, "n_heads": 6, "n_kv_heads": 6}  # an MLP that two ranks can divide
    return {
        name: write_pipeline(root / f"tiny-{name}", name, **(divisible if name == "z_image" else {})) for name in SIZES
    }


def theirs(folder: Path, name: str, noise: Tensor, guidance: float | None, output: str, prompts: list[str]) -> Any:
    """Draw with diffusers' pipeline from the given noise (B, C, ...)."""
    steps = STEPS
    networks()
    pipeline = open_pipeline(folder, name)
    pipeline.set_progress_bar_config(disable=True)
    height, width = SIZES[name]["size"]
    scale = "true_cfg_scale" if name == "qwen_image" else "guidance_scale"
    more: dict[str, Any] = {} if guidance is None else {scale: guidance}
    if name in ("qwen_image", "cosmos2"):  # needs one to be guided, or has its own default
        more["negative_prompt"] = [""] * len(prompts)
    if "frames" in SIZES[name]:
        more["num_frames"] = SIZES[name]["frames"]
    if name == "cosmos2":  # its last step has no length
        steps, noise = STEPS + 1, noise.unsqueeze(2)
    latents = packed(noise) if name in PACKED else noise.flatten(2).transpose(1, 2) if name == "ltx" else noise
    drawn = pipeline(
        prompt=prompts, height=height, width=width, num_inference_steps=steps, latents=latents, output_type=output,
        **more,
    )[0]  # fmt: skip
    if name == "flux2" and output == "latent":
        drawn = drawn.transpose(1, 2).reshape(noise.shape)
    if name == "flux2_klein" and output == "latent":  # not normalised, and without patches as channels
        norm = pipeline.vae.bn
        mean, std = norm.running_mean, torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
        drawn = ((packed(drawn) - mean) / std).transpose(1, 2).reshape(noise.shape)
    if name in PACKED and output == "latent":
        drawn = unpacked(drawn, noise.shape)
    if name == "ltx" and output == "latent":
        drawn = drawn.transpose(1, 2).view(noise.shape)
    return drawn


def ours(pipe: Pipeline, name: str, guidance: float, prompts: list[str]) -> tuple[Tensor, Tensor, list[Any]]:
    """Return the noise of seed 3, and the latents and pictures drawn from it."""
    seen: list[Tensor] = []
    drawn = pipe(
        prompts, steps=STEPS, guidance=guidance, seed=3, progress=False, callback=lambda _, x: seen.append(x.clone()),
        **SIZES[name],
    )  # fmt: skip
    return initial_noise(3, torch.arange(len(prompts)), tuple(seen[-1].shape[1:])), seen[-1], drawn


@pytest.mark.parametrize("guidance", [None, 0.0, 2.5])
@pytest.mark.parametrize("name", SIZES)
def test_latents_are_those_of_diffusers(name, guidance, folders):
    if name in ("flux", "flux2") and guidance == 0:
        guidance = 1.0
    pipe = opendit.load(folders[name])
    usual = {"flux": 3.5, "z_image": 5.0, "wan": 5.0, "ltx": 3.0, "sd3": 7.0, "cosmos2": 7.0}.get(name, 4.0)
    noise, latents, _ = ours(pipe, name, usual if guidance is None else guidance, PROMPTS)
    reference = theirs(folders[name], name, noise, guidance, "latent", PROMPTS)
    assert (latents - reference).abs().max() < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("name", SIZES)
def test_pictures_are_those_of_diffusers(name, folders):
    pipe = opendit.load(folders[name])
    noise, _, drawn = ours(pipe, name, 5.0, PROMPTS[:2])
    reference = theirs(folders[name], name, noise, 5.0, "np", PROMPTS[:2])
    found = np.stack([np.asarray(getattr(picture, "frames", picture)) for picture in drawn])
    assert found.shape == reference.shape
    assert np.abs(found.astype(float) - np.clip(reference, 0, 1) * 255).max() <= 1.01


def test_sample_py_draws_from_a_folder_by_the_familys_defaults(folders, tmp_path):
    output = tmp_path / "drawn"
    flags = ["--ckpt", str(folders["flux"]), "--prompt", *PROMPTS, "--image_size", "48", "64"]
    sample.main([*flags, "--num_sampling_steps", "2", "--output", str(output), "--seed", "5"])
    assert len(list(output.glob("*.png"))) == len(PROMPTS) + 1  # and the grid
    pipe = opendit.load(folders["flux"])
    expected = pipe(PROMPTS, steps=2, size=(48, 64), seed=5, progress=False)
    for number, picture in enumerate(expected):
        (file,) = output.glob(f"{number:06d}*.png")
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(picture))


@pytest.mark.parametrize(
    ("size", "fix"),
    [
        ("50", "50: does not divide by 16; give 48"),
        ("48 50", "48 50: does not divide by 16; give 48 48"),
        ("256", "16 patches along a side; the model has .* 8$"),
    ],
)
def test_a_size_that_can_not_be_drawn_is_refused_before_the_text_is_encoded(folders, tmp_path, capsys, size, fix):
    argv = ["--ckpt", str(folders["sd3"]), "--prompt", "fog", "--image_size", *size.split(), "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PublishedConditioner, "encode", lambda *_, **__: pytest.fail("the text is encoded"))
        sample.main(argv)
    assert stop.value.code == 2 and re.search(f"--image_size.* ?{fix}", capsys.readouterr().err.strip())


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_a_model_of_text_to_video_takes_no_first_frame(name, folders):
    with pytest.raises(ValueError, match="draws clips of captions alone; leave it out, or take a model of im"):
        opendit.load(folders[name])(PROMPTS[:1], image=np.zeros((8, 8, 3), np.uint8), steps=1, **SIZES[name])


def test_text_encoders_in_fewer_bits(folders, tmp_path):
    output, what = tmp_path / "drawn", dict(steps=1, size=64, seed=5, progress=False)
    flags = ["--ckpt", str(folders["flux"]), "--prompt", PROMPTS[0], "--image_size", "64", "--text_precision", "nf4"]
    sample.main([*flags, "--num_sampling_steps", "1", "--output", str(output), "--seed", "5"])
    stored, exact = (
        np.asarray(opendit.load(folders["flux"], text_precision=kind)(PROMPTS[:1], **what)[0])
        for kind in ("nf4", "bf16")
    )
    (file,) = output.glob("000000*.png")
    assert np.array_equal(np.asarray(Image.open(file)), stored) and not np.array_equal(stored, exact)
    with pytest.raises(ValueError, match="text_precision q4: must be one of bf16, fp8, int8, nf4"):
        opendit.load(folders["flux"], text_precision="q4")


SHARED = ("flux", "z_image", "wan")  # drawn on two ranks


def test_a_distilled_folder_is_drawn_without_guidance_in_few_steps_by_default(folders, tmp_path):
    shutil.copytree(folders["flux2_klein"], folder := tmp_path / "tiny")
    write_index(folder, "flux2_klein", is_distilled=True)
    found = [opendit.load(folder)("fog", size=64, seed=5, progress=False)]
    found.append(opendit.load(folders["flux2_klein"])("fog", steps=4, guidance=1, size=64, seed=5, progress=False))
    assert np.array_equal(*(np.asarray(picture[0]) for picture in found))


WAYS = ("--cfg_parallel", "--tensor_parallel_size 2", "--sequence_parallel_size 2")
REFUSED = [  # (family, flags, part of the error)
    ("flux", "--cfg_parallel", "--cfg_parallel: "),
    ("flux", "--guidance_every 2", "--guidance_every: "),
    ("flux", "--negative_prompt fog", "makes one pass a step, and its guidance no second one; leave the flag out"),
    ("z_image", "--cfg_scale 0 --cfg_parallel", "--cfg_parallel: does nothing with --cfg_scale 0"),
    ("z_image", "--cache first_block --cfg_parallel", "decides by a batch, which --cfg_parallel shares out"),
]


def command(folders: dict[str, Path], name: str, more: str, output: Path) -> list[str]:
    """Return a command line of sample.py for three prompts of unequal lengths, in batches of two and one."""
    frames = {"wan": "--num_frames 5", "ltx": "--num_frames 9"}.get(name, "")
    side = 64 if name == "ltx" else 32
    flags = f"--ckpt {folders[name]} --num_sampling_steps 3 --batch_size 2 --seed 3 --image_size {side} {frames} {more}"
    return [*flags.split(), "--output", str(output), "--prompt", *PROMPTS]


def draw(argv: list[str]) -> tuple[Any, str]:
    """Run sample.py; return the latents that it has drawn, and its stderr."""
    found, draw_batch = [], sample.draw_batch
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setattr(sample, "draw_batch", lambda *args: found.append(draw_batch(*args)) or found[-1])
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            sample.main(argv)
    return torch.cat([latents for _, latents in found]).numpy() if found else None, errors.getvalue()


def programs(mesh, commands: list[list[str]]) -> list[tuple[Any, str]]:
    several_programs()
    return [draw(argv) for argv in commands]


def test_sample_py_on_two_ranks_draws_what_one_draws(folders, tmp_path, no_ranks, monkeypatch):
    monkeypatch.setattr("opendit.parallel.supervisor.close_mesh", lambda: None)
    ways = [(name, way) for name in SHARED for way in WAYS if (name, way) != ("flux", "--cfg_parallel")]
    runs = ways + [(name, flags) for name, flags, _ in REFUSED]
    commands = [command(folders, name, way, tmp_path / f"{name} {way}") for name, way in runs]
    alone = {name: draw(command(folders, name, "", tmp_path / name))[0] for name in SHARED}
    both = [*zip(*run_ranks(2, programs, commands), strict=True)]
    for (name, way), ((latents, errors), (others, _)) in zip(ways, both[: len(ways)], strict=True):
        assert latents is not None, (name, way, errors)
        assert np.array_equal(latents, others), (name, way)
        assert np.abs(latents - alone[name]).max() < 1e-5 * np.abs(alone[name]).max(), (name, way)
    for (name, way, words), ((latents, errors), (others, more)) in zip(REFUSED, both[len(ways) :], strict=True):
        assert latents is None and others is None and words in errors + more, (name, way, errors + more)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda f: (f / "transformer" / "config.json").write_text("{}"), "_class_name is missing"),
        (
            lambda f: (f / "transformer" / "config.json").write_text('{"_class_name": "SanaTransformer2DModel"}'),
            "'SanaTransformer2DModel' is a network that is not known; known are CosmosTransformer3DModel, ",
        ),
        (
            lambda f: write_index(f, "z_image", _class_name="ZImageControlNetPipeline"),
            "not ZImagePipeline; other pipelines of z_image, such as those that are given pictures, are not known",
        ),
        (lambda f: (f / "vae" / "config.json").unlink(), "vae"),
        (lambda f: next((f / "transformer").glob("*.safetensors")).unlink(), "safetensors"),
        (lambda f: next((f / "text_encoder").glob("*.safetensors")).unlink(), "safetensors"),
        (
            lambda f: (f / "scheduler" / "scheduler_config.json").write_text(
                json.dumps({"_class_name": "DDIMScheduler"})
            ),
            "DDIMScheduler",
        ),
    ],
)
def test_a_damaged_folder_is_named_in_one_line(change, message, tmp_path):
    folder = write_pipeline(tmp_path / "tiny", "z_image")
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as found:
        opendit.load(folder)
    assert message in str(found.value) and "\n" not in str(found.value)
