"""--negative_prompt: its embedding only replaces the null condition."""

import numpy as np
import pytest
import torch

import sample
from opendit.checkpoint.pretrained import load_pretrained
from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.encoders.pictures import to_uint8
from opendit.models.conditioning import TextConfig, encode_bytes
from tests.sampling.small import BYTES, write

pytestmark = pytest.mark.usefixtures("no_ranks")


def draw(ckpt, folder, *more: str) -> np.ndarray:
    words = f"--ckpt {ckpt} --num_sampling_steps 4 --sampler ddim --seed 3 --output {folder} --npz {folder}/s.npz"
    sample.main([*words.split(), *more])
    return np.load(folder / "s.npz")["arr_0"]


@pytest.mark.parametrize("text", [BYTES, TextConfig("bytes", 64, 16, True)], ids=["pooled", "cross-attention"])
def test_the_other_half_of_guidance_sees_it(text, tmp_path):
    ckpt, prompts = write(tmp_path / "words.safetensors", text=text), ["a seven", "a dog", "a very long eight"]
    drawn = draw(ckpt, tmp_path, "--prompt", *prompts, "--cfg_scale", "3", "--negative_prompt", "blurred")
    model, _ = load_pretrained(ckpt)
    with torch.inference_mode():
        y, null = encode_bytes(prompts, 16), encode_bytes(["blurred"], 16)

        def latents(null):
            settings = dict(objective=DDPMObjective(), seed=3, steps=4, sampler="ddim", cfg_scale=3.0)
            return to_uint8(sample_latents(model.eval(), y, null, torch.arange(3), **settings))

    assert np.array_equal(drawn, latents(null)) and drawn.std() > 1
    plain = draw(ckpt, tmp_path, "--prompt", *prompts, "--cfg_scale", "3")
    assert np.array_equal(plain, latents(encode_bytes([""], 16))) and not np.array_equal(plain, drawn)
    empty = draw(ckpt, tmp_path, "--prompt", *prompts, "--cfg_scale", "3", "--negative_prompt", "")
    assert np.array_equal(plain, empty)


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        ("classes", ["--negative_prompt", "blurred"], "is conditioned on classes"),
        ("words", ["--negative_prompt", "x", "--cfg_scale", "1"], "--negative_prompt: does nothing with --cfg_scale 1"),
    ],
)
def test_refused_where_it_means_nothing(kind, argv, message, tmp_path, capsys):
    ckpt = write(tmp_path / "w.safetensors", **({"text": BYTES} if kind == "words" else {}))
    with pytest.raises(SystemExit) as stop:
        draw(ckpt, tmp_path, *argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err
