"""Test opendit.load on a GPU: the same samples as sample.py, recorded steps, callbacks and the choice of a device."""

import numpy as np
import pytest
import torch

import opendit
import sample
from tests.sampling.small import BYTES, write
from tests.sampling.test_pipeline import pixels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = "--enable_modulate_kernel --enable_layernorm_kernel --enable_flashattn"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_samples_are_those_of_sample_py(precision, kernels, tmp_path, no_ranks):
    ckpt = write(tmp_path / "words.safetensors", text=BYTES, in_channels=3)
    flags = f"--ckpt {ckpt} --num_sampling_steps 6 --sampler ddim --seed 7 --batch_size 2 --mixed_precision {precision}"
    words = ["--prompt", "a dog", "a cat", "a bird", "--negative_prompt", "a seven"]
    output = f"--output {tmp_path} --npz {tmp_path}/s.npz {KERNELS if kernels else ''}"
    sample.main([*flags.split(), *words, *output.split()])
    drawn = np.load(tmp_path / "s.npz")["arr_0"]
    pipe, seen = opendit.load(ckpt, precision=precision, kernels=kernels), []
    settings = dict(steps=6, sampler="ddim", seed=7, batch_size=2, negative="a seven", progress=False)
    for _ in range(2):  # in the second call, all steps are replayed
        samples = pipe(["a dog", "a cat", "a bird"], **settings, callback=lambda i, x: seen.append((i, x.clone())))
        assert np.array_equal(pixels(samples), drawn) and drawn.std() > 1
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6] * 4
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(seen[:12], seen[12:], strict=True))
    assert next(iter(pipe.engines.values())).records


def test_a_cancelled_call_leaves_the_pipeline_whole(tmp_path):
    pipe = opendit.load(write(tmp_path / "classes.safetensors"))
    assert pipe.device.type == "cuda" and pipe.precision == "bf16"
    before = pixels(pipe([0, 1], steps=5, progress=False))

    def cancel(step, latents):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe([2, 3], steps=5, progress=False, callback=cancel)
    assert np.array_equal(pixels(pipe([0, 1], steps=5, progress=False)), before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(tmp_path):
    ckpt = write(tmp_path / "classes.safetensors")
    drawn = [pixels(opendit.load(ckpt, device=f"cuda:{i}")([0, 1], steps=5, progress=False)) for i in (0, 1)]
    assert torch.cuda.current_device() == 0 and np.array_equal(*drawn)
