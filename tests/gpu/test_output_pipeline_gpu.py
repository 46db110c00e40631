"""Test decoding on a side stream: the pictures match those of the codec alone while the main stream is busy."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import VAECodec
from opendit.encoders.video_vae import FrameCodec
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.sampling import sample_cache as cache_module
from opendit.sampling.output_pipeline import OutputPipeline
from opendit.sampling.sample_cache import FOLDER
from opendit.sampling.sample_output import tensors_digest
from tests.encoders.test_vae import small_vae
from tests.models.test_dit import randomised

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("clips", [False, True])
def test_the_next_batch_may_overwrite_the_latents_at_once(clips):
    codec = VAECodec(small_vae(scaling_factor=0.3), device="cuda", dtype=torch.float16, chunk=5)
    codec = FrameCodec(codec) if clips else codec
    shape = (16, 4, 3, 32, 32) if clips else (16, 4, 32, 32)
    generator = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randn(shape, generator=generator, device="cuda") for _ in range(12)]
    expected = [to_uint8(codec.decode(latents)) for latents in batches]
    assert all(np.abs(expected[0].astype(int) - other).max() > 50 for other in expected[1:])
    static, busy = torch.empty(shape, device="cuda"), torch.randn(4096, 4096, device="cuda")
    delivered = []

    def deliver(index, pictures):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        delivered.append((index.tolist(), pictures))

    with OutputPipeline(codec, torch.device("cuda", 0), deliver) as pipeline:
        for number, latents in enumerate(batches):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)  # delays the latents
            static.copy_(latents)
            pipeline.put(torch.arange(16) + 16 * number, static)
            static.fill_(float("nan"))
            # takes memory that was freed too early
            torch.empty(1 << 26, dtype=torch.uint8, device="cuda").fill_(7)
    assert [index[0] for index, _ in delivered] == list(range(0, 192, 16))
    for (_, pictures), reference in zip(delivered, expected, strict=True):
        assert np.abs(pictures.astype(int) - reference).max() <= 1


@pytest.mark.parametrize("tiling", [False, True])
def test_a_compiled_decoder(tiling):
    settings = dict(device="cuda", dtype=torch.float16, chunk=4, tiling=tiling)
    plain, codec = (VAECodec(small_vae(scaling_factor=0.3), compiled=on, **settings) for on in (False, True))
    plain.tile = codec.tile = 32
    latents = torch.randn(6, 4, 9, 12, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = plain.decode(latents)
    assert expected.std() > 0.1
    for _ in range(2):
        assert (codec.decode(latents) - expected).abs().max() < 0.02  # values have a range of 2; fp16


def test_a_digest_is_that_of_the_cpu():
    model = DiT(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5))
    for dtype in (torch.float32, torch.bfloat16):
        state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        assert tensors_digest(state) == tensors_digest({name: tensor.cuda() for name, tensor in state.items()})


def test_recorded_steps_go_on_where_they_were(tmp_path, no_ranks, monkeypatch, capsys):
    """With bf16, recorded steps and a VAE, a job that is stopped and resumed gives the same pictures."""
    monkeypatch.setattr(cache_module, "FINE", 0)
    small_vae(scaling_factor=0.3).save_pretrained(tmp_path / "vae")
    config = model_config("DiT-S/2", input_size=(16, 16), in_channels=4, num_classes=5)
    torch.manual_seed(0)
    info = {"model": "DiT-S/2", "config": config.to_dict(), "vae": "ema"}
    path = tmp_path / "ema.safetensors"
    save_file(randomised(DiT(config)).state_dict(), path, metadata={METADATA_KEY: json.dumps(info)})
    argv = f"--ckpt {path} --vae {tmp_path}/vae --num_samples 90 --batch_size 8 --num_sampling_steps 5".split()
    argv += "--sampler ddim --enable_modulate_kernel --enable_layernorm_kernel --enable_flashattn".split()
    sample.main([*argv, "--output", str(tmp_path / "a"), "--npz", str(tmp_path / "a.npz")])
    out = capsys.readouterr().out
    assert "recorded as a CUDA graph" in out

    draw, again = sample.draw_batch, [*argv, "--output", str(tmp_path / "b"), "--npz", str(tmp_path / "b.npz")]

    def stops(sampling, batch):
        if batch.start == 5 * 8:
            while not list((tmp_path / "b" / FOLDER).glob("0*.npy")):
                time.sleep(0.01)
            raise OSError("stop")
        return draw(sampling, batch)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sample, "draw_batch", stops)
        sample.main(again)
    capsys.readouterr()
    sample.main(again)
    assert " of 90 samples are there from an earlier start" in capsys.readouterr().out
    ours, theirs = np.load(tmp_path / "b.npz"), np.load(tmp_path / "a.npz")
    assert theirs["arr_0"].std() > 1 and np.array_equal(ours["arr_0"], theirs["arr_0"])
    pictures = [sorted(Path(tmp_path / name).glob("0*.png")) for name in "ab"]
    assert [p.name for p in pictures[0]] == [p.name for p in pictures[1]] and len(pictures[0]) == 90
