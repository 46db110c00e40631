"""The lines of a run's log: what the monitor measures, and what only the loader, the saves and the optimizer know."""

from typing import Any

import torch

from opendit.checkpoint.save import Checkpoints
from opendit.data import BatchIterator, BatchSchedule
from opendit.parallel.engines import Engine, StepResult
from opendit.training.monitor import Monitor
from opendit.training.pace import Pace


class StepLog:
    """Writes log lines; use it on every rank.

    Args:
        first_step: of this start of the run.
        skipped_before: steps that the run skipped before it.

    Attributes:
        skipped: steps of the run that were skipped up to the last line, those before it was resumed included.
        logged: the step of the last line.
        figures: what the last line says of the held-out loss and of samples, as it is saved; those that are finite.
    """

    def __init__(
        self,
        engine: Engine,
        loader: BatchIterator,
        schedule: BatchSchedule,
        checkpoints: Checkpoints,
        monitor: Monitor,
        pace: Pace,
        first_step: int,
        skipped_before: int,
    ):
        self._engine, self._loader, self._checkpoints = engine, loader, checkpoints
        self._schedule = schedule
        self._monitor, self._pace = monitor, pace
        self._skipped_before = self.skipped = skipped_before
        self.figures: dict[str, Any] = {}
        self.logged = first_step
        self._bytes_read = 0  # up to it, by all ranks

    def write(self, done: int, lr: float, result: StepResult, measured: dict[str, Any]) -> None:
        """Write a line after ``done`` steps, with the figures ``measured`` on held-out samples and on drawn ones. The
        host waits for the device."""
        mesh = self._engine.mesh
        self.figures = {k: v for k, v in measured.items() if k == "val_loss" and v is not None}
        if (of := measured.get("eval_of")) is not None:
            names = {k: k.removeprefix("eval_") for k, v in measured.items() if k.startswith("eval_") and k != "eval_s"}
            figures = {name: measured[k] for k, name in names.items() if isinstance(measured[k], float)}
            self.figures["evaluation"] = {"of": of, "figures": figures}
        grad_norm = float(result.grad_norm) if result.finite else None
        self.skipped = self._skipped_before + int(self._engine.skipped)
        loader = self._loader
        seen = torch.tensor([loader.skipped, loader.shortened, loader.bytes_read], device=mesh.device)
        bad_files, short_clips, bytes_read = (mesh.sum(seen) // mesh.sharing).tolist()  # so many ranks read the same
        counts = {"loss_scale": float(result.loss_scale), "skipped": self.skipped, "bad_files": bad_files}
        counts |= {"short_clips": short_clips, "failed_saves": len(self._checkpoints.failures)}
        counts |= self._schedule.log(done)
        counts |= self._pace.log(done, done - self.logged)
        self._monitor.count_bytes(bytes_read - self._bytes_read)
        self.logged, self._bytes_read = done, bytes_read
        self._monitor.log(done, self._schedule.epoch(done - 1), lr, grad_norm, **counts, **measured)
