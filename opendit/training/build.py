"""Build a training run from its specification: model, engine, averages, runner, log, data loader and checkpoints.

:class:`Run` holds the state of the run.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import load_checkpoint
from opendit.checkpoint.run_folders import ENDED, folder_name
from opendit.checkpoint.save import BestCheckpoint, Checkpoints, most_bytes_of_a_host
from opendit.common.records import WriteFailures
from opendit.config.names import BUT_ATTENTION, PLUGINS
from opendit.config.token_routing import TokenRoute
from opendit.data import Batch, BatchIterator, BatchSchedule, build_loader
from opendit.kernels.base_precision import store_base
from opendit.kernels.fp8_weight import keep_weights
from opendit.models.dit import DiT, DiTConfig
from opendit.models.lora import Lora
from opendit.models.zoo import empty_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import PRECISIONS, Engine, MuonSettings, StepResult, build_engine
from opendit.parallel.experts import expert_group
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import matrix_rows
from opendit.parallel.streamed_blocks import StreamedBlocks
from opendit.parallel.supervisor import Supervisor
from opendit.parallel.tensor import allocate, tensor_group
from opendit.training.batches import Batches
from opendit.training.diagnosis import Diagnosis, MakesMicroBatches, SkippedSteps
from opendit.training.drawing import EMASampler, SampleGrids
from opendit.training.due import Due, PeriodicWork
from opendit.training.first_values import first_values
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.loggers import LOGGERS
from opendit.training.memory import GIB, USABLE_OF_A_HOST, host_memory
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch, Packing
from opendit.training.monitor import Monitor
from opendit.training.profiling import StepProfiler
from opendit.training.run_end import begin_run, write_end
from opendit.training.runners import EagerPasses, Runner, build_runner
from opendit.training.specification import RunSpecification
from opendit.training.step_cost import training_flops
from opendit.training.step_log import Pace, StepLog
from opendit.training.summary import announce, announce_memory, summarise
from opendit.training.validation import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearningRate:
    """Learning rate that rises linearly to ``peak``, then stays constant or follows a cosine to zero at the last step.

    Args:
        schedule: "constant" or "cosine".
    """

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
    """Counter of the FLOPs of a model's training passes over latents of any size.

    Args:
        lora: the trained LoRA; None for full training.
    """

    def __init__(self, config: DiTConfig, lora: Lora | None = None, route: TokenRoute | None = None):
        self._patch = config.patch
        self._of_size = cache(
            lambda size, routed=False: training_flops(replace(config, input_size=size), lora, route if routed else None)
        )

    def of(self, micro_batch: MicroBatch | PackedMicroBatch) -> float:
        """Return the FLOPs of the forward and backward pass over this rank's micro-batch, without a pack's padding."""
        if isinstance(micro_batch, PackedMicroBatch):
            grids = (grid[-len(self._patch) :] for grid in micro_batch.segments.grids)
            return sum(self._of_size(tuple(n * p for n, p in zip(grid, self._patch, strict=True))) for grid in grids)
        return len(micro_batch.x0) * self._of_size(tuple(micro_batch.x0.shape[2:]), micro_batch.kept is not None)


class TrainedNetwork(NamedTuple):
    """A network that a run trains, with the objects that train it. skipped: detects the network's skipped steps."""

    engine: Engine
    ema: EMA
    runner: Runner
    inputs: MakesMicroBatches
    skipped: SkippedSteps


def build_model_and_engine(spec: RunSpecification) -> Engine:
    flags = spec.flags
    torch.set_float32_matmul_precision("high")  # use TF32 for matrix products that stay in fp32 on a GPU
    mesh = spec.mesh
    cut = flags.plugin == "fsdp" and mesh.dims.size("loss") > 1
    # Allocate all parameters at once only if every rank holds the complete model in fp32. FSDP, tensor and pipeline
    # parallelism divide the model, and LoRA does not keep its base weights in fp32.
    at_once = not cut and mesh.tp_size * mesh.pp_size == 1 and spec.lora is None
    with mesh.device:
        model = empty_model(spec.model_config, parameters=at_once)
    initial = first_values(spec, model)
    # Cast frozen weights once. ddp instead casts the weights in every product.
    if spec.lora is not None and not cut and flags.plugin != "ddp":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(PRECISIONS[flags.mixed_precision])
    if flags.base_precision != "bf16":
        store_base(model, flags.base_precision, PRECISIONS[flags.mixed_precision], mesh.device)
    apply_parallel(
        model,
        ops=spec.kernels.ops,
        attend=spec.kernels.attend,
        varlen=spec.kernels.varlen,
        sequence=spec.sequence,
        tensor=tensor_group(mesh),
        experts=expert_group(mesh),
        stages=spec.stages,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        recompute_blocks=flags.recompute_blocks,
        compiled=spec.why_not_compiled is None,
    )
    count = 0 if cut else flags.streamed_blocks
    streamed = StreamedBlocks(model, count, mesh.device) if count else None
    if not cut:
        allocate(model, mesh.device)
    engine = build_engine(
        model.train(),
        mesh,
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        lr=flags.lr,
        weight_decay=flags.weight_decay,
        betas=(flags.adam_beta1, flags.adam_beta2),
        grad_clip=flags.grad_clip,
        grad_accumulation=flags.grad_accumulation,
        sharding=spec.sharding,
        offload=flags.offloaded_state,
        streamed=streamed,
        initial=initial,
        muon=muon_settings(spec),
        eight_bits=flags.optimizer == "adamw8bit",
    )
    recomputed = flags.grad_checkpoint or flags.recompute == BUT_ATTENTION
    if spec.lora is not None and not cut and not recomputed and spec.kernels.ops.float8:
        keep_weights(model)  # needs no more memory: the backward pass needs all casts anyway
    return engine


def muon_settings(spec: RunSpecification) -> MuonSettings | None:
    """Return the settings of --optimizer muon; None with AdamW alone."""
    flags = spec.flags
    if flags.optimizer != "muon":
        return None
    return MuonSettings(matrix_rows(spec.model_config), flags.muon_momentum, PRECISIONS[flags.muon_precision])


def open_monitor(spec: RunSpecification, supervisor: Supervisor, failures: WriteFailures) -> Monitor:
    monitor = Monitor(
        spec.folder,
        spec.mesh,
        first_step=spec.first_step,
        last_step=spec.last_step,
        precision=spec.flags.mixed_precision,
        failures=failures,
        loggers={name: partial(LOGGERS[name], spec.folder, spec.flag_values()) for name in spec.flags.loggers},
    )
    supervisor.closes(lambda _: monitor.close())
    return monitor


def open_loader(spec: RunSpecification, supervisor: Supervisor) -> BatchIterator:
    flags, mesh = spec.flags, spec.mesh
    loader = build_loader(
        spec.dataset,
        spec.schedule,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        batch_size=flags.batch_size,
        micro_batches=flags.grad_accumulation,
        start_step=spec.first_step,
        end_step=spec.last_step,
        num_workers=flags.num_workers,
        pin_memory=True,
        max_bad=flags.max_bad,
        on_skip=partial(warn_skipped, mesh),
        as_bytes=True,  # send bytes, a quarter of the traffic of floats; the device converts them
        enlarge=mesh.device.type == "cpu",  # with a GPU, the GPU enlarges the samples while the loader reads more
        patience=flags.data_timeout,
        who=f"rank {mesh.rank}: ",
        on_hang=supervisor.fail,
    )
    supervisor.closes(lambda _: loader.close())
    return loader


def open_checkpoints(
    spec: RunSpecification,
    networks: Sequence[TrainedNetwork],
    monitor: Monitor,
    supervisor: Supervisor,
    evaluated: str | None = None,
) -> Checkpoints:
    """Open the run's checkpoints. evaluated: identifier of the settings that determine the results of
    --evaluate_every."""
    engine, ema = networks[0].engine, networks[0].ema
    before = None if spec.low is None else open_checkpoints(spec.low, networks[1:], monitor, supervisor)
    checkpoints = Checkpoints(
        spec.folder / "checkpoints",
        engine,
        ema,
        spec.info(),
        keep=spec.flags.ckpt_keep,
        in_use=spec.resume and spec.resume.folder,
        sharded=sharded_checkpoints(spec, engine, monitor),
        enabled=spec.flags.save,
        write_failures=monitor.failures,
        best=best_checkpoint(spec, evaluated),
        before=before,
    )
    supervisor.closes(checkpoints.abandon)
    return checkpoints


def best_checkpoint(spec: RunSpecification, evaluated: str | None) -> BestCheckpoint | None:
    """Find the checkpoint that --ckpt_best keeps. evaluated: see :func:`open_checkpoints`."""
    name = spec.flags.ckpt_best
    if name is None or not spec.mesh.is_main:
        return None
    of = spec.fingerprint["validation"] if name == "val_loss" else evaluated
    best = BestCheckpoint(spec.folder / "checkpoints", name, cast(str, of), spec.first_step)
    if best.folder is not None:
        called = "held-out loss" if name == "val_loss" else name
        logger.info(f"--ckpt_best: so far {best.folder}, with a {called} of {best.figure:.5f}")
    return best


def sharded_checkpoints(spec: RunSpecification, engine: Engine, monitor: Monitor) -> bool:
    """Return True if every rank writes its own shards (--checkpoint_format). The answer is the same on every rank.

    "auto" chooses shards if the plugin prefers shards, if the run has pipeline stages, or if a host's memory is too
    small for buffers of whole tensors.
    """
    asked = spec.flags.checkpoint_format
    if asked != "auto":
        return asked == "sharded"
    if PLUGINS[spec.flags.plugin].sharded_checkpoints or spec.stages is not None:
        return True
    networks = 2 if spec.flags.expert == "both" else 1
    sizes = {name: networks * math.prod(shape) for name, shape in engine.shapes.items()}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = most_bytes_of_a_host(sizes, len(spec.flags.ema_decays), spec.mesh.world_size, ranks)
    there = host_memory()
    too_large = spec.mesh.broadcast_object(needed > USABLE_OF_A_HOST * there)
    if too_large and spec.flags.save and spec.mesh.is_main:
        logger.info(
            f"checkpoints: in shards, because whole tensors would take {needed / GIB:,.1f} GiB of a host's memory "
            f"({there / GIB:,.1f} GiB)"
        )
    return too_large


def open_profiler(spec: RunSpecification, monitor: Monitor) -> StepProfiler:
    return StepProfiler(
        spec.flags.profile and spec.mesh.is_main,
        spec.folder / "profile",
        spec.mesh.device,
        steps=spec.last_step - spec.first_step,
        failures=monitor.failures,
    )


def warn_skipped(mesh: Mesh, file: str) -> None:
    if mesh.leads_sharing:  # log the file once: all ranks that share samples skip the same file
        logger.warning(f"rank {mesh.rank}: skipped {file}")


class Evaluation(Protocol):
    """Interface for evaluating samples drawn with the EMA weights; opendit/evaluation implements it.

    Attributes:
        of: identifier of everything, except the weights, that determines the results.
    """

    of: str

    def after(self, step: int, sampler: EMASampler, monitor: Monitor) -> dict[str, Any]:
        """Evaluate samples after a step; return the fields for the step's line in the log. Collective."""
        ...


@dataclass
class Run:
    """The state of a training run.

    Attributes:
        networks: the networks of the run. engine, ema, runner, inputs and skipped are those of the step's network.
        network_of: returns the number of the network that a step trains.
        done: number of steps done since the run's first start.
        result: result of the last step; None before the first step since this start.
        batches: source of the next step's batches.
        interrupt: tells whether the run must end.
        periodic: decides which periodic work is due after a step.
        skipped: detects steps whose gradients were not finite.
        fingerprint: see opendit/training/fingerprint.py.
    """

    mesh: Mesh
    schedule: BatchSchedule
    first_step: int
    last_step: int
    engine: Engine
    ema: EMA
    runner: Runner
    batches: Batches
    inputs: MakesMicroBatches
    flops: TrainingFlops
    learning_rate: LearningRate
    interrupt: Interrupt
    periodic: PeriodicWork
    skipped: SkippedSteps
    monitor: Monitor
    profiler: StepProfiler
    log: StepLog
    checkpoints: Checkpoints
    sampler: EMASampler
    grids: SampleGrids
    validation: Validation | None
    evaluation: Evaluation | None
    fingerprint: dict[str, Any]
    done: int
    networks: Sequence[TrainedNetwork] = ()
    network_of: Callable[[int], int] = lambda step: 0
    result: StepResult | None = None

    def begin(self, step: int) -> None:
        """Choose the network that a step trains. A run of several networks (--expert both) trains them by turns."""
        if len(self.networks) > 1:
            network = self.networks[self.network_of(step)]
            self.engine, self.ema, self.runner, self.inputs, self.skipped = network
            self.batches.diagnosis = self.skipped.diagnosis

    def count(self, batch: Batch, micro_batch: MicroBatch | PackedMicroBatch) -> None:
        """Count the samples and the work of a micro-batch for the log."""
        # number of samples of the whole step, which only the first micro-batch counts
        samples = batch.segments_in_step if batch.micro == 0 else 0
        self.monitor.count(samples, self.flops.of(micro_batch))

    def due(self, stopping: bool) -> Due:
        """Return the work that is due after the step; the answer is the same on every rank.

        The host waits for the device only before it logs, saves or draws, to see whether the step was skipped.

        Raises:
            FloatingPointError: too many steps in a row were skipped.
        """
        if self.periodic.step_done(self.done, stopping):
            assert self.result is not None, "a step has been made"
            self.skipped.look(self.done, self.result)
        due = self.periodic.due(self.skipped.skipping, self.skipped.failing)
        if due.refuse:
            self.checkpoints.refuse(self.done, "the gradients of this step were not finite")
        return due

    def measure(self, due: Due) -> dict[str, Any]:
        """Validate and evaluate if ``due`` says so. Return the figures as fields for the step's line in the log."""
        measured = {}
        with self.monitor.paused(due.validate or due.evaluate):
            if due.validate and self.validation is not None:
                measured |= self.validation.after(self.done)
            if due.evaluate and self.evaluation is not None:
                measured |= self.evaluation.after(self.done, self.sampler, self.monitor)
        return measured

    def save(self) -> None:
        """Start saving the run's state."""
        with self.monitor.paused():
            epoch = self.schedule.epoch(self.done - 1)
            state = {"step": self.done, "epoch": epoch, "skipped": self.log.skipped, "fingerprint": self.fingerprint}
            state["packs"] = self.schedule.state(self.done)
            self.checkpoints.save(state | self.log.figures)

    def draw(self) -> None:
        """Draw a grid of samples."""
        with self.monitor.paused():
            self.grids.draw(self.done)

    @contextlib.contextmanager
    def saving_if_data_end(self) -> Iterator[None]:
        """Context that logs and saves the last step's state if its block raises NoData. Work that is already done is
        not repeated.

        Logging and saving are collective.
        """
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
        """Return the number of saves and other writes that failed, the same on every rank. Collective."""
        # Rank 0 counts the failed writes, and every rank adds this count.
        return len(self.checkpoints.failures) + self.mesh.broadcast_object(self.monitor.failures.count)


def build_network(
    spec: RunSpecification,
    make_inputs: Callable[..., MakesMicroBatches],
    make_passes: Callable[..., EagerPasses],
    pace: Pace,
) -> TrainedNetwork:
    """Build one of the run's networks with the objects that train it, and load its checkpoint if the run is resumed."""
    flags, mesh, config = spec.flags, spec.mesh, spec.model_config
    engine = build_model_and_engine(spec)
    route = flags.token_route
    cast(DiT, engine.module).route = None if route is None else (route.first, route.last)
    ema = EMA(engine, flags.ema_decays, spec.ema_warmup, power=flags.average is not None)
    if spec.resume:
        load_checkpoint(spec.resume, engine, ema)
    passes = make_passes(engine, spec.objective, flags.grad_accumulation, after_forward=pace.end)
    runner = build_runner(passes, graph=flags.enable_cuda_graph, packs=flags.pack_tokens is not None)
    inputs = make_inputs(
        spec.latents,
        spec.objective,
        spec.conditioner,
        mesh.device,
        flags.global_seed,
        flags.label_drop,
        packing=_packing(spec),
        tokens_of=lambda size: math.prod(config.grid_of(size)),
        given_frames=spec.given_frames,
        in_place=config.given_in_place,
        beside=config.given_beside,
        route=route,
        teacher=spec.teacher,
        uncertain=flags.uncertainty_weighting,
    )
    diagnosis = Diagnosis(engine, runner, inputs, spec.dataset, spec.schedule, flags.grad_accumulation)
    return TrainedNetwork(engine, ema, runner, inputs, SkippedSteps(engine, diagnosis, flags.max_bad_steps))


def _packing(spec: RunSpecification) -> Packing | None:
    flags, mesh = spec.flags, spec.mesh
    if flags.pack_tokens is None:
        return None
    return Packing(
        spec.model_config.patch, flags.batch_size * flags.pack_tokens, mesh.dp_size * flags.grad_accumulation
    )


def _interchangeable(spec: RunSpecification) -> bool:
    """Return True if any batch of the run can replace any other batch.

    Ranks that share samples or experts exchange tensors of a sample's size. Their batches must have the same shape, so
    they can be replaced only if all batches of the run have one shape.
    """
    dims, schedule = spec.mesh.dims, spec.schedule
    return (spec.mesh.sharing == 1 and dims.ep == 1) or (schedule.micro_batches is None and not schedule.packed)


@contextlib.contextmanager
def recorded_end(run: Run, folder: Path, supervisor: Supervisor) -> Iterator[None]:
    """Context that writes, on rank 0, how the run ended."""
    if not run.mesh.is_main:
        yield
        return
    failures = run.monitor.failures

    def write(failed: bool, why: str | None = None) -> None:
        how = {name: name == why for name in ("stopped", "hours_up")}
        with failures.survive(ENDED, run.done):
            write_end(folder, run.done, done=run.done >= run.last_step, **how, failed=failed)

    with failures.survive(ENDED):
        begin_run(folder)
    supervisor.closes(lambda _: write(failed=True))
    try:
        yield
    except BaseException:
        write(failed=True)
        raise
    write(bool(run.checkpoints.failures or failures.count), run.interrupt.why)


@contextlib.contextmanager
def build(
    spec: RunSpecification,
    supervisor: Supervisor,
    make_inputs: Callable[..., MakesMicroBatches],
    make_passes: Callable[..., EagerPasses],
    evaluation: Evaluation | None = None,
) -> Iterator[Run]:
    """Build the run and print its summary. On exit, close the run, even after an error.

    Args:
        make_inputs, make_passes: classes ``Inputs`` and ``EagerPasses`` of train.py.
        evaluation: the evaluation of --evaluate_every; None without that flag.
    """
    flags, mesh, failures = spec.flags, spec.mesh, WriteFailures()
    with spec.lock:
        announce_memory(spec)
        pace = Pace(mesh)
        networks = [build_network(each, make_inputs, make_passes, pace) for each in spec.networks]
        engine, ema, runner, inputs, skipped = networks[0]
        announce(spec, failures, engine, ema, runner.note)
        evaluated = None if evaluation is None else evaluation.of
        count = flags.grad_accumulation
        with (
            contextlib.ExitStack() as runners,
            open_monitor(spec, supervisor, failures) as monitor,
            open_loader(spec, supervisor) as loader,
            open_checkpoints(spec, networks, monitor, supervisor, evaluated) as checkpoints,
            open_profiler(spec, monitor) as profiler,
            supervisor.announced(),
            Interrupt(mesh, flags.max_hours, lambda: checkpoints.stall_s + checkpoints.write_s) as interrupt,
        ):
            for network in networks:
                runners.enter_context(contextlib.closing(network.runner))
            sampler = EMASampler(spec, engine, ema, monitor)
            engines = [network.engine for network in networks]
            skipped_before = spec.resume.state["skipped"] if spec.resume else 0
            run = Run(
                mesh=mesh,
                schedule=spec.schedule,
                first_step=spec.first_step,
                last_step=spec.last_step,
                engine=engine,
                ema=ema,
                runner=runner,
                batches=Batches(loader, count, monitor, pace, skipped.diagnosis, interrupt, _interchangeable(spec)),
                inputs=inputs,
                flops=TrainingFlops(spec.model_config, spec.lora, flags.token_route),
                learning_rate=LearningRate(flags.lr, flags.warmup_steps, flags.lr_schedule, spec.last_step),
                interrupt=interrupt,
                periodic=PeriodicWork(flags, spec.last_step),
                skipped=skipped,
                monitor=monitor,
                profiler=profiler,
                log=StepLog(
                    engines, loader, spec.schedule, checkpoints, monitor, pace, spec.first_step, skipped_before
                ),
                checkpoints=checkpoints,
                sampler=sampler,
                grids=SampleGrids(spec, sampler, monitor),
                validation=None if spec.validation is None else Validation(spec, engine, ema, runner, monitor),
                evaluation=evaluation,
                fingerprint=spec.fingerprint,
                done=spec.first_step,
                networks=networks,
                network_of=spec.network_of,
            )
            with recorded_end(run, spec.folder, supervisor):
                yield run
                profiler.close()
                loader.close()
                checkpoints.wait()
        if mesh.is_main:
            summarise(spec, monitor, checkpoints)
