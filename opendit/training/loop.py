"""The training program: data -> prepare -> model -> loss -> step -> EMA -> log.

(The runner prepares, calls the model and its loss, and steps: opendit/training/runners/eager.py.)
"""

import math
import time
from collections.abc import Iterator

import torch

from opendit.cli.train_flags import TrainConfig
from opendit.common.records import WriteFailures
from opendit.data import Batch, BatchIterator
from opendit.data.base import to_pixels
from opendit.data.progress import Progress
from opendit.diffusion.random import Stream, normal, uniform
from opendit.models import build_model
from opendit.models.adapt import adapt
from opendit.models.lora import add_lora
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.names import PLUGINS
from opendit.parallel.supervisor import Supervisor
from opendit.state.checkpoint import load_checkpoint
from opendit.state.ema import EMA
from opendit.training.agenda import Agenda
from opendit.training.diagnosis import Diagnosis
from opendit.training.drawing import draw_grid
from opendit.training.from_flags import config_of
from opendit.training.interrupt import Interrupt
from opendit.training.monitor import Monitor
from opendit.training.pace import Pace
from opendit.training.prepare import TrainingRun
from opendit.training.resources import open_checkpoints, open_loader, open_monitor, open_profiler
from opendit.training.runners import MicroBatch, Runner, build_runner
from opendit.training.skipped_steps import SkippedSteps
from opendit.training.step_log import StepLog
from opendit.training.summary import announce, announce_memory, summarise


def train(job: TrainingRun, supervisor: Supervisor) -> int:
    """Trains to the job's last step, or to the one in which a signal comes; returns how many saves and other writes
    failed, the same on every rank.

    Whatever owns a process, a thread or a file is closed on every way out.
    """
    flags, mesh, failures = job.flags, job.mesh, WriteFailures(Progress.write)
    announce_memory(job)
    engine = build_model_and_engine(job)
    ema = EMA(engine, flags.ema_decays, flags.ema_warmup)
    if job.resume:
        load_checkpoint(job.resume, engine, ema)
    pace = Pace(mesh, Progress.write)
    runner = runner_of(job, engine, pace)
    announce(job, failures, engine, ema, runner.note, why_not_compiled(flags) or COMPILED)
    diagnosis, agenda = Diagnosis(job, engine, inputs, runner), Agenda(flags, job.last_step)
    with (
        open_monitor(job, supervisor, failures) as monitor,
        open_loader(job, supervisor) as loader,
        open_checkpoints(job, engine, ema, monitor, supervisor) as checkpoints,
        open_profiler(job, monitor, failures) as profiler,
        supervisor.announced(),
        Interrupt(mesh) as interrupt,
    ):
        skipped = SkippedSteps(engine, diagnosis, flags.max_bad_steps, monitor.say)
        log = StepLog(job, engine, loader, checkpoints, monitor, pace)
        for step in range(job.first_step, job.last_step):
            engine.set_lr(lr := learning_rate(flags, step, job.last_step))
            micro_batches = step_inputs(job, loader, monitor, pace, diagnosis)
            result = runner.train_step(micro_batches, before_update=interrupt.ask)
            ema.update(result.finite)
            monitor.add(result.loss, result.finite)
            profiler.step()
            done, epoch, stopping = step + 1, job.schedule.epoch(step), interrupt.answer()
            if agenda.step_done(done, stopping):
                skipped.look(done, result)  # here alone, and for a line, a save or a drawing, the host waits
            due = agenda.due(skipped.skipping, skipped.failing)
            if due.refuse:
                checkpoints.refuse(done, "the gradients of this step were not finite")
            if due.log:
                log.write(done, epoch, lr, result)
            with monitor.paused(due.save or due.draw):
                if due.save:
                    state = {"step": done, "epoch": epoch, "skipped": log.skipped, "fingerprint": job.fingerprint}
                    checkpoints.save(state)
                if due.draw:
                    draw_grid(job, engine, ema, monitor, done)
            if stopping:
                break
        profiler.close()
        loader.close()
        checkpoints.wait()
    if mesh.is_main:
        summarise(job, monitor, checkpoints)
    return len(checkpoints.failures) + mesh.broadcast_object(failures.count)  # rank 0 writes the others


def step_inputs(
    job: TrainingRun, loader: BatchIterator, monitor: Monitor, pace: Pace, diagnosis: Diagnosis
) -> Iterator[MicroBatch]:
    """The micro-batches of the next step, each loaded when it is asked for."""
    for _ in range(job.flags.grad_accumulation):
        asked = time.perf_counter()
        batch = next(loader)
        waited = time.perf_counter() - asked
        monitor.loader_wait(waited)
        pace.begin(waited)
        diagnosis.keep(batch)
        yield inputs(job, batch)


def inputs(job: TrainingRun, batch: Batch) -> MicroBatch:
    """A loader's batch on the device, as latents; all its randomness is keyed by (seed, step, sample)."""
    device, seed, step = job.mesh.device, job.flags.global_seed, batch.step
    index = batch.index.to(device, non_blocking=True)
    latents = job.latents(to_pixels(batch.x.to(device, non_blocking=True)), step, index)
    t = job.objective.times(seed, step, index)
    noise = normal(seed, step, index, Stream.NOISE, tuple(latents.shape[1:]))
    dropped = uniform(seed, step, index, Stream.CONDITION_DROP) < job.flags.label_drop
    return MicroBatch(latents, t, noise, job.conditioner.drop(job.conditioner.of_batch(batch), dropped))


def learning_rate(flags: TrainConfig, step: int, last_step: int) -> float:
    """Linear warm-up to --lr, then constant, or a cosine to zero at the last step."""
    if step < flags.warmup_steps:
        return flags.lr * (step + 1) / flags.warmup_steps
    if flags.lr_schedule == "constant":
        return flags.lr
    progress = (step - flags.warmup_steps) / max(1, last_step - flags.warmup_steps)
    return flags.lr * 0.5 * (1 + math.cos(math.pi * progress))


def runner_of(job: TrainingRun, engine: Engine, pace: Pace) -> Runner:
    return build_runner(
        engine,
        job.objective,
        micro_batches=job.flags.grad_accumulation,
        graph=job.flags.enable_cuda_graph,
        after_forward=pace.end,
        say=Progress.write,
    )


def build_model_and_engine(job: TrainingRun) -> Engine:
    flags = job.flags
    torch.manual_seed(flags.global_seed)  # the same initial weights on every rank
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32 on a GPU
    with job.mesh.device:
        model = build_model(job.model_config)
    if job.initial is not None:
        start = adapt(model, job.initial, config_of(job.initial, flags.model), job.dataset.class_names)
        job.notes += [f"--pretrained: {line}" for line in start.describe()]
        if job.lora is not None:
            add_lora(model, job.lora, start.untrained)
    apply_parallel(
        model,
        ops=job.kernels.ops,
        attend=job.kernels.attend,
        sequence=job.sequence,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        compiled=why_not_compiled(flags) is None,
    )
    return build_engine(
        model.train(),
        job.mesh,
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        lr=flags.lr,
        weight_decay=flags.weight_decay,
        betas=(flags.adam_beta1, flags.adam_beta2),
        grad_clip=flags.grad_clip,
        grad_accumulation=flags.grad_accumulation,
    )


COMPILED = "blocks and final layer, when they first meet a shape"


def why_not_compiled(flags: TrainConfig) -> str | None:
    """Why --compile is not done; None: it is."""
    if not flags.compile:
        return "off (--compile is)"
    why = PLUGINS[flags.plugin].ignores.get("compile")
    return None if why is None else f"off: {why}"
