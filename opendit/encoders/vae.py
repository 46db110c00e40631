"""Pixels <-> latents: Stable Diffusion's image VAE, or none at all.

An encoder gives moments, the mean and standard deviation of every latent number; a latent is drawn from them
with noise that the caller keys by the sample, mean + std * noise, then shifted and scaled to unit size. A codec
is a plain object, not a module, so it never ends up in a model's state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.encoders.tiles import Tiles, tiles_of
from opendit.encoders.vae_folder import HUB, IMAGE_CLASSES, load_vae, picture_geometry, read_vae_config

# Pixels (of one channel) that go through the VAE at once unless a chunk is given: 32 pictures of 256x256, which took
# 3.7 GiB to encode and 4.7 GiB to decode in half precision; 64 were no faster.
PIXELS_AT_ONCE = 32 * 256 * 256
TILE = 512  # pixels a side of the tiles that larger pictures are decoded in, which overlap by a quarter


PerChannel = float | Sequence[float]  # one number for all channels of a latent, or one for each


def sample_moments(moments: Tensor, noise: Tensor, scaling: PerChannel, shift: PerChannel) -> Tensor:
    """Latents (B, C, ...) fp32 from moments (B, 2C, ...) = [mean, std] and standard normal noise (B, C, ...)."""
    mean, std = moments.float().chunk(2, dim=1)
    return (mean + std * noise - _over_channels(shift, mean)) * _over_channels(scaling, mean)


def _over_channels(values: PerChannel, latents: Tensor) -> float | Tensor:
    """``values`` in the shape that is broadcast over latents (B, C, ...)."""
    if isinstance(values, int | float):
        return values
    return torch.tensor(values, device=latents.device).view(-1, *(1,) * (latents.dim() - 2))


class Codec(ABC):
    """Pixels in [-1, 1] <-> latents of about unit variance. Shapes are those of pictures; clips (see
    opendit.encoders.video_vae) have frames before the height.

    latent_channels: C of the latents. downscale: pixels a latent's side. scaling_factor, shift_factor: as in
    ``sample_moments``. name: what ``--vae`` said.
    """

    name: str
    latent_channels: int
    downscale: int
    scaling_factor: PerChannel = 1.0
    shift_factor: PerChannel = 0.0

    @abstractmethod
    def moments(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 1 or 3, H, W) in [-1, 1] -> mean and standard deviation (B, 2C, h, w) fp32."""

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Moments (B, 2C, h, w) and standard normal noise (B, C, h, w) -> latents (B, C, h, w) fp32."""
        return sample_moments(moments, noise, self.scaling_factor, self.shift_factor)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pixels (B, 1 or 3, H, W) in [-1, 1] and noise (B, C, h, w) -> latents (B, C, h, w) fp32. Only ``--vae none``
        needs no noise."""
        assert noise is not None
        return self.sample(self.moments(pixels), noise)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> pixels (B, 1 or 3, H, W) fp32 in [-1, 1]."""

    def decode_in_slices(self, latents: Tensor) -> Iterator[Tensor]:
        """The rows of :meth:`decode`, as many at a time as the codec works on at once."""
        yield self.decode(latents)

    def tiles(self, latents: Tensor) -> Tiles | None:
        """The tiles that latents (B, C, ..., h, w) are decoded in; None: whole."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of everything that latents depend on."""


class ImageCodec(Codec):
    """The codec of pictures."""

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """(C, h, w) of a square picture's latent; raises ValueError if the size doesn't divide."""
        if image_size < 1 or image_size % self.downscale:
            raise ValueError(f"--image_size {image_size}: no multiple of {self.downscale}; --vae {self.name} needs one")
        side = image_size // self.downscale
        return self.latent_channels, side, side


class PixelCodec(ImageCodec):
    """``--vae none``: the latents are the pixels, with a standard deviation of zero."""

    name, downscale = "none", 1

    def __init__(self, channels: int):
        self.latent_channels = channels

    def moments(self, pixels: Tensor) -> Tensor:
        pixels = _with_channels(pixels, self.latent_channels).float()
        return torch.cat((pixels, torch.zeros_like(pixels)), dim=1)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        return _with_channels(pixels, self.latent_channels).float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().clamp(-1, 1)

    def fingerprint(self) -> str:
        return hash_parts(self.name)


class FrozenVAE(Codec):
    """An autoencoder, ours or of diffusers, frozen, run without gradients and a bounded number of pixels at a time.

    device: where it runs; inputs are brought there and results stay there. dtype: of its weights and
    activations on a GPU; a CPU always computes in fp32. chunk: samples at once, by default as many as memory allows.
    tiling: large pictures go in overlapping tiles whose seams are blended (opendit.encoders.tiles): the result is close
    to that of the whole picture, not the same, and takes a tile's memory. tile: pixels a side. compiled: the decoder is
    compiled, once for every size of frames; a smaller batch than the first one is filled up to it.
    """

    def __init__(
        self,
        vae: Any,  # ours or of diffusers, which share the methods and no class
        *,
        name: str = "vae",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int | None = None,
        tiling: bool = False,
        compiled: bool = False,
    ):
        config = vae.config
        self.name, self.chunk, self.tiling, self.tile = name, chunk, tiling, TILE
        self.device = torch.device(device)
        self.dtype = dtype if self.device.type == "cuda" else torch.float32
        self.scaling_factor, self.shift_factor = scale_and_shift(config)
        # Memory stays contiguous: channels_last encoded 555 instead of 728 pictures of 256x256 a second and decoded 284
        # instead of 315 (SD's VAE in fp16 on an H200). Module.to itself, because diffusers' own warns that a cast may
        # harm layers kept in fp32, of which this VAE has none.
        self.vae: Any = torch.nn.Module.to(vae.eval().requires_grad_(False), self.device, self.dtype)
        self._compiled = torch.compile(self.vae.decode, dynamic=False) if compiled else None
        self._rows: dict[tuple[int, ...], int] = {}  # sides of latents -> rows of the batch that is compiled for them

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> Tensor:
        parts = []
        for part in pixels.split(self._samples_at_once(pixels.shape[-2] * pixels.shape[-1])):
            part = _with_channels(part.to(self.device, self.dtype, non_blocking=True), 3)
            # In fp32 from here: exp() of a half-precision logarithm would lose a decimal of the deviation.
            found = self.vae.encode(part)
            found = found if isinstance(found, Tensor) else found.latent_dist.parameters  # diffusers' own classes
            mean, logvar = found.float().chunk(2, dim=1)
            parts.append(torch.cat((mean, torch.exp(0.5 * logvar.clamp(-30, 20))), dim=1))
        return torch.cat(parts)

    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat(list(self.decode_in_slices(latents)))

    def decode_in_slices(self, latents: Tensor) -> Iterator[Tensor]:
        tiles = self.tiles(latents)
        if tiles is None:
            yield from self.decode_whole(latents)
            return
        for sample in latents.split(1):
            yield tiles.join(torch.cat(list(self.decode_whole(tiles.cut(sample)))), self.downscale)

    @torch.no_grad()
    def decode_whole(self, latents: Tensor) -> Iterator[Tensor]:
        """Decode latents that are whole frames or tiles; see :meth:`decode_in_slices`."""
        latents = latents.to(self.device, torch.float32)
        latents = latents / _over_channels(self.scaling_factor, latents) + _over_channels(self.shift_factor, latents)
        at_once = self._samples_at_once(latents.shape[-2] * latents.shape[-1] * self.downscale**2)
        for part in latents.to(self.dtype).split(at_once):
            yield self._decoded(part).float().clamp_(-1, 1)

    def _decoded(self, latents: Tensor) -> Tensor:
        if self._compiled is None:
            decoded = self.vae.decode(latents)
            return decoded if isinstance(decoded, Tensor) else decoded.sample  # diffusers' own classes
        count, sides = len(latents), tuple(latents.shape[1:])
        self._rows[sides] = rows = max(count, self._rows.get(sides, 0))
        filled = torch.cat([latents, latents[:1].expand(rows - count, *sides)]) if rows > count else latents
        decoded = self._compiled(filled)
        return (decoded if isinstance(decoded, Tensor) else decoded.sample)[:count]

    def fingerprint(self) -> str:
        return module_fingerprint(self.vae, f"{self.scaling_factor} {self.shift_factor}")

    def _samples_at_once(self, pixels: int) -> int:
        """Return how many samples go through the VAE together. pixels: of one picture or frame."""
        return self.chunk or max(1, PIXELS_AT_ONCE // pixels)


class VAECodec(FrozenVAE, ImageCodec):
    """Stable Diffusion's kind of VAE, ours or diffusers' ``AutoencoderKL``; ``chunk`` counts pictures."""

    def __init__(self, vae: Any, **settings: Any):
        super().__init__(vae, **settings)
        self.latent_channels, self.downscale = picture_geometry(vae.config)

    def moments(self, pixels: Tensor) -> Tensor:
        tiles = self._tiles((pixels.shape[-2] // self.downscale, pixels.shape[-1] // self.downscale))
        if tiles is None:
            return super().moments(pixels)
        cut = (tiles.cut(sample, self.downscale) for sample in pixels.split(1))
        return torch.cat([tiles.join(super(VAECodec, self).moments(some)) for some in cut])

    def tiles(self, latents: Tensor) -> Tiles | None:
        return self._tiles((latents.shape[-2], latents.shape[-1]))

    def _tiles(self, sides: tuple[int, int]) -> Tiles | None:
        return square_tiles(sides, self.tile, self.downscale) if self.tiling else None


def square_tiles(sides: tuple[int, int], pixels: int, downscale: int) -> Tiles | None:
    """Tiles of ``pixels`` a side that overlap by a quarter, for latents of these sides."""
    size = max(pixels // downscale, 4)  # an overlap is at least one latent number
    return tiles_of(sides, (size, size), (size // 4, size // 4))


def module_fingerprint(module: torch.nn.Module, *settings: str) -> str:
    """A hash of a module's weights and buffers, and of the settings it is used with."""
    parts: list[bytes | str] = list(settings)
    for name, weight in sorted(module.state_dict().items()):
        parts += [name, weight.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()]
    return hash_parts(*parts)


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Grey pictures (B, 1, ...) repeated to ``channels``; others must have them."""
    if pixels.shape[1] == 1:
        return pixels.expand(-1, channels, *pixels.shape[2:])
    if pixels.shape[1] != channels:
        raise ValueError(f"pictures of {pixels.shape[1]} channels can't be encoded as {channels}")
    return pixels


def scale_and_shift(config: dict[str, Any]) -> tuple[PerChannel, PerChannel]:
    """(scaling, shift) of ``sample_moments`` from a VAE's configuration, in either of diffusers' two forms: numbers
    scaling_factor and shift_factor, or lists latents_mean and latents_std with one number for each channel."""
    scaling = config.get("scaling_factor")
    scaling = 1.0 if scaling is None else float(scaling)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return scaling, float(config.get("shift_factor") or 0)
    return [scaling / float(s) for s in std], [float(m) for m in mean]


def codec_geometry(name: str, channels: int) -> tuple[int, int]:
    """(latent channels, pixels a latent's side) of ``--vae name``, read without making or downloading weights.

    channels: of the pixels, for ``none``. Raises FileNotFoundError or ValueError as ``load_codec`` does."""
    if name == "none":
        return channels, 1
    if name in HUB:
        return 4, 8
    return picture_geometry(read_vae_config(name, IMAGE_CLASSES)[1])


def load_codec(
    name: str,
    *,
    channels: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    tiling: bool = False,
    compiled: bool = False,
) -> ImageCodec:
    """The codec of ``--vae name``: "none" (latents = pixels of ``channels`` channels), "ema" or "mse" (Stable
    Diffusion's fine-tuned VAEs, from the local cache or the hub) or a folder with a VAE in diffusers' format.

    tiling, compiled: as of :class:`FrozenVAE`; pixels have no tiles and no decoder.

    Raises FileNotFoundError or ValueError, naming the flag and what to do, if there is no such VAE."""
    if name == "none":
        return PixelCodec(channels)
    vae = load_vae(name, IMAGE_CLASSES)
    return VAECodec(vae, name=name, device=device, dtype=dtype, chunk=chunk, tiling=tiling, compiled=compiled)
