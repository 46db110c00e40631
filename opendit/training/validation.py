"""Measure the loss of the EMA weights on held-out samples, by noise level."""

import io
import itertools
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from opendit.common.progress import Progress
from opendit.common.safe_files import write_whole
from opendit.data import MediaDataset
from opendit.data.base import SampleKey, to_pixels
from opendit.data.held_out import SEED
from opendit.data.loader import read_batches
from opendit.data.order import permuted
from opendit.diffusion.objectives.base import Objective
from opendit.diffusion.random import Stream, draw_conditioning_frames, normal
from opendit.models.conditioning import Condition
from opendit.training.micro_batch import MicroBatch, condition_on_first_frames
from opendit.training.run import Run

logger = logging.getLogger(__name__)

LEVELS = 10  # noise levels, each with an equal fraction of the training times
MOST_SAMPLES = 1000
RISING = 3  # number of rising held-out losses in a row until a warning, printed once
# held-out losses per training sample; their forward passes cost 0.5 % of the run's work
SHARE_OF_SAMPLES = 0.015


def steps_between(run: Run) -> int:
    """Return the number of steps between validations, or all steps if the run validates only at its end."""
    flags = run.flags
    return (flags.ckpt_every if flags.validate_every is None else flags.validate_every) or run.last_step


def number_of_losses(run: Run) -> int:
    """Return --validate_samples, or by default a number of losses that costs little compared to training. In a pipeline
    the default is smaller, because all ranks except one are idle."""
    if run.flags.validate_samples is not None:
        return run.flags.validate_samples
    trained_on = steps_between(run) * run.schedule.global_batch
    return max(LEVELS, min(MOST_SAMPLES, int(SHARE_OF_SAMPLES * trained_on / run.mesh.pp_size)))


class FixedSamples:
    """The samples, times and micro-batches of ``count`` losses.

    All samples are used equally often, give or take one use. (``SEED``, i) keys the noise of loss i. The times are
    stratified: each loss has a different quantile (k + 1/2) / count of the training times, with k from 0 to count - 1.

    Attributes:
        quantiles: (count,) float64 in (0, 1).
        micro_batches: indices of each micro-batch's ``size`` losses. A micro-batch's samples have one shape.
        new: for each micro-batch, the number of leading losses that count. The rest fills the micro-batch.
    """

    def __init__(self, dataset: MediaDataset, count: int, size: int):
        numbers = np.arange(count)
        self.rows = permuted(numbers % len(dataset), len(dataset), SEED, 1, 0)
        self.quantiles = torch.from_numpy((permuted(numbers, count, SEED, 2, 0) + 0.5) / count)
        shapes = dataset.shapes()
        keys = np.array([shapes.key(int(row)) for row in self.rows])
        self.micro_batches: list[list[int]] = []
        self.new: list[int] = []
        for key in np.unique(keys):
            numbers = np.flatnonzero(keys == key)
            filled = np.resize(numbers, -(-len(numbers) // size) * size)
            self.micro_batches += filled.reshape(-1, size).tolist()
            self.new += [min(size, len(numbers) - first) for first in range(0, len(numbers), size)]

    def keys(self, number: int) -> list[SampleKey]:
        return [SampleKey(int(self.rows[i]), 0, i) for i in self.micro_batches[number]]


MOST = 20  # upper end of the heat map's scale, in % above a level's lowest loss


@dataclass
class LossHistory:
    """A run's validations, oldest first. A loss that was not finite is None. noise: sigma of each noise level,
    ascending. by_noise: each validation's mean loss per level."""

    noise: list[float]
    steps: list[int] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    by_noise: list[list[float | None]] = field(default_factory=list)

    @classmethod
    def read(cls, log: Path, noise: list[float]) -> "LossHistory":
        """Read the validations with noise levels ``noise`` from log.jsonl. Skip unreadable lines. Raises OSError."""
        history = cls(noise)
        for line in log.read_bytes().splitlines() if log.is_file() else []:
            try:
                history.add(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        return history

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of the log. Lines without these noise levels are ignored."""
        if line.get("val_noise") == self.noise:
            step, loss, by_noise = (line[key] for key in ("step", "val_loss", "val_loss_by_noise"))
            self.steps.append(step)
            self.losses.append(loss)
            self.by_noise.append(by_noise)

    def rises_since(self) -> int | None:
        """Return the step of the lowest loss if at least RISING losses followed it, and the last RISING losses rise.
        Otherwise return None."""
        losses = [math.inf if loss is None else loss for loss in self.losses]
        lowest = losses.index(min(losses)) if losses else 0
        recent = losses[-RISING:]
        rising = len(losses) - 1 - lowest >= RISING and all(a < b < math.inf for a, b in itertools.pairwise(recent))
        return self.steps[lowest] if rising else None


def draw_losses(history: LossHistory, path: Path, title: str) -> None:
    """Write a PNG that plots the mean loss over steps, and the loss at each noise level. Raises OSError. A heat map
    shows each level's loss above its minimum: where the model still learns, and where it begins to memorise."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # pyplot would keep every figure in memory and need a display

    table = np.array(history.by_noise, dtype=float).reshape(len(history.steps), -1).T  # (levels, validations)
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    figure.suptitle(title)
    total, levels, heat = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
    total.plot(history.steps, np.array(history.losses, dtype=float), marker="." if len(history.steps) < 50 else None)
    total.set(title="held-out loss of the EMA weights", xlabel="step", ylabel="loss")
    total.grid(alpha=0.3)
    names = [f"{sigma:.3g}" for sigma in history.noise]
    colours = [colormaps["plasma"](0.9 * i / max(1, len(names) - 1)) for i in range(len(names))]
    for name, colour, losses in zip(names, colours, table, strict=True):
        levels.plot(history.steps, losses, color=colour, label=name, marker="." if len(history.steps) < 50 else None)
    levels.set(title="by noise level", xlabel="step", ylabel="loss", yscale="log")
    levels.grid(alpha=0.3)
    levels.legend(title="noise / signal", fontsize=7, title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    with np.errstate(invalid="ignore", divide="ignore"):
        lowest = np.min(np.where(np.isfinite(table), table, np.inf), axis=1, keepdims=True)
        excess = 100 * (table / lowest - 1)
    image = heat.pcolormesh(_edges(history.steps), np.arange(len(names) + 1), excess, cmap="viridis", vmin=0, vmax=MOST)
    heat.set(title="above that level's lowest loss", xlabel="step", ylabel="noise / signal")
    heat.set_yticks(np.arange(len(names)) + 0.5, names)
    figure.colorbar(image, ax=heat, label="%", extend="max")
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=100)
    write_whole(path, memory.getvalue(), make=True)


def _edges(steps: list[int]) -> list[float]:
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middle = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    return [steps[0] - (middle[0] - steps[0]), *middle, steps[-1] + (steps[-1] - middle[-1])]


PICTURE = "validation.png"


class FixedBatch(NamedTuple):
    """A micro-batch in host memory, without noise.

    Attributes:
        numbers: (B,) indices of the losses.
        new: number of leading losses that count; 0 if this rank has no micro-batch left.
        given: mask and latents of first frames for an image-to-video model.
    """

    numbers: Tensor
    new: int
    x0: Tensor
    condition: Condition
    given: Tensor | None = None


class Validation:
    """Measures the objective's loss on fixed samples, noise and times, without dropped conditions.

    With equal weights and --batch_size, results are bit-identical on any number of data-parallel ranks: one rank
    computes each micro-batch, and sums are exact. The constructor reads and encodes the samples, and stores latents in
    host memory. Construct and call on every rank.
    """

    def __init__(self, run: Run):
        self._run, self._monitor = run, run.monitor
        flags, mesh, dataset = run.flags, run.mesh, run.validation
        assert dataset is not None, "the run holds samples out"
        every, self.count = steps_between(run), number_of_losses(run)
        self.samples = FixedSamples(dataset, self.count, flags.batch_size)
        quantiles = self.samples.quantiles
        objective = run.objective.for_tokens(run.model_config.tokens)
        self._times = objective.times_at(quantiles)
        self._levels = (quantiles * LEVELS).long().tolist()
        self.noise = noise_levels(objective)
        batches = len(self.samples.micro_batches)
        self._history, self._warned = LossHistory(sorted(self.noise)), False
        if mesh.is_main:
            with run.monitor.failures.survive(PICTURE):
                self._history = LossHistory.read(run.folder / "log.jsonl", sorted(self.noise))
        rounds = -(-batches // mesh.dp_size)
        self._batches = self._read(dataset, [turn * mesh.dp_size + mesh.dp_rank for turn in range(rounds)])
        work = rounds * mesh.pp_size / (3 * every * flags.grad_accumulation)
        if mesh.is_main:
            logger.info(
                f"validation: {self.count:,} losses on {dataset.describe().text}, every {every:,} steps: "
                f"{work:.2%} of the run's work"
            )

    def _read(self, dataset: MediaDataset, turns: list[int]) -> list[FixedBatch]:
        """Read and encode micro-batches. turns: their indices. For an index beyond the last, no loss counts."""
        run, flags, device = self._run, self._run.flags, self._run.mesh.device
        found, there = [], len(self.samples.micro_batches)
        latents = run.latents_of(dataset, SEED)
        keys = [self.samples.keys(turn if turn < there else 0) for turn in turns]
        how: dict[str, Any] = dict(num_workers=min(flags.num_workers, len(keys)), patience=flags.data_timeout)
        shown = Progress(len(keys), "micro-batches", title="validation", disable=not run.mesh.is_main)
        with shown, read_batches(dataset, keys, max_bad=flags.max_bad, on_skip=logger.warning, **how) as read:
            for turn, batch in zip(turns, read, strict=True):
                index = batch.index.to(device)
                with torch.no_grad():
                    x, given = cast(Tensor, batch.x).to(device), None
                    x0, condition = latents.of(to_pixels(x), 0, index), run.conditioner.of_batch(batch)
                    if run.model_config.given_beside:
                        condition, given = condition_on_first_frames(condition, batch, x, latents, run.conditioner)
                new = self.samples.new[turn] if turn < there else 0
                given = None if given is None else given.cpu()
                found.append(FixedBatch(batch.index, new, x0.cpu(), condition.to("cpu"), given))
                shown.update()
        return found

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Return all losses, (count,) float64 in host memory, equal on every rank. All ranks must call this."""
        mesh = self._run.mesh
        losses = torch.zeros(self.count, dtype=torch.float64, device=mesh.device)
        with self._run.ema.at_work():
            for batch in self._batches:
                found = self._run.runner.losses(self._micro_batch(batch)).double()
                if mesh.leads_sharing:
                    losses[batch.numbers[: batch.new].to(mesh.device)] = found[: batch.new]
        return mesh.sum(losses).cpu()  # exact: each loss is 0 on all ranks except one

    def _micro_batch(self, batch: FixedBatch) -> MicroBatch:
        device = self._run.mesh.device
        index, x0 = batch.numbers.to(device), batch.x0.to(device)
        noise = normal(SEED, 0, index, Stream.NOISE, tuple(x0.shape[1:]))
        if batch.given is None:
            given = draw_conditioning_frames(self._run.given_frames, x0, SEED, 0, index)
        else:
            given = batch.given.to(device)
        t, condition = self._times[batch.numbers].to(device), batch.condition.to(device)
        return MicroBatch.of(x0, t, noise, condition, given, self._run.model_config.given_in_place)

    def after(self, step: int) -> dict[str, Any]:
        """Validate after ``step``. Return fields for the log; None for non-finite means. All ranks must call this."""
        began = time.perf_counter()
        with self._monitor.memory_not_counted():
            losses = self.losses().tolist()
        by_level = [[] for _ in range(LEVELS)]
        for level, loss in zip(self._levels, losses, strict=True):
            by_level[level].append(loss)
        means = sorted(zip(self.noise, map(_mean, by_level), strict=True), key=lambda pair: pair[0])
        loss = _mean(losses)
        if self._run.mesh.is_main:
            logger.info(f"step {step}: held-out loss {'not finite' if loss is None else f'{loss:.5f}'}")
        noise, by_noise = (list(column) for column in zip(*means, strict=True))
        line = {"val_loss": loss, "val_loss_by_noise": by_noise, "val_noise": noise}
        if self._run.mesh.is_main:
            self._draw({"step": step, **line})
        return line | {"val_s": time.perf_counter() - began}

    def _draw(self, line: dict[str, Any]) -> None:
        monitor, path, step = self._monitor, self._run.folder / PICTURE, line["step"]
        self._history.add(line)
        if not self._warned and (since := self._history.rises_since()) is not None:
            self._warned = True
            logger.warning(
                f"step {step}: held-out loss rises since step {since}: the model begins to memorise its training "
                "samples; the checkpoint of that step, more data or fewer steps may do better"
            )
        with monitor.failures.survive(PICTURE, step):
            draw_losses(self._history, path, f"{self._run.folder.name}: {self.count:,} losses")
            monitor.picture(path, step, "held-out loss")
        curves = zip(line["val_noise"], line["val_loss_by_noise"], strict=True)
        monitor.scalars({f"val_loss_by_noise/{sigma:.3g}": loss for sigma, loss in curves if loss is not None}, step)


def noise_levels(objective: Objective) -> list[float]:
    """Return sigma (noise over signal) at the middle of ``LEVELS`` equally probable intervals of training times."""
    t = objective.times_at((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS)
    nothing = torch.zeros(LEVELS, 1)
    return objective.noise_level(objective.prepare(nothing, t, nothing).timestep).double().tolist()


def _mean(losses: list[float]) -> float | None:
    """Return the mean, or None if it is not finite. The sum is exact, so the order does not matter."""
    return math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
