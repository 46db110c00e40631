"""Write the lines of a run's log, and find a rank that slows down the other ranks."""

import logging
import socket
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from opendit.checkpoint.save import Checkpoints
from opendit.data import BatchIterator, BatchSchedule
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.mesh import ControlGroup, Mesh
from opendit.training.monitor import Monitor

logger = logging.getLogger(__name__)

SLOW = 1.5  # a rank is slow if its work takes more than this multiple of the other ranks' median
LOSS = 0.1  # a rank is reported as slow only if it costs at least this fraction of a step
# a rank is reported as slow only if it costs at least this number of seconds between two lines of the log
LEAST_S = 1.0
REPEAT = 20  # number of lines of the log after which the warning is repeated
TIMED = 32  # number of micro-batches before each line of the log whose forward passes are timed


class Pace:
    """Timer of each rank's own work, to find a slow rank. With one rank it does nothing.

    All ranks take the same time for a step, because they wait for each other. But two things differ between ranks: the
    wait for data, and the forward pass before the first communication. If the forward pass itself waits for other ranks
    (Gemini's gathers, sequence parallelism) or is part of a CUDA graph, only the wait for data is compared. The host
    reads the GPU's timers only when it logs a line, because it then waits for the GPU anyway.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._channel = ControlGroup(mesh) if mesh.world_size > 1 else None
        self._on_gpu = mesh.device.type == "cuda"
        self._data, self._batches, self._since = 0.0, 0, time.perf_counter()
        self._begun: Any = None  # start of the micro-batch: host time in seconds, or an event on a GPU
        # durations of forward passes: seconds, or pairs of events on a GPU
        self._forwards: deque[Any] = deque(maxlen=TIMED)
        self._named, self._lines = None, 0  # rank that the last warning named, and number of lines since then

    def begin(self, waited: float) -> None:
        """Start timing a micro-batch. waited: seconds that the rank waited for its data."""
        if self._channel is None:
            return
        self._data += waited
        self._batches += 1
        self._begun = self._now()

    def end(self) -> None:
        """Stop timing. Call when the forward pass has ended, or on a GPU when it has been enqueued."""
        if self._begun is None or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        begun, now, self._begun = self._begun, self._now(), None
        self._forwards.append((begun, now) if self._on_gpu else now - begun)

    def log(self, step: int, steps: int) -> dict[str, Any]:
        """Return fields for a line of the log: the slowest rank, and the ratio of that rank's work to the median of the
        other ranks.

        Collective. Call after the host has waited for the device.

        Args:
            steps: number of steps since the last line.
        """
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
        slow = own[slowest] > SLOW * usual and lost > LOSS * length / steps and lost * steps > LEAST_S
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

    Args:
        engines: the engines of the run's networks.
        first_step: first step of this start of the run.
        skipped_before: number of steps that the run skipped before this start.

    Attributes:
        skipped: number of skipped steps of the whole run, up to the last line.
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
        """Write the log's line for step ``done``. The host waits for the device.

        Args:
            measured: results of validation and evaluation at this step.
        """
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
        # count files once, because ranks that share samples read the same files
        bad_files, short_clips, bytes_read = (mesh.sum(seen) // mesh.sharing).tolist()
        counts = {"loss_scale": float(result.loss_scale), "skipped": self.skipped, "bad_files": bad_files}
        counts |= {"short_clips": short_clips, "failed_saves": len(self._checkpoints.failures)}
        counts |= self._schedule.log(done)
        counts |= self._pace.log(done, done - self.logged)
        self._monitor.count_bytes(bytes_read - self._bytes_read)
        self.logged, self._bytes_read = done, bytes_read
        self._monitor.log(done, self._schedule.epoch(done - 1), lr, grad_norm, **counts, **measured)
