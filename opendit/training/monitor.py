"""Log a run: progress bar, log.jsonl, TensorBoard and other loggers, throughput, memory, and slow ranks."""

import contextlib
import io
import json
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from opendit.checkpoint.save import Checkpoints
from opendit.common.progress import Progress
from opendit.common.safe_files import RecordFile, WriteFailures, make_folder, open_to_append, refuse_links, write_whole
from opendit.data import BatchIterator, BatchSchedule
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.mesh import ControlGroup, Mesh


class Board:
    """Writer of curves and pictures for TensorBoard. Each start of a run writes a new event file.

    This start repeats the steps from ``first_step`` on, so TensorBoard hides the steps' earlier points. root: see
    :class:`RecordFile`. Methods raise OSError if a write fails; the next write repeats the points.
    """

    def __init__(self, folder: Path, first_step: int, root: Path | None = None):
        made = _messages("event")
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file, self._written = RecordFile(folder / name, root), False
        version = made.Event(wall_time=time.time(), file_version="brain.Event:2")
        log = made.SessionLog(status=made.SessionLog.START)
        start = made.Event(wall_time=time.time(), step=first_step, session_log=log)
        self._start = _record(version.SerializeToString()) + _record(start.SerializeToString())

    @property
    def complete(self) -> bool:
        """True if records were written, and none is lost or waiting."""
        return self._written and not self._file.waiting and not self._file.lost

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add one point to each named curve."""
        Summary = _messages("summary").Summary
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)

    def picture(self, tag: str, png: bytes, step: int) -> None:
        """Write a picture. png: the bytes of a PNG file."""
        Summary = _messages("summary").Summary
        width, height = struct.unpack(">II", png[16:24])  # fields of IHDR, the first chunk of every PNG
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self) -> None:
        self._file.close()

    def _add(self, summary, step: int) -> None:
        event = _record(_messages("event").Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        start, self._start = self._start, b""
        self._written = True
        self._file.append(start + event)


def _messages(of: str) -> Any:
    return import_module(f"tensorboard.compat.proto.{of}_pb2")


def _record(data: bytes) -> bytes:
    """Return a TFRecord: the length and the data, each followed by its masked CRC."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    class Sink:
        write = staticmethod(written.append)

    RecordWriter(Sink).write(data)
    return b"".join(written)


PROJECT = "opendit"


class WandbLogger:
    """Logger for Weights & Biases (project: WANDB_PROJECT). Writes to the run's folder unless WANDB_MODE is set."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no crash reports to W&B
        import wandb  # pyright: ignore[reportMissingImports]  # an optional dependency

        self._wandb = wandb
        known = folder / "wandb" / "run_id"
        make_folder(known.parent, root=folder)  # wandb would follow a symbolic link
        run_id = known.read_text().strip() if known.is_file() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            mode=mode,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            # wandb must not capture the progress bar
            settings=wandb.Settings(console="off", silent=True),
        )
        write_whole(known, self._run.id.encode(), root=folder)
        # W&B's step can only rise. A metric "step" lets a resumed run log steps again.
        self._run.define_metric("*", step_metric="step")
        self.where = f"wandb sync {folder}/wandb/offline-run-*" if mode == "offline" else f"wandb ({mode})"

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._run.log({tag: self._wandb.Image(_image(png)), "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """Logger for MLflow. It writes to a database next to the run folders unless MLFLOW_TRACKING_URI is set.
    MLFLOW_EXPERIMENT_NAME names the experiment."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no usage reports to MLflow's makers
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # an optional dependency
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, outputs = Metric, folder.resolve().parent
        own = f"sqlite:///{outputs / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = self._find(folder, None if uri != own else (outputs / "mlartifacts").as_uri())
        # logged parameters can't be changed
        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, str(value)[:500]) for name, value in config.items() if name not in known]
        for first in range(0, len(params), 100):  # one call accepts at most 100 parameters
            self._client.log_batch(self._run_id, params=params[first : first + 100])
        self.where = f"mlflow ui --backend-store-uri {uri}"

    def _find(self, folder: Path, artifacts: str | None) -> str:
        """Return the id of the MLflow run for this folder; create the run if there is none."""
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name, artifact_location=artifacts)
        path = folder / "mlflow_run_id"
        if path.is_file():
            run_id = path.read_text().strip()
            client.update_run(run_id, status="RUNNING")
            return run_id
        run_id = client.create_run(experiment, run_name=folder.name).info.run_id
        write_whole(path, run_id.encode())
        return run_id

    def scalars(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[self._metric(k, float(v), now, step) for k, v in values.items()])

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._client.log_image(self._run_id, _image(png), key=tag, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED")


# Loggers besides TensorBoard, with the methods of Board. Constructors take the run's folder and flags. Methods may
# raise their library's errors. ``where`` tells the user how to view the log.
RunLogger = WandbLogger | MlflowLogger
LOGGERS: dict[str, type[RunLogger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


def _image(png: bytes):
    from PIL import Image

    return Image.open(io.BytesIO(png))


def allocation_retries() -> int:
    """Return how often torch's allocator ran out of memory, freed its cache and tried again while the host waited."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


class MemoryPressure:
    """Detector of nearly full GPU memory: torch retried allocations in ``LINES`` consecutive lines of the log."""

    LINES = 2  # single retries are normal, in the first steps or when a sample grid is drawn

    def __init__(self, retries: Callable[[], int] = allocation_retries):
        self._retries, self._before, self._lines, self._noted = retries, None, 0, False

    def note(self, steps: int) -> str | None:
        """Return a note, once, if memory is nearly full. Call this for each line of the log. steps: number of steps
        since the last line."""
        now, before = self._retries(), self._before
        self._before = now
        if self._noted or before is None:
            return None
        self._lines = self._lines + 1 if now > before else 0
        if self._lines < self.LINES:
            return None
        self._noted = True
        return (
            f"note: the GPU's memory is nearly full: in the last {steps} steps torch had to free memory kept for "
            f"reuse {now - before} times, and training waited for it; a smaller --batch_size, --recompute cheap or, "
            "with --plugin fsdp, --offload average is likely to be faster"
        )


logger = logging.getLogger(__name__)

# Peak FLOP/s for dense bf16/fp16 products, from data sheets. No MFU is logged for other GPUs.
PEAK_FLOPS = {
    "H200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return a device's peak FLOP/s; None if unknown (CPUs, fp32, other GPUs)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if all(word in name for word in key.split())), None)


class Monitor:
    """Context manager that logs a run. Rank 0 writes; all ranks contribute to the values.

    Args:
        failures: counts failed writes and loggers' errors.
        loggers: constructors of further loggers, by name.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        first_step: int,
        last_step: int,
        precision: str,
        failures: WriteFailures,
        loggers: Mapping[str, Callable[[], RunLogger]] = MappingProxyType({}),
    ):
        self.mesh = mesh
        self.peak = peak_flops(mesh.device, precision)
        self.data_wait = 0.0
        # sum and number of losses since the last line
        self._sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        self._steps, self._since = 0, time.perf_counter()
        self._samples, self.bytes_read, self._flops = 0, 0, 0.0
        self._peak_gib = 0.0  # peak memory before the last drawing or validation
        self._pressure = MemoryPressure()
        self._lines, self._last_step = 0, last_step
        self.last: dict[str, Any] = {}
        self.failures = failures
        if mesh.is_main:
            with failures.survive("log.jsonl"):
                keep_up_to(folder / "log.jsonl", first_step)
            self.log_file = RecordFile(folder / "log.jsonl")
            self.board = Board(folder / "tensorboard", first_step + 1, root=folder)
            self.boards: dict[str, Board | RunLogger] = {"TensorBoard": self.board}
            for name, make in loggers.items():
                with self._survive(name):
                    self.boards[name] = make()
            self._bar = Progress(last_step, "steps", initial=first_step)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loader_wait(self, seconds: float) -> None:
        self.data_wait += seconds

    def count(self, samples: int, flops: float) -> None:
        """Add all ranks' samples, and the FLOPs of this rank's samples. Ranks that share samples give equal FLOPs."""
        self._samples += samples
        self._flops += flops

    def add(self, loss: torch.Tensor, finite: torch.Tensor) -> None:
        """Add this rank's mean loss of a step, 0-dim, unless ``finite`` is False. The host does not wait."""
        self._sums += torch.stack([torch.where(finite, loss, 0).double(), finite.double()])
        self._steps += 1
        if self.mesh.is_main:
            self._bar.update()

    @contextlib.contextmanager
    def memory_not_counted(self) -> Iterator[None]:
        """Exclude the block's memory from the run's peak. The peak before the block is kept, because a CUDA graph
        allocates memory only once."""
        before = allocated_gib()
        yield
        self._peak_gib = max(self._peak_gib, before)
        if self.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def paused(self, really: bool = True) -> Iterator[None]:
        """If ``really``, wait for the device, and exclude the block from the training time."""
        if not really:
            yield
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def log(self, step: int, epoch: int, lr: float, grad_norm: float | None, **more: Any) -> dict[str, Any]:
        """Write a line of the log, and return its fields. All ranks must call this. The loss is a mean over ranks and
        over the steps since the last line. It is None if all steps were skipped."""
        total, count = self.mesh.sum(self._sums).tolist()
        loss = total / count if count else None
        now = time.perf_counter()
        rate = self._samples / (now - self._since)
        flops = self._flops / self.mesh.sharing / (now - self._since)
        cuda = self.mesh.device.type == "cuda"
        self.last = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "samples_per_s": rate,
            "read_mb_per_s": self.bytes_read / 1e6 / (now - self._since),
            "tflops": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "memory_gib": max(self._peak_gib, allocated_gib()) if cuda else resident_gib(),
            "data_wait_s": self.data_wait,
            **more,
            "failed_writes": self.failures.count,
        }
        self._lines += 1
        if self.mesh.is_main:
            # the first line's time includes compilation and warm-up
            if self._lines == 2 and step < self._last_step:
                left, pace = self._last_step - step, (now - self._since) / self._steps
                steps = f"{left:,} step{'s' * (left != 1)}"
                logger.info(f"step {step}: {steps} left, {describe_duration(left * pace)} at {pace:.3g} s a step")
            with self.failures.survive("log.jsonl", step):
                self.log_file.append(json.dumps(self.last).encode() + b"\n")
            numbers = {k: v for k, v in self.last.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
            self.scalars(dict[str, float](numbers), step)
            shown = {"loss": "-" if loss is None else f"{loss:.4f}", "img/s": f"{rate:.1f}"}
            if flops >= 5e10:  # smaller values would be shown as 0.0
                shown["TFLOP/s"] = f"{flops / 1e12:.1f}"
            if self.peak:
                shown["MFU"] = f"{self.last['mfu']:.1%}"
            self._bar.figures(shown)
            if note := self._pressure.note(self._steps):
                logger.info(note)
        self._sums.zero_()
        self._steps, self._since, self.data_wait = 0, now, 0.0
        self._samples, self.bytes_read, self._flops = 0, 0, 0.0
        return self.last

    def picture(self, path: Path, step: int, tag: str = "samples") -> None:
        """Show a PNG file in all loggers. Call on rank 0."""
        for name, board in self.boards.items():
            with self._survive(name, step):
                board.picture(tag, path.read_bytes(), step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add one point to each named curve in all loggers. Call on rank 0."""
        for name, board in self.boards.items():
            with self._survive(name, step):
                board.scalars(values, step)

    def close(self) -> None:
        if self.mesh.is_main:
            self._bar.close()
            with self.failures.survive("log.jsonl"):
                self.log_file.close()
            for name, board in self.boards.items():
                with self._survive(name):
                    board.close()

    @contextlib.contextmanager
    def _survive(self, name: str, step: int | None = None) -> Iterator[None]:
        """Count and suppress any exception, because a logger's library may raise any error."""
        with self.failures.survive(name, step):
            try:
                yield
            except OSError:
                raise
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from error


def describe_duration(seconds: float) -> str:
    """Format a duration in the unit that fits: 9000 -> "about 2.5 hours", 300 -> "about 5 min", 20 -> "about 20 s"."""
    if seconds >= 3600:
        return f"about {seconds / 3600:,.1f} hours"
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else f"about {max(1, round(seconds))} s"


def keep_up_to(log: Path, step: int) -> None:
    """Remove the log's lines after ``step``, and an incomplete last line. Raises OSError."""
    refuse_links(log.parent, [log.name])
    if not log.is_file():
        return
    lines = log.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _is_up_to(line, step)]
    if kept == lines[: len(kept)]:
        with open(open_to_append(log), "a+b") as file:
            file.truncate(sum(map(len, kept)))  # works on a full disk, unlike rewriting
        return
    write_whole(log, b"".join(kept))


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError, RecursionError):  # the run was killed while it wrote the line
        return False


def allocated_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def resident_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


SLOW = 1.5  # a rank is slow at this multiple of all other ranks' median time
# Warn if a slow rank costs this fraction of a step, and this many seconds between two lines of the log.
LOST_SHARE, LOST_S = 0.1, 1.0
REPEAT = 20  # lines of the log until the warning is repeated
TIMED = 32  # number of forward passes, the last ones before a line of the log, to average


class Pace:
    """Timer of each rank's data waits and forward passes, to find a slow rank. With one rank it does nothing.

    Steps take equally long on all ranks, because ranks wait for each other. A slow rank shows in the wait for data and
    in the forward pass before the first communication. With Gemini, sequence parallelism or a CUDA graph, only the wait
    for data shows it. The host reads the GPU's timers only when it logs a line.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._channel = ControlGroup(mesh) if mesh.world_size > 1 else None
        self._on_gpu = mesh.device.type == "cuda"
        self._data, self._batches, self._since = 0.0, 0, time.perf_counter()
        self._begun: Any = None  # start of the micro-batch: host time in seconds, or a GPU's event
        # durations of forward passes: seconds, or pairs of a GPU's events
        self._forwards: deque[Any] = deque(maxlen=TIMED)
        self._named, self._lines = None, 0  # rank in the last warning, and lines since then

    def begin(self, waited: float) -> None:
        """Start timing a micro-batch. waited: seconds that the rank waited for its data."""
        if self._channel is None:
            return
        self._data += waited
        self._batches += 1
        self._begun = self._now()

    def end(self) -> None:
        """Stop timing when the forward pass has ended or, on a GPU, has been enqueued."""
        if self._begun is None or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        begun, now, self._begun = self._begun, self._now(), None
        self._forwards.append((begun, now) if self._on_gpu else now - begun)

    def log(self, step: int, steps: int) -> dict[str, Any]:
        """Return fields for a line of the log: the slowest rank, and its time divided by the median of all other ranks.
        All ranks must call this, after the host has waited for the device. steps: steps since the last line."""
        if self._channel is None:
            return {}
        forwards = [begun.elapsed_time(end) / 1e3 for begun, end in self._forwards] if self._on_gpu else self._forwards
        forward = sum(forwards) / len(forwards) * self._batches if forwards else 0.0
        length = time.perf_counter() - self._since
        ranks = self._channel.gather((self._data / steps, forward / steps, socket.gethostname()))
        self._forwards.clear()
        self._data, self._batches, self._since, self._begun = 0.0, 0, time.perf_counter(), None
        own = [data + forward for data, forward, _ in ranks]
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = median(own[:slowest] + own[slowest + 1 :])
        lost = own[slowest] - usual
        slow = own[slowest] > SLOW * usual and lost > LOST_SHARE * length / steps and lost * steps > LOST_S
        self._lines += 1
        if slow and (self._named != slowest or self._lines >= REPEAT):
            data, _, host = ranks[slowest]
            logger.warning(
                f"step {step}: rank {slowest} ({host}) holds the others up: it works {own[slowest]:.2f} s a step "
                f"before it meets them, they {usual:.2f} s; {data:.2f} s of it is the wait for its data"
            )
            self._lines = 0
        self._named = slowest if slow else None
        return {"slowest_rank": slowest, "slowest_x": own[slowest] / usual if usual else None}

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepLog:
    """Writer of the lines of a run's log. Call on every rank.

    Attributes:
        skipped: number of steps that the run has skipped, up to the last line.
        logged: step of the last line.
        figures: finite results of validation and evaluation in the last line, in the form that checkpoints store.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        loader: BatchIterator,
        schedule: BatchSchedule,
        checkpoints: Checkpoints,
        monitor: Monitor,
        pace: Pace,
        first_step: int,
        skipped_before: int,
    ):
        self._engines, self._loader, self._checkpoints = engines, loader, checkpoints
        self._schedule = schedule
        self._monitor, self._pace = monitor, pace
        self._skipped_before = self.skipped = skipped_before
        self.figures: dict[str, Any] = {}
        self.logged = first_step
        self._bytes_read = 0  # bytes read by all ranks, up to the last line

    def write(self, done: int, lr: float, result: StepResult, measured: dict[str, Any]) -> None:
        """Write the log's line for step ``done``, with the results ``measured``. The host waits for the device."""
        mesh = self._engines[0].mesh
        self.figures = {k: v for k, v in measured.items() if k == "val_loss" and v is not None}
        if (of := measured.get("eval_of")) is not None:
            names = {k: k.removeprefix("eval_") for k, v in measured.items() if k.startswith("eval_") and k != "eval_s"}
            figures = {name: measured[k] for k, name in names.items() if isinstance(measured[k], float)}
            self.figures["evaluation"] = {"of": of, "figures": figures}
        grad_norm = float(result.grad_norm) if result.finite else None
        self.skipped = self._skipped_before + sum(int(engine.skipped) for engine in self._engines)
        loader = self._loader
        seen = torch.tensor([loader.skipped, loader.shortened, loader.bytes_read], device=mesh.device)
        # count files once: ranks that share samples read equal files
        bad_files, short_clips, bytes_read = (mesh.sum(seen) // mesh.sharing).tolist()
        counts = {"loss_scale": float(result.loss_scale), "skipped": self.skipped, "bad_files": bad_files}
        counts |= {"short_clips": short_clips, "failed_saves": len(self._checkpoints.failures)}
        counts |= self._schedule.log(done)
        counts |= self._pace.log(done, done - self.logged)
        self._monitor.bytes_read += bytes_read - self._bytes_read
        self.logged, self._bytes_read = done, bytes_read
        self._monitor.log(done, self._schedule.epoch(done - 1), lr, grad_norm, **counts, **measured)
