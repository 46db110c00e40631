"""Load a run of sample.py from its flags: the model, its VAE and the conditions of all samples."""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from opendit.checkpoint.ema import reconstruct
from opendit.checkpoint.pretrained import find_weights, read_config
from opendit.checkpoint.run_folders import checkpoint_at, lock_folder
from opendit.common.stages import Stages
from opendit.config.checks import path_and_weight, read_prompts
from opendit.config.console import print_block
from opendit.data.files import name_few
from opendit.diffusion.objectives import Objective
from opendit.encoders.conditioner import (
    CaptionConditioner,
    Conditioner,
    PublishedConditioner,
    class_number,
    preview_labels,
)
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models.conditioning import Condition, same_length
from opendit.models.configuration import times
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import PublicConfig, embedded_guidance
from opendit.models.zoo import Weights
from opendit.parallel.collectives import SharedBatch
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.mesh import ControlGroup, Mesh, Replica, make_replicas
from opendit.parallel.sequence import SequenceParallel, attention_note, sequence_parallel, sequence_shape
from opendit.parallel.sequence.choose import make_plan
from opendit.parallel.tensor import TensorParallel, check_tensor_parallel, tensor_group
from opendit.sampling import model_loading as loading
from opendit.sampling.conditioning_frames import (
    encode_frames,
    encode_pictures,
    frames_of_samples,
    with_pictures,
)
from opendit.sampling.sampling_engine import SamplingEngine

if TYPE_CHECKING:
    from opendit.config.sample import SampleConfig

logger = logging.getLogger(__name__)

# Files that sample.py and opendit evaluate write in --output, besides pictures and clips.
WRITTEN = (".samples.json", ".parts", "grid.png", "grid.gif", "profile.json", "results.jsonl", "sweep.csv")


@dataclass
class SamplingRun:
    """A run of sample.py with checked flags. ``choices[i]`` is the index of sample i's class or prompt in ``names``."""

    flags: "SampleConfig"
    mesh: Mesh
    replica: Replica
    model: DiT
    codec: ImageCodec | VideoCodec
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    conditioner: Conditioner
    conditions: Condition  # conditions of all classes or prompts
    null: Condition  # condition of guidance's unconditional half, as a batch of one
    conditioning_frames: Tensor | None  # (n, 1 + C, T, H, W); sample i uses row i modulo n
    pictures: Tensor | None  # (n, tokens, width), for models that attend to pictures; sample i uses row i modulo n
    choices: Tensor
    names: list[str]  # names of all classes or prompts
    size: tuple[int, ...]  # size of the latents
    fps: float
    frame_interval: int  # interval between the frames of a training clip
    trained_fps: float | None  # frame rate in training, for models trained with a rate instead of an interval
    source: Path  # path of the weights
    lock: AbstractContextManager[Any]  # lock on the folder --output
    notes: list[str]  # remarks for the user
    stages: Stages
    _profiled: set[int] = field(default_factory=set)

    @property
    def captions(self) -> list[str]:
        """Class name or prompt of every sample."""
        return [self.names[choice] for choice in self.choices.tolist()]

    @functools.cached_property
    def engine(self) -> SamplingEngine:
        """The engine that draws all batches of this process."""
        flags, halves = self.flags, self.replica.halves
        return SamplingEngine(
            self.model,
            self.objective,
            steps=flags.num_sampling_steps,
            sampler=flags.sampler,
            cfg_scale=loading.guidance_of(self.model.config, flags.cfg_scale),
            cfg_channels=flags.cfg_channels,
            cfg_interval=(flags.cfg_interval[0], flags.cfg_interval[1]) if flags.cfg_interval else None,
            guidance_every=flags.guidance_every,
            guidance_by=flags.guidance_by,
            cache=flags.cache,
            size=self.size,
            around=(lambda model: SharedBatch(model, halves)) if halves else None,
        )

    def conditions_of(self, index: Tensor) -> tuple[Condition, Tensor | None]:
        """Return the conditions of the samples ``index`` (B,), and the samples' conditioning frames or None."""
        rows = self.choices[index].to(self.mesh.device)
        y = with_pictures(self.conditions[rows], self.pictures, index)
        return y, frames_of_samples(self.conditioning_frames, index)

    def profiled_steps(self, samples: int) -> Callable[[Iterable[int]], Iterator[int]] | None:
        """Return a function that wraps an iterable of steps and measures their time; None without --profile. The first
        two steps of a batch size are a separate stage, because they compile kernels and record the CUDA graph."""
        if not self.flags.profile:
            return None
        first = samples not in self._profiled
        self._profiled.add(samples)

        def profiled(steps: Iterable[int]) -> Iterator[int]:
            for i in steps:
                with self.stages("drawing: first two steps (compiling, recording)" if first and i < 2 else "drawing"):
                    yield i

        return profiled


def load_run(flags: "SampleConfig", mesh: Mesh, stages: Stages) -> SamplingRun:
    """Load the model, its VAE and the conditions of all samples, and lock --output. All ranks must call this. Raises
    ValueError or OSError with a message for the user."""
    torch.set_float32_matmul_precision("highest")
    flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
    fix = "wait for its end, or give another --output"
    lock, more = lock_folder(Path(flags.output), mesh, "--output", fix, written=WRITTEN)
    try:
        return _load(flags, mesh, stages, lock, notes + more)
    except BaseException:
        lock.__exit__(None, None, None)
        raise


def _load(
    flags: "SampleConfig", mesh: Mesh, stages: Stages, lock: AbstractContextManager[Any], notes: list[str]
) -> SamplingRun:
    ckpt = _checkpoint(flags, mesh)
    shared = (flags, flags.attention, flags.mixed_precision)
    if mesh.sharing > 1 and (stored := read_config(find_weights(ckpt, flags.weights))):
        # check this before the weights are read
        check_tensor_parallel(stored, mesh.tp_size)
        if mesh.sp_size > 1:
            shape = sequence_shape(*shared, stored, samples_at_once(flags), tensor_parallel=mesh.tp_size)
            make_plan(flags.sequence_parallel_type, mesh.sp_size, shape)
    loaded = loading.load_model(
        ckpt,
        loading.VaeLoader(mesh.device, flags.mixed_precision, flags.vae_tiling, flags.vae_compile),
        name=flags.model,
        which=flags.weights,
        lora=[path_and_weight(text) for text in flags.lora],
        second=flags.second_ckpt,
        num_classes=flags.num_classes,
        vae=flags.vae,
        stage=stages,
        mesh=mesh,
    )
    model, weights, objective = loaded.network, loaded.weights, loaded.objective
    config, dtype = model.config, PRECISIONS[flags.mixed_precision]
    notes += loaded.notes
    flags = with_usual_settings(flags, config, weights)
    check_fits(flags, config, weights, loaded.vae)
    objective.choose(flags.sampler)
    size = loading.latent_size(config, weights, loaded.vae, flags.num_frames, flags.image_size)
    long = config.is_video and mesh.device.type == "cpu" and math.prod(config.grid_of(size)) > 4096
    if isinstance(config, PublicConfig) and long and {"num_frames", "image_size"}.isdisjoint(flags.given):
        raise ValueError(
            f"--num_frames: {weights.path} draws clips of {times(size)} latents by default, which takes hours without "
            "a GPU; give --num_frames and --image_size"
        )

    replica = make_replicas(mesh, flags.cfg_parallel)
    shape = sequence_shape(*shared, config, samples_at_once(flags), size, mesh.tp_size)
    sequence = sequence_parallel(mesh, flags.sequence_parallel_type, shape, sampling=True)
    what, divided = (flags, mesh.device, dtype, config.head_dim, config.tokens), tensor_group(mesh)
    # Inference kernels read a projection's full weight, so ranks with shards can't use them.
    kernels = select_kernels(*what, inference=divided is None, shared=sequence is not None)
    shares = sequence if divided is None else TensorParallel(divided, sequence)
    strategy: Any = shares  # Any: the object implements only the methods that this model calls
    model.eval().use(ops=kernels.ops, attend=kernels.attend, sequence=strategy)

    with stages("VAE: waited for"):
        codec = loaded.codec()
    if (work := loaded.vae_loader.work) is not None:
        stages.beside("VAE: imports and weights", work.seconds)
    with stages("text encoder, prompts"):
        precisions = flags.mixed_precision, flags.text_precision
        conditioner = loading.make_conditioner(config, weights, flags.text_encoder, mesh.device, *precisions)
        if isinstance(conditioner, PublishedConditioner):
            conditioner.guidance = embedded_guidance(config, flags.cfg_scale)
        null = loading.null_of(conditioner, flags.negative_prompt)
        conditions, choices, names = conditions_to_draw(flags, config, weights, conditioner)
        null, conditions = same_length(null, conditions)
        if isinstance(conditioner, CaptionConditioner):
            notes += conditioner.cut(names, "captions")
            notes += conditioner.cut([flags.negative_prompt] if flags.negative_prompt else [], "--negative_prompt")
    frames = encode_frames(
        config,
        codec,
        size,
        mesh.device,
        image=flags.image or None,
        clip=flags.clip or None,
        frames=flags.clip_frames,
        interval=flags.frame_interval or weights.info.get("frame_interval", 1),
        fps=None if flags.frame_interval else weights.info.get("fps"),
        path=str(weights.path),
    )
    if len(choices) < replica.count:
        notes.append(
            f"processes: {replica.count - len(choices)} of the {replica.count} groups have nothing to draw; "
            "--sequence_parallel_size, --tensor_parallel_size and --cfg_parallel let several processes share a sample"
        )
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
        null=null,
        conditioning_frames=frames,
        pictures=encode_pictures(conditioner.pictures, flags.image or None, flags.clip or None),
        choices=choices,
        names=names,
        size=size,
        fps=loading.frames_per_second(weights, flags.frame_interval),
        frame_interval=weights.info.get("frame_interval", 1),
        trained_fps=weights.info.get("fps"),
        source=weights.path,
        lock=lock,
        notes=notes,
        stages=stages,
    )


def _checkpoint(flags: "SampleConfig", mesh: Mesh) -> Path:
    """Return the checkpoint of --ckpt. With --ema, rank 0 first reconstructs a checkpoint with that average."""
    ckpt = checkpoint_at(flags.ckpt, flags.outputs, flags.model, flags.use_video)
    if (width := flags.ema) is None:
        return ckpt
    group = ControlGroup(mesh)
    made = group.together(lambda: reconstruct(ckpt, width) if mesh.is_main else None, ValueError, OSError)
    return cast(Path, group.gather(made)[0])


def with_usual_settings(flags: "SampleConfig", config: DiTConfig, weights: Weights) -> "SampleConfig":
    """Replace sampling steps, guidance scale and sampler by the model's usual values, if flags do not set them."""
    steps, scale = loading.usual_settings(config, flags.num_sampling_steps, flags.cfg_scale, weights)
    usual = {"num_sampling_steps": steps, "cfg_scale": scale}
    flags = replace(flags, **{name: value for name, value in usual.items() if name not in flags.given})
    if flags.sampler is None and "sampler" in weights.info:
        flags = replace(flags, sampler=weights.info["sampler"])
    return flags


def check_fits(flags: "SampleConfig", config: DiTConfig, weights: Weights, vae: str) -> None:
    """Raise ValueError if a flag does not apply to this model. vae: path of the VAE, or "none"."""
    path = weights.path
    asked = ("cfg_parallel", "cfg_interval", "cfg_channels", "negative_prompt")
    how = flags.cfg_scale, flags.guidance_by, flags.guidance_every
    loading.check_guidance(config, weights, *how, **{name: getattr(flags, name) for name in asked})
    if config.text is None and flags.prompt:
        raise ValueError(f"--prompt: {path} is conditioned on classes; use --class_labels")
    if config.text is not None and flags.class_labels:
        raise ValueError(f"--class_labels: {path} is conditioned on captions; use --prompt")
    if not config.is_video:
        for name in ("use_video", "num_frames", "frame_interval"):
            if getattr(flags, name):
                raise ValueError(f"--{name}: {path} draws pictures; leave the flag out")
    loading.check_text_encoder(flags.text_encoder, flags.text_precision, config, weights)
    if flags.cfg_channels is not None and flags.cfg_channels > config.in_channels:
        raise ValueError(f"--cfg_channels {flags.cfg_channels}: {path} has {config.in_channels} channels; lower it")
    for name in ("vae_tiling", "vae_compile"):
        if getattr(flags, name) and vae == "none":
            raise ValueError(f"--{name}: {path} draws pixels, no VAE decodes them; leave the flag out")
    if flags.fp8:
        config.check_speed(True, "none")


def samples_at_once(flags: "SampleConfig") -> int:
    """Return the model's batch size in one call. Guidance doubles the batch, unless processes share its halves."""
    return flags.batch_size * (1 if flags.cfg_scale == 1 or flags.cfg_parallel else 2)


def conditions_to_draw(
    flags: "SampleConfig", config: DiTConfig, weights: Weights, conditioner: Conditioner
) -> tuple[Condition, Tensor, list[str]]:
    """Return (conditions of all classes or prompts, each sample's index in them, names). Raises ValueError for an
    unknown class."""
    if config.text is None:
        names = loading.class_names(config, weights)
        return torch.arange(len(names), device=conditioner.device), choose_labels(flags, names), names
    prompts = read_prompts(flags.prompt, "--prompt") or weights.info.get("captions") or [""]
    assert isinstance(conditioner, CaptionConditioner)
    count = flags.num_samples or max(len(prompts), len(flags.image), len(flags.clip))
    return conditioner.encode(prompts), torch.arange(count) % len(prompts), prompts


def choose_labels(flags: "SampleConfig", names: list[str]) -> Tensor:
    """Return the label of every sample, (N,) int64. A number in --class_labels is always a label, even if a class has
    that name. Raises ValueError for an unknown class."""
    if flags.class_labels:
        labels = torch.tensor([_label(str(word), names) for word in flags.class_labels])
        return labels[torch.arange(flags.num_samples or len(labels)) % len(labels)]
    return preview_labels(len(names), flags.num_samples or min(16, 2 * len(names)))


def _label(word: str, names: list[str]) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,9}", word):
        try:
            return class_number(word, names)
        except ValueError as error:
            raise ValueError(f"--class_labels {error}") from error
    if not 0 <= int(word) < len(names):
        raise ValueError(f"--class_labels {word}: no class of the model; give labels from 0 to {len(names) - 1}")
    return int(word)


def announce(run: SamplingRun) -> None:
    """Print a summary of the run and its settings on rank 0."""
    if not run.mesh.is_main:
        return
    flags, device, replica, sequence = run.flags, run.mesh.device, run.replica, run.sequence
    parameters, ranks = run.model.config.parameters(), run.mesh.tp_size
    layers = f", layers divided by {ranks}" if ranks > 1 else ""
    processor = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sampler = run.objective.choose(flags.sampler)
    shares = f", shared out over {replica.count}" if replica.count > 1 else ""
    loras = [f"{weight:g} x {path}" for path, weight in map(path_and_weight, flags.lora)]
    rows = {
        "weights": str(run.source),
        **({"networks": f"{flags.ckpt}, {flags.second_ckpt}"} if flags.second_ckpt else {}),
        **({"LoRA": ", ".join(loras)} if loras else {}),
        "model": f"{parameters / 1e6:.1f} M parameters, {flags.mixed_precision}{layers}",
        "sampler": f"{sampler}, {flags.num_sampling_steps} steps, guidance {flags.cfg_scale}"
        f"{', its halves on different processes' if replica.halves else ''}",
        "vae": run.codec.name,
        "attention": attention_note(run.kernels.attention_note, sequence),
        "kernels": run.kernels.ops_note,
        "steps": run.engine.note,
        **({"approximate": approximations} if (approximations := run.engine.approximations.note) else {}),
        "sequence": f"over {run.mesh.sp_size} ranks, {sequence.plan}" if sequence else "whole on every rank",
        "processes": f"{run.mesh.world_size} ({processor})",
        "samples": f"{len(run.choices)}{shares}, seed {flags.seed}",
    }
    if run.conditioning_frames is not None:
        mask = run.conditioning_frames[0, 0].flatten(1).amax(1)
        files = name_few(flags.image or flags.clip)
        rows["given"] = f"{int(mask.sum())} of {len(mask)} latent frames, by {files}"
    print_block("OpenDiT sampling", rows)
    for note in run.notes:
        logger.info("note: %s", note)
