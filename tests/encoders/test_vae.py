"""Codecs match diffusers' encode and decode, and a missing VAE causes a helpful error."""

import json
import time

import pytest
import torch

from opendit.encoders import PixelCodec, VAECodec, codec_geometry, load_codec, sample_moments
from opendit.encoders import folder as folder_module
from opendit.encoders import vae as vae_module
from opendit.encoders.vae import HUB


def small_vae(**options):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        **{
            "block_out_channels": (8, 16, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
            "norm_num_groups": 4,
            "latent_channels": 4,
            **options,
        }
    ).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    small_vae(scaling_factor=0.3, shift_factor=0.25).save_pretrained(path)
    return path


@pytest.fixture
def pixels():
    return torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_encode_and_decode_are_diffusers(folder, pixels):
    codec = load_codec(str(folder), channels=3, device="cpu")
    reference = small_vae()
    with torch.no_grad():
        posterior = reference.encode(pixels).latent_dist
    moments = codec.moments(pixels)
    mean, std = moments.chunk(2, dim=1)
    assert moments.shape == (5, 8, 8, 8) and moments.dtype == torch.float32 and not moments.requires_grad
    torch.testing.assert_close(mean, posterior.mean)
    torch.testing.assert_close(std, posterior.std)
    noise = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    latents = codec.encode(pixels, noise)
    torch.testing.assert_close(latents, (posterior.mean + posterior.std * noise - 0.25) * 0.3)
    assert torch.equal(latents, sample_moments(moments, noise, codec.scaling_factor, codec.shift_factor))
    with torch.no_grad():
        expected = reference.decode(latents / 0.3 + 0.25).sample
    decoded = codec.decode(latents)
    torch.testing.assert_close(decoded, expected.clamp(-1, 1))
    assert decoded.shape == (5, 3, 32, 32) and expected.std() > 0.01


def test_decode_clamps_and_a_missing_shift_is_zero(pixels):
    codec = VAECodec(small_vae())
    assert codec.scaling_factor == pytest.approx(0.18215) and codec.shift_factor == 0
    decoded = codec.decode(torch.randn(2, 4, 8, 8) * 1000)
    assert float(decoded.min()) >= -1 and float(decoded.max()) <= 1 and decoded.dtype == torch.float32


def test_chunks_bound_the_batch_but_change_nothing(folder, pixels, monkeypatch):
    whole = load_codec(str(folder), channels=3, device="cpu")
    parts = load_codec(str(folder), channels=3, device="cpu", chunk=2)
    sizes = []
    encode, decode = parts.vae.encode, parts.vae.decode
    monkeypatch.setattr(parts.vae, "encode", lambda x: sizes.append(len(x)) or encode(x))
    monkeypatch.setattr(parts.vae, "decode", lambda x: sizes.append(len(x)) or decode(x))
    moments = whole.moments(pixels)
    torch.testing.assert_close(parts.moments(pixels), moments)
    torch.testing.assert_close(parts.decode(moments[:, :4]), whole.decode(moments[:, :4]))
    assert sizes == [2, 2, 1, 2, 2, 1]
    monkeypatch.setattr(vae_module, "PIXELS_AT_ONCE", 3 * 32 * 32)
    parts.chunk, sizes[:] = None, []
    parts.moments(pixels), parts.decode(moments[:, :4])
    assert sizes == [3, 2, 3, 2]


def test_large_pictures_are_decoded_in_tiles(folder, monkeypatch):
    codec, whole = (load_codec(str(folder), channels=3, device="cpu", tiling=tiling) for tiling in (True, False))
    codec.tile = 32
    seen, decoder = [], codec.vae.decoder.forward
    monkeypatch.setattr(codec.vae.decoder, "forward", lambda z: seen.append(z.shape) or decoder(z))
    latents = torch.randn(2, 4, 13, 16, generator=torch.Generator().manual_seed(3))
    tiled, expected = codec.decode(latents), whole.decode(latents)
    assert tiled.shape == expected.shape == (2, 3, 52, 64)
    assert {tuple(shape[2:]) for shape in seen} == {(8, 8)}  # tiles at 0 and 5, and at 0, 6 and 8, overlap by 2 or more
    reference = small_vae(scaling_factor=0.3, shift_factor=0.25)
    with torch.no_grad():
        corner = reference.decode(latents[:, :, :8, :8] / 0.3 + 0.25).sample.clamp(-1, 1)
    torch.testing.assert_close(tiled[..., :20, :24], corner[..., :20, :24])  # where no other tile overlaps
    assert 1e-3 < (tiled - expected).abs().mean() < 0.5 * expected.abs().mean()  # normalisation sees only one tile
    small = latents[..., :8, :8]
    assert torch.equal(codec.decode(small), whole.decode(small))  # one tile is the whole picture


def test_grey_pictures_are_repeated(folder, pixels):
    codec = load_codec(str(folder), channels=1, device="cpu")
    grey = pixels[:, :1]
    torch.testing.assert_close(codec.moments(grey), codec.moments(grey.repeat(1, 3, 1, 1)))
    with pytest.raises(ValueError, match="2 channels"):
        codec.moments(pixels[:, :2])


def test_the_vae_is_frozen_and_no_module(folder):
    codec = load_codec(str(folder), channels=3, device="cpu", dtype=torch.bfloat16)
    assert not any(p.requires_grad for p in codec.vae.parameters()) and not codec.vae.training
    assert not isinstance(codec, torch.nn.Module) and codec.dtype == torch.float32  # bf16 is for GPUs
    holder = torch.nn.Linear(1, 1)
    holder.codec = codec
    assert set(holder.state_dict()) == {"weight", "bias"}
    latents = torch.randn(1, 4, 8, 8, requires_grad=True)
    assert not codec.decode(latents).requires_grad
    codec.moments(torch.zeros(1, 3, 8, 8)).requires_grad_().sum().backward()  # no inference tensor


def test_fingerprints_tell_vaes_apart(folder):
    a, b = load_codec(str(folder), channels=3, device="cpu"), VAECodec(small_vae(scaling_factor=0.3, shift_factor=0.25))
    assert a.fingerprint() == b.fingerprint() != VAECodec(small_vae()).fingerprint()
    with torch.no_grad():
        next(b.vae.parameters()).view(-1)[0] += 1e-3
    assert a.fingerprint() != b.fingerprint()


# ---------------------------------------------------------------- no VAE


def test_pixels_as_latents():
    codec = load_codec("none", channels=1, device="cpu")
    assert isinstance(codec, PixelCodec) and codec.latent_shape(8, 8) == (1, 8, 8) == (codec.latent_channels, 8, 8)
    x = torch.rand(3, 1, 8, 8) * 2 - 1
    noise = torch.randn(3, 1, 8, 8)
    assert torch.equal(codec.encode(x, noise), x) and torch.equal(codec.decode(x), x)
    assert torch.equal(codec.sample(codec.moments(x), noise), x)
    assert codec.moments(x).shape == (3, 2, 8, 8)
    assert codec.decode(x * 9).abs().max() <= 1
    assert torch.equal(PixelCodec(3).encode(x, noise), x.expand(3, 3, 8, 8))
    with pytest.raises(ValueError, match="3 channels"):
        codec.encode(torch.zeros(1, 3, 8, 8), None)


# ---------------------------------------------------------------- geometry and errors


def test_geometry_needs_no_weights(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert codec_geometry(str(tmp_path), 3) == (4, 4)
    assert codec_geometry("none", 1) == (1, 1)
    assert codec_geometry("ema", 3) == codec_geometry("mse", 3) == (4, 8)
    codec = load_codec(str(folder), channels=3, device="cpu")
    assert (codec.latent_channels, codec.downscale) == (4, 4) and codec.latent_shape(32, 24) == (4, 8, 6)
    with pytest.raises(ValueError, match="--image_size 30: no multiple of 4"):
        codec.latent_shape(32, 30)


def test_a_path_that_is_no_vae(folder, tmp_path):
    for call in (lambda p: codec_geometry(p, 3), lambda p: load_codec(p, channels=3, device="cpu")):
        with pytest.raises(FileNotFoundError, match="--vae emma: .*--vae PATH needs .*config.json.*--vae none"):
            call("emma")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match="isn't the configuration of a VAE"):
            call(str(tmp_path))
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "VQModel"}))
        with pytest.raises(ValueError, match="is a VQModel, not an AutoencoderKL"):
            call(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="no diffusion_pytorch_model.safetensors"):
        load_codec(str(tmp_path), channels=3, device="cpu")
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="can't be loaded"):
        load_codec(str(tmp_path), channels=3, device="cpu")


@pytest.mark.parametrize("offline", [True, False])
def test_an_unreachable_hub_is_told_fast(monkeypatch, tmp_path, offline):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # an empty cache
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"--vae mse: .*cache.*hub .*--vae PATH .*config\.json.*--vae none"):
        load_codec("mse", channels=3, device="cpu")
    assert time.monotonic() - start < 15


def test_the_cache_serves_without_the_hub(monkeypatch, tmp_path, folder):
    from huggingface_hub import constants

    repository = tmp_path / "models--stabilityai--sd-vae-ft-ema"
    snapshot = repository / "snapshots" / HUB["ema"][1]
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)  # a newer commit does not matter
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(folder_module, "probe_hub", lambda endpoint: pytest.fail("asked the hub"))
    codec = load_codec("ema", channels=3, device="cpu")
    assert codec.name == "ema" and codec.scaling_factor == 0.3
