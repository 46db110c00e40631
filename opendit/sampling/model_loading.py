"""Load a model for sampling: its weights, objective, VAE, text encoder and class names.

ValueErrors name flags of sample.py; ``opendit.sampling.pipeline`` replaces the flags by argument names."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opendit.checkpoint.foreign import EXPERTS, assumption, is_published
from opendit.checkpoint.pretrained import (
    ALONE,
    WeightedLora,
    find_weights,
    load_pretrained,
    read_config,
    read_info,
    weights_in,
)
from opendit.checkpoint.run_folders import checkpoints_in, low_noise_of
from opendit.checkpoint.tensor_set import is_set, open_set
from opendit.common.stages import Background
from opendit.diffusion.guidance import scale_of_family
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, LabelConditioner, PublishedConditioner
from opendit.encoders.folder import KNOWN, encoder_name
from opendit.encoders.text import load_text_encoder, text_geometry
from opendit.encoders.vae import ImageCodec, codec_geometry, load_codec
from opendit.encoders.video_vae import VideoCodec, latent_frames, load_video_codec, video_geometry
from opendit.encoders.vision import PictureTokens
from opendit.models.conditioning import Condition
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.families.public_config import PublicConfig, embedded_guidance, family_of
from opendit.models.zoo import Weights
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.mesh import Mesh
from opendit.sampling.approximate_steps import weak_route

PUBLIC_FPS = 16.0  # default frame rate of public models' clips, as in Wan 2.1
SOURCE_FPS = 24  # frame rate of the training files if the weights don't store one


def check_guidance(
    config: DiTConfig, weights: Weights, scale: float, by: str, every: int, conditioned: bool = True, **asked: Any
) -> None:
    """Raise ValueError if the model does not support a setting of guidance.

    by, every: values of --guidance_by and --guidance_every. conditioned: False to draw without classes and captions.
    asked: other flags of guidance, falsy if not set."""
    path = weights.path
    if conditioned:
        weak_route(config, by)
        if not config.null_class and scale != 1 and by in ("null", "route"):
            raise ValueError(
                f"--cfg_scale {scale:g}: {path} was trained without class dropout, and has no null class "
                "to guide away from; use --cfg_scale 1"
            )
    if asked.get("negative_prompt") is not None and config.text is None:
        raise ValueError(
            f"--negative_prompt: {path} is conditioned on classes, and has none that a picture should be "
            "guided away from but the null class; leave it out"
        )
    if not isinstance(config, PublicConfig) or guidance_of(config, scale) != 1.0:
        return
    # a public model without a second forward pass for guidance
    why = f"does nothing with --cfg_scale {scale:g}, which is no guidance; leave one of them out"
    if family_of(config.family).guidance.formula == "embedded":
        why = f"{path} makes one pass a step, and its guidance no second one; leave the flag out"
    for name, value in {**asked, "guidance_every": every > 1, "guidance_by": by != "null"}.items():
        if value:
            raise ValueError(f"--{name}: {why}")


def vae_of(vae: str | None, weights: Weights) -> str:
    """Return the VAE's name or folder: ``vae``, else the VAE in the weights' metadata, else "ema". Raises ValueError if
    the name is unknown, or if the weights are a folder without a VAE and no VAE is named."""
    stored: Any = weights.info.get("vae")
    if vae is None and stored is None and weights.path.is_dir():
        raise ValueError(f"{weights.path} holds a network alone; give --vae and --text_encoder, its pipeline's folders")
    if vae is None and stored is not None and weights.path.is_dir():  # a diffusers pipeline's folder contains its VAE
        return str(stored)
    text = weights.info.get("text_encoder")  # the suggested command must name it, too
    also = f" --text_encoder {shlex.quote(text)}" if isinstance(text, str) and text not in KNOWN else ""
    return encoder_name("--vae", vae, stored, weights.path, also if also.isprintable() else "") or "ema"


@dataclass
class VaeLoader:
    """Loads the VAE for a model's latents, if possible in a thread (``work``) while the caller reads the weights.
    precision: the model's precision, fp32, bf16 or fp16. tiling, compiled: see ``load_codec``."""

    device: torch.device
    precision: str
    tiling: bool = False
    compiled: bool = False
    work: Background[ImageCodec | VideoCodec] | None = None
    _begun: tuple[str, DiTConfig | None] | None = None

    def begin(self, path: str | Path, which: str, vae: str | None) -> None:
        """Start to load the VAE in a thread. path, which: as for ``find_weights``. vae: as for :func:`vae_of`."""
        try:
            file = find_weights(path, which)
            weights = Weights({}, file, read_info(file))
            name, config = vae_of(vae, weights), weights.config
        except (ValueError, KeyError, TypeError, OSError):
            return
        if name != "none" and (weights.path.suffix != ".json" or weights.info):
            self._begun = name, config
            self.work = Background(lambda: self._load(name, config), name="VAE")

    def get(self, name: str, config: DiTConfig) -> ImageCodec | VideoCodec:
        """Return the VAE. name: a result of :func:`vae_of`. For errors see ``load_codec``."""
        if self.work is None or self._begun not in ((name, config), (name, None)):
            return self._load(name, config)
        return self.work.result()

    def _load(self, name: str, config: DiTConfig | None) -> ImageCodec | VideoCodec:
        """Load a VAE. config: the model's configuration; None for a latent model of pictures."""
        load = load_video_codec if config is not None and config.is_video else load_codec
        # Only the VAE "none" uses ``channels``.
        channels = 0 if config is None else config.in_channels
        settings: dict[str, Any] = dict(tiling=self.tiling, compiled=self.compiled, dtype=encoder_dtype(self.precision))
        return load(name, channels=channels, device=self.device, **settings)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, objective and VAE. The VAE may still be loading. notes: remarks for the user."""

    network: DiT
    weights: Weights
    objective: Objective
    vae: str
    vae_loader: VaeLoader
    notes: list[str]

    def codec(self) -> ImageCodec | VideoCodec:
        """Wait for the VAE and return it. For errors see ``load_codec``."""
        return self.vae_loader.get(self.vae, self.network.config)


def load_model(
    path: str | Path,
    loader: VaeLoader,
    *,
    name: str | None = None,
    which: str = "ema",
    lora: Sequence[WeightedLora] = (),
    second: str | Path | None = None,
    num_classes: int | None = None,
    vae: str | None = None,
    stage: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    mesh: Mesh = ALONE,
) -> LoadedModel:
    """Load a model with ``loader``'s device and precision, and start to load its VAE. second: a run with the second
    network, for a model with two networks. For other arguments and for errors see ``load_pretrained``."""
    notes: list[str] = []
    loader.begin(path if is_published(path) or not lora else lora[0][0], which, vae)
    files = [find_weights(path, which), *(weights_in(folder, which) for folder in checkpoints_in(Path(path)))]
    stored = next(filter(None, map(read_config, files)), None)  # skip damaged checkpoints
    both = _both_of(path, stored, second, which)
    added = {"high": list(lora)} if both is None else _loras_of_experts(lora, which)
    how: dict[str, Any] = dict(name=name, which=which, num_classes=num_classes, notes=notes)
    how |= dict(device=loader.device, dtype=PRECISIONS[loader.precision], stage=stage, mesh=mesh)
    network, weights = load_pretrained(path if both is None else both.high, lora=added["high"], **how)
    if both is not None:
        network.config = replace(both.config, text=network.config.text)
        weights = replace(weights, info=weights.info | {"config": network.config.to_dict()})
        # Load both networks from the same checkpoint, even if the newest checkpoint is damaged.
        low = (low_noise_of(weights.path) if second is None else None) or both.low
        network.second, _ = load_pretrained(low, lora=added["low"], **how)
    notes += assumption(weights, network.config)
    objective = objective_from_dict(weights.info.get("objective"))
    return LoadedModel(network, weights, objective, vae_of(vae, weights), loader, notes)


class BothNetworks(NamedTuple):
    """A model with two networks: its configuration, and the paths of the high-noise and the low-noise network."""

    config: PublicConfig
    high: str | Path
    low: str | Path


def _both_of(path: str | Path, config: DiTConfig | None, second: str | Path | None, which: str) -> BothNetworks | None:
    """Return a model's two networks; None for a model with one. Raises ValueError if one is missing or doesn't fit."""
    two = config if isinstance(config, PublicConfig) and config.boundary is not None else None
    second = low_noise_of(path) if second is None else second
    if second is not None and (two is None or two.expert is None):
        raise ValueError(f"--second_ckpt {second}: {path} is no run of one network of two; leave it out")
    if two is None:
        return None
    if two.expert is None:
        low = next(inside for inside, expert in EXPERTS.items() if expert == "low")
        return BothNetworks(two, path, Path(path) / low)
    if second is None:
        raise ValueError(
            f"{path}: holds the {two.expert}-noise network alone; give the other one's run to --second_ckpt, or "
            "draw with --ckpt FOLDER, of both, and --lora; or export it (python -m opendit.export diffusers)"
        )
    other = read_config(find_weights(second, which))
    if (
        not isinstance(other, PublicConfig)
        or (other.family, other.published, other.boundary) != (two.family, two.published, two.boundary)
        or {other.expert, two.expert} != set(EXPERTS.values())
    ):
        raise ValueError(
            f"--second_ckpt {second}: is not the other network than {path}, which holds the {two.expert}-noise one; "
            "give a run of that one"
        )
    both = replace(two, index=two.index_of_both)
    return BothNetworks(both, path, second) if two.expert == "high" else BothNetworks(both, second, path)


def _loras_of_experts(lora: Sequence[WeightedLora], which: str) -> dict[str, list[WeightedLora]]:
    """Group LoRAs by their network, "high" or "low". Raises ValueError for a file that does not name its network."""
    found: dict[str, list[WeightedLora]] = {expert: [] for expert in EXPERTS.values()}
    for each, weight in lora:
        file = find_weights(each, which)
        added = getattr(read_config(file), "expert", None)
        if added is None and is_set(file):
            with open_set(file) as tensors:
                added = tensors.metadata.get("expert")
        if added not in found:
            raise ValueError(
                f"--lora {each}: does not say which of the two networks it is for; give runs of --expert, or files "
                "that opendit export lora has made of them"
            )
        found[added].append((each, weight))
        if (low := low_noise_of(each)) is not None:
            found["low"].append((low, weight))
    return found


def encoder_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the VAE and the text encoder: float32 for fp32 models, otherwise float16."""
    return torch.float32 if precision == "fp32" else torch.float16


def text_encoder_of(name: str | None, weights: Weights) -> str:
    """Return the text encoder's name: ``name``, by default the encoder in the weights' metadata. Raises ValueError if
    the name is unknown, or if the encoder does not fit the model."""
    text = weights.config and weights.config.text
    assert text is not None  # only models with captions get here
    stored: str = weights.info.get("text_encoder") or text.name
    if name is None and weights.path.is_dir():  # a public model's folder contains its encoders
        return stored
    name = encoder_name("--text_encoder", name, stored, weights.path) or stored
    kind, width, _ = text_geometry(name)
    if (kind, width) != (text.name, text.width):
        raise ValueError(
            f"--text_encoder {name}: is a {kind} of width {width}; {weights.path} was trained with a {text.name} of "
            f"width {text.width}"
        )
    return name


def check_text_encoder(name: str | None, text_precision: str, config: DiTConfig, weights: Weights) -> None:
    """Raise ValueError if a flag of the text encoder is set for a model that needs no text encoder."""
    if config.text is None or config.text.inside:
        has = "is conditioned on classes" if config.text is None else "holds its encoder of captions"
        for flag, given in (("text_encoder", name is not None), ("text_precision", text_precision != "bf16")):
            if given:
                raise ValueError(f"--{flag}: {weights.path} {has}; leave the flag out")


def make_conditioner(
    config: DiTConfig,
    weights: Weights,
    text_encoder: str | None,
    device: torch.device,
    precision: str,
    text_precision: str = "bf16",
) -> Conditioner:
    """Return a model's conditioner, with the frozen text encoder if needed. For errors see :func:`text_encoder_of`."""
    if config.text is None:
        assert config.num_classes is not None
        return LabelConditioner(config.num_classes, device)
    if config.text.inside:
        return CaptionConditioner(config.text, device)
    if isinstance(config, PublicConfig):
        return published_conditioner(config, weights, text_encoder, device, precision, text_precision)
    how: dict[str, Any] = dict(device=device, max_tokens=config.text.max_tokens, precision=text_precision)
    encoder = load_text_encoder(text_encoder_of(text_encoder, weights), dtype=encoder_dtype(precision), **how)
    return CaptionConditioner(config.text, device, encoder)


def published_conditioner(
    config: PublicConfig,
    weights: Weights,
    text_encoder: str | None,
    device: torch.device,
    precision: str,
    text_precision: str = "bf16",
) -> PublishedConditioner:
    """Return a public model's conditioner, with the text encoders from its pipeline's folder. Raises ValueError or
    FileNotFoundError if a file is missing or belongs to another model."""
    from opendit.encoders.published_text import load_published_text, text_widths

    stored = weights.info.get("text_encoder")
    name = stored if text_encoder is None and weights.path.is_dir() else None
    name = name or encoder_name("--text_encoder", text_encoder, stored, weights.path)
    if name is None:
        raise ValueError(f"--text_encoder: {weights.path} has none; give the folder of a pipeline that has")
    folder, family = Path(name).expanduser(), family_of(config.family)
    widths = text_widths(folder, family)
    if widths != (config.spec.text.width, config.spec.text.pooled):
        raise ValueError(
            f"--text_encoder {folder}: is of width {widths[0]}, the network takes {config.spec.text.width}; name the "
            "folder of its own pipeline"
        )
    assert config.text is not None
    how: dict[str, Any] = dict(device=device, dtype=PRECISIONS[precision], max_tokens=config.text.max_tokens)
    encoder = load_published_text(folder, family, precision=text_precision, **how)
    pictures = PictureTokens(folder, width, device) if (width := config.spec.text.picture) else None
    return PublishedConditioner(config.text, device, encoder, embedded_guidance(config), pictures=pictures)


def guidance_of(config: DiTConfig, scale: float) -> float:
    """Convert a guidance scale from the convention of the model's pipeline to the sampling engine's."""
    if not isinstance(config, PublicConfig):
        return scale
    guidance = family_of(config.family).guidance
    # some networks, such as FLUX.1-schnell's, have no guidance input
    if guidance.formula == "embedded" and not config.spec.guidance:
        return 1.0
    return scale_of_family(guidance, scale)


def usual_settings(config: DiTConfig, steps: int, scale: float, weights: Weights | None = None) -> tuple[int, float]:
    """Return the default (number of steps, guidance scale) of a public model or MeanFlow, else the arguments."""
    if not isinstance(config, PublicConfig):
        made_for_few = weights is not None and weights.info.get("objective", {}).get("name") == "meanflow"
        return (2, 1.0) if made_for_few else (steps, scale)
    family, variant = family_of(config.family), config.variant
    if family.distilled is not None and weights is not None and weights.info.get("distilled"):
        return family.distilled
    return (family.steps, family.guidance.scale) if variant is None else (variant.steps, variant.scale)


def class_names(config: DiTConfig, weights: Weights) -> list[str]:
    """Return the names of a model's classes. The name of an unnamed class is its number."""
    assert config.num_classes is not None
    names = [*(weights.info.get("class_names") or [])]
    return names + [str(number) for number in range(len(names), config.num_classes)]


def null_of(conditioner: Conditioner, negative: str | None) -> Condition:
    """Return the condition of guidance's unconditional half, as a batch of one."""
    if negative is None:
        return conditioner.null()
    assert isinstance(conditioner, CaptionConditioner)
    return conditioner.encode([negative], away=True)


def latent_size(
    config: DiTConfig,
    weights: Weights,
    vae: str,
    num_frames: int | None = None,
    image_size: int | Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the size of the latents to draw, (h, w) or (t, h, w). Raises ValueError if an argument does not fit the
    model. num_frames: by default as in training. image_size: the side, or (height, width), in pixels."""
    *frames, height, width = config.input_size
    if frames:
        channels, downscale, temporal = video_geometry(vae, config.in_channels)
        if num_frames is not None:
            frames = [latent_frames(num_frames, temporal)]
    else:
        channels, downscale = codec_geometry(vae, config.in_channels)
    if isinstance(config, PublicConfig):
        return _any_size(config, image_size, tuple(frames), downscale)
    if channels != config.in_channels:
        raise ValueError(f"--vae {vae}: has {channels} channels, the model {config.in_channels}; name the model's VAE")
    pixels = (height * downscale, width * downscale)
    if image_size is not None and image_size != pixels[0] and _sides(image_size) != pixels:
        shown = _shown(image_size)
        raise ValueError(f"--image_size {shown}: {weights.path} draws {pixels[0]} x {pixels[1]}; leave the flag out")
    # Raises ValueError for frames that don't fill a patch.
    grid = config.grid_of((*frames, height, width))
    if config.positions == "learned" and grid[0] > config.grid[0]:  # only the number of frames may differ from training
        most = (config.grid[0] * config.patch[0] - 1) * temporal + 1
        raise ValueError(f"--num_frames {num_frames}: {weights.path} has learned fewer positions; give {most} at most")
    return (*frames, height, width)


def _sides(image_size: int | Sequence[int]) -> tuple[int, ...]:
    """Return height and width. image_size: see :func:`latent_size`."""
    return tuple(image_size) if isinstance(image_size, Sequence) else (image_size, image_size)


def _shown(image_size: int | Sequence[int]) -> str:
    """Return the size as it was given: a list by the command line, a tuple from Python."""
    return " ".join(map(str, image_size)) if isinstance(image_size, list) else str(image_size)


def _any_size(
    config: PublicConfig, image_size: int | Sequence[int] | None, frames: tuple[int, ...], downscale: int
) -> tuple[int, ...]:
    """Return the size of the latents for a public model. Raises ValueError if a side is not a multiple of a patch's
    pixels, or exceeds the table of positions."""
    if image_size is None:
        return (*frames, *config.input_size[-2:])
    sides, unit = _sides(image_size), downscale * config.patch[-1]
    if any(side % unit for side in sides):
        near = [max(unit, side // unit * unit) for side in sides]
        of_both = near if isinstance(image_size, list) else tuple(near)
        fix = of_both if isinstance(image_size, Sequence) else near[0]
        raise ValueError(f"--image_size {_shown(image_size)}: does not divide by {unit}; give {_shown(fix)}")
    config.check_side(max(sides) // unit)
    return (*frames, *(side // downscale for side in sides))


def frames_per_second(weights: Weights, frame_interval: int | None = None) -> float:
    """Return the frame rate of generated clips: the rate in the weights' metadata, else SOURCE_FPS / interval.
    frame_interval: replaces the training interval, except for a public model's folder."""
    if weights.path.is_dir() and weights.config is not None and isinstance(weights.config, PublicConfig):
        return weights.info.get("clip_fps", PUBLIC_FPS)
    if (known := weights.info.get("clip_fps")) is not None:
        return known * weights.info.get("frame_interval", 1) / (frame_interval or weights.info.get("frame_interval", 1))
    return max(1.0, SOURCE_FPS / (frame_interval or weights.info.get("frame_interval", 1)))
