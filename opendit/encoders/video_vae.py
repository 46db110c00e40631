"""Convert clips to latents and back, with a picture codec per frame or a video autoencoder (CogVideoX, LTX, Wan).

Video autoencoders come from diffusers. Pixels are (B, 1 or 3, T, H, W) in [-1, 1], latents (B, C, t, h, w). A video
autoencoder encodes the first frame to one latent frame, and each following group of ``temporal_downscale`` frames to
another. A picture is a clip of one frame.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.encoders.autoencoder_kl import DEFAULTS
from opendit.encoders.vae import (
    HUB,
    IMAGE_CLASSES,
    KL,
    Codec,
    FrozenVAE,
    Geometry,
    ImageCodec,
    PerChannel,
    Tiles,
    codec_geometry,
    latent_sides,
    load_codec,
    load_vae,
    read_vae_config,
    scale_and_shift,
    square_tiles,
)

# Frames of more than TILED_ABOVE pixels are processed in overlapping tiles with blended seams. This is not exact. TILE
# is the side of the decoder's tiles in pixels. The encoder uses diffusers' tiles.
TILED_ABOVE = 768 * 768
TILE = 256


def latent_frames(frames: int, temporal_downscale: int, what: str = "the VAE") -> int:
    """Return the latent frames of a clip with ``frames`` frames. Raises ValueError for a length that can't be encoded.
    The message gives the nearest valid lengths."""
    if frames >= 1 and (frames - 1) % temporal_downscale == 0:
        return (frames - 1) // temporal_downscale + 1
    below = max(1, frames - (frames - 1) % temporal_downscale)
    nearest = "1 is" if frames < 1 else f"{below} and {below + temporal_downscale} are"
    raise ValueError(
        f"--num_frames {frames}: {what} takes 1 frame or {temporal_downscale} k + 1; {nearest} the nearest it can take"
    )


class VideoCodec(Codec):
    """A codec of clips. temporal_downscale: frames per latent frame. The first latent frame always holds one frame."""

    temporal_downscale: int = 1

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (C, t, h, w) of a clip's latent. Raises ValueError for a size that the VAE can't encode."""
        count = latent_frames(frames, self.temporal_downscale, f"--vae {self.name}")
        return self.latent_channels, count, *latent_sides(self.name, self.downscale, height, width)

    @abstractmethod
    def moments(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 1 or 3, T, H, W) in [-1, 1] to mean and standard deviation (B, 2C, t, h, w) fp32. Raises
        ValueError for a size that ``latent_shape`` rejects."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (B, C, t, h, w) to pixels (B, 1 or 3, T, H, W) fp32 in [-1, 1]."""


class FrameCodec(VideoCodec):
    """A picture codec applied to every frame."""

    def __init__(self, codec: ImageCodec):
        self.codec, self.name = codec, codec.name
        self.latent_channels, self.downscale = codec.latent_channels, codec.downscale
        self.scaling_factor, self.shift_factor = codec.scaling_factor, codec.shift_factor

    def moments(self, pixels: Tensor) -> Tensor:
        return _clips(self.codec.moments(frames_of(pixels)), len(pixels))

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode clips frame by frame; see ``Codec.encode``. ``--vae none`` needs no noise."""
        noise = noise if noise is None else frames_of(noise)
        return _clips(self.codec.encode(frames_of(pixels), noise), len(pixels))

    def decode(self, latents: Tensor) -> Tensor:
        return _clips(self.codec.decode(frames_of(latents)), len(latents))

    def fingerprint(self) -> str:
        return self.codec.fingerprint()


def frames_of(clips: Tensor) -> Tensor:
    """Reshape clips (B, C, T, H, W) to frames (B * T, C, H, W)."""
    return clips.transpose(1, 2).flatten(0, 1)


def _clips(frames: Tensor, batch: int) -> Tensor:
    """Reshape frames (B * T, C, H, W) to clips (B, C, T, H, W)."""
    return frames.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


class VideoVAECodec(FrozenVAE, VideoCodec):
    """A video autoencoder of diffusers. ``chunk`` counts clips and is 1 by default. A few frames are processed at a
    time, so longer clips need no more memory for activations."""

    def __init__(self, vae: Any, *, chunk: int | None = None, **settings: Any):
        super().__init__(vae, chunk=chunk or 1, **settings)
        self.tile = TILE
        self.latent_channels, self.downscale, self.temporal_downscale = VIDEO_CLASSES[type(vae).__name__](vae.config)

    def moments(self, pixels: Tensor) -> Tensor:
        # diffusers' classes would silently drop excess frames.
        _, *expected = self.latent_shape(*pixels.shape[2:])
        tiled = self._tiled(pixels.shape[-2] * pixels.shape[-1])
        self.vae.enable_tiling() if tiled else self.vae.disable_tiling()
        return self._checked(super().moments(pixels), expected, pixels.shape[-2:])

    def tiles(self, latents: Tensor) -> Tiles | None:
        height, width = latents.shape[-2:]
        pixels = height * width * self.downscale**2
        return square_tiles((height, width), self.tile, self.downscale) if self._tiled(pixels) else None

    def decode_whole(self, latents: Tensor) -> Iterator[Tensor]:
        count, *sides = latents.shape[2:]
        height, width = (side * self.downscale for side in sides)
        frames = (count - 1) * self.temporal_downscale + 1
        self.vae.disable_tiling()
        # CogVideoX decodes two latent frames at a time. For an even number of latent frames, the first latent frame
        # becomes temporal_downscale frames. Only the last frame is valid, so drop the others.
        for pixels in super().decode_whole(latents):
            yield self._checked(pixels[:, :, -frames:], [frames, height, width], (height, width))

    def _decoded(self, latents: Tensor) -> Tensor:
        if not self.vae.config.get("timestep_conditioning"):
            return super()._decoded(latents)
        # A timestep of 0 tells the decoder that the latents have no noise.
        return self.vae.decode(latents, latents.new_zeros(len(latents))).sample

    def _checked(self, result: Tensor, expected: list[int], frame: Sequence[int]) -> Tensor:
        if list(result.shape[2:]) != expected:
            height, width = frame
            raise ValueError(f"--vae {self.name}: its tiles do not fit frames of {height} x {width}; use smaller ones")
        return result

    def _tiled(self, pixels: int) -> bool:
        return self.tiling or pixels > TILED_ABOVE


def _cogvideox_geometry(config: dict[str, Any]) -> tuple[int, int, int]:
    sides = 2 ** (len(config["block_out_channels"]) - 1)
    return config["latent_channels"], sides, int(config["temporal_compression_ratio"])


def _wan_geometry(config: dict[str, Any]) -> tuple[int, int, int]:
    sides = 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)
    return config["z_dim"], sides, 2 ** sum(config["temperal_downsample"])


def _ltx_geometry(config: dict[str, Any]) -> tuple[int, int, int]:
    if any(config.get("decoder_inject_noise") or ()):
        raise ValueError("decoder_inject_noise: decoders that draw noise are not supported")
    halved = 2 ** sum(config["spatio_temporal_scaling"])
    sides = config.get("spatial_compression_ratio") or (config.get("patch_size") or 4) * halved
    frames = config.get("temporal_compression_ratio") or (config.get("patch_size_t") or 1) * halved
    return config["latent_channels"], sides, int(frames)


# Class of diffusers -> function from its configuration to (latent channels, pixels per latent value along a side,
# frames per latent frame).
VIDEO_CLASSES: dict[str, Geometry] = {
    "AutoencoderKLCogVideoX": _cogvideox_geometry,
    "AutoencoderKLLTXVideo": _ltx_geometry,
    "AutoencoderKLWan": _wan_geometry,
}


def class_of(name: str) -> str | None:
    """Return the diffusers class of ``--vae name``; None for "none" and the names in HUB."""
    return None if name == "none" or name in HUB else read_vae_config(name, IMAGE_CLASSES | VIDEO_CLASSES)[0]


def _video_vae(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return (class, configuration) of the video autoencoder ``--vae name``; None for a picture codec."""
    if (found := class_of(name)) not in VIDEO_CLASSES:
        return None
    return found, read_vae_config(name, VIDEO_CLASSES)[1]


def video_geometry(name: str, channels: int) -> tuple[int, int, int]:
    """Return (latent channels, pixels per latent value along a side, frames per latent frame) of ``--vae name`` without
    reading its weights. channels: the pixels' channels, for ``none``. Raises as :func:`load_video_codec`."""
    video = _video_vae(name)
    if video is None:
        return (*codec_geometry(name, channels), 1)
    found, config = video
    latent_channels, downscale, temporal_downscale = VIDEO_CLASSES[found](config)
    return latent_channels, downscale, temporal_downscale


def codec_scale(name: str) -> tuple[PerChannel, PerChannel]:
    """Return (scaling factor, shift factor) of ``--vae name`` without reading its weights."""
    if name in HUB:
        return scale_and_shift(DEFAULTS)
    found, config = read_vae_config(name, IMAGE_CLASSES | VIDEO_CLASSES)
    return scale_and_shift(DEFAULTS | config if found == KL else config)


def load_video_codec(
    name: str, *, channels: int, device: torch.device | str, compiled: bool = False, **settings: Any
) -> VideoCodec:
    """Load the codec of ``--vae name`` for clips: a video autoencoder if the folder's class is in VIDEO_CLASSES,
    otherwise a picture codec for every frame.

    compiled: for picture codecs only. settings: dtype, chunk and tiling, see ``load_codec``. chunk counts frames for a
    picture codec and clips for a video autoencoder. tiling: if False, a video autoencoder uses tiles only for frames
    above TILED_ABOVE pixels. Raises as :func:`load_codec`."""
    if (video := _video_vae(name)) is None:
        return FrameCodec(load_codec(name, channels=channels, device=device, compiled=compiled, **settings))
    if compiled:  # not possible: torch.compile would recompile for every frame, because of the cache of earlier frames
        raise ValueError(f"--vae_compile: --vae {name} is an {video[0]}, and only pictures' are compiled; leave it out")
    return VideoVAECodec(load_vae(name, VIDEO_CLASSES), name=name, device=device, **settings)
