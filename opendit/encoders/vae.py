"""Convert pixels to latents and back, with an image VAE, or with no VAE at all (latents = pixels).

An encoder computes moments: the mean and standard deviation of every latent value. A latent is mean + std * noise, then
shifted and scaled to about unit variance. The caller supplies the noise. A codec is no ``nn.Module``, so that a model's
state can't contain one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from opendit.common.tensor_files import open_safetensors
from opendit.common.torch_utils import on_meta
from opendit.common.utils import HashedStream, hash_parts
from opendit.encoders.autoencoder_kl import AutoencoderKL, canonical_names, describes
from opendit.encoders.folder import (
    CONFIG,
    check_size,
    fetch,
    lazy_module,
    one_line,
    reason,
    refuse_adapters,
    weight_files,
    weight_shapes,
)

# Default number of pixels, per channel, that the VAE processes at once: 32 pictures of 256x256. In half precision,
# encoding them took 3.7 GiB and decoding 4.7 GiB. 64 pictures were not faster.
PIXELS_AT_ONCE = 32 * 256 * 256
TILE = 512  # side of a tile in pixels; tiles of larger pictures overlap by a quarter

PerChannel = float | Sequence[float]  # one number for all channels of a latent, or one per channel


# ------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True)
class Tiles:
    """A division of latents (B, C, ..., h, w) into overlapping tiles. The last tile in a row or column may overlap
    more, because it ends at the border."""

    sides: tuple[int, int]  # (h, w) of the latents
    size: tuple[int, int]  # a tile's height and width, at most ``sides``
    overlap: tuple[int, int]  # neighbours' overlap along height and width, less than ``size``

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """Start positions of the tiles along height and along width."""
        rows, columns = (
            [*range(0, side - size, size - overlap), side - size]
            for side, size, overlap in zip(self.sides, self.size, self.overlap, strict=True)
        )
        return rows, columns

    @property
    def count(self) -> int:
        rows, columns = self.starts
        return len(rows) * len(columns)

    def cut(self, latents: Tensor, scale: int = 1) -> Tensor:
        """Cut latents (B, C, ..., h, w) into tiles (B * count, C, ..., *size), sample by sample and row by row. scale:
        pixels per latent value along a side, to cut pixels instead of latents."""
        rows, columns = ([scale * start for start in starts] for starts in self.starts)
        height, width = (scale * side for side in self.size)
        tiles = [latents[..., y : y + height, x : x + width] for y in rows for x in columns]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def join(self, tiles: Tensor, downscale: int = 1) -> Tensor:
        """Blend the decoded tiles of :meth:`cut` into pixels (B, ..., h * downscale, w * downscale) fp32. Where tiles
        overlap, a pixel is a weighted mean."""
        (rows, columns), sides = self.starts, [side * downscale for side in self.sides]
        tiles = tiles.unflatten(0, (-1, self.count))
        joined = torch.zeros(*tiles.shape[:1], *tiles.shape[2:-2], *sides, device=tiles.device)
        weights = torch.zeros(sides, device=tiles.device)
        places = [(y * downscale, x * downscale) for y in rows for x in columns]
        height, width = tiles.shape[-2:]
        for number, (y, x) in enumerate(places):
            ramps = [
                _ramp(start, length, side, overlap * downscale, tiles.device)
                for start, length, side, overlap in zip((y, x), (height, width), sides, self.overlap, strict=True)
            ]
            weight = ramps[0].unsqueeze(1) * ramps[1]
            joined[..., y : y + height, x : x + width] += tiles[:, number].float() * weight
            weights[y : y + height, x : x + width] += weight
        return joined.div_(weights)


def _ramp(start: int, length: int, side: int, overlap: int, device: torch.device) -> Tensor:
    """Return a tile's weights (length,) along one side. Weights rise to 1 over ``overlap`` values from an inner border.
    At the frame's border, weights are 1."""
    places = torch.arange(length, device=device) + 0.5
    up = (places / overlap).clamp(max=1) if start > 0 else torch.ones_like(places)
    down = ((length - places) / overlap).clamp(max=1) if start + length < side else torch.ones_like(places)
    return torch.minimum(up, down)


def tiles_of(sides: tuple[int, int], size: tuple[int, int], overlap: tuple[int, int]) -> Tiles | None:
    """Return tiles of at most this size; None if one tile covers the latents."""
    (height, width), (rows, columns) = sides, map(min, sides, size)
    if (rows, columns) == (height, width):
        return None
    return Tiles((height, width), (rows, columns), (min(overlap[0], rows - 1), min(overlap[1], columns - 1)))


# ------------------------------------------------------------------------------------------ codecs


def sample_moments(moments: Tensor, noise: Tensor, scaling: PerChannel, shift: PerChannel) -> Tensor:
    """Return latents (B, C, ...) fp32 for moments (B, 2C, ...) = [mean, std] and standard normal noise (B, C, ...)."""
    mean, std = moments.float().chunk(2, dim=1)
    return (mean + std * noise - _over_channels(shift, mean)) * _over_channels(scaling, mean)


def _over_channels(values: PerChannel, latents: Tensor) -> float | Tensor:
    """Reshape ``values`` to broadcast over latents (B, C, ...)."""
    if isinstance(values, int | float):
        return values
    return torch.tensor(values, device=latents.device).view(-1, *(1,) * (latents.dim() - 2))


class Codec(ABC):
    """Converts pixels in [-1, 1] to latents of about unit variance, and back.

    The shapes below are for pictures. Clips have a frame dimension before the height (see opendit.encoders.video_vae).
    """

    name: str  # the value of ``--vae``
    latent_channels: int  # C of the latents
    downscale: int  # pixels per latent value along a side
    # scaling_factor, shift_factor: see ``sample_moments``
    scaling_factor: PerChannel = 1.0
    shift_factor: PerChannel = 0.0

    @abstractmethod
    def moments(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 1 or 3, H, W) in [-1, 1] to mean and standard deviation (B, 2C, h, w) fp32."""

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Sample latents (B, C, h, w) fp32 from moments (B, 2C, h, w) and standard normal noise (B, C, h, w)."""
        return sample_moments(moments, noise, self.scaling_factor, self.shift_factor)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pixels (B, 1 or 3, H, W) to latents (B, C, h, w) fp32. Only ``--vae none`` needs no ``noise``."""
        assert noise is not None
        return self.sample(self.moments(pixels), noise)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (B, C, h, w) to pixels (B, 1 or 3, H, W) fp32 in [-1, 1]."""

    def decode_in_slices(self, latents: Tensor) -> Iterator[Tensor]:
        """Yield samples as soon as they are decoded. Concatenated, they are the result of :meth:`decode`."""
        yield self.decode(latents)

    def tiles(self, latents: Tensor) -> Tiles | None:
        """Return the tiles for decoding latents (B, C, ..., h, w); None if the latents are decoded without tiles."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash all values that latents depend on."""


def latent_sides(vae: str, downscale: int, height: int, width: int) -> tuple[int, int]:
    """Return (h, w) of a latent. Raises ValueError if a side of the frame is not a multiple of ``downscale``."""
    for side in (height, width):
        if side < 1 or side % downscale:
            raise ValueError(f"--image_size {side}: no multiple of {downscale}; --vae {vae} needs one")
    return height // downscale, width // downscale


class ImageCodec(Codec):
    """A codec of pictures."""

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, h, w) of a picture's latent. Raises ValueError if a side is not a multiple of ``downscale``."""
        return self.latent_channels, *latent_sides(self.name, self.downscale, height, width)


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
    """A frozen autoencoder, from this package or from diffusers. It runs without gradients and in chunks.

    Args:
        name: the value of ``--vae``.
        device: device of the autoencoder. Inputs are moved there, and results stay there.
        dtype: dtype of the weights and activations on a GPU; a CPU always computes in fp32.
        chunk: number of samples to process at once; by default as many as PIXELS_AT_ONCE allows.
        tiling: process large pictures in overlapping tiles with blended seams. This saves memory, but changes the
            result slightly.
        compiled: compile the decoder, once for every frame size. Smaller batches are padded to the largest so far.
    """

    def __init__(
        self,
        # Any, because diffusers' classes and AutoencoderKL have no common base class
        vae: Any,
        *,
        name: str = "vae",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int | None = None,
        tiling: bool = False,
        compiled: bool = False,
    ):
        config = dict(vae.config)
        self.name, self.chunk, self.tiling, self.tile = name, chunk, tiling, TILE
        self.device = torch.device(device)
        self.dtype = dtype if self.device.type == "cuda" else torch.float32
        self.scaling_factor, self.shift_factor = scale_and_shift(config | statistics_of(vae.state_dict()))
        # Keep the contiguous memory format. With channels_last, an H200 encoded 555 instead of 728 pictures of 256x256
        # a second in fp16. Module.to avoids a wrong warning about fp32 layers in diffusers' ``to``.
        self.vae: Any = torch.nn.Module.to(vae.eval().requires_grad_(False), self.device, self.dtype)
        self._compiled = torch.compile(self.vae.decode, dynamic=False) if compiled else None
        self._rows: dict[tuple[int, ...], int] = {}  # a latent's shape -> batch size of the compiled decoder

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> Tensor:
        parts = []
        for part in pixels.split(self._samples_at_once(pixels.shape[-2] * pixels.shape[-1])):
            part = _with_channels(part.to(self.device, self.dtype, non_blocking=True), 3)
            # Continue in fp32: exp() in half precision would cost the standard deviation one digit.
            found = self.vae.encode(part)
            # Classes of diffusers wrap the moments.
            found = found if isinstance(found, Tensor) else found.latent_dist.parameters
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
        """Yield decoded pictures or tiles, like :meth:`decode_in_slices` but without tiling."""
        latents = latents.to(self.device, torch.float32)
        latents = latents / _over_channels(self.scaling_factor, latents) + _over_channels(self.shift_factor, latents)
        at_once = self._samples_at_once(latents.shape[-2] * latents.shape[-1] * self.downscale**2)
        for part in latents.to(self.dtype).split(at_once):
            yield self._decoded(part).float().clamp_(-1, 1)

    def _decoded(self, latents: Tensor) -> Tensor:
        if self._compiled is None:
            decoded = self.vae.decode(latents)
            return decoded if isinstance(decoded, Tensor) else decoded.sample  # diffusers' classes wrap the tensor
        count, sides = len(latents), tuple(latents.shape[1:])
        self._rows[sides] = rows = max(count, self._rows.get(sides, 0))
        filled = torch.cat([latents, latents[:1].expand(rows - count, *sides)]) if rows > count else latents
        decoded = self._compiled(filled)
        return (decoded if isinstance(decoded, Tensor) else decoded.sample)[:count]

    def fingerprint(self) -> str:
        return module_fingerprint(self.vae, f"{self.scaling_factor} {self.shift_factor}")

    def _samples_at_once(self, pixels: int) -> int:
        """Return the number of samples to process at once. pixels: number of pixels in one picture or frame."""
        return self.chunk or max(1, PIXELS_AT_ONCE // pixels)


class VAECodec(FrozenVAE, ImageCodec):
    """A picture VAE, one of IMAGE_CLASSES. ``chunk`` counts pictures."""

    def __init__(self, vae: Any, **settings: Any):
        super().__init__(vae, **settings)
        self.latent_channels, self.downscale = IMAGE_CLASSES[vae.config.get("_class_name", KL)](vae.config)

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
    """Return square tiles that overlap by a quarter. sides: (h, w) of the latents. pixels: a tile's side in pixels."""
    size = max(pixels // downscale, 4)  # at least 4, so that the overlap is at least one latent value
    return tiles_of(sides, (size, size), (size // 4, size // 4))


def module_fingerprint(module: torch.nn.Module, *settings: str) -> str:
    """Hash a module's weights and buffers, and its settings."""
    parts: list[str | HashedStream] = list(settings)
    for name, weight in sorted(module.state_dict().items()):
        parts += [name, HashedStream(weight.numel() * weight.element_size(), _bytes_of(weight))]
    return hash_parts(*parts)


def _bytes_of(weight: Tensor) -> Iterator[bytes]:
    """Yield a weight's bytes. This is a generator so that only one copy is in memory at a time."""
    yield weight.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Repeat grey pictures (B, 1, ...) to ``channels`` channels. Raises ValueError for another number of channels."""
    if pixels.shape[1] == 1:
        return pixels.expand(-1, channels, *pixels.shape[2:])
    if pixels.shape[1] != channels:
        raise ValueError(f"pictures of {pixels.shape[1]} channels can't be encoded as {channels}")
    return pixels


def scale_and_shift(config: dict[str, Any]) -> tuple[PerChannel, PerChannel]:
    """Return (scaling, shift) for ``sample_moments``. The configuration has either scaling_factor and shift_factor, or
    the lists latents_mean and latents_std."""
    scaling = config.get("scaling_factor")
    scaling = 1.0 if scaling is None else float(scaling)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return scaling, float(config.get("shift_factor") or 0)
    return [scaling / float(s) for s in std], [float(m) for m in mean]


# ------------------------------------------------------------------------------------------ VAEs of diffusers


class OneFrame(nn.Module):
    """Makes a video autoencoder (Qwen-Image) encode pictures, as clips of one frame."""

    def __init__(self, vae: Any):
        super().__init__()
        self.vae, self.config = vae, dict(vae.config) | {"_class_name": type(vae).__name__}

    def encode(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels.unsqueeze(2)).latent_dist.parameters.squeeze(2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents.unsqueeze(2)).sample.squeeze(2)


class Packed(nn.Module):
    """Packs FLUX.2's latents: 2 x 2 values become the channels of one position. The codec normalises packed
    latents with the statistics of the autoencoder's batch norm."""

    def __init__(self, vae: Any):
        super().__init__()
        self.vae = vae
        # Remove patch_size, because it counts latent values, and other code expects pixels.
        about = {"_class_name": type(vae).__name__, "patch_size": None}
        numbers = of_batch_norm(vae.bn.running_mean, vae.bn.running_var, vae.config.batch_norm_eps)
        self.config = dict(vae.config) | about | numbers

    def encode(self, pixels: Tensor) -> Tensor:
        return pixel_unshuffle(self.vae.encode(pixels).latent_dist.parameters, 2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(pixel_shuffle(latents, 2)).sample


def of_batch_norm(mean: Tensor, variance: Tensor, eps: float) -> dict[str, Any]:
    """Return a codec's settings that normalise latents by a batch norm's statistics (C,)."""
    return {"scaling_factor": None, "latents_mean": mean.tolist(), "latents_std": (variance + eps).sqrt().tolist()}


# ------------------------------------------------------------------------------------------ folders of VAEs

# Short name -> (repository on the hub, commit).
HUB = {
    "ema": ("stabilityai/sd-vae-ft-ema", "f04b2c4b98319346dad8c65879f680b1997b204a"),
    "mse": ("stabilityai/sd-vae-ft-mse", "31f26fdeee1355a5c34592e401dd41e45d25a493"),
}
STEM = "diffusion_pytorch_model"
FILES = (CONFIG, f"{STEM}.safetensors")


def picture_geometry(config: dict[str, Any]) -> tuple[int, int]:
    """Return (latent channels, pixels per latent value along a side) for a configuration of ``AutoencoderKL``."""
    return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)


Geometry = Callable[[dict[str, Any]], tuple[int, ...]]  # function from a configuration to the sizes of the VAE
KL, FLUX2 = AutoencoderKL.__name__, "AutoencoderKLFlux2"


def one_frame_geometry(config: dict[str, Any]) -> tuple[int, int]:
    """Return the sizes in :func:`picture_geometry` for ``AutoencoderKLWan`` and ``AutoencoderKLQwenImage``."""
    return config["z_dim"], 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)


IMAGE_CLASSES: dict[str, Geometry] = {
    KL: picture_geometry,
    "AutoencoderKLQwenImage": one_frame_geometry,
    "AutoencoderKLWan": one_frame_geometry,
    FLUX2: lambda config: (4 * config["latent_channels"], 2 * picture_geometry(config)[1]),
}
# Class of diffusers -> wrapper that gives it the methods encode and decode of AutoencoderKL.
ADAPTED: dict[str, Callable[[Any], torch.nn.Module]] = {
    "AutoencoderKLQwenImage": OneFrame,
    "AutoencoderKLWan": OneFrame,
    FLUX2: Packed,
}


def load_vae(name: str, classes: dict[str, Geometry], own: bool = True) -> torch.nn.Module:
    """Load the autoencoder of ``--vae name``. Stable Diffusion's is loaded as this package's ``AutoencoderKL``, unless
    ``own`` is False. Others need diffusers. classes: accepted classes of diffusers. Raises FileNotFoundError or
    ValueError, with the flag and the fix."""
    folder = vae_folder(name)
    class_name, config = read_vae_config(str(folder), classes)
    try:
        refuse_adapters(folder)
        if own and class_name == KL and describes(config):
            return _own(folder, config)
        return _of_diffusers(folder, class_name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--vae {name}: {error}; {_needs()}") from error
    except Exception as error:
        raise ValueError(f"--vae {name}: {folder} can't be loaded ({one_line(error)}); {_needs()}") from error


def _own(folder: Path, config: dict[str, Any]) -> AutoencoderKL:
    check_size(lambda: AutoencoderKL(config), weight_shapes(folder, STEM), folder)
    with on_meta():
        vae = AutoencoderKL(config)
    stored: dict[str, torch.Tensor] = {}
    for path in weight_files(folder, STEM):
        with open_safetensors(path) as file:
            # Copy the tensors, because another program could still change the mapped file.
            stored |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    state = canonical_names(stored)
    for name, parameter in vae.state_dict().items():
        if name not in state:
            raise ValueError(f"its weights lack {name}")
        if state[name].shape != parameter.shape:
            found, wanted = list(state[name].shape), list(parameter.shape)
            raise ValueError(f"{name} is of shape {found}, by the configuration it is {wanted}")
    vae.load_state_dict({name: state[name] for name in vae.state_dict()}, assign=True)
    return vae.float()


def _of_diffusers(folder: Path, class_name: str) -> torch.nn.Module:
    shapes = weight_shapes(folder, STEM)
    vae_class = getattr(lazy_module("diffusers"), class_name)
    made = vae_class.load_config(folder, local_files_only=True)
    check_size(lambda: vae_class.from_config(made), shapes, folder)
    vae, report = vae_class.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
    )
    if report["missing_keys"]:  # diffusers would initialise missing weights at random
        raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
    return vae


# Class -> names of two weights: the latents' mean, and the standard deviation or variance.
STATISTICS = {FLUX2: ("bn.running_mean", "bn.running_var"), "AutoencoderKLLTXVideo": ("latents_mean", "latents_std")}


def statistics_of(weights: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return latents_mean and latents_std if they are in a VAE's weights."""
    return {key: weights[key].tolist() for key in ("latents_mean", "latents_std") if key in weights}


def read_vae_config(name: str, classes: dict[str, Geometry]) -> tuple[str, dict[str, Any]]:
    """Return (class, configuration) of the VAE in a folder. Raises FileNotFoundError, or ValueError if the
    configuration is invalid or the class is not in ``classes``."""
    from opendit.common.json_models import read_file  # imports pydantic, so only when a file is read
    from opendit.encoders.schema import VAE

    path = Path(name).expanduser() / FILES[0]
    try:
        config = read_file(path, VAE)
        found = config.get("_class_name", KL)
        if found in STATISTICS and found in classes:
            config |= _stored_statistics(path.parent, found, config)
        if found in classes:
            channels = classes[found](config)[0]
            for key in ("latents_mean", "latents_std"):
                if config.get(key) is not None and len(config[key]) != channels:
                    raise ValueError(f"{path}: {key} has {len(config[key])} numbers for {channels} channels")
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_file():  # the configuration exists, so only the weights are missing
            raise
        raise FileNotFoundError(f"--vae {name}: {path} doesn't exist; use ema, mse or a folder: {_needs()}") from error
    except KeyError as error:
        raise ValueError(f"--vae {name}: {path} isn't the configuration of a VAE: no {error}; {_needs()}") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--vae {name}: {path} isn't the configuration of a VAE: {reason(path, error)}; {_needs()}"
        ) from error
    if found not in classes:
        raise ValueError(f"--vae {name}: is a {found}, not an {' or '.join(classes)}; {_needs()}")
    return found, config


def _stored_statistics(folder: Path, class_name: str, config: dict[str, Any]) -> dict[str, list[float]]:
    """Return latents_mean and latents_std from a VAE's weights or, for FLUX.2, from its batch norm."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder, STEM):
        with open_safetensors(path) as file:
            found |= {name: file.get_tensor(name) for name in set(file.keys()).intersection(STATISTICS[class_name])}
    if missing := set(STATISTICS[class_name]) - found.keys():
        raise ValueError(f"its weights lack {min(missing)}")
    mean, spread = (found[name].float() for name in STATISTICS[class_name])
    if not (mean.isfinite().all() and spread.isfinite().all() and (spread > 0).all()):
        raise ValueError(f"{' or '.join(STATISTICS[class_name])} among its weights is out of range")
    if class_name == FLUX2:
        return of_batch_norm(mean, spread, config.get("batch_norm_eps", 1e-4))
    return statistics_of(found)


def _needs() -> str:
    return f"--vae PATH needs a folder with {' and '.join(FILES)}, and --vae none trains on pixels"


def vae_folder(name: str) -> Path:
    """Return the folder of ``--vae name``. A VAE from the hub is read from the local cache, or downloaded."""
    if name not in HUB:
        return Path(name).expanduser()
    repository, commit = HUB[name]
    return fetch(repository, commit, FILES, (), f"--vae {name}: {repository}", _needs())


def codec_geometry(name: str, channels: int) -> tuple[int, int]:
    """Return (latent channels, pixels per latent value along a side) of ``--vae name`` without reading its weights.
    channels: the pixels' channels, for ``none``. Raises as :func:`load_codec`."""
    if name == "none":
        return channels, 1
    if name in HUB:
        return 4, 8
    found, config = read_vae_config(name, IMAGE_CLASSES)
    return cast(tuple[int, int], IMAGE_CLASSES[found](config))


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
    """Load the codec of ``--vae name``.

    name: "none" (the latents are the pixels), "ema" or "mse" (Stable Diffusion's fine-tuned VAEs), or a folder with a
    VAE in diffusers' format. channels: the pixels' channels, for "none". Other arguments: see :class:`FrozenVAE`.
    Raises FileNotFoundError or ValueError, naming the flag and the fix, if the VAE is missing or invalid."""
    if name == "none":
        return PixelCodec(channels)
    vae = load_vae(name, IMAGE_CLASSES)
    vae = ADAPTED.get(type(vae).__name__, lambda vae: vae)(vae)
    return VAECodec(vae, name=name, device=device, dtype=dtype, chunk=chunk, tiling=tiling, compiled=compiled)
