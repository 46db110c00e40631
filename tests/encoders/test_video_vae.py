"""Video codecs match diffusers' encode and decode for every frame count that they take."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendit.encoders import load_codec, sample_moments
from opendit.encoders import vae as vae_module
from opendit.encoders import video_vae as video_module
from opendit.encoders.video_vae import FrameCodec, VideoVAECodec, latent_frames, load_video_codec, video_geometry
from tests.encoders.test_vae import small_vae

MEAN, STD = [0.3, -0.2, 0.1, 0.5], [2.0, 0.5, 1.5, 0.8]


def small_cogvideox(**options):
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    settings = {"block_out_channels": (8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 4}
    settings |= {"down_block_types": ("CogVideoXDownBlock3D",) * 3, "up_block_types": ("CogVideoXUpBlock3D",) * 3}
    return AutoencoderKLCogVideoX(**settings, **options).eval()


def small_wan(**options):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    settings = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1}
    settings |= {"temperal_downsample": [True, True], "latents_mean": MEAN, "latents_std": STD}
    return AutoencoderKLWan(**settings, scale_factor_spatial=4, **options).eval()


MAKERS = {"cogvideox": lambda: small_cogvideox(scaling_factor=0.7), "wan": small_wan}


@pytest.fixture(scope="module", params=list(MAKERS))
def video(request, tmp_path_factory):
    """Return (folder, the VAE itself, latent -> normalised, normalised -> latent)."""
    path = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save_pretrained(path)
    mean, std = (torch.tensor(values).view(1, 4, 1, 1, 1) for values in (MEAN, STD))
    if request.param == "wan":
        return str(path), small_wan(), lambda z: (z - mean) / std, lambda z: z * std + mean
    return str(path), small_cogvideox(), lambda z: z * 0.7, lambda z: z / 0.7


def clip(frames, height=16, width=24, batch=2, seed=1):
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# ---------------------------------------------------------------- video autoencoders


@pytest.mark.parametrize("frames", [1, 5, 9, 13, 17])
def test_encode_and_decode_are_diffusers(video, frames):
    folder, reference, normalise, restore = video
    codec = load_video_codec(folder, channels=3, device="cpu")
    pixels, count = clip(frames), 1 + (frames - 1) // 4
    assert codec.latent_shape(frames, 16, 24) == (4, count, 4, 6)
    moments = codec.moments(pixels)
    with torch.no_grad():
        posterior = reference.encode(pixels).latent_dist
    assert moments.shape == (2, 8, count, 4, 6) and moments.dtype == torch.float32 and not moments.requires_grad
    torch.testing.assert_close(moments[:, :4], posterior.mean)
    torch.testing.assert_close(moments[:, 4:], posterior.std)
    noise = torch.randn(2, 4, count, 4, 6, generator=torch.Generator().manual_seed(2))
    latents = codec.encode(pixels, noise)
    torch.testing.assert_close(latents, normalise(posterior.mean + posterior.std * noise))
    assert torch.equal(latents, sample_moments(moments, noise, codec.scaling_factor, codec.shift_factor))
    with torch.no_grad():
        expected = reference.decode(restore(latents)).sample.clamp(-1, 1)
    decoded = codec.decode(latents)
    assert decoded.shape == (2, 3, frames, 16, 24) and decoded.dtype == torch.float32
    # For an even number of latent frames, CogVideoX makes three frames too many at the beginning.
    torch.testing.assert_close(decoded, expected[:, :, -frames:], rtol=1e-4, atol=1e-5)
    assert expected.shape[2] - frames in (0, 3) and decoded.std() > 0.01


def test_frame_counts_that_do_not_fit_name_the_nearest(video):
    codec = load_video_codec(video[0], channels=3, device="cpu")
    with pytest.raises(ValueError, match=r"--num_frames 16: --vae .* 4 k \+ 1; 13 and 17 are the nearest"):
        codec.latent_shape(16, 16, 16)
    with pytest.raises(ValueError, match="--num_frames 4: .*1 and 5 are"):
        codec.moments(clip(4))
    with pytest.raises(ValueError, match="--image_size 18: no multiple of 4"):
        codec.latent_shape(5, 16, 18)
    with pytest.raises(ValueError, match="--image_size 18: no multiple of 4"):
        codec.moments(clip(5, width=18))


@given(st.integers(-2, 200), st.integers(1, 8))
def test_latent_frames(frames, stride):
    good = [f for f in range(1, 220) if (f - 1) % stride == 0]
    if frames in good:
        assert latent_frames(frames, stride) == good.index(frames) + 1
        return
    with pytest.raises(ValueError) as error:
        latent_frames(frames, stride)
    named = [int(word) for word in str(error.value).split("; ")[1].split() if word.isdigit()]
    below, above = [f for f in good if f < frames][-1:], [f for f in good if f > frames][:1]
    assert named == below + above


def test_clips_go_one_by_one_but_change_nothing(video, monkeypatch):
    folder, *_ = video
    one, three = (load_video_codec(folder, channels=3, device="cpu", chunk=chunk) for chunk in (None, 3))
    sizes = []
    encode, decode = one.vae.encode, one.vae.decode
    monkeypatch.setattr(one.vae, "encode", lambda x: sizes.append(len(x)) or encode(x))
    monkeypatch.setattr(one.vae, "decode", lambda x: sizes.append(len(x)) or decode(x))
    pixels = clip(5, batch=3)
    moments = three.moments(pixels)
    torch.testing.assert_close(one.moments(pixels), moments, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.decode(moments[:, :4]), three.decode(moments[:, :4]), rtol=1e-4, atol=1e-5)
    assert sizes == [1] * 6


def test_large_frames_go_in_tiles(video, monkeypatch):
    folder, *_ = video
    codec = load_video_codec(folder, channels=3, device="cpu")
    codec.tile = 32
    strides = {"tile_sample_stride_height": 16, "tile_sample_stride_width": 32} if "wan" in folder else {}
    codec.vae.enable_tiling(tile_sample_min_height=24, tile_sample_min_width=40, **strides)
    codec.vae.disable_tiling()
    used = []
    for name in ("tiled_encode", "decode"):
        real = getattr(codec.vae, name)
        monkeypatch.setattr(
            codec.vae, name, lambda x, *a, n=name, r=real, **k: used.append((n, *x.shape[-2:])) or r(x, *a, **k)
        )
    pixels = clip(5, 48, 80, batch=1)
    whole = codec.moments(pixels)
    decoded, (height, width) = codec.decode(whole[:, :4]), whole.shape[-2:]
    assert used == [("decode", height, width)]
    monkeypatch.setattr(video_module, "TILED_ABOVE", 48 * 80 - 1)
    tiled, side = codec.moments(pixels), 32 // codec.downscale
    small = codec.decode(whole[:, :4])
    assert tiled.shape == whole.shape and small.shape == decoded.shape and not torch.equal(small, decoded)
    count = codec.tiles(whole).count
    assert used[1:] == [("tiled_encode", 48, 80)] + [("decode", side, side)] * count and count >= 6
    codec.moments(clip(1, 16, 16))  # small frames are not cut
    assert len(used) == 2 + count
    monkeypatch.undo()
    asked = load_video_codec(folder, channels=3, device="cpu", tiling=True)
    asked.tile = 32
    torch.testing.assert_close(asked.decode(whole[:, :4]), small)  # tiling=True cuts all frames larger than a tile


@pytest.mark.parametrize("count", [4, 9])
def test_long_clips_are_decoded_a_few_frames_at_a_time(video, count, monkeypatch):
    """Memory does not grow with a clip. Decoding is causal, so frames do not depend on those that follow."""
    codec = load_video_codec(video[0], channels=3, device="cpu")
    seen, decoder = [], codec.vae.decoder.forward
    monkeypatch.setattr(codec.vae.decoder, "forward", lambda z, *a, **k: seen.append(z.shape[2]) or decoder(z, *a, **k))
    latents = torch.randn(1, 4, count, 3, 4, generator=torch.Generator().manual_seed(1))
    decoded = codec.decode(latents)
    assert decoded.shape[2] == 4 * (count - 1) + 1 and max(seen) <= 3 and sum(seen) == count
    first = codec.decode(latents[:, :, : count - 2])
    torch.testing.assert_close(decoded[:, :, : first.shape[2]], first, rtol=1e-4, atol=1e-5)


def test_only_decoders_of_pictures_are_compiled(video):
    with pytest.raises(ValueError, match="--vae_compile: --vae .* is an Autoencoder.*leave it out"):
        load_video_codec(video[0], channels=3, device="cpu", compiled=True)


def test_tiles_that_do_not_fit_are_told():
    """diffusers' tiles for CogVideoX's encoder change the size unless overlaps are whole latents."""
    codec = VideoVAECodec(small_cogvideox(sample_height=32, sample_width=32), name="cog", tiling=True)
    with pytest.raises(ValueError, match="--vae cog: its tiles do not fit frames of 32 x 32"):
        codec.moments(clip(5, 32, 32, batch=1))
    codec.tile = 16
    assert codec.decode(torch.randn(1, 4, 2, 8, 8)).shape[-2:] == (32, 32)  # our tiles always fit


def test_wans_own_patches_count_as_downscale():
    codec = VideoVAECodec(small_wan(patch_size=2, in_channels=12, out_channels=12))
    assert (codec.downscale, codec.temporal_downscale) == (8, 4)
    assert codec.moments(clip(5, 16, 16)).shape == (2, 8, 2, 2, 2)
    assert codec.decode(torch.randn(2, 4, 2, 2, 2)).shape == (2, 3, 5, 16, 16)


def test_the_vae_is_frozen_and_grey_clips_are_repeated(video):
    codec = load_video_codec(video[0], channels=1, device="cpu", dtype=torch.bfloat16)
    assert not any(p.requires_grad for p in codec.vae.parameters()) and codec.dtype == torch.float32
    assert not isinstance(codec, torch.nn.Module)
    grey = clip(5)[:, :1]
    torch.testing.assert_close(codec.moments(grey), codec.moments(grey.repeat(1, 3, 1, 1, 1)))


def test_fingerprints_tell_vaes_apart(video):
    folder, *_ = video
    prints = [load_video_codec(folder, channels=3, device="cpu").fingerprint() for _ in range(2)]
    others = {VideoVAECodec(small_cogvideox(scaling_factor=0.9)).fingerprint()}
    others.add(load_video_codec("none", channels=3, device="cpu").fingerprint())
    assert prints[0] == prints[1] and prints[0] not in others and len(others) == 2


# ---------------------------------------------------------------- frame by frame


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    small_vae(scaling_factor=0.3, shift_factor=0.25).save_pretrained(path)
    return str(path)


def test_frames_are_pictures(image_folder):
    codec, pictures = (load(image_folder, channels=3, device="cpu") for load in (load_video_codec, load_codec))
    assert isinstance(codec, FrameCodec) and codec.latent_shape(6, 16, 24) == (4, 6, 4, 6)
    pixels, noise = clip(6), torch.randn(2, 4, 6, 4, 6)
    moments, latents = codec.moments(pixels), codec.encode(pixels, noise)
    decoded = codec.decode(latents)
    assert moments.shape == (2, 8, 6, 4, 6) and decoded.shape == (2, 3, 6, 16, 24)
    for t in range(6):
        torch.testing.assert_close(moments[:, :, t], pictures.moments(pixels[:, :, t]), rtol=1e-4, atol=1e-5)
        expected = pictures.encode(pixels[:, :, t], noise[:, :, t])
        torch.testing.assert_close(latents[:, :, t], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decoded[:, :, t], pictures.decode(latents[:, :, t]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(codec.sample(moments, noise), latents)
    assert codec.moments(pixels[:, :, :1]).shape == (2, 8, 1, 4, 6)
    assert codec.fingerprint() == pictures.fingerprint()


def test_frames_are_bounded(image_folder, monkeypatch):
    codec = load_video_codec(image_folder, channels=3, device="cpu")
    sizes = []
    vae = codec.codec.vae
    encode, decode = vae.encode, vae.decode
    monkeypatch.setattr(vae, "encode", lambda x: sizes.append(len(x)) or encode(x))
    monkeypatch.setattr(vae, "decode", lambda x: sizes.append(len(x)) or decode(x))
    monkeypatch.setattr(vae_module, "PIXELS_AT_ONCE", 4 * 16 * 16)
    codec.decode(codec.moments(clip(5, 16, 16))[:, :4])
    assert sizes == [4, 4, 2] * 2


def test_pixels_as_latents():
    codec = load_video_codec("none", channels=1, device="cpu")
    x, noise = clip(3)[:, :1], torch.randn(2, 1, 3, 16, 24)
    assert codec.latent_shape(3, 16, 24) == (1, 3, 16, 24) and codec.temporal_downscale == 1
    assert torch.equal(codec.encode(x), x) and torch.equal(codec.encode(x, noise), x)
    assert torch.equal(codec.sample(codec.moments(x), noise), x) and torch.equal(codec.decode(x), x)
    assert codec.decode(x * 9).abs().max() <= 1 and codec.decode(x).is_contiguous()


# ---------------------------------------------------------------- geometry and errors


def test_geometry_needs_no_weights(video, image_folder, tmp_path):
    (tmp_path / "config.json").write_text(Path(video[0], "config.json").read_text())
    codec = load_video_codec(video[0], channels=3, device="cpu")
    expected = (codec.latent_channels, codec.downscale, codec.temporal_downscale)
    assert video_geometry(str(tmp_path), 3) == expected == (4, 4, 4)
    assert video_geometry("none", 1) == (1, 1, 1) and video_geometry("ema", 3) == (4, 8, 1)
    assert video_geometry(image_folder, 3) == (4, 4, 1)
    with pytest.raises(FileNotFoundError, match="no diffusion_pytorch_model.safetensors"):
        load_video_codec(str(tmp_path), channels=3, device="cpu")


def test_what_is_no_vae_of_clips(video, tmp_path):
    for call in (lambda p: video_geometry(p, 3), lambda p: load_video_codec(p, channels=3, device="cpu")):
        with pytest.raises(FileNotFoundError, match="--vae emma: .*--vae PATH needs .*--vae none"):
            call("emma")
        (tmp_path / "config.json").write_text('{"_class_name": "VQModel"}')
        with pytest.raises(ValueError, match="VQModel, not an AutoencoderKL or .*Wan or .*CogVideoX"):
            call(str(tmp_path))
        config = json.loads(Path(video[0], "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": config["_class_name"]}))
        with pytest.raises(ValueError, match="isn't the configuration of a VAE"):
            call(str(tmp_path))
    if "Wan" in config["_class_name"]:  # a picture is a clip of one frame
        codec, picture = load_codec(video[0], channels=3, device="cpu"), clip(1)
        of_clip = load_video_codec(video[0], channels=3, device="cpu").moments(picture)
        torch.testing.assert_close(codec.moments(picture.squeeze(2)), of_clip.squeeze(2))
        return
    with pytest.raises(ValueError, match="not an AutoencoderKL or .*Flux2; "):  # for pictures
        load_codec(video[0], channels=3, device="cpu")
