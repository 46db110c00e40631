"""The state of a training run, its batches, and the work that is due after each step."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import Checkpoint
from opendit.checkpoint.matched import DeviceReader, MatchedTensors
from opendit.checkpoint.pretrained import FirstWeights
from opendit.checkpoint.run_folders import folder_name
from opendit.checkpoint.save import Checkpoints
from opendit.config.components import TokenRoute
from opendit.config.train import TrainConfig
from opendit.data import Batch, BatchIterator, BatchSchedule, DataError, MediaDataset
from opendit.data.base import BadSample, Embedding
from opendit.diffusion.objectives.base import Objective
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.diffusion.random import Stream, uniform
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.folder import KNOWN
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.encoders.vision import CachedTeacher, VisionTeacher
from opendit.kernels.select import KernelChoice
from opendit.models.conditioning import Condition
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.finetuning import Lora, adapt, add_lora
from opendit.models.zoo import Weights
from opendit.parallel.engines import Engine, StepResult, Values
from opendit.parallel.fsdp import Sharding
from opendit.parallel.layout import InitialValues
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import PipelineStages
from opendit.parallel.sequence import SequenceParallel
from opendit.training.diagnosis import Diagnosis, SkippedSteps
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.memory import Setup
from opendit.training.micro_batch import Latents, MicroBatch, PackedMicroBatch, SampleInputs
from opendit.training.monitor import Monitor, Pace, StepLog
from opendit.training.profiling import StepProfiler
from opendit.training.runners import Runner
from opendit.training.step_cost import training_flops


@dataclass(frozen=True)
class Due:
    """The work that is due after a step. refuse: end the run without saving, because a fault skipped steps."""

    log: bool
    save: bool
    refuse: bool
    draw: bool
    validate: bool = False
    evaluate: bool = False


class PeriodicWork:
    """Decides which work is due, equally on every rank. Call ``step_done``, then ``due``, after every step. A save
    waits until a step is not skipped, because a run that skips steps may be about to fail."""

    def __init__(self, flags: TrainConfig, last_step: int):
        self._flags, self._last_step = flags, last_step
        self._draw_every = flags.ckpt_every if flags.sample_every is None else flags.sample_every
        self._validate_every = flags.ckpt_every if flags.validate_every is None else flags.validate_every
        self._save_owed = False

    def step_done(self, done: int, stopping: bool) -> bool:
        """Return True if the host must wait for the device now, to check for skipped steps. stopping: a signal or
        --max_hours ends the run."""
        flags = self._flags
        self._done, self._stopping = done, stopping
        self._last = stopping or done == self._last_step
        self._save_owed |= flags.save and _every(flags.ckpt_every, done)
        validate_every = self._validate_every if flags.validates else 0
        looks = (flags.log_every, flags.max_bad_steps, validate_every, flags.evaluate_every)
        return self._last or self._save_owed or any(_every(steps, done) for steps in looks)

    def due(self, skipping: bool, failing: bool) -> Due:
        """Return the work that is due. skipping: the last examined step was skipped; failing: because of a fault."""
        flags, last = self._flags, self._last
        save = flags.save and ((last and not failing) or (self._save_owed and not skipping))
        self._save_owed &= not save
        ended = self._done == self._last_step
        at_end = ended and flags.sample_every != 0
        # After a signal, there is no time to validate. --ckpt_best val_loss needs a validation at every save.
        by_loss = flags.ckpt_best == "val_loss"
        validate = _every(self._validate_every, self._done) or (ended and self._validate_every != 0)
        validate = flags.validates and not self._stopping and (validate or (save and by_loss))
        evaluate = _every(flags.evaluate_every, self._done) or (ended and flags.evaluate_every > 0)
        evaluate = not self._stopping and (evaluate or (save and flags.ckpt_best is not None and not by_loss))
        return Due(
            # log at a save, because a resumed run starts a new mean of the loss
            log=save or last or validate or evaluate or _every(flags.log_every, self._done),
            save=save,
            refuse=flags.save and last and failing,
            draw=not self._stopping and (at_end or _every(self._draw_every, self._done)),
            validate=validate,
            evaluate=evaluate,
        )


def _every(steps: int, done: int) -> bool:
    return steps > 0 and done % steps == 0


class Batches:
    """Source of the ``count`` batches of each step. ``interchangeable``: any batch can replace any other."""

    def __init__(
        self,
        loader: BatchIterator,
        count: int,
        monitor: Monitor,
        pace: Pace,
        diagnosis: Diagnosis,
        interrupt: Interrupt,
        interchangeable: bool,
    ):
        self._loader, self._count = loader, count
        self._monitor, self._pace, self.diagnosis = monitor, pace, diagnosis
        self._interrupt, self._interchangeable = interrupt, interchangeable
        self._last: Batch | None = None

    def of_next_step(self) -> Iterator[Batch]:
        """Yield the next step's batches. A batch is read on request, so that reading overlaps with computing.

        If the data can't be read any more, this rank repeats its last batch, because other ranks wait.
        ``Interrupt.ask`` then drops the step on all ranks. Without other ranks, NoData is raised instead.

        Raises DataError if no batch can be repeated.
        """
        for _ in range(self._count):
            asked = time.perf_counter()
            batch = self._last = self._next()
            waited = time.perf_counter() - asked
            self._monitor.loader_wait(waited)
            self._pace.begin(waited)
            self.diagnosis.keep(batch)
            yield batch

    def _next(self) -> Batch:
        if self._last is not None and self._interrupt.lost is not None:
            return self._last
        try:
            return next(self._loader)
        except DataError as error:
            if self._last is None:  # no step since this start, so nothing to save
                raise
            if self._interrupt.alone:
                raise NoData(str(error)) from error
            if not self._interchangeable:
                raise
            self._interrupt.lost = error
            return self._last


def example_captions(dataset: MediaDataset, count: int = 16) -> list[str]:
    """Return distinct captions for sample grids, spread evenly over the data set. Unreadable samples are left out."""
    return list(_example_rows(dataset, count))


def _example_rows(dataset: MediaDataset, count: int) -> dict[str, int]:
    """Return caption -> index of a sample, for :func:`example_captions`."""
    if dataset.describe().conditioning != "text":
        return {}
    found: dict[str, int] = {}
    for row in range(0, len(dataset), max(1, len(dataset) // (4 * count))):
        with suppress(BadSample):
            found.setdefault(cast(str, dataset.caption(row)), row)
    return dict(list(found.items())[:count])


def example_embeddings(dataset: MediaDataset, count: int = 16) -> tuple[list[str], Embedding]:
    """Return the captions of :func:`example_captions` and their cached embeddings."""
    found: dict[str, Embedding] = {}
    for caption, row in _example_rows(dataset, count).items():
        with suppress(BadSample):
            found[caption] = cast(Embedding, dataset.read(row).embedding)
    return list(found), Embedding(*map(torch.stack, zip(*found.values(), strict=True)))


def _path_or_name(value: str | None) -> str | None:
    """Return the text to store in checkpoints for an encoder: the absolute path of a folder, otherwise the name."""
    folder = value is not None and value not in KNOWN and Path(value).expanduser()
    return str(folder.resolve()) if folder and folder.exists() else value


@dataclass(frozen=True)
class LearningRate:
    """Learning rate: rises linearly to ``peak``, then stays "constant" or follows a "cosine" to 0 at the last step."""

    peak: float
    warmup_steps: int
    schedule: str
    last_step: int

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.last_step - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * progress))


class TrainingFlops:
    """Counter of FLOPs for training a model, or its LoRA, on latents of any size."""

    def __init__(self, config: DiTConfig, lora: Lora | None = None, route: TokenRoute | None = None):
        self._patch = config.patch
        self._of_size = cache(
            lambda size, routed=False: training_flops(replace(config, input_size=size), lora, route if routed else None)
        )

    def of(self, micro_batch: MicroBatch | PackedMicroBatch) -> float:
        """Return the FLOPs of this rank's micro-batch, without a pack's padding."""
        routed = micro_batch.kept is not None
        if isinstance(micro_batch, PackedMicroBatch):
            grids = (grid[-len(self._patch) :] for grid in micro_batch.segments.grids)
            sizes = (tuple(n * p for n, p in zip(grid, self._patch, strict=True)) for grid in grids)
            return sum(self._of_size(size, routed) for size in sizes)
        return len(micro_batch.x0) * self._of_size(tuple(micro_batch.x0.shape[2:]), routed)


class TrainedNetwork(NamedTuple):
    """A network that a run trains, with the objects that train it."""

    engine: Engine
    ema: EMA
    runner: Runner
    inputs: SampleInputs
    skipped: SkippedSteps


@dataclass
class Run:
    """The state of a training run.

    prepare() creates it before the model exists. build() sets the fields that the constructor does not take.

    Attributes:
        vae: name of the VAE.
        codec: None for cached latents if the VAE can't be loaded.
        why_not_compiled: why blocks are not compiled; None if they are.
        initial, initial_config: weights that the run starts from, and their model's configuration.
        samples_at_once: size of a rank's micro-batch, in samples of the configured size.
        teacher: frozen vision encoder of --repa, or its cached features.
        validation: held-out samples for the validation loss.
        prompts: captions for sample grids, and the encoded captions; None for the data set's captions.
        clip_fps: frame rate of drawn clips; None if unknown.
        low: the low-noise network of --expert both. The other fields then describe the high-noise network.
        networks: the run's networks. engine, ema, runner, inputs and skipped belong to the network in training.
        validate, evaluate: called with a step, return fields for the log. All ranks must call them together.
        done: number of steps since the run's first start.
        result: result of the last step; None before the first step of this start.
    """

    flags: TrainConfig
    mesh: Mesh
    dataset: MediaDataset
    schedule: BatchSchedule
    model_config: DiTConfig
    codec: ImageCodec | VideoCodec | None
    vae: str
    conditioner: Conditioner
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    stages: PipelineStages | None
    why_not_compiled: str | None
    memory: Setup
    sharding: Sharding | None
    folder: Path
    lock: AbstractContextManager[Any]
    resume: Checkpoint | None
    first_step: int
    last_step: int
    initial: Weights | None
    initial_config: DiTConfig | None
    lora: Lora | None
    notes: list[str]
    ema_warmup: float
    samples_at_once: int
    teacher: VisionTeacher | CachedTeacher | None = None
    validation: MediaDataset | None = None
    prompts: tuple[list[str], Condition] | None = None
    clip_fps: float | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    low: "Run | None" = None
    done: int = 0
    result: StepResult | None = None

    networks: Sequence[TrainedNetwork] = field(init=False)
    engine: Engine = field(init=False)
    ema: EMA = field(init=False)
    runner: Runner = field(init=False)
    inputs: SampleInputs = field(init=False)
    skipped: SkippedSteps = field(init=False)
    batches: Batches = field(init=False)
    interrupt: Interrupt = field(init=False)
    periodic: PeriodicWork = field(init=False)
    monitor: Monitor = field(init=False)
    profiler: StepProfiler = field(init=False)
    log: StepLog = field(init=False)
    checkpoints: Checkpoints = field(init=False)
    validate: Callable[[int], dict[str, Any]] = field(init=False)
    evaluate: Callable[[int], dict[str, Any]] = field(init=False)
    draw_grid: Callable[[int], None] = field(init=False)

    @cached_property
    def learning_rate(self) -> LearningRate:
        flags = self.flags
        return LearningRate(flags.lr, flags.warmup_steps, flags.lr_schedule, self.last_step)

    @cached_property
    def flops(self) -> TrainingFlops:
        return TrainingFlops(self.model_config, self.lora, self.flags.token_route)

    @cached_property
    def share(self) -> float:
        """The first network's fraction of the training times, and so of the steps."""
        objective = self.objective.for_tokens(self.model_config.tokens)
        return 1.0 if self.low is None else cast(FlowObjective, objective).share

    def network_of(self, step: int) -> int:
        """Return the index of the network that a step trains, 0 or 1, drawn by (seed, step)."""
        u = uniform(self.flags.global_seed, step, torch.zeros(1, dtype=torch.int64), Stream.EXPERT)
        return int(u >= self.share)

    @property
    def given_frames(self) -> str | None:
        """Conditioning frames of the training clips, as in --given_frames. A model with frames in place may be trained
        without conditioning frames, so the flag decides."""
        config = self.model_config
        return self.flags.given_frames if config.given_in_place else config.given_frames

    def latents_of(self, dataset: MediaDataset, seed: int) -> Latents:
        """Return the converter from a data set's samples to latents. ``seed`` keys the VAE's noise."""
        about, cached = dataset.describe(), None
        if about.scaling_factor is not None and about.shift_factor is not None:
            cached = about.scaling_factor, about.shift_factor
        return Latents(self.codec, cached, self.vae != "none", seed)

    def first_values(self, model: DiT) -> Values:
        """Return the parameters' first values: weights from --pretrained where they fit, otherwise random. With --lora,
        also add the LoRA matrices to the model."""
        seed = self.flags.global_seed
        initial = InitialValues(model, seed)
        if self.initial is None or self.initial_config is None:
            return initial
        classes = self.dataset.describe().class_names
        start = adapt(model, self.initial, self.initial_config, classes, fresh=initial.whole)
        lines = [f"--pretrained: {line}" for line in start.describe()]
        self.notes += [line for line in lines if line not in self.notes]
        if self.lora is not None:
            add_lora(model, self.lora, start.untrained, seed)
            initial = InitialValues(model, seed)
        if isinstance(self.initial.state, MatchedTensors) and not start.made and self.flags.offloaded_state == "none":
            return DeviceReader(self.initial.state, self.mesh.device, otherwise=initial)
        return FirstWeights(start, self.initial.state, initial)

    def info(self) -> dict[str, Any]:
        """Return the metadata of this run's weights files."""
        discrete = isinstance(self.objective, FlowObjective) and self.objective.discrete_times
        return {
            "model": self.flags.model,
            "config": self.model_config.to_dict(),
            "objective": self.objective.to_dict(),
            "class_names": self.dataset.describe().class_names,
            "captions": example_captions(self.dataset),
            "vae": _path_or_name(self.vae),
            "text_encoder": _path_or_name(self.flags.text_encoder),
            **({"sampler": "unipc"} if discrete else {}),
            "image_size": self.flags.image_size,
            "frame_interval": self.flags.frame_interval,
            **({"fps": self.flags.fps} if self.flags.fps is not None else {}),
            **({"clip_fps": self.clip_fps} if self.clip_fps is not None else {}),
            **({"lora": self.lora.to_dict()} if self.lora else {}),
        }

    def begin(self, step: int) -> None:
        """Choose the network that a step trains. With --expert both, two networks train by turns."""
        if len(self.networks) > 1:
            self.engine, self.ema, self.runner, self.inputs, self.skipped = self.networks[self.network_of(step)]
            self.batches.diagnosis = self.skipped.diagnosis

    def count(self, batch: Batch, micro_batch: MicroBatch | PackedMicroBatch) -> None:
        # count a step's samples once
        samples = batch.samples_in_step if batch.micro == 0 else 0
        self.monitor.count(samples, self.flops.of(micro_batch))

    def due(self, stopping: bool) -> Due:
        """Return the work that is due after the step, equal on every rank. The host waits for the device if it must
        know whether the step was skipped. Raises FloatingPointError after too many skipped steps in a row."""
        if self.periodic.step_done(self.done, stopping):
            assert self.result is not None, "a step has been made"
            self.skipped.look(self.done, self.result)
        due = self.periodic.due(self.skipped.skipping, self.skipped.failing)
        if due.refuse:
            self.checkpoints.refuse(self.done, "the gradients of this step were not finite")
        return due

    def measure(self, due: Due) -> dict[str, Any]:
        """Validate and evaluate if ``due`` says so. Return fields for the step's line in the log."""
        with self.monitor.paused(due.validate or due.evaluate):
            measured = self.validate(self.done) if due.validate else {}
            return measured | (self.evaluate(self.done) if due.evaluate else {})

    def save(self) -> None:
        with self.monitor.paused():
            epoch = self.schedule.epoch(self.done - 1)
            state = {"step": self.done, "epoch": epoch, "skipped": self.log.skipped, "fingerprint": self.fingerprint}
            state["packs"] = self.schedule.state(self.done)
            self.checkpoints.save(state | self.log.figures)

    def draw(self) -> None:
        with self.monitor.paused():
            self.draw_grid(self.done)

    @contextlib.contextmanager
    def saving_if_data_end(self) -> Iterator[None]:
        """Log and save the last step's state if the block raises NoData. All ranks must enter this context."""
        try:
            yield
        except NoData:
            if self.result is not None:
                self._end_without_data(self.result)
            raise

    def _end_without_data(self, last: StepResult) -> None:
        self.checkpoints.wait()
        self.skipped.look(self.done, last)
        newest = self.checkpoints.newest
        if self.log.logged != self.done:
            self.log.write(self.done, self.learning_rate.at(self.done - 1), last, {})
        saved = newest is not None and newest.name == folder_name(self.done)
        if self.checkpoints.enabled and not saved and not self.skipped.failing:
            self.save()
            self.checkpoints.wait()
        self.interrupt.leave()

    def failed_writes(self) -> int:
        """Return the number of failed saves and other writes, equal on every rank. All ranks must call this."""
        return len(self.checkpoints.failures) + self.mesh.broadcast_object(self.monitor.failures.count)
