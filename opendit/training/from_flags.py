"""What the flags ask for, without making any of it: data, configuration, objective, steps, first weights."""

import math
from dataclasses import replace
from pathlib import Path

from opendit.cli.sample_flags import SampleConfig
from opendit.cli.train_flags import TrainConfig
from opendit.data import BatchSchedule, MediaDataset, build_dataset
from opendit.diffusion import Objective, objective_from_flags
from opendit.encoders.text import check_tokens, text_geometry
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import latent_frames, video_geometry
from opendit.models import DiTConfig, TextConfig, model_config
from opendit.models.adapt import check_same_blocks
from opendit.models.names import patch_size
from opendit.models.zoo import of_revision
from opendit.parallel.sequence.choose import Shape
from opendit.state.pretrained import Weights, assumption, infer_config, read_newest
from opendit.training.memory import BYTES


def open_data(flags: TrainConfig, data_path: str | None = None) -> MediaDataset:
    """The data set of --data_path, or of another one. Raises as ``build_dataset``."""
    return build_dataset(
        data_path or flags.data_path,
        flags.image_size,
        seed=flags.global_seed,
        random_flip=flags.random_flip,
        max_bad=flags.max_bad,
        use_video=flags.use_video,
        num_frames=flags.num_frames,
        frame_interval=flags.frame_interval,
        short_clips=flags.short_clips,
        vae=flags.vae,
        num_classes=flags.num_classes,
        text_encoder=flags.text_encoder or ("bytes" if flags.cross_attention else None),
        max_text_tokens=flags.max_text_tokens,
    )


def settle_captions(flags: TrainConfig, dataset: MediaDataset) -> tuple[TrainConfig, list[str]]:
    """The flags with a text encoder where the data set has captions and none where it has classes, and notes.

    Raises ValueError for flags of captions that the data set does not go with."""
    if dataset.conditioning == "text":
        if flags.num_classes is not None:
            raise ValueError(f"--num_classes: --data_path {flags.data_path} has captions, not classes; leave it out")
        cached = getattr(dataset, "text_encoder", None)
        given = flags.text_encoder
        if cached and given not in (None, "bytes", cached) and str(Path(given).expanduser().resolve()) != cached:
            raise ValueError(f"--text_encoder {flags.text_encoder}: {flags.data_path} was made with {cached}")
        return replace(flags, text_encoder=given or cached or "bytes"), []
    notes, unused = [], {}
    for name in ("text_encoder", "cross_attention", "max_text_tokens"):
        if name in flags.given:
            raise ValueError(f"--{name}: --data_path {flags.data_path} has no captions; give a CSV of path,text")
        if getattr(flags, name):  # a recipe's
            notes.append(f"{name} of --recipe {flags.recipe} is not used: --data_path {flags.data_path} has classes")
            unused[name] = type(flags).__dataclass_fields__[name].default
    return replace(flags, **unused), notes


def plan_model(flags: TrainConfig, dataset: MediaDataset) -> tuple[DiTConfig, Objective, str]:
    """The model's configuration, its objective, and the VAE's name. The configuration is of the newest revision;
    weights that the run starts from may be of an earlier one (:func:`check_pretrained`).

    flags: of :func:`settle_captions`.

    Raises ValueError or OSError, naming the flag and the fix, for sizes and conditions that do not go together.
    """
    vae, channels, size, frames = _latent_geometry(flags, dataset)
    objective = objective_from_flags(flags)
    condition = _condition(flags, dataset)
    config = model_config(
        flags.model,
        input_size=size,
        in_channels=channels,
        frames=frames,
        learn_sigma=objective.learn_sigma,
        **condition,
        **flags.architecture,
    )
    config.check_speed(flags.fp8, flags.recompute)
    if flags.lora is not None and flags.lora >= config.hidden_size:
        raise ValueError(f"--lora {flags.lora}: a rank from 1 to below the width, {config.hidden_size}")
    return config, objective, vae


def sequence_shape(
    flags: TrainConfig | SampleConfig, config: DiTConfig, samples: int, size: tuple[int, ...] | None = None
) -> Shape:
    """What --sequence_parallel_type chooses by: ``samples`` latents at once, of the configured size or of ``size``.

    Raises ValueError if the model can't share samples, or not that way.
    """
    if flags.sequence_parallel_size > 1:
        config.check_sequence_parallel(flags.sequence_parallel_type)
    return Shape(
        tokens=math.prod(config.grid_of(size or config.input_size)),
        hidden=config.hidden_size,
        heads=config.num_heads,
        samples=samples,
        bytes=BYTES[flags.mixed_precision],
        types=flags.sequence_types(config.sequence_types),
    )


def check_pretrained(
    flags: TrainConfig, config: DiTConfig, notes: list[str], resumed: bool = False
) -> tuple[Weights, DiTConfig]:
    """The weights of --pretrained, in CPU memory, and the model's configuration in their revision; of a run that is
    ``resumed``, the configuration as it is.

    Raises ValueError or FileNotFoundError if there are none that this model can start from."""
    weights = read_newest(flags.pretrained, notes=notes)
    if "lora" in weights.info:
        raise ValueError(f"--pretrained {flags.pretrained} holds what --lora adds to {weights.info['lora']['base']}")
    found = config_of(weights, flags.model)
    config = config if resumed else of_revision(config, flags.model, found.revision)
    check_same_blocks(found, config, weights.path)
    notes += assumption(weights, found)
    return weights, config


def config_of(weights: Weights, model: str) -> DiTConfig:
    """What the file says, or what its shapes say of Meta's files."""
    return weights.config or infer_config(weights.state, model, weights.path, weights.num_classes)


def saved_by_adaln_lora(config: DiTConfig) -> str:
    """The note on how many weights --adaln_lora leaves out."""
    full, low = (made.parameters() / 1e6 for made in (replace(config, adaln_lora=None), config))
    share = (full - low) / full
    return f"--adaln_lora {config.adaln_lora} saves {full - low:,.1f} M of {full:,.1f} M weights ({share:.0%})"


def last_step_of(flags: TrainConfig, schedule: BatchSchedule) -> int:
    """The step at which --epochs or --max_steps ends the run."""
    steps = flags.epochs * schedule.steps_per_epoch
    return min(steps, flags.max_steps or steps)


def _condition(flags: TrainConfig, dataset: MediaDataset) -> dict:
    """What the model is conditioned on, as arguments of model_config: num_classes or text."""
    if dataset.conditioning == "text":
        name, cached = flags.text_encoder, getattr(dataset, "text_encoder", None)
        kind, width, longest = text_geometry(name)
        tokens = flags.max_text_tokens or (dataset.max_tokens if cached and name != "bytes" else longest)
        check_tokens(name, kind, longest, tokens)
        return {"text": TextConfig(kind, width, tokens, flags.cross_attention)}
    if (flags.num_classes or dataset.num_classes) < dataset.num_classes:
        raise ValueError(
            f"--num_classes {flags.num_classes}: --data_path {flags.data_path} has {dataset.num_classes} classes, "
            f"labels 0 to {dataset.num_classes - 1}; leave the flag out or raise it"
        )
    return {"num_classes": flags.num_classes or dataset.num_classes}


def _check_decodes(flags: TrainConfig, channels: int, side: int) -> None:
    """Raises ValueError if the VAE of --vae has latents of another shape than those of --data_path."""
    theirs, downscale = video_geometry(flags.vae, 3)[:2] if flags.use_video else codec_geometry(flags.vae, 3)
    if (theirs, flags.image_size // downscale) != (channels, side):
        raise ValueError(
            f"--vae {flags.vae}: a picture of {flags.image_size} px has {theirs} x {flags.image_size // downscale} x "
            f"{flags.image_size // downscale} latents, --data_path {flags.data_path} has {channels} x {side} x {side}; "
            "name the VAE that made them, or leave the flag out"
        )


def _latent_geometry(flags: TrainConfig, dataset: MediaDataset) -> tuple[str, int, tuple[int, int], int | None]:
    """(the VAE's name, latent channels, latent height and width, latent frames); raises ValueError if sizes don't
    divide."""
    patch = patch_size(flags.model)
    if dataset.kind == "latents":
        channels, *frames, height, width = dataset.sample_shape
        if "vae" in flags.given:
            _check_decodes(flags, channels // 2, width)
        vae = flags.vae if "vae" in flags.given else dataset.vae
        return vae, channels // 2, (height, width), frames[0] if frames else None
    if flags.use_video:
        channels, downscale, temporal = video_geometry(flags.vae, dataset.sample_shape[0])
        frames, side = latent_frames(flags.num_frames, temporal), math.lcm(*patch[1:])
        if frames % patch[0]:
            raise ValueError(
                f"--num_frames {flags.num_frames}: {frames} latent frames do not divide by the {patch[0]} frames of a "
                f"patch of {flags.model}; change it, or take a model with a shorter patch"
            )
    else:
        (channels, downscale), frames, side = codec_geometry(flags.vae, dataset.sample_shape[0]), None, patch
    multiple = downscale * side
    if flags.image_size % multiple:
        raise ValueError(
            f"--image_size {flags.image_size} does not divide by {multiple} (--vae {flags.vae}: {downscale}, patch of "
            f"{flags.model}: {side}); use {max(multiple, round(flags.image_size / multiple) * multiple)}"
        )
    return flags.vae, channels, (flags.image_size // downscale,) * 2, frames
