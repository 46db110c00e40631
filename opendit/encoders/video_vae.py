"""Clips <-> latents: a picture's codec frame by frame, or a video autoencoder of diffusers (CogVideoX, Wan).

Pixels are (B, 1 or 3, T, H, W) in [-1, 1], latents (B, C, t, h, w). A video autoencoder is causal: the first frame is
a latent frame of its own, every ``temporal_downscale`` frames after it are one more, and a picture is a clip of one
frame.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opendit.encoders.autoencoder_kl import DEFAULTS
from opendit.encoders.tiles import Tiles
from opendit.encoders.vae import (
    Codec,
    FrozenVAE,
    ImageCodec,
    PerChannel,
    codec_geometry,
    load_codec,
    scale_and_shift,
    square_tiles,
)
from opendit.encoders.vae_folder import HUB, IMAGE_CLASSES, Geometry, load_vae, read_vae_config

# Frames of more pixels go through a video autoencoder in overlapping tiles, whose seams are blended: the result is
# close to that of the whole frame, not the same. The decoder's tiles are of TILE pixels a side, the encoder's its own.
TILED_ABOVE = 768 * 768
TILE = 256


def latent_frames(frames: int, temporal_downscale: int, what: str = "the VAE") -> int:
    """Latent frames of a clip of ``frames``. Raises ValueError, naming the nearest counts, if it can't be encoded."""
    if frames >= 1 and (frames - 1) % temporal_downscale == 0:
        return (frames - 1) // temporal_downscale + 1
    below = max(1, frames - (frames - 1) % temporal_downscale)
    nearest = "1 is" if frames < 1 else f"{below} and {below + temporal_downscale} are"
    raise ValueError(
        f"--num_frames {frames}: {what} takes 1 frame or {temporal_downscale} k + 1; {nearest} the nearest it can take"
    )


class VideoCodec(Codec):
    """The codec of clips. temporal_downscale: frames that a latent frame after the first one stands for."""

    temporal_downscale: int = 1

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, t, h, w) of a clip's latent; raises ValueError if the VAE can't take that size."""
        count = latent_frames(frames, self.temporal_downscale, f"--vae {self.name}")
        for side in (height, width):
            if side < 1 or side % self.downscale:
                raise ValueError(f"--image_size {side}: no multiple of {self.downscale}; --vae {self.name} needs one")
        return self.latent_channels, count, height // self.downscale, width // self.downscale

    @abstractmethod
    def moments(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 1 or 3, T, H, W) in [-1, 1] -> mean and standard deviation (B, 2C, t, h, w) fp32.

        Raises ValueError for a size that ``latent_shape`` refuses."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, t, h, w) -> pixels (B, 1 or 3, T, H, W) fp32 in [-1, 1]."""


class FrameCodec(VideoCodec):
    """A picture's codec, one frame after the other; the codec itself bounds how many frames it works on at once."""

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
    """(B, C, T, H, W) -> (B * T, C, H, W)."""
    return clips.transpose(1, 2).flatten(0, 1)


def _clips(frames: Tensor, batch: int) -> Tensor:
    """(B * T, C, H, W) -> (B, C, T, H, W)."""
    return frames.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


class VideoVAECodec(FrozenVAE, VideoCodec):
    """A video autoencoder of diffusers; ``chunk`` counts clips, by default one.

    Within a clip these autoencoders work on a few frames at a time and keep what their causal convolutions need of the
    frames before, so the memory they take does not grow with the clip's length.
    """

    def __init__(self, vae: Any, *, chunk: int | None = None, **settings: Any):
        super().__init__(vae, chunk=chunk or 1, **settings)
        self.tile = TILE
        self.latent_channels, self.downscale, self.temporal_downscale = VIDEO_CLASSES[type(vae).__name__](vae.config)

    def moments(self, pixels: Tensor) -> Tensor:
        # Both classes would silently leave out frames that are too many.
        _, *expected = self.latent_shape(*pixels.shape[2:])
        tiled = self._tiled(pixels.shape[-2] * pixels.shape[-1])
        self.vae.enable_tiling() if tiled else self.vae.disable_tiling()
        height, width = pixels.shape[-2:]
        return self._checked(super().moments(pixels), expected, (height, width))

    def tiles(self, latents: Tensor) -> Tiles | None:
        height, width = latents.shape[-2:]
        pixels = height * width * self.downscale**2
        return square_tiles((height, width), self.tile, self.downscale) if self._tiled(pixels) else None

    def decode_whole(self, latents: Tensor) -> Iterator[Tensor]:
        count, *sides = latents.shape[2:]
        height, width = (side * self.downscale for side in sides)
        frames = (count - 1) * self.temporal_downscale + 1
        self.vae.disable_tiling()
        # CogVideoX decodes two latent frames at a time and knows the first frame by an odd number of them. Of an even
        # number it makes temporal_downscale frames of the first latent frame, too; the last of those is the frame.
        for pixels in super().decode_whole(latents):
            yield self._checked(pixels[:, :, -frames:], [frames, height, width], (height, width))

    def _checked(self, result: Tensor, expected: list[int], frame: tuple[int, int]) -> Tensor:
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


# Class of diffusers -> (latent channels, pixels a latent's side, frames a latent frame), read from its configuration.
VIDEO_CLASSES: dict[str, Geometry] = {
    "AutoencoderKLCogVideoX": _cogvideox_geometry,
    "AutoencoderKLWan": _wan_geometry,
}


def _video_vae(name: str) -> tuple[str, dict[str, Any]] | None:
    """(class, configuration) if ``--vae name`` is a video autoencoder, None if it is a picture's codec."""
    if name == "none" or name in HUB:
        return None
    found, config = read_vae_config(name, IMAGE_CLASSES | VIDEO_CLASSES)
    return (found, config) if found in VIDEO_CLASSES else None


def video_geometry(name: str, channels: int) -> tuple[int, int, int]:
    """(latent channels, pixels a latent's side, frames a latent frame) of ``--vae name``, without its weights.

    channels: of the pixels, for ``none``. Raises FileNotFoundError or ValueError as ``load_video_codec`` does."""
    video = _video_vae(name)
    if video is None:
        return (*codec_geometry(name, channels), 1)
    found, config = video
    latent_channels, downscale, temporal_downscale = VIDEO_CLASSES[found](config)
    return latent_channels, downscale, temporal_downscale


def codec_scale(name: str) -> tuple[PerChannel, PerChannel]:
    """(scaling factor, shift factor) of ``--vae name``, of pictures or clips, without its weights.

    Raises FileNotFoundError or ValueError as ``load_video_codec`` does."""
    if name in HUB:
        return scale_and_shift(DEFAULTS)
    found, config = read_vae_config(name, IMAGE_CLASSES | VIDEO_CLASSES)
    return scale_and_shift(DEFAULTS | config if found in IMAGE_CLASSES else config)


def load_video_codec(
    name: str,
    *,
    channels: int,
    device: torch.device | str,
    compiled: bool = False,
    **settings: Any,
) -> VideoCodec:
    """The codec of ``--vae name``: all that ``load_codec`` knows, frame by frame, or a folder with one of
    VIDEO_CLASSES in diffusers' format.

    settings: dtype, chunk and tiling, as of ``load_codec`` but for two. chunk: frames (of a picture's codec) or clips
    (of a video autoencoder) that are worked on at once. tiling: a video autoencoder, which takes tiles by itself for
    frames of more than TILED_ABOVE pixels, takes them for frames of any size above a tile. compiled: of a picture's
    codec only.
    Raises FileNotFoundError or ValueError, naming the flag and what to do, if there is no such VAE."""
    if (video := _video_vae(name)) is None:
        return FrameCodec(load_codec(name, channels=channels, device=device, compiled=compiled, **settings))
    if compiled:  # its convolutions keep what they need of earlier frames, which would be compiled for each of them
        raise ValueError(f"--vae_compile: --vae {name} is an {video[0]}, and only pictures' are compiled; leave it out")
    return VideoVAECodec(load_vae(name, VIDEO_CLASSES), name=name, device=device, **settings)
