"""Open what a run holds open while it trains. Owners of processes, threads and files are registered with the
Supervisor, which closes them if the run ends by an error."""

import math
import os
from functools import partial
from typing import cast

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.save import BestCheckpoint, Checkpoints, most_bytes_of_a_host
from opendit.common.records import WriteFailures
from opendit.config.names import PLUGINS
from opendit.data import BatchIterator, build_loader
from opendit.data.progress import Progress
from opendit.parallel.engines import Engine
from opendit.parallel.mesh import Mesh
from opendit.parallel.supervisor import Supervisor
from opendit.training.host_memory import USABLE_OF_A_HOST, host_memory
from opendit.training.memory import GIB
from opendit.training.monitor import Monitor
from opendit.training.profiling import StepProfiler
from opendit.training.run_loggers import LOGGERS
from opendit.training.specification import RunSpecification


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
        on_skip=partial(say_skipped, mesh),
        as_bytes=True,  # a quarter of the memory traffic and of the transfer; the device makes the floats
        enlarge=mesh.device.type == "cpu",  # a GPU does it beside what reads
        patience=flags.data_timeout,
        log=lambda text: Progress.write(f"rank {mesh.rank}: {text}"),
        on_hang=supervisor.fail,
    )
    supervisor.closes(lambda _: loader.close())
    return loader


def open_checkpoints(
    spec: RunSpecification,
    engine: Engine,
    ema: EMA,
    monitor: Monitor,
    supervisor: Supervisor,
    evaluated: str | None = None,
) -> Checkpoints:
    """Open the run's checkpoints. evaluated: identifies what decides --evaluate_every's figures beside the weights."""
    checkpoints = Checkpoints(
        spec.folder / "checkpoints",
        engine,
        ema,
        spec.info(),
        keep=spec.flags.ckpt_keep,
        in_use=spec.resume and spec.resume.folder,
        sharded=sharded_checkpoints(spec, engine, monitor),
        say=monitor.say,
        enabled=spec.flags.save,
        write_failures=monitor.failures,
        best=best_checkpoint(spec, evaluated),
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
        Progress.write(f"--ckpt_best: so far {best.folder}, with a {called} of {best.figure:.5f}")
    return best


def sharded_checkpoints(spec: RunSpecification, engine: Engine, monitor: Monitor) -> bool:
    """Return True if every rank writes its own shards, as --checkpoint_format says. With auto it depends on the plugin,
    and on room for buffers of whole tensors on the hosts; stages of a pipeline always do. The same on every rank."""
    asked = spec.flags.checkpoint_format
    if asked != "auto":
        return asked == "sharded"
    if PLUGINS[spec.flags.plugin].sharded_checkpoints or spec.stages is not None:
        return True
    sizes = {name: math.prod(shape) for name, shape in engine.shapes.items()}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = most_bytes_of_a_host(sizes, len(spec.flags.ema_decays), spec.mesh.world_size, ranks)
    there = host_memory()
    too_large = spec.mesh.broadcast_object(needed > USABLE_OF_A_HOST * there)
    if too_large and spec.flags.save and spec.mesh.is_main:
        monitor.say(
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


def say_skipped(mesh: Mesh, file: str) -> None:
    if mesh.leads_sharing:  # the others that share its samples skip the same
        Progress.write(f"rank {mesh.rank}: skipped {file}")
