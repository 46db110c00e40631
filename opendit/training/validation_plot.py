"""The held-out loss of a run as a picture: over training, and by noise level."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendit.common.safe_files import write_whole

MOST = 20  # % above a level's lowest loss that the heat map tells apart: losses of the first steps are many times it


@dataclass
class LossHistory:
    """The validations of a run, oldest first.

    steps: of each. losses: the mean of each. noise: sigma of the noise levels, rising. by_noise: of each validation the
    loss at every level. None stands for what was not finite.
    """

    noise: list[float]
    steps: list[int] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    by_noise: list[list[float | None]] = field(default_factory=list)

    @classmethod
    def read(cls, log: Path, noise: list[float]) -> "LossHistory":
        """Read the losses of these noise levels from log.jsonl, and skip unreadable lines. Raises OSError."""
        history = cls(noise)
        for line in log.read_bytes().splitlines() if log.is_file() else []:
            try:
                history.add(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        return history

    def add(self, line: dict[str, Any]) -> None:
        """A line of the log, if it is of a validation at these noise levels."""
        if line.get("val_noise") == self.noise:
            step, loss, by_noise = (line[key] for key in ("step", "val_loss", "val_loss_by_noise"))
            self.steps.append(step)
            self.losses.append(loss)
            self.by_noise.append(by_noise)


def draw_losses(history: LossHistory, path: Path, title: str) -> None:
    """Writes a PNG of three parts: the mean over training; the loss at each noise level over training; and as a heat
    map how far each level is above its own lowest loss, which shows where the model still learns and where it begins
    to repeat its training samples. Raises OSError."""
    import numpy as np
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a screen

    table = np.array(history.by_noise, dtype=float).reshape(len(history.steps), -1).T  # (levels, validations)
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    figure.suptitle(title)
    total, levels, heat = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
    total.plot(history.steps, np.array(history.losses, dtype=float), marker="." if len(history.steps) < 50 else None)
    total.set(title="held-out loss of the EMA weights", xlabel="step", ylabel="loss")
    total.grid(alpha=0.3)
    names = [f"{sigma:.3g}" for sigma in history.noise]
    colours = _colours(len(names))
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


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["plasma"](0.9 * i / max(1, count - 1)) for i in range(count)]


def _edges(steps: list[int]) -> list[float]:
    """Return the edges of a heat map's columns, one column around each step."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middle = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    return [steps[0] - (middle[0] - steps[0]), *middle, steps[-1] + (steps[-1] - middle[-1])]
