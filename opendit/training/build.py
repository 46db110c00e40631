"""Build a prepared run: model, engine, averages, runner, log, data loader and checkpoints."""

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import load_checkpoint
from opendit.checkpoint.run_folders import ENDED
from opendit.checkpoint.save import BestCheckpoint, Checkpoints, most_bytes_of_a_host
from opendit.common.safe_files import WriteFailures, remove, write_whole
from opendit.common.utils import collection_paused
from opendit.config.flags import to_dict
from opendit.config.names import PLUGINS
from opendit.data import BatchIterator, build_loader
from opendit.kernels.base_precision import store_base
from opendit.kernels.fp8 import keep_weights
from opendit.models.dit import DiT
from opendit.models.zoo import empty_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import PRECISIONS, Engine, MuonSettings, build_engine
from opendit.parallel.experts import expert_group
from opendit.parallel.host_memory import StreamedBlocks
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import matrix_rows
from opendit.parallel.supervisor import Supervisor
from opendit.parallel.tensor import allocate, tensor_group
from opendit.training.diagnosis import Diagnosis, SkippedSteps
from opendit.training.drawing import EMASampler, SampleGrids
from opendit.training.interrupt import RUN_FOLDER_FILE, Interrupt
from opendit.training.memory import GIB, USABLE_OF_A_HOST, host_memory
from opendit.training.micro_batch import Packing, SampleInputs
from opendit.training.monitor import LOGGERS, Monitor, Pace, StepLog
from opendit.training.profiling import StepProfiler
from opendit.training.run import Batches, PeriodicWork, Run, TrainedNetwork
from opendit.training.runners import MicroBatchPasses, build_runner
from opendit.training.summary import announce, announce_memory, summarise
from opendit.training.validation import Validation

logger = logging.getLogger(__name__)


@collection_paused()  # no garbage collection during an engine's imports, because it would be slow
def build_model_and_engine(run: Run) -> Engine:
    flags = run.flags
    torch.set_float32_matmul_precision("high")  # use TF32 for matrix products that stay in fp32 on a GPU
    mesh = run.mesh
    cut = flags.plugin == "fsdp" and mesh.dims.size("loss") > 1
    # Allocate all parameters at once only if a rank holds the complete model in fp32. Parallelism other than data
    # parallelism divides the model, and LoRA stores its base weights in other dtypes.
    at_once = not cut and mesh.tp_size * mesh.pp_size == 1 and run.lora is None
    with mesh.device:
        model = empty_model(run.model_config, parameters=at_once)
    initial = run.first_values(model)
    # Cast frozen weights once, but not under ddp, where products cast them.
    if run.lora is not None and not cut and flags.plugin != "ddp":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(PRECISIONS[flags.mixed_precision])
    if flags.base_precision != "bf16":
        store_base(model, flags.base_precision, PRECISIONS[flags.mixed_precision], mesh.device)
    apply_parallel(
        model,
        ops=run.kernels.ops,
        attend=run.kernels.attend,
        varlen=run.kernels.varlen,
        sequence=run.sequence,
        tensor=tensor_group(mesh),
        experts=expert_group(mesh),
        stages=run.stages,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        recompute_blocks=flags.recompute_blocks,
        compiled=run.why_not_compiled is None,
    )
    count = 0 if cut else flags.streamed_blocks
    streamed = StreamedBlocks(model, count, mesh.device) if count else None
    if not cut:
        allocate(model, mesh.device)
    muon = None
    if flags.optimizer == "muon":
        muon = MuonSettings(matrix_rows(run.model_config), flags.muon_momentum, PRECISIONS[flags.muon_precision])
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
        sharding=run.sharding,
        offload=flags.offloaded_state,
        streamed=streamed,
        initial=initial,
        muon=muon,
        eight_bits=flags.optimizer == "adamw8bit",
    )
    if run.lora is not None and not cut and not flags.checkpointed and run.kernels.ops.float8:
        keep_weights(model)  # costs no memory: the backward pass also needs all casts
    return engine


def open_monitor(run: Run, supervisor: Supervisor, failures: WriteFailures) -> Monitor:
    monitor = Monitor(
        run.folder,
        run.mesh,
        first_step=run.first_step,
        last_step=run.last_step,
        precision=run.flags.mixed_precision,
        failures=failures,
        loggers={name: partial(LOGGERS[name], run.folder, to_dict(run.flags)) for name in run.flags.loggers},
    )
    supervisor.closes(lambda _: monitor.close())
    return monitor


def open_loader(run: Run, supervisor: Supervisor) -> BatchIterator:
    flags, mesh = run.flags, run.mesh
    loader = build_loader(
        run.dataset,
        run.schedule,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        batch_size=flags.batch_size,
        micro_batches=flags.grad_accumulation,
        start_step=run.first_step,
        end_step=run.last_step,
        num_workers=flags.num_workers,
        pin_memory=True,
        max_bad=flags.max_bad,
        on_skip=partial(warn_skipped, mesh),  # picklable, for worker processes that do not fork
        as_bytes=True,  # send bytes, a quarter of the traffic of floats; the device converts them
        enlarge=mesh.device.type == "cpu",  # with a GPU, the GPU enlarges the samples while the loader reads more
        patience=flags.data_timeout,
        who=f"rank {mesh.rank}: ",
        on_hang=supervisor.fail,
    )
    supervisor.closes(lambda _: loader.close())
    return loader


def open_checkpoints(
    run: Run,
    networks: Sequence[TrainedNetwork],
    failures: WriteFailures,
    supervisor: Supervisor,
    evaluated: str | None = None,
) -> Checkpoints:
    """Open the run's checkpoints. ``evaluated`` identifies the settings of --evaluate_every."""
    engine, ema = networks[0].engine, networks[0].ema
    before = None if run.low is None else open_checkpoints(run.low, networks[1:], failures, supervisor)
    checkpoints = Checkpoints(
        run.folder / "checkpoints",
        engine,
        ema,
        run.info(),
        keep=run.flags.ckpt_keep,
        in_use=run.resume and run.resume.folder,
        sharded=sharded_checkpoints(run, engine),
        enabled=run.flags.save,
        write_failures=failures,
        best=best_checkpoint(run, evaluated),
        before=before,
    )
    supervisor.closes(checkpoints.abandon)
    return checkpoints


def best_checkpoint(run: Run, evaluated: str | None) -> BestCheckpoint | None:
    """Return the object that tracks the best checkpoint; None on other ranks than 0 and without --ckpt_best."""
    name = run.flags.ckpt_best
    if name is None or not run.mesh.is_main:
        return None
    of = run.fingerprint["validation"] if name == "val_loss" else evaluated
    best = BestCheckpoint(run.folder / "checkpoints", name, cast(str, of), run.first_step)
    if best.folder is not None:
        called = "held-out loss" if name == "val_loss" else name
        logger.info(f"--ckpt_best: so far {best.folder}, with a {called} of {best.figure:.5f}")
    return best


def sharded_checkpoints(run: Run, engine: Engine) -> bool:
    """Return True if each rank writes its shards (--checkpoint_format). The result is equal on every rank. "auto" means
    shards if the plugin prefers them, for pipelines, or if full tensors don't fit in host memory."""
    asked = run.flags.checkpoint_format
    if asked != "auto":
        return asked == "sharded"
    if PLUGINS[run.flags.plugin].sharded_checkpoints or run.stages is not None:
        return True
    networks = 2 if run.flags.expert == "both" else 1
    sizes = {name: networks * math.prod(shape) for name, shape in engine.shapes.items()}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = most_bytes_of_a_host(sizes, len(run.flags.ema_decays), run.mesh.world_size, ranks)
    there = host_memory()
    too_large = run.mesh.broadcast_object(needed > USABLE_OF_A_HOST * there)
    if too_large and run.flags.save and run.mesh.is_main:
        logger.info(
            f"checkpoints: in shards, because whole tensors would take {needed / GIB:,.1f} GiB of a host's memory "
            f"({there / GIB:,.1f} GiB)"
        )
    return too_large


def warn_skipped(mesh: Mesh, file: str) -> None:
    if mesh.leads_sharing:  # only one of several ranks that share samples
        logger.warning(f"rank {mesh.rank}: skipped {file}")


class Evaluation(Protocol):
    """Interface for evaluating samples of the EMA weights. Implemented in opendit/evaluation. of: identifier of the
    settings that determine the results."""

    of: str

    def after(self, step: int, sampler: EMASampler, monitor: Monitor) -> dict[str, Any]:
        """Evaluate samples after a step. Return fields for the step's line in the log. All ranks must call this."""
        ...


def build_network(
    run: Run, make_inputs: Callable[..., SampleInputs], make_passes: Callable[..., MicroBatchPasses], pace: Pace
) -> TrainedNetwork:
    """Build a network and the objects that train it. A resumed run loads its checkpoint."""
    flags, mesh, config = run.flags, run.mesh, run.model_config
    engine = build_model_and_engine(run)
    route = flags.token_route
    cast(DiT, engine.module).route = None if route is None else (route.first, route.last)
    ema = EMA(engine, flags.ema_decays, run.ema_warmup, power=flags.average is not None)
    if run.resume:
        load_checkpoint(run.resume, engine, ema)
    passes = make_passes(engine, run.objective, flags.grad_accumulation, after_forward=pace.end)
    runner = build_runner(passes, graph=flags.enable_cuda_graph, packs=flags.pack_tokens is not None)
    packing = None
    if flags.pack_tokens is not None:
        micro_batches = mesh.dp_size * flags.grad_accumulation
        packing = Packing(config.patch, flags.batch_size * flags.pack_tokens, micro_batches)
    inputs = make_inputs(
        run.latents_of(run.dataset, flags.global_seed),
        run.objective,
        run.conditioner,
        mesh.device,
        flags.global_seed,
        flags.label_drop,
        packing=packing,
        tokens_of=lambda size: math.prod(config.grid_of(size)),
        given_frames=run.given_frames,
        in_place=config.given_in_place,
        beside=config.given_beside,
        route=route,
        teacher=run.teacher,
        uncertain=flags.uncertainty_weighting,
    )
    diagnosis = Diagnosis(engine, runner, inputs, run.dataset, run.schedule, flags.grad_accumulation)
    return TrainedNetwork(engine, ema, runner, inputs, SkippedSteps(engine, diagnosis, flags.max_bad_steps))


def _interchangeable(run: Run) -> bool:
    """Return True if any batch can replace any other batch. Ranks that share samples or experts exchange tensors, so
    their batches must have one shape."""
    dims, schedule = run.mesh.dims, run.schedule
    return (run.mesh.sharing == 1 and dims.ep == 1) or (schedule.micro_batches is None and not schedule.packed)


@contextlib.contextmanager
def recorded_end(run: Run, supervisor: Supervisor) -> Iterator[None]:
    if not run.mesh.is_main:
        yield
        return
    failures = run.monitor.failures
    writing = threading.Lock()  # if a rank is lost, this thread and the supervisor's may write at the same time

    def write(failed: bool, why: str | None = None) -> None:
        how = {name: name == why for name in ("stopped", "hours_up")}
        with writing, failures.survive(ENDED, run.done):
            ended = {"step": run.done, "done": run.done >= run.last_step, **how, "failed": failed}
            write_whole(run.folder / ENDED, (json.dumps(ended) + "\n").encode(), root=run.folder)

    with failures.survive(ENDED):
        with contextlib.suppress(FileNotFoundError):
            remove(run.folder / ENDED, root=run.folder)  # written by an earlier start
        if path := os.environ.get(RUN_FOLDER_FILE):
            Path(path).write_text(f"{run.folder}\n", encoding="utf-8")
    supervisor.closes(lambda _: write(failed=True))
    try:
        yield
    except BaseException:
        write(failed=True)
        raise
    write(bool(run.checkpoints.failures or failures.count), run.interrupt.why)


@contextlib.contextmanager
def build(
    run: Run,
    supervisor: Supervisor,
    make_inputs: Callable[..., SampleInputs],
    make_passes: Callable[..., MicroBatchPasses],
    evaluation: Evaluation | None = None,
) -> Iterator[None]:
    """Build a prepared run and print its summary. On exit, close the run, even after an error.

    ``make_inputs`` and ``make_passes`` are ``Inputs`` and ``EagerPasses`` of train.py.
    """
    flags, mesh, failures = run.flags, run.mesh, WriteFailures()
    with run.lock:
        announce_memory(run)
        pace = Pace(mesh)
        parts = [run] if run.low is None else [run, run.low]
        run.networks = [build_network(part, make_inputs, make_passes, pace) for part in parts]
        run.engine, run.ema, run.runner, run.inputs, run.skipped = run.networks[0]
        announce(run, failures)
        evaluated = None if evaluation is None else evaluation.of
        profiled, steps = flags.profile and mesh.is_main, run.last_step - run.first_step
        with (
            contextlib.ExitStack() as runners,
            open_monitor(run, supervisor, failures) as run.monitor,
            open_loader(run, supervisor) as loader,
            open_checkpoints(run, run.networks, failures, supervisor, evaluated) as run.checkpoints,
            StepProfiler(profiled, run.folder / "profile", mesh.device, steps, failures) as run.profiler,
            supervisor.announced(),
            Interrupt(mesh, flags.max_hours, lambda: run.checkpoints.stall_s + run.checkpoints.write_s) as interrupt,
        ):
            for network in run.networks:
                runners.enter_context(contextlib.closing(network.runner))
            run.done, run.interrupt, run.periodic = run.first_step, interrupt, PeriodicWork(flags, run.last_step)
            count, diagnosis = flags.grad_accumulation, run.skipped.diagnosis
            run.batches = Batches(loader, count, run.monitor, pace, diagnosis, interrupt, _interchangeable(run))
            engines = [network.engine for network in run.networks]
            skipped_before = run.resume.state["skipped"] if run.resume else 0
            run.log = StepLog(
                engines, loader, run.schedule, run.checkpoints, run.monitor, pace, run.first_step, skipped_before
            )
            sampler = EMASampler(run)
            run.draw_grid = SampleGrids(run, sampler).draw
            if run.validation is not None:
                run.validate = Validation(run).after
            if evaluation is not None:
                run.evaluate = lambda step: evaluation.after(step, sampler, run.monitor)
            with recorded_end(run, supervisor):
                yield
                run.profiler.close()
                loader.close()
                run.checkpoints.wait()
        if mesh.is_main:
            summarise(run)
