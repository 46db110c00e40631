"""Build a run's parts in the order that they need: memory estimate, model and engine, averages, runner, log, loader,
checkpoints."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import load_checkpoint
from opendit.checkpoint.run_folders import folder_name
from opendit.checkpoint.save import Checkpoints
from opendit.common.records import WriteFailures
from opendit.data import BatchSchedule
from opendit.data.progress import Progress
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.mesh import Mesh
from opendit.parallel.supervisor import Supervisor
from opendit.training.agenda import Agenda
from opendit.training.diagnosis import Diagnosis
from opendit.training.drawing import EMASampler, SampleGrids
from opendit.training.engine import build_model_and_engine
from opendit.training.flops import TrainingFlops
from opendit.training.inputs import Inputs
from opendit.training.interrupt import Interrupt
from opendit.training.learning_rate import LearningRate
from opendit.training.micro_batches import MicroBatches
from opendit.training.monitor import Monitor
from opendit.training.pace import Pace
from opendit.training.packing import Packing
from opendit.training.profiling import StepProfiler
from opendit.training.resources import open_checkpoints, open_loader, open_monitor, open_profiler
from opendit.training.runners import Runner, build_runner
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


@dataclass(frozen=True)
class Run:
    """The parts that the loop works with, open while it runs.

    micro_batches: of the next step. interrupt: tells if the run has to end. agenda: the work due after a step.
    skipped: steps whose gradients were not finite. fingerprint: see :mod:`opendit.training.fingerprint`.
    """

    mesh: Mesh
    schedule: BatchSchedule
    first_step: int
    last_step: int
    engine: Engine
    ema: EMA
    runner: Runner
    micro_batches: MicroBatches
    learning_rate: LearningRate
    interrupt: Interrupt
    agenda: Agenda
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

    def save(self, done: int, epoch: int) -> None:
        """Begins to save the run's state after ``done`` steps, the last of which was of this epoch."""
        state = {"step": done, "epoch": epoch, "skipped": self.log.skipped, "fingerprint": self.fingerprint}
        state["packs"] = self.schedule.state(done)
        self.checkpoints.save(state | self.log.figures)

    def end_without_data(self, done: int, last: StepResult) -> None:
        """Logs and saves the state after ``done`` steps, if that is still to do: for the next one data are lacking.

        last: of the last step. Collective.
        """
        self.checkpoints.wait()
        self.skipped.look(done, last)
        epoch, newest = self.schedule.epoch(done - 1), self.checkpoints.newest
        if self.log.logged != done:
            self.log.write(done, epoch, self.learning_rate.at(done - 1), last, {})
        saved = newest is not None and newest.name == folder_name(done)
        if self.checkpoints.enabled and not saved and not self.skipped.failing:
            self.save(done, epoch)
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


def _alike(spec: RunSpecification) -> bool:
    """Return True if any batch of the run can replace another one: ranks that share samples or experts exchange tensors
    of a sample's size, so that all their batches must have one shape."""
    dims, schedule = spec.mesh.dims, spec.schedule
    return (spec.mesh.sharing == 1 and dims.ep == 1) or (schedule.micro_batches is None and not schedule.packed)


@contextlib.contextmanager
def build(spec: RunSpecification, supervisor: Supervisor, evaluation: Evaluation | None = None) -> Iterator[Run]:
    """The run of a specification, announced; at the end it is put away and summed up.

    evaluation: of --evaluate_every.

    Whatever owns a process, a thread or a file is closed, however the run ends.
    """
    flags, mesh, failures = spec.flags, spec.mesh, WriteFailures(Progress.write)
    with spec.lock:
        announce_memory(spec)
        engine = build_model_and_engine(spec)
        ema = EMA(engine, flags.ema_decays, spec.ema_warmup)
        if spec.resume:
            load_checkpoint(spec.resume, engine, ema)
        pace = Pace(mesh, Progress.write)
        runner = build_runner(
            engine,
            spec.objective,
            micro_batches=flags.grad_accumulation,
            graph=flags.enable_cuda_graph,
            packs=flags.pack_tokens is not None,
            after_forward=pace.end,
            say=Progress.write,
        )
        announce(spec, failures, engine, ema, runner.note)
        inputs = Inputs(
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
        diagnosis = Diagnosis(engine, runner, inputs, spec.dataset, spec.schedule, flags.grad_accumulation)
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
            yield Run(
                mesh=mesh,
                schedule=spec.schedule,
                first_step=spec.first_step,
                last_step=spec.last_step,
                engine=engine,
                ema=ema,
                runner=runner,
                micro_batches=MicroBatches(
                    loader,
                    inputs,
                    flags.grad_accumulation,
                    TrainingFlops(spec.model_config),
                    monitor,
                    pace,
                    diagnosis,
                    interrupt,
                    alike=_alike(spec),
                ),
                learning_rate=LearningRate(flags.lr, flags.warmup_steps, flags.lr_schedule, spec.last_step),
                interrupt=interrupt,
                agenda=Agenda(flags, spec.last_step),
                skipped=SkippedSteps(engine, diagnosis, flags.max_bad_steps, monitor.say),
                monitor=monitor,
                profiler=profiler,
                log=StepLog(
                    engine, loader, spec.schedule, checkpoints, monitor, pace, spec.first_step, spec.skipped_before
                ),
                checkpoints=checkpoints,
                sampler=sampler,
                grids=SampleGrids(spec, sampler, monitor),
                validation=None if spec.validation is None else Validation(spec, engine, ema, runner, monitor),
                evaluation=evaluation,
                fingerprint=spec.fingerprint,
            )
            profiler.close()
            loader.close()
            checkpoints.wait()
        if mesh.is_main:
            summarise(spec, monitor, checkpoints)
