"""Specification of a training run: the settings and objects that prepare() has checked, before the model is built."""

import math
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from opendit.checkpoint.load import Checkpoint
from opendit.checkpoint.pretrained import read_info, table_notes
from opendit.checkpoint.tensor_set import compare
from opendit.config.flags import to_dict
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, MediaDataset, build_schedule
from opendit.data.base import BadSample, Embedding
from opendit.data.shaped import crop_media, shape_latents, token_size
from opendit.diffusion.objectives import Objective, objective_from_dict
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.diffusion.random import Stream, uniform
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.folder import KNOWN
from opendit.encoders.vae import ImageCodec, codec_geometry
from opendit.encoders.video_vae import VideoCodec, video_geometry
from opendit.encoders.vision import CachedTeacher, VisionTeacher
from opendit.kernels.select import KernelChoice
from opendit.models.conditioning import Condition
from opendit.models.dit import DiTConfig
from opendit.models.lora import Lora
from opendit.models.weights import Weights
from opendit.models.zoo import config_from_dict, model_shapes
from opendit.parallel.apply import Sharding
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import PipelineStages
from opendit.parallel.sequence import SequenceParallel
from opendit.training.memory import USABLE, Setup, resolve_sharding
from opendit.training.micro_batch import Latents


@dataclass
class RunSpecification:
    """A checked training run whose model and engine are not built yet."""

    flags: TrainConfig
    mesh: Mesh
    dataset: MediaDataset
    schedule: BatchSchedule
    model_config: DiTConfig
    codec: ImageCodec | VideoCodec | None  # None for cached latents whose VAE can't be loaded
    vae: str
    conditioner: Conditioner
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    stages: PipelineStages | None  # this rank's stages of the pipeline; None without a pipeline
    why_not_compiled: str | None  # reason; None if blocks are compiled
    memory: Setup
    sharding: Sharding | None  # settings by which --plugin fsdp divides the model
    folder: Path
    lock: AbstractContextManager[Any]  # lock on the run's folder, held while the run writes to the folder
    resume: Checkpoint | None
    first_step: int
    last_step: int
    initial: Weights | None
    initial_config: DiTConfig | None  # configuration of the model that `initial` belongs to
    lora: Lora | None
    notes: list[str]
    ema_warmup: float  # warm-up of the averages, see opendit.checkpoint.ema.EMA
    # number of samples of the configured size that together have as many tokens as a rank's micro-batch
    samples_at_once: int
    teacher: VisionTeacher | CachedTeacher | None = None  # frozen vision encoder of --repa, or its cached features
    validation: MediaDataset | None = None  # samples on which the loss is measured, but which are not trained on
    # captions for sample grids, instead of captions from the data set
    prompts: tuple[list[str], Condition] | None = None
    clip_fps: float | None = None  # frames per second of the clips that the model draws; None if unknown
    fingerprint: dict[str, Any] = field(default_factory=dict)  # see opendit.training.fingerprint
    low: "RunSpecification | None" = None  # low-noise network of --expert both; other fields: high-noise network

    @property
    def networks(self) -> "tuple[RunSpecification, ...]":
        """The specification of each network that the run trains."""
        return (self,) if self.low is None else (self, self.low)

    @cached_property
    def share(self) -> float:
        """Fraction of the steps that train the first network: the fraction of the training times that are this
        network's."""
        objective = self.objective.for_tokens(self.model_config.tokens)
        return 1.0 if self.low is None else cast(FlowObjective, objective).share

    def network_of(self, step: int) -> int:
        """Return the number of the network that a step trains, 0 or 1. It is keyed by the seed and the step."""
        u = uniform(self.flags.global_seed, step, torch.zeros(1, dtype=torch.int64), Stream.EXPERT)
        return int(u >= self.share)

    @property
    def given_frames(self) -> str | None:
        """Conditioning frames of the training clips, as in --given_frames.

        A model with conditioning frames in place can also train without conditioning frames, so for such a model the
        flag decides. For other models, the configuration decides.
        """
        config = self.model_config
        return self.flags.given_frames if config.given_in_place else config.given_frames

    @property
    def latents(self) -> Latents:
        """Return the function that converts items of the data set to latents."""
        return self.latents_of(self.dataset, self.flags.global_seed)

    def latents_of(self, dataset: MediaDataset, seed: int) -> Latents:
        """Return the function that converts items of another data set of the same kind to latents. The VAE's noise is
        keyed by ``seed``."""
        about, cached = dataset.describe(), None
        if about.scaling_factor is not None and about.shift_factor is not None:
            cached = about.scaling_factor, about.shift_factor
        return Latents(self.codec, cached, self.vae != "none", seed)

    @property
    def skipped_before(self) -> int:
        """Return the number of steps that the run had skipped before this start."""
        return self.resume.state["skipped"] if self.resume else 0

    def flag_values(self) -> dict[str, Any]:
        """Return every flag and its value."""
        return to_dict(self.flags)

    def info(self) -> dict[str, Any]:
        """Return the metadata of this run's weights files."""
        return {
            "model": self.flags.model,
            "config": self.model_config.to_dict(),
            "objective": self.objective.to_dict(),
            "class_names": self.dataset.describe().class_names,
            "captions": example_captions(self.dataset),
            "vae": _path_or_name(self.vae),
            "text_encoder": _path_or_name(self.flags.text_encoder),
            **({"sampler": "unipc"} if getattr(self.objective, "discrete_times", False) else {}),
            "image_size": self.flags.image_size,
            "frame_interval": self.flags.frame_interval,
            **({"fps": self.flags.fps} if self.flags.fps is not None else {}),
            **({"clip_fps": self.clip_fps} if self.clip_fps is not None else {}),
            **({"lora": self.lora.to_dict()} if self.lora else {}),
        }


def example_captions(dataset: MediaDataset, count: int = 16) -> list[str]:
    """Return distinct captions, spread evenly over the data set. Sample grids show these captions if the user gives no
    captions.

    Rows that can't be read are left out; the data loader replaces and counts such rows.
    """
    return list(_example_rows(dataset, count))


def _example_rows(dataset: MediaDataset, count: int) -> dict[str, int]:
    """Return the captions for :func:`example_captions`. Each caption is mapped to the index of a row with this
    caption."""
    if dataset.describe().conditioning != "text":
        return {}
    found: dict[str, int] = {}
    for row in range(0, len(dataset), max(1, len(dataset) // (4 * count))):
        with suppress(BadSample):
            found.setdefault(cast(str, dataset.caption(row)), row)
    return dict(list(found.items())[:count])


def example_embeddings(dataset: MediaDataset, count: int = 16) -> tuple[list[str], Embedding]:
    """Return the captions of :func:`example_captions` and their embeddings, for a data set with cached embeddings."""
    found: dict[str, Embedding] = {}
    for caption, row in _example_rows(dataset, count).items():
        with suppress(BadSample):
            found[caption] = cast(Embedding, dataset.read(row).embedding)
    return list(found), Embedding(*map(torch.stack, zip(*found.values(), strict=True)))


def _path_or_name(value: str | None) -> str | None:
    """Return an encoder's path or name as it is stored in checkpoints: a folder's path becomes absolute, and a name
    does not change."""
    folder = value is not None and value not in KNOWN and Path(value).expanduser()
    return str(folder.resolve()) if folder and folder.exists() else value


def choose_sharding(config: DiTConfig, setup: Setup, batch: int, capacity: float | None) -> Sharding:
    """Choose the sharding. Settings that the flags leave open get the values with the least traffic with which, by the
    estimate, a step fits in memory.

    Args:
        batch: samples of a micro-batch on a rank.
        capacity: bytes of a GPU's memory; None on a CPU, where everything is assumed to fit.
    """
    resolved = resolve_sharding(config, setup, batch, None if capacity is None else USABLE * capacity)
    return Sharding(
        reduce_dtype=PRECISIONS[resolved.reduce_dtype],
        keep_gathered=resolved.reshard == "never",
        keep_gradients=cast(bool, resolved.keep_gradients),  # resolve_sharding has replaced None
        gather_float8=setup.gathers_float8,
        hosted=setup.streamed,
    )


def shape_samples(flags: TrainConfig, dataset: MediaDataset, config: DiTConfig) -> MediaDataset:
    """Resize the samples of the data set for --bucket_tokens or --pack_tokens. Without these flags, return the data set
    unchanged.

    Raises:
        ValueError: the model or the data set can't be used with the flag. The message names the flag and the fix.
    """
    if flags.tokens is None:
        latents = dataset.shapes().latents
        if config.positions == "learned" and latents and len({size[1:] for _, size in latents()}) > 1:
            raise ValueError(
                f"--data_path {flags.data_path}: samples of several sizes, but this model has learned positions, of "
                "one size; give --positions sincos or rope"
            )
        return dataset
    flag = "--bucket_tokens" if flags.pack_tokens is None else "--pack_tokens"
    caption = 0 if flags.pack_tokens is None else config.caption_tokens
    if flags.pack_tokens is not None:
        config.check_packs()
        if config.joint_sequence and flags.sequence_parallel_size > 1:
            raise ValueError(
                f"{flag} {flags.tokens}: ranks can't share the packs of a model whose captions are tokens of the "
                "sequence; leave --sequence_parallel_size out, or give --bucket_tokens"
            )
    if config.positions == "learned":
        raise ValueError(
            f"{flag} {flags.tokens}: this model has learned positions, of one size; give --positions sincos or rope"
        )
    about = dataset.describe()
    if about.kind == "latents":
        return shape_latents(dataset, token_size(config.patch), flags.tokens, flag, beside=caption)
    if caption and flags.tokens < config.tokens + caption:
        raise ValueError(
            f"{flag} {flags.tokens}: a picture of --image_size {flags.image_size} has {config.tokens:,} tokens and its "
            f"caption up to {caption:,} more; raise it to {config.tokens + caption} at least"
        )
    channels = about.sample_shape[0]
    if flags.use_video:
        _, downscale, temporal = video_geometry(flags.vae, channels)
    else:
        downscale, temporal = codec_geometry(flags.vae, channels)[1], 1
    return crop_media(
        dataset,
        token_size(config.patch, downscale, temporal),
        flags.tokens - caption,
        flag,
        image_size=flags.image_size,
        num_frames=flags.num_frames if flags.use_video else 1,
        frame_interval=flags.frame_interval,
        short_clips=flags.short_clips,
        fps=flags.fps,
        max_upscale=flags.max_upscale,
        fine=flags.pack_tokens is not None,
    )


def make_schedule(
    flags: TrainConfig,
    dataset: MediaDataset,
    global_batch: int,
    config: DiTConfig,
    parts: int | None = None,
) -> BatchSchedule:
    """Return the order in which the run trains on the samples of :func:`shape_samples`.

    Raises the same errors as ``build_schedule``.

    Args:
        parts: number of parts into which a step is divided; all samples of a part have one shape. None for the number
            of micro-batches.
    """
    return build_schedule(
        dataset,
        global_batch,
        parts or flags.grad_accumulation,
        flags.global_seed,
        bucket_tokens=flags.bucket_tokens,
        pack_tokens=flags.pack_tokens,
        caption_tokens=config.caption_tokens,
        attention=attention_length(config),
    )


def parts_of_run(stored: dict[str, Any], flags: TrainConfig, global_batch: int, experts: int) -> int | None:
    """Return the number of parts in a step of a resumed run, as its checkpoint records it. All samples of a part have
    one shape.

    Return None if the number is unknown, or if a micro-batch of a rank would contain samples of two parts.

    Args:
        stored: the checkpoint's fingerprint.
        experts: number of ranks that divide the experts. Their micro-batches must have one shape.
    """
    split = str(stored.get("split", "")).split(" x ")
    # Older checkpoints have no "parts"; in these, the number of parts equals the number of micro-batches.
    parts = stored.get("parts", int(split[2]) if len(split) == 3 else None)
    if parts is None or stored.get("global_batch") != global_batch or global_batch % parts:
        return None
    within = (global_batch // parts) % flags.batch_size == 0
    return parts if within and (experts == 1 or flags.grad_accumulation % parts == 0) else None


def attention_length(config: DiTConfig) -> float:
    """Return the number of tokens per sample at which attention takes as many FLOPs as the linear layers."""
    return config.hidden_size * (2 + config.mlp_ratio)


def samples_at_once(flags: TrainConfig, config: DiTConfig) -> int:
    """Return the number of samples of the configured size, rounded up, that together have as many tokens as a rank's
    micro-batch."""
    if flags.tokens is None:
        return flags.batch_size
    tokens = config.tokens + (config.caption_tokens if flags.pack_tokens is not None else 0)
    return math.ceil(flags.batch_size * flags.tokens / tokens)


def check_resume(checkpoint: Checkpoint, config: DiTConfig, objective: Objective, adds: bool) -> list[str]:
    """Check that the run can resume from a checkpoint. Return notes to print.

    Args:
        adds: True if the run trains only the layers of ``--lora``.

    Raises:
        ValueError: the checkpoint contains another model, a model trained with another objective, or weights that don't
            fit the checkpoint's configuration.
    """
    folder, info = checkpoint.folder, read_info(checkpoint.model)
    if "config" not in info:
        raise ValueError(f"--load: {checkpoint.model} does not say which model it holds; load another checkpoint")
    found = config_from_dict(info["config"])
    if ("lora" in info) != adds:
        raise ValueError(f"--load: {folder} was made with{'out' if adds else ''} --lora; do so again")
    if found != config:
        there, here = found.to_dict(), config.to_dict()
        differences = [
            f"{key} {there.get(key)} there, {here.get(key)} here"
            for key in dict.fromkeys([*there, *here])
            if there.get(key) != here.get(key)
        ]
        raise ValueError(
            f"--load: {folder} is a checkpoint of another model ({', '.join(differences)}); give that model's flags"
        )
    if not adds:
        _check_shapes(checkpoint, config)
    then = objective_from_dict(info.get("objective") or checkpoint.state.get("objective")).predicts
    if then != objective.predicts:
        flags = " ".join(f"--{name} {value}" for name, value in then.items())
        raise ValueError(
            f"--load: the model in {folder} learned another objective; repeat its {flags}, or give it to --pretrained "
            "to start from its weights"
        )
    with checkpoint.open(checkpoint.model.name) as tensors:
        notes = table_notes(config, tensors, checkpoint.model)
    if not checkpoint.damaged:
        return notes
    return [*notes, f"--load: {'; '.join(checkpoint.damaged)}; going on from {folder}, the newest that is intact"]


def _check_shapes(checkpoint: Checkpoint, config: DiTConfig) -> None:
    """Raise ValueError if the files of weights and averages don't have the shapes of the model ``config``.

    Only the headers of the files are read.
    """
    own = model_shapes(config)[0]
    for name in (checkpoint.model.name, *checkpoint.state["ema"]["files"]):
        with checkpoint.open(name) as tensors:
            tensors.check_floats()
            theirs = {key: shape for key, shape in tensors.shapes.items() if key in own}
        compare(own, theirs, checkpoint.folder / name)
