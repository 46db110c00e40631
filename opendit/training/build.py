"""Build a run's parts in the order that they need: memory estimate, model and engine, averages, runner, log, loader,
checkpoints."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import load_checkpoint
from opendit.checkpoint.run_folders import folder_name
from opendit.checkpoint.save import Checkpoints
from opendit.common.records import WriteFailures
from opendit.data import Batch, BatchSchedule
from opendit.data.progress import Progress
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.mesh import Mesh
from opendit.parallel.supervisor import Supervisor
from opendit.training.batches import Batches
from opendit.training.diagnosis import Diagnosis, MakesMicroBatches
from opendit.training.drawing import EMASampler, SampleGrids
from opendit.training.due import Due, PeriodicWork
from opendit.training.engine import build_model_and_engine
from opendit.training.flops import TrainingFlops
from opendit.training.interrupt import Interrupt, NoData
from opendit.training.learning_rate import LearningRate
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch
from opendit.training.monitor import Monitor
from opendit.training.pace import Pace
from opendit.training.packing import Packing
from opendit.training.profiling import StepProfiler
from opendit.training.resources import open_checkpoints, open_loader, open_monitor, open_profiler
from opendit.training.runners import EagerPasses, Runner, build_runner
from opendit.training.skipped_steps import SkippedSteps
from opendit.training.specification import RunSpecification
from opendit.training.step_log import StepLog
from opendit.training.summary import announce, announce_memory, summarise
from opendit.training.validation import Validation


class Evaluation(Protocol):
    """The interface of evaluations of the EMA weights' samples; :mod:`opendit.evaluation` implements it.

    of: identifies all that decides the figures beside the weights.
    """

    of: str

    def after(self, step: int, sampler: EMASampler, monitor: Monitor) -> dict[str, Any]:
        """Evaluate samples after a step, and return the fields for its line of the log. Collective."""
        ...


@dataclass
class Run:
    """The state of a run that trains.

    done: steps of the run so far. result: of the last step of this start. batches: of the next step.
    interrupt: knows whether the run has to end. periodic: decides what is due after a step. skipped: looks for steps
    whose gradients were not finite. fingerprint: see :mod:`opendit.training.fingerprint`.
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
    result: StepResult | None = None

    def count(self, batch: Batch, micro_batch: MicroBatch | PackedMicroBatch) -> None:
        """Count the samples and the work of a micro-batch for the log."""
        samples = batch.segments_in_step if batch.micro == 0 else 0  # of the whole step, with its first micro-batch
        self.monitor.count(samples, self.flops.of(micro_batch))

    def due(self, stopping: bool) -> Due:
        """Return the work that is due after the step, the same on every rank. Only for a line, a save or a drawing does
        the host wait for the device, to see whether the step was skipped.

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
        """Return the figures of held-out samples and of drawn ones that are due, as fields of the log's line."""
        measured = {}
        with self.monitor.paused(due.validate or due.evaluate):
            if due.validate and self.validation is not None:
                measured |= self.validation.after(self.done)
            if due.evaluate and self.evaluation is not None:
                measured |= self.evaluation.after(self.done, self.sampler, self.monitor)
        return measured

    def save(self) -> None:
        """Begin to save the run's state."""
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
        """Log and save the last step's state, unless that is done, if the block raises NoData. Collective then."""
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
        return len(self.checkpoints.failures) + self.mesh.broadcast_object(self.monitor.failures.count)  # rank 0's


def _packing(spec: RunSpecification) -> Packing | None:
    flags, mesh = spec.flags, spec.mesh
    if flags.pack_tokens is None:
        return None
    return Packing(
        spec.model_config.patch, flags.batch_size * flags.pack_tokens, mesh.dp_size * flags.grad_accumulation
    )


def _interchangeable(spec: RunSpecification) -> bool:
    """Return True if any batch of the run can stand in for another one: ranks that share samples or experts exchange
    tensors of a sample's size, so that all their batches must have one shape."""
    dims, schedule = spec.mesh.dims, spec.schedule
    return (spec.mesh.sharing == 1 and dims.ep == 1) or (schedule.micro_batches is None and not schedule.packed)


@contextlib.contextmanager
def build(
    spec: RunSpecification,
    supervisor: Supervisor,
    make_inputs: Callable[..., MakesMicroBatches],
    make_passes: Callable[..., EagerPasses],
    evaluation: Evaluation | None = None,
) -> Iterator[Run]:
    """Build the run, print its summary, and close it on exit, however it ends.

    Args:
        make_inputs, make_passes: ``Inputs`` and ``EagerPasses`` of train.py.
        evaluation: of --evaluate_every.
    """
    flags, mesh, failures = spec.flags, spec.mesh, WriteFailures(Progress.write)
    with spec.lock:
        announce_memory(spec)
        engine = build_model_and_engine(spec)
        ema = EMA(engine, flags.ema_decays, spec.ema_warmup)
        if spec.resume:
            load_checkpoint(spec.resume, engine, ema)
        pace = Pace(mesh)
        passes = make_passes(engine, spec.objective, flags.grad_accumulation, after_forward=pace.end)
        runner = build_runner(passes, graph=flags.enable_cuda_graph, packs=flags.pack_tokens is not None)
        announce(spec, failures, engine, ema, runner.note)
        inputs = make_inputs(
            spec.latents,
            spec.objective,
            spec.conditioner,
            mesh.device,
            flags.global_seed,
            flags.label_drop,
            packing=_packing(spec),
            tokens_of=lambda size: math.prod(spec.model_config.grid_of(size)),
            given_frames=spec.model_config.given_frames,
        )
        evaluated = None if evaluation is None else evaluation.of
        count = flags.grad_accumulation
        diagnosis = Diagnosis(engine, runner, inputs, spec.dataset, spec.schedule, count)
        with (
            contextlib.closing(runner),
            open_monitor(spec, supervisor, failures) as monitor,
            open_loader(spec, supervisor) as loader,
            open_checkpoints(spec, engine, ema, monitor, supervisor, evaluated) as checkpoints,
            open_profiler(spec, monitor) as profiler,
            supervisor.announced(),
            Interrupt(mesh) as interrupt,
        ):
            sampler = EMASampler(spec, engine, ema, monitor)
            skipped_before = spec.resume.state["skipped"] if spec.resume else 0
            yield Run(
                mesh=mesh,
                schedule=spec.schedule,
                first_step=spec.first_step,
                last_step=spec.last_step,
                engine=engine,
                ema=ema,
                runner=runner,
                batches=Batches(loader, count, monitor, pace, diagnosis, interrupt, _interchangeable(spec)),
                inputs=inputs,
                flops=TrainingFlops(spec.model_config),
                learning_rate=LearningRate(flags.lr, flags.warmup_steps, flags.lr_schedule, spec.last_step),
                interrupt=interrupt,
                periodic=PeriodicWork(flags, spec.last_step),
                skipped=SkippedSteps(engine, diagnosis, flags.max_bad_steps),
                monitor=monitor,
                profiler=profiler,
                log=StepLog(engine, loader, spec.schedule, checkpoints, monitor, pace, spec.first_step, skipped_before),
                checkpoints=checkpoints,
                sampler=sampler,
                grids=SampleGrids(spec, sampler, monitor),
                validation=None if spec.validation is None else Validation(spec, engine, ema, runner, monitor),
                evaluation=evaluation,
                fingerprint=spec.fingerprint,
                done=spec.first_step,
            )
            profiler.close()
            loader.close()
            checkpoints.wait()
        if mesh.is_main:
            summarise(spec, monitor, checkpoints)
