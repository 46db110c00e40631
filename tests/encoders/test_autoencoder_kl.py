"""Our network of Stable Diffusion's autoencoder equals diffusers' bit for bit and reads its folders."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from opendit.encoders import load_codec
from opendit.encoders.autoencoder_kl import AutoencoderKL, canonical_names, describes
from opendit.encoders.vae import STEM
from tests.encoders.test_vae import small_vae

VARIANTS = {
    "stable diffusion": {},
    "three layers a level": {"layers_per_block": 3},
    "no 1 x 1 convolutions, 16 channels": {
        "use_quant_conv": False, "use_post_quant_conv": False, "latent_channels": 16, "shift_factor": 0.1
    },
    "no attention": {"mid_block_add_attention": False},
    "one level": {
        "block_out_channels": (12,), "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
    },
}  # fmt: skip


def ours(reference) -> AutoencoderKL:
    """Return our network with the weights of diffusers'."""
    vae = AutoencoderKL(dict(reference.config))
    vae.load_state_dict(reference.state_dict())
    return vae


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_it_is_diffusers_bit_for_bit(options):
    reference = small_vae(**options)
    assert describes(reference.config)
    with torch.no_grad():
        for parameter in reference.parameters():  # including norms and biases, which begin as ones and zeros
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        vae = ours(reference)
        pixels = torch.rand(3, 3, 24, 40, generator=torch.Generator().manual_seed(1)) * 2 - 1
        moments = vae.encode(pixels)
        assert torch.equal(moments, reference.encode(pixels).latent_dist.parameters)
        latents = moments.chunk(2, dim=1)[0]
        decoded = vae.decode(latents)
        assert torch.equal(decoded, reference.decode(latents).sample) and decoded.shape == pixels.shape
    assert moments.std() > 0.01 and decoded.std() > 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    small_vae(scaling_factor=0.3).save_pretrained(path)
    return path


def copy_of(folder, path, change_config=None, change_weights=None):
    """Write a copy of a VAE's folder with changes."""
    config = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | (change_config or {})))
    weights = load_file(folder / f"{STEM}.safetensors")
    save_file(change_weights(weights) if change_weights else weights, path / f"{STEM}.safetensors")
    return str(path)


def test_it_needs_neither_diffusers_nor_what_that_imports(folder):
    code = f"""
import sys, torch
from opendit.encoders import load_codec
codec = load_codec({str(folder)!r}, channels=3, device="cpu")
assert codec.decode(torch.zeros(1, 4, 4, 4)).shape == (1, 3, 16, 16)
print(sorted({{"diffusers", "transformers", "peft", "torch._dynamo"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_files_with_older_names_of_attentions_layers(folder, tmp_path):
    def older(weights):
        new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for now, before in new.items():
            weights = {name.replace(f".{now}.", f".{before}."): tensor for name, tensor in weights.items()}
        assert sum("query" in name for name in weights) == 4
        return weights

    first, second = (load_codec(str(path), channels=3, device="cpu") for path in (folder, copy_of(folder, tmp_path)))
    path = copy_of(folder, tmp_path, change_weights=older)
    third = load_codec(path, channels=3, device="cpu")
    assert first.fingerprint() == second.fingerprint() == third.fingerprint()
    assert canonical_names({"a": torch.zeros(1), "x.value.weight": torch.zeros(1)}).keys() == {"a", "x.value.weight"}


def test_weights_in_half_precision_and_keys_of_others(folder, tmp_path):
    def half(weights):
        return {name: tensor.half() for name, tensor in weights.items()} | {"loss.logvar": torch.zeros(())}

    codec = load_codec(copy_of(folder, tmp_path, change_weights=half), channels=3, device="cpu")
    assert {tensor.dtype for tensor in codec.vae.state_dict().values()} == {torch.float32}
    assert "loss.logvar" not in codec.vae.state_dict()


def test_weights_of_another_shape_are_told(folder, tmp_path):
    def wider(weights):
        return weights | {"decoder.conv_out.weight": torch.zeros(3, 9, 3, 3)}

    with pytest.raises(ValueError, match=r"decoder.conv_out.weight is of shape \[3, 9, 3, 3\].* it is \[3, 8, 3, 3\]"):
        load_codec(copy_of(folder, tmp_path, change_weights=wider), channels=3, device="cpu")


def test_other_kinds_of_blocks_are_diffusers_own(tmp_path):
    kinds = {"down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D", "DownEncoderBlock2D")}
    reference = small_vae(**kinds)
    assert not describes(reference.config) and not describes(small_vae(act_fn="gelu").config)
    reference.save_pretrained(tmp_path)
    codec = load_codec(str(tmp_path), channels=3, device="cpu")
    assert type(codec.vae) is type(reference)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(codec.moments(pixels)[:, :4], reference.encode(pixels).latent_dist.mean)


def test_a_compiled_decoder_is_given_batches_of_one_size(folder, monkeypatch):
    """Smaller batches are padded, so that a last batch or tile is not compiled again."""
    seen, options = [], []

    def compiles(function, **given):
        options.append(given)
        return lambda z: seen.append(tuple(z.shape)) or function(z)

    monkeypatch.setattr(torch, "compile", compiles)
    plain, codec = (load_codec(str(folder), channels=3, device="cpu", chunk=4, compiled=on) for on in (False, True))
    latents = torch.randn(6, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(codec.decode(latents), plain.decode(latents))
    torch.testing.assert_close(codec.decode(latents[:1, :, :2]), plain.decode(latents[:1, :, :2]))
    assert seen == [(4, 4, 3, 5), (4, 4, 3, 5), (1, 4, 2, 5)] and options == [{"dynamic": False}]


def test_large_pictures_are_encoded_in_tiles(folder, monkeypatch):
    tiled, whole = (load_codec(str(folder), channels=3, device="cpu", tiling=tiling) for tiling in (True, False))
    tiled.tile = 32  # 8 x 8 latents
    seen, encoder = [], tiled.vae.encoder.forward
    monkeypatch.setattr(tiled.vae.encoder, "forward", lambda x: seen.append(tuple(x.shape[2:])) or encoder(x))
    pixels = torch.rand(2, 3, 52, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1
    moments, expected = tiled.moments(pixels), whole.moments(pixels)
    assert moments.shape == expected.shape == (2, 8, 13, 16) and set(seen) == {(32, 32)}
    corner = whole.moments(pixels[..., :32, :32])
    torch.testing.assert_close(moments[..., :5, :6], corner[..., :5, :6])  # where no other tile overlaps
    corner = whole.moments(pixels[..., -32:, -32:])
    torch.testing.assert_close(moments[..., -5:, -2:], corner[..., -5:, -2:])
    corner = whole.moments(pixels[..., :32, :32])
    assert 1e-4 < (moments - expected).abs().mean() < 0.2 * expected.abs().mean()
    assert torch.equal(tiled.moments(pixels[..., :32, :32]), corner)
