"""From sample.py's flags to a model, its VAE and what to draw, checked before weights are read where possible."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opendit.diffusion import Objective, objective_from_dict
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, LabelConditioner, preview_labels
from opendit.encoders.folder import encoder_name
from opendit.encoders.text import load_text_encoder, text_geometry
from opendit.encoders.vae import ImageCodec, codec_geometry, load_codec
from opendit.encoders.video_vae import VideoCodec, latent_frames, load_video_codec, video_geometry
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models import Condition, DiT, DiTConfig
from opendit.models.weights import Weights
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.guidance import Replica, make_replicas
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.choose import make_plan
from opendit.state.checkpoint import newest_run
from opendit.state.lock import lock_folder
from opendit.state.pretrained import assumption, find_weights, load_pretrained, read_config
from opendit.training.from_flags import sequence_shape

if TYPE_CHECKING:
    from opendit.cli.sample_flags import SampleConfig

SOURCE_FPS = 24  # of the files that clips were read from, as --frame_interval counts


@dataclass
class SamplingRun:
    """A run of sample.py, checked. Sample number i draws ``choices[i]``: a class, or a row of the prompts."""

    flags: "SampleConfig"
    mesh: Mesh
    replica: Replica
    model: DiT
    codec: ImageCodec | VideoCodec | None  # only the rank that leads a replica has one
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    conditioner: Conditioner
    conditions: Condition  # of every class or prompt
    choices: Tensor
    names: list[str]  # of every class or prompt
    size: tuple[int, ...]  # of the latents
    fps: float
    source: Path
    lock: AbstractContextManager  # the right to write to --output
    notes: list[str]

    @property
    def captions(self) -> list[str]:
        """What every sample shows."""
        return [self.names[choice] for choice in self.choices.tolist()]


def prepare(flags: "SampleConfig", mesh: Mesh) -> SamplingRun:
    """Loads the model and its VAE. Raises ValueError or OSError with a message for the user."""
    flags, notes = flags.settled(mesh.world_size, mesh.device.type == "cuda")
    lock, more = lock_folder(Path(flags.output), mesh, "--output", "wait for its end, or give another --output")
    try:
        return _load(flags, mesh, lock, notes + more)
    except BaseException:
        lock.__exit__(None, None, None)
        raise


def _load(flags: "SampleConfig", mesh: Mesh, lock: AbstractContextManager, notes: list[str]) -> SamplingRun:
    ckpt = flags.ckpt
    if ckpt == "latest":
        found = newest_run(flags.outputs, flags.model, flags.use_video)
        if found is None:
            raise ValueError(f"--ckpt latest: no run with a checkpoint under --outputs {flags.outputs}; give a path")
        ckpt = found
    shared = (flags, flags.attention, flags.mixed_precision)  # of what a strategy for sharing sequences depends on
    if mesh.sp_size > 1 and (stored := read_config(find_weights(ckpt, flags.weights))):
        # What sequence_parallel would refuse, before the weights are read.
        make_plan(flags.sequence_parallel_type, mesh.sp_size, sequence_shape(*shared, stored, samples_at_once(flags)))
    model, weights = load_pretrained(ckpt, flags.model, flags.weights, flags.lora, flags.num_classes, notes)
    config = model.config
    notes += assumption(weights, config)
    if not config.null_class and flags.cfg_scale != 1:
        raise ValueError(
            f"--cfg_scale {flags.cfg_scale:g}: {weights.path} was trained without class dropout, and has no null class "
            "to guide away from; use --cfg_scale 1"
        )
    check_fits(flags, config, weights.path)
    objective = objective_from_dict(weights.info.get("objective"))
    objective.choose(flags.sampler)
    dtype = PRECISIONS[flags.mixed_precision]
    size = latent_size(flags, model, weights)
    if flags.fp8:
        config.check_speed(True, "none")
    replica = make_replicas(mesh, flags.cfg_parallel)
    shape = sequence_shape(*shared, config, samples_at_once(flags), size)
    sequence = sequence_parallel(mesh, flags.sequence_parallel_type, shape)
    kernels = select_kernels(flags, mesh.device, dtype, config.hidden_size // config.num_heads, config.tokens)
    model.place(mesh.device, dtype).eval().use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)
    half = torch.float32 if flags.mixed_precision == "fp32" else torch.float16  # closer to fp32 than bf16 for a VAE
    codec = None
    if replica.leads:
        load = load_video_codec if config.is_video else load_codec
        codec = load(vae_of(flags, weights), channels=config.in_channels, device=mesh.device, dtype=half)
    conditioner, conditions, choices, names = what_to_draw(flags, model, weights, half, mesh)
    if len(choices) < replica.count:
        notes.append(
            f"processes: {replica.count - len(choices)} of the {replica.count} groups have nothing to draw; "
            "--sequence_parallel_size and --cfg_parallel let several processes share a sample"
        )
    interval = flags.frame_interval or weights.info.get("frame_interval", 1)
    return SamplingRun(
        flags=flags,
        mesh=mesh,
        replica=replica,
        model=model,
        codec=codec,
        objective=objective,
        kernels=kernels,
        sequence=sequence,
        conditioner=conditioner,
        conditions=conditions,
        choices=choices,
        names=names,
        size=size,
        fps=max(1.0, SOURCE_FPS / interval),
        source=weights.path,
        lock=lock,
        notes=notes,
    )


def check_fits(flags: "SampleConfig", config: DiTConfig, path: Path) -> None:
    """Raises ValueError for flags that this model has no use for."""
    if not config.is_video:
        for name in ("use_video", "num_frames", "frame_interval"):
            if getattr(flags, name):
                raise ValueError(f"--{name}: {path} draws pictures; leave the flag out")
    if flags.text_encoder is not None and (config.text is None or config.text.inside):
        has = "is conditioned on classes" if config.text is None else "holds its encoder of captions"
        raise ValueError(f"--text_encoder: {path} {has}; leave the flag out")
    if flags.cfg_channels is not None and flags.cfg_channels > config.in_channels:
        raise ValueError(f"--cfg_channels {flags.cfg_channels}: {path} has {config.in_channels} channels")


def vae_of(flags: "SampleConfig", weights: Weights) -> str:
    """The VAE to draw with. Raises ValueError for one that the weights' metadata alone names and that isn't known."""
    return encoder_name("--vae", flags.vae, weights.info.get("vae"), weights.path) or "ema"


def text_encoder_of(flags: "SampleConfig", weights: Weights) -> str:
    """The frozen text encoder of a model's prompts, as :func:`vae_of`. Raises ValueError, too, for one of another kind
    or width than the model's."""
    text = weights.config.text
    stored = weights.info.get("text_encoder") or text.name
    name = encoder_name("--text_encoder", flags.text_encoder, stored, weights.path)
    kind, width, _ = text_geometry(name)
    if (kind, width) != (text.name, text.width):
        raise ValueError(
            f"--text_encoder {name} is a {kind} of width {width}; {weights.path} was trained with a {text.name} of "
            f"width {text.width}"
        )
    return name


def latent_size(flags: "SampleConfig", model: DiT, weights: Weights) -> tuple[int, ...]:
    """(h, w) or (t, h, w) to draw. Raises ValueError if a flag does not fit the model or its VAE."""
    config, vae = model.config, vae_of(flags, weights)
    *frames, height, width = config.input_size
    if frames:
        channels, downscale, temporal = video_geometry(vae, config.in_channels)
        if flags.num_frames is not None:
            frames = [latent_frames(flags.num_frames, temporal)]
    else:
        channels, downscale = codec_geometry(vae, config.in_channels)
    if channels != config.in_channels:
        raise ValueError(f"--vae {vae} has {channels} channels, the model {config.in_channels}; name the model's VAE")
    if flags.image_size not in (None, height * downscale):
        raise ValueError(
            f"--image_size {flags.image_size}: {weights.path} draws {height * downscale} x {width * downscale}; leave "
            "the flag out"
        )
    grid = config.grid_of((*frames, height, width))  # raises ValueError if the patch does not divide the frames
    if config.positions == "learned" and grid[0] > config.grid[0]:  # (the other sides are the model's own)
        most = (config.grid[0] * config.patch[0] - 1) * temporal + 1
        raise ValueError(f"--num_frames {flags.num_frames}: {weights.path} has learned the positions of {most} at most")
    return (*frames, height, width)


def samples_at_once(flags: "SampleConfig") -> int:
    """That the model is given in one call: with guidance both halves, unless other processes have one of them."""
    return flags.batch_size * (1 if flags.cfg_scale == 1 or flags.cfg_parallel else 2)


def what_to_draw(
    flags: "SampleConfig", model: DiT, weights: Weights, dtype: torch.dtype, mesh: Mesh
) -> tuple[Conditioner, Condition, Tensor, list[str]]:
    """The conditioner, the condition of every class or prompt, every sample's choice of them, and their names.

    Raises ValueError for classes that the model does not have, or for prompts given to a class model and the other
    way round.
    """
    text, info = model.config.text, weights.info
    if text is None:
        if flags.prompt:
            raise ValueError(f"--prompt: {weights.path} is conditioned on classes; use --class_labels")
        names = [*(info.get("class_names") or [])]
        names += [str(i) for i in range(len(names), model.config.num_classes)]
        choices = choose(flags, len(names))
        return LabelConditioner(len(names), mesh.device), torch.arange(len(names), device=mesh.device), choices, names
    if flags.class_labels:
        raise ValueError(f"--class_labels: {weights.path} is conditioned on captions; use --prompt")
    prompts = read_prompts(flags.prompt) or info.get("captions") or [""]
    encoder = None
    if not text.inside:
        name = text_encoder_of(flags, weights)
        encoder = load_text_encoder(name, device=mesh.device, dtype=dtype, max_tokens=text.max_tokens)
    conditioner = CaptionConditioner(text, mesh.device, encoder)
    choices = torch.arange(flags.num_samples or len(prompts)) % len(prompts)
    return conditioner, conditioner.encode(prompts), choices, prompts


def read_prompts(given: list[str]) -> list[str]:
    """The prompts of --prompt: as they are, or the lines of one text file."""
    if len(given) == 1 and given[0].endswith(".txt"):
        try:
            lines = Path(given[0]).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"--prompt {given[0]}: can't be read ({error.strerror})") from error
        given = [line.strip() for line in lines if line.strip()]
        if not given:
            raise ValueError("--prompt: the file holds no caption; one a line is expected")
    return given


def choose(flags: "SampleConfig", num_classes: int) -> Tensor:
    """The label of every sample, (N,) int64. Raises ValueError for labels the model does not have."""
    bad = [label for label in flags.class_labels if not 0 <= label < num_classes]
    if bad:
        raise ValueError(f"--class_labels {bad[0]}: the model has labels 0 to {num_classes - 1}")
    if flags.class_labels:
        given = torch.tensor(flags.class_labels)
        return given[torch.arange(flags.num_samples or len(given)) % len(given)]
    return preview_labels(num_classes, flags.num_samples or min(16, 2 * num_classes))
