"""The loss of the EMA weights on samples that are not trained on, by noise level."""

import math
import time
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.data import MediaDataset
from opendit.data.base import to_pixels
from opendit.data.loader import read_batches
from opendit.data.progress import Progress
from opendit.diffusion import Objective
from opendit.diffusion.given_frames import draw_given
from opendit.diffusion.random import Stream, normal
from opendit.models import Condition
from opendit.parallel.engines import Engine
from opendit.training import monitor as monitoring
from opendit.training.micro_batch import MicroBatch
from opendit.training.monitor import Monitor
from opendit.training.runners import Runner
from opendit.training.specification import RunSpecification
from opendit.training.validation_data import LEVELS, SEED, FixedSamples, number_of_losses, steps_between
from opendit.training.validation_plot import LossHistory, draw_losses

PICTURE = "validation.png"


class FixedBatch(NamedTuple):
    """A micro-batch without its noise, in host memory. numbers: (B,) of its losses. new: how many, the first ones, are
    taken; 0 if it only keeps other ranks company. x0: (B, C, ...) float32. condition: of B samples."""

    numbers: Tensor
    new: int
    x0: Tensor
    condition: Condition


class Validation:
    """The objective's loss of fixed samples with fixed noise at fixed times, without dropped conditions.

    The same numbers on any number of data-parallel ranks, bit for bit, for the same weights and --batch_size: micro-
    batches are dealt out whole, and the losses are added up in the order of their numbers. Samples are read, and
    encoded, once, when this is made; then their latents wait in host memory. Build and use it on every rank.
    """

    def __init__(self, spec: RunSpecification, engine: Engine, ema: EMA, runner: Runner, monitor: Monitor):
        self._spec, self._engine, self._ema, self._runner, self._monitor = spec, engine, ema, runner, monitor
        flags, mesh, dataset = spec.flags, spec.mesh, spec.validation
        assert dataset is not None, "the run holds samples out"
        every, self.count = steps_between(spec), number_of_losses(spec)
        self.samples = FixedSamples(dataset, self.count, flags.batch_size)
        quantiles = self.samples.quantiles
        objective = spec.objective.for_tokens(spec.model_config.tokens)
        self._times = objective.times_at(quantiles)
        self._levels = (quantiles * LEVELS).long().tolist()
        self.noise = noise_levels(objective)
        batches = len(self.samples.micro_batches)
        self._history = LossHistory(sorted(self.noise))
        if mesh.is_main:
            with monitor.failures.survive(PICTURE):
                self._history = LossHistory.read(spec.folder / "log.jsonl", sorted(self.noise))
        rounds = -(-batches // mesh.dp_size)
        self._batches = self._read(dataset, [turn * mesh.dp_size + mesh.dp_rank for turn in range(rounds)])
        work = rounds * mesh.pp_size / (3 * every * flags.grad_accumulation)
        monitor.say(
            f"validation: {self.count:,} losses on {dataset.describe()}, every {every:,} steps: "
            f"{work:.2%} of the run's work"
        )

    def _read(self, dataset: MediaDataset, turns: list[int]) -> list[FixedBatch]:
        """This rank's micro-batches; what is beyond the last one is the first one again, and does not count."""
        spec, flags, device = self._spec, self._spec.flags, self._spec.mesh.device
        found, there = [], len(self.samples.micro_batches)
        latents = spec.latents_of(dataset, SEED)
        keys = [self.samples.keys(turn if turn < there else 0) for turn in turns]
        how: dict[str, Any] = dict(num_workers=min(flags.num_workers, len(keys)), patience=flags.data_timeout)
        shown = Progress(len(keys), "micro-batches", title="validation", disable=not spec.mesh.is_main)
        with shown, read_batches(dataset, keys, max_bad=flags.max_bad, on_skip=Progress.write, **how) as read:
            for turn, batch in zip(turns, read, strict=True):
                index = batch.index.to(device)
                with torch.no_grad():
                    x0 = latents.of(to_pixels(cast(Tensor, batch.x).to(device)), 0, index)
                    condition = spec.conditioner.of_batch(batch)
                new = self.samples.new[turn] if turn < there else 0
                found.append(FixedBatch(batch.index, new, x0.cpu(), condition.to("cpu")))
                shown.update()
        return found

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Every loss by its number, (count,) float64 in host memory, the same on every rank. Collective."""
        mesh = self._engine.mesh
        losses = torch.zeros(self.count, dtype=torch.float64, device=mesh.device)
        with self._ema.at_work():
            for batch in self._batches:
                found = self._runner.losses(self._micro_batch(batch)).double()
                if mesh.leads_sharing:
                    losses[batch.numbers[: batch.new].to(mesh.device)] = found[: batch.new]
        return mesh.sum(losses).cpu()  # of each number all but one rank's are 0, so that nothing is rounded

    def _micro_batch(self, batch: FixedBatch) -> MicroBatch:
        device = self._engine.mesh.device
        index, x0 = batch.numbers.to(device), batch.x0.to(device)
        noise = normal(SEED, 0, index, Stream.NOISE, tuple(x0.shape[1:]))
        given = draw_given(self._spec.model_config.given_frames, x0, SEED, 0, index)
        return MicroBatch(x0, self._times[batch.numbers].to(device), noise, batch.condition.to(device), given)

    def after(self, step: int) -> dict[str, Any]:
        """Validate after ``step``. Return fields for its line of the log: the mean, the means by noise level, the
        levels as sigma, and the seconds. Null for what is not finite. Collective."""
        began = time.perf_counter()
        trained = monitoring.allocated_gib()
        losses = self.losses().tolist()
        self._monitor.forget_drawing(trained)
        by_level = [[] for _ in range(LEVELS)]
        for level, loss in zip(self._levels, losses, strict=True):
            by_level[level].append(loss)
        means = sorted(zip(self.noise, map(_mean, by_level), strict=True), key=lambda pair: pair[0])
        loss = _mean(losses)
        self._monitor.say(f"step {step}: held-out loss {'not finite' if loss is None else f'{loss:.5f}'}")
        noise, by_noise = (list(column) for column in zip(*means, strict=True))
        line = {"val_loss": loss, "val_loss_by_noise": by_noise, "val_noise": noise}
        if self._engine.mesh.is_main:
            self._draw({"step": step, **line})
        return line | {"val_s": time.perf_counter() - began}

    def _draw(self, line: dict[str, Any]) -> None:
        monitor, path, step = self._monitor, self._spec.folder / PICTURE, line["step"]
        self._history.add(line)
        with monitor.failures.survive(PICTURE, step):
            draw_losses(self._history, path, f"{self._spec.folder.name}: {self.count:,} losses")
            monitor.picture(path, step, "held-out loss")
        curves = zip(line["val_noise"], line["val_loss_by_noise"], strict=True)
        monitor.scalars({f"val_loss_by_noise/{sigma:.3g}": loss for sigma, loss in curves if loss is not None}, step)


def noise_levels(objective: Objective) -> list[float]:
    """Sigma, noise over signal, in the middle of each of ``LEVELS`` equal shares of training's times."""
    t = objective.times_at((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS)
    nothing = torch.zeros(LEVELS, 1)
    return objective.noise_level(objective.prepare(nothing, t, nothing).timestep).double().tolist()


def _mean(losses: list[float]) -> float | None:
    """Exactly rounded, whatever the order; None if it is not finite."""
    return math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
