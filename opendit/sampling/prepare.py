"""From sample.py's flags to a model, its VAE and what to draw, checked before weights are read where possible."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opendit.checkpoint.lock import lock_folder
from opendit.checkpoint.pretrained import find_weights, read_config
from opendit.common.stages import Stages
from opendit.diffusion import Objective
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, preview_labels
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models import Condition, DiT, DiTConfig
from opendit.models.weights import Weights
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.guidance import Replica, SharedBatch, make_replicas
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel, sequence_shape
from opendit.parallel.sequence.choose import make_plan
from opendit.parallel.tensor import TensorParallel, check_tensor_parallel, tensor_group
from opendit.sampling.engine import SamplingEngine
from opendit.sampling.given import given_latents
from opendit.sampling.loading import (
    VaeLoader,
    check_guidance,
    check_negative,
    check_text_encoder,
    checkpoint_at,
    class_names,
    frames_per_second,
    latent_size,
    load_model,
    make_conditioner,
    null_of,
)

if TYPE_CHECKING:
    from opendit.config.sample import SampleConfig

# What sample.py and opendit evaluate write in --output beside single samples.
WRITTEN = (".samples.json", ".parts", "grid.png", "grid.gif", "profile.json", "results.jsonl", "sweep.csv")


@dataclass
class SamplingRun:
    """A run of sample.py, checked. Sample number i draws ``choices[i]``: a class, or a row of the prompts."""

    flags: "SampleConfig"
    mesh: Mesh
    replica: Replica
    model: DiT
    codec: ImageCodec | VideoCodec
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    conditioner: Conditioner
    conditions: Condition  # of every class or prompt
    null: Condition  # of guidance's other half, one row
    given: Tensor | None  # frames: sample number i has row i of them, beginning again after the last
    choices: Tensor
    names: list[str]  # of every class or prompt
    size: tuple[int, ...]  # of the latents
    fps: float
    frame_interval: int  # of the clips' files that were trained on
    trained_fps: float | None  # at which they were read instead
    source: Path
    lock: AbstractContextManager[Any]  # the right to write to --output
    notes: list[str]
    stages: Stages
    _staged: set[int] = field(default_factory=set)

    @property
    def captions(self) -> list[str]:
        """Return the caption of every sample."""
        return [self.names[choice] for choice in self.choices.tolist()]

    @functools.cached_property
    def engine(self) -> SamplingEngine:
        """Draws all of this process's batches."""
        flags, halves = self.flags, self.replica.halves
        return SamplingEngine(
            self.model,
            self.objective,
            steps=flags.num_sampling_steps,
            sampler=flags.sampler,
            cfg_scale=flags.cfg_scale,
            cfg_channels=flags.cfg_channels,
            cfg_interval=(flags.cfg_interval[0], flags.cfg_interval[1]) if flags.cfg_interval else None,
            guidance_every=flags.guidance_every,
            cache=flags.cache,
            size=self.size,
            around=(lambda model: SharedBatch(model, halves)) if halves else None,
        )

    def staged_steps(self, samples: int) -> Callable[[Iterable[int]], Iterator[int]]:
        """Wraps the steps of a batch of so many samples for --profile: the first two steps of a batch size, which
        compile kernels and record the CUDA graph, are a stage of their own."""
        first = samples not in self._staged
        self._staged.add(samples)

        def staged(steps: Iterable[int]) -> Iterator[int]:
            for i in steps:
                with self.stages("drawing: first two steps (compiling, recording)" if first and i < 2 else "drawing"):
                    yield i

        return staged


def prepare(flags: "SampleConfig", mesh: Mesh, stages: Stages) -> SamplingRun:
    """Loads the model and its VAE. Raises ValueError or OSError with a message for the user."""
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
    ckpt = checkpoint_at(flags.ckpt, flags.outputs, flags.model, flags.use_video)
    shared = (flags, flags.attention, flags.mixed_precision)  # of what a strategy for sharing sequences depends on
    if mesh.sharing > 1 and (stored := read_config(find_weights(ckpt, flags.weights))):
        # What ranks would refuse that share samples or divide layers, before the weights are read.
        check_tensor_parallel(stored, mesh.tp_size)
        if mesh.sp_size > 1:
            shape = sequence_shape(*shared, stored, samples_at_once(flags), tensor_parallel=mesh.tp_size)
            make_plan(flags.sequence_parallel_type, mesh.sp_size, shape)
    loaded = load_model(
        ckpt,
        VaeLoader(mesh.device, flags.mixed_precision, flags.vae_tiling, flags.vae_compile),
        name=flags.model,
        which=flags.weights,
        lora=flags.lora,
        num_classes=flags.num_classes,
        vae=flags.vae,
        stage=stages,
        mesh=mesh,
    )
    model, weights, objective = loaded.network, loaded.weights, loaded.objective
    config, dtype = model.config, PRECISIONS[flags.mixed_precision]
    notes += loaded.notes
    check_guidance(config, weights, flags.cfg_scale)
    check_fits(flags, config, weights)
    objective.choose(flags.sampler)
    for name in ("vae_tiling", "vae_compile"):
        if getattr(flags, name) and loaded.vae == "none":
            raise ValueError(f"--{name}: {weights.path} draws pixels, no VAE decodes them; leave the flag out")
    size = latent_size(config, weights, loaded.vae, flags.num_frames, flags.image_size)
    if flags.fp8:
        config.check_speed(True, "none")
    replica = make_replicas(mesh, flags.cfg_parallel)
    shape = sequence_shape(*shared, config, samples_at_once(flags), size, mesh.tp_size)
    sequence = sequence_parallel(mesh, flags.sequence_parallel_type, shape)
    what, divided = (flags, mesh.device, dtype, config.head_dim, config.tokens), tensor_group(mesh)
    # (Operations for inference alone read a projection's weight, of which ranks have parts.)
    kernels = select_kernels(*what, inference=divided is None, shared=sequence is not None)
    shares = sequence if divided is None else TensorParallel(divided, sequence)
    how: Any = shares  # of a kind that has what this model asks it for, where SequenceShards names all that any does
    model.eval().use(ops=kernels.ops, attend=kernels.attend, sequence=how)
    with stages("VAE: waited for"):
        codec = loaded.codec()
    if (work := loaded.vae_loading.work) is not None:
        stages.beside("VAE: imports and weights", work.seconds)
    with stages("text encoder, prompts"):
        conditioner = make_conditioner(config, weights, flags.text_encoder, mesh.device, flags.mixed_precision)
        null = null_of(conditioner, flags.negative_prompt)
        conditions, choices, names = what_to_draw(flags, config, weights, conditioner)
        if isinstance(conditioner, CaptionConditioner):
            notes += conditioner.cut(names, "captions")
            notes += conditioner.cut([flags.negative_prompt] if flags.negative_prompt else [], "--negative_prompt")
    given = given_latents(
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
        given=given,
        choices=choices,
        names=names,
        size=size,
        fps=frames_per_second(weights, flags.frame_interval),
        frame_interval=weights.info.get("frame_interval", 1),
        trained_fps=weights.info.get("fps"),
        source=weights.path,
        lock=lock,
        notes=notes,
        stages=stages,
    )


def check_fits(flags: "SampleConfig", config: DiTConfig, weights: Weights) -> None:
    """Raises ValueError for flags that this model has no use for."""
    path = weights.path
    if config.text is None and flags.prompt:
        raise ValueError(f"--prompt: {path} is conditioned on classes; use --class_labels")
    if config.text is not None and flags.class_labels:
        raise ValueError(f"--class_labels: {path} is conditioned on captions; use --prompt")
    check_negative(flags.negative_prompt, config, weights)
    if not config.is_video:
        for name in ("use_video", "num_frames", "frame_interval"):
            if getattr(flags, name):
                raise ValueError(f"--{name}: {path} draws pictures; leave the flag out")
    check_text_encoder(flags.text_encoder, config, weights)
    if flags.cfg_channels is not None and flags.cfg_channels > config.in_channels:
        raise ValueError(f"--cfg_channels {flags.cfg_channels}: {path} has {config.in_channels} channels; lower it")


def samples_at_once(flags: "SampleConfig") -> int:
    """That the model is given in one call: with guidance both halves, unless other processes have one of them."""
    return flags.batch_size * (1 if flags.cfg_scale == 1 or flags.cfg_parallel else 2)


def what_to_draw(
    flags: "SampleConfig", config: DiTConfig, weights: Weights, conditioner: Conditioner
) -> tuple[Condition, Tensor, list[str]]:
    """The condition of every class or prompt, every sample's choice of them, and their names. Raises ValueError for
    classes that the model does not have."""
    if config.text is None:
        names = class_names(config, weights)
        return torch.arange(len(names), device=conditioner.device), choose(flags, len(names)), names
    prompts = read_prompts(flags.prompt) or weights.info.get("captions") or [""]
    assert isinstance(conditioner, CaptionConditioner)
    count = flags.num_samples or max(len(prompts), len(flags.image), len(flags.clip))
    return conditioner.encode(prompts), torch.arange(count) % len(prompts), prompts


def read_prompts(given: list[str]) -> list[str]:
    """The prompts of --prompt: as they are, or the lines of one text file."""
    if len(given) == 1 and given[0].endswith(".txt"):
        try:
            lines = Path(given[0]).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(
                f"--prompt {given[0]}: can't be read ({error.strerror}); give captions, or a file of them"
            ) from error
        given = [line.strip() for line in lines if line.strip()]
        if not given:
            raise ValueError("--prompt: the file holds no caption; one a line is expected")
    return given


def choose(flags: "SampleConfig", num_classes: int) -> Tensor:
    """The label of every sample, (N,) int64. Raises ValueError for labels the model does not have."""
    bad = [label for label in flags.class_labels if not 0 <= label < num_classes]
    if bad:
        raise ValueError(f"--class_labels {bad[0]}: no class of the model; give labels from 0 to {num_classes - 1}")
    if flags.class_labels:
        given = torch.tensor(flags.class_labels)
        return given[torch.arange(flags.num_samples or len(given)) % len(given)]
    return preview_labels(num_classes, flags.num_samples or min(16, 2 * num_classes))
