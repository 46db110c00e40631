"""Test pipelines of public models on a GPU, in bf16 and FP8. Sampled latents are compared with diffusers in fp32 on the
CPU, and a hundred steps of train.py with fp32."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import opendit
import train
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from opendit.diffusion.random import initial_noise
from opendit.kernels.fp8_linear import float8_available
from tests.encoders.published_folders import write_pipeline
from tests.sampling import test_public_pipelines as pipelines
from tests.training import test_wan_frames as frames
from tests.training.test_train import log_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HEADS = dict(attention_head_dim=64, num_attention_heads=4)
NETWORKS: dict[str, dict[str, Any]] = {  # heads and widths that the kernels and FP8 support
    "flux": HEADS | dict(axes_dims_rope=(16, 24, 24)),
    "z_image": dict(dim=384, n_heads=6, n_kv_heads=6, axes_dims=[16, 24, 24]),
    "wan": HEADS | dict(ffn_dim=528),
    "qwen_image": HEADS | dict(axes_dims_rope=(16, 24, 24)),
    "flux2_klein": HEADS | dict(axes_dims_rope=(16, 16, 16, 16)),
    "cosmos2": HEADS,
    "wan_ti2v": HEADS | dict(ffn_dim=528),
}
BOUNDS = {"bf16": 0.1, "fp8": 0.2}  # relative error of the latents
CURVES = {"bf16": 0.01, "fp8": 0.09}  # relative error of the mean of ten losses
STEPS, LENGTH = 100, 9
names = pytest.mark.parametrize("name", NETWORKS)


def available(precision: str) -> None:
    """Skip the test if the precision is FP8 and this GPU does not support it."""
    found, why = float8_available("cuda", torch.bfloat16)
    if precision == "fp8" and not found:
        pytest.skip(why)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with the pipelines, captioned pictures and captioned clips."""
    root, random = tmp_path_factory.mktemp("public"), np.random.default_rng(0)
    for name, values in NETWORKS.items():
        write_pipeline(root / name, name, **values)
    rows = ["path,text"], ["path,text"]
    for number in range(4):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), np.uint8)).save(root / f"{number}.png")
        write_mp4(root / f"{number}.mp4", random.integers(0, 256, (LENGTH, 64, 64, 3), np.uint8), 8)
        for lines, suffix in zip(rows, ("png", "mp4"), strict=True):
            lines.append(f"{number}.{suffix},{pipelines.PROMPTS[number % 2]}")
    for lines, kind in zip(rows, ("pictures", "clips"), strict=True):
        (root / f"{kind}.csv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("sizes")))
        yield root


@pytest.mark.parametrize("precision", BOUNDS)
@names
def test_latents_are_near_those_of_diffusers(root, name, precision):
    available(precision)
    pipe = opendit.load(root / name, precision="bf16", fp8=precision == "fp8")
    if name == "wan_ti2v":
        how = dict(steps=frames.STEPS, guidance=2.5, seed=3, size=frames.SIZE, frames=LENGTH, progress=False)
        found = frames.drawn(lambda: pipe(frames.PROMPTS, **how)).cpu()
        noise = initial_noise(3, torch.arange(2), tuple(found.shape[1:]))
        expected = frames.theirs(root / name, noise)
    else:
        noise, found, _ = pipelines.ours(pipe, name, 2.5, pipelines.PROMPTS)
        expected = pipelines.theirs(root / name, name, noise.cpu(), 2.5, "latent", pipelines.PROMPTS)
    assert (found.cpu() - expected).norm() < BOUNDS[precision] * expected.norm()


def curve(root: Path, name: str, flags: str, outputs: Path) -> np.ndarray:
    """Train with these flags, and return the mean of every ten losses."""
    data = f"{root}/clips.csv --use_video --num_frames {LENGTH}" if "wan" in name else f"{root}/pictures.csv"
    argv = f"--pretrained {root}/{name} --data_path {data} --image_size 64 --batch_size 4 --num_workers 0 --lr 1e-4"
    argv += f" --log_every 1 --sample_every 0 --no_save --warmup_steps 0 --max_steps {STEPS} --outputs {outputs}"
    train.main([*argv.split(), *flags.split()])
    (run,) = outputs.glob("0*")
    return np.array([line["loss"] for line in log_of(run)]).reshape(STEPS // 10, 10).mean(1)


@pytest.fixture(scope="module")
def exact(root, tmp_path_factory) -> Callable[[str], np.ndarray]:
    """Return a function that returns a network's curve in fp32."""
    return functools.cache(lambda name: curve(root, name, "--mixed_precision fp32", tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("precision", CURVES)
@names
def test_a_hundred_steps_follow_the_curve_of_fp32(root, exact, name, precision, tmp_path):
    available(precision)
    flags = "--mixed_precision bf16 --enable_modulate_kernel --enable_layernorm_kernel --enable_flashattn"
    found = curve(root, name, flags + (" --fp8" if precision == "fp8" else ""), tmp_path)
    wanted = exact(name)
    assert wanted[-1] < 0.85 * wanted[0] and found == pytest.approx(wanted, rel=CURVES[precision])
