"""Plot several runs in the same panels: figures over training, sampling steps and guidance, and losses."""

import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendit.common.safe_files import write_whole
from opendit.data.files import printable
from opendit.evaluation.results import FILE as RESULTS
from opendit.evaluation.results import Measurement, read_results, why_not_comparable

LOG, FOLDER = "log.jsonl", "evaluation"  # the log of a run, and the subfolder that may hold its figures
ACROSS = 4  # maximum number of panels in a row
STEP = re.compile(r"(?:^|/)step_(\d+)$")
STYLES, MARKERS = ("-", "--", ":", "-."), "osD^vPX"  # distinguish the lines of one run
SMOOTH = 50  # maximum number of points in the curve of the training loss


@dataclass
class PlottedRun:
    """The data of a run. Points are (x, y).

    Attributes:
        name: name of the run.
        figures: the measured figures.
        loss: (step, training loss), from the log.
        held_out: (step, held-out loss), from the log.
        by_noise: (noise level sigma, held-out loss) of the last validation in the log.
    """

    name: str
    figures: list[Measurement]
    loss: list[tuple[float, float]] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    by_noise: list[tuple[float, float]] = field(default_factory=list)


PlotPoint = tuple[float, float, float | None, float | None]  # (x, y, low, high)


@dataclass(frozen=True)
class PlotLine:
    """A line of a panel.

    Attributes:
        name: text of the legend.
        points: (x, y, low, high), sorted by x, or by guidance for precision against recall. Without an interval, low
            and high are None.
        words: text next to each point.
        run: name of the run. All lines of a run have the same colour.
    """

    name: str
    points: Sequence[PlotPoint]
    words: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class PlotPanel:
    """One panel of the figure: its title, axes and lines."""

    title: str
    x: str
    y: str
    lines: list[PlotLine]
    scale: str = "linear"  # scale of the x axis
    y_scale: str = "linear"
    ticks: bool = False  # True for x ticks only at the points


def read_run(path: Path) -> PlottedRun:
    """Read a run's folder (log.jsonl, evaluation/results.jsonl), an evaluation's folder, or a results.jsonl.

    Raises ValueError if ``path`` has neither figures nor a log.
    """
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else [folder / RESULTS, folder / FOLDER / RESULTS]
    log = folder / LOG if path.is_dir() else path
    rows = [row for file in files for row in read_results(file)]
    run = PlottedRun(path.resolve().name if path.is_dir() else path.resolve().parent.name, rows)
    if path.is_dir() and log.is_file():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                _add_line(run, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):  # a truncated line, or a line of another program
                continue
    if not (run.figures or run.loss or run.held_out):
        raise ValueError(f"{printable(path)} holds neither {RESULTS} with figures nor {LOG} of a run")
    return run


def _add_line(run: PlottedRun, line: dict[str, Any]) -> None:
    step = line["step"]
    if _finite(line.get("loss")):
        run.loss.append((step, line["loss"]))
    if _finite(line.get("val_loss")):
        run.held_out.append((step, line["val_loss"]))
        pairs = zip(line["val_noise"], line["val_loss_by_noise"], strict=True)
        run.by_noise = [(sigma, loss) for sigma, loss in pairs if _finite(loss) and sigma > 0]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ------------------------------------------------------------------------------------------ panels


def panels(runs: Sequence[PlottedRun], chosen: Sequence[str] = ()) -> tuple[list[PlotPanel], list[str]]:
    """Return the panels for all metrics or the chosen ones, and messages about figures that are left out.

    Figures are left out if they are not comparable with the other figures of their metric.
    """
    rows, notes = _comparable([row for run in runs for row in run.figures])
    metrics = [name for name in dict.fromkeys(row.metric for row in rows) if not chosen or name in chosen]
    found = []
    for metric in metrics:
        of_metric = [row for row in rows if row.metric == metric]
        for title, x, scale, value, others in AXES:
            lines = _lines(of_metric, value, others)
            if any(len(line.points) > 1 for line in lines):
                found.append(PlotPanel(f"{metric} over {title}", x, metric, lines, scale, ticks=x != "training step"))
    if (curve := _precision_recall(rows)) and (not chosen or {"precision", "recall"} & set(chosen)):
        found.append(PlotPanel("precision against recall", "recall", "precision", curve))
    losses: tuple[tuple[str, str, str, Callable[[PlottedRun], Sequence[tuple[float, float]]]], ...] = (
        ("training loss", "step", "linear", lambda run: _means(run.loss)),
        ("held-out loss", "step", "linear", lambda run: run.held_out),
        ("held-out loss by noise level, last validation", "noise / signal", "log", lambda run: run.by_noise),
    )
    for title, x, scale, points in losses:
        curves = {run.name: points(run) for run in runs if points(run)}
        lines = [PlotLine(name, [(x, y, None, None) for x, y in curve], run=name) for name, curve in curves.items()]
        if lines:
            found.append(PlotPanel(title, x, "loss", lines, scale, "log"))
    return found, notes


def _training_step(row: Measurement) -> int | None:
    found = STEP.search(row.samples)
    return found and int(found[1])


def _model(row: Measurement) -> str:
    return STEP.sub("", row.samples)


def _at(row: Measurement) -> str:
    step = _training_step(row)
    return "" if step is None else f"step {step:,}"


def _guided(row: Measurement) -> str:
    return "" if row.guidance is None else f"guidance {row.guidance:g}"


def _sampled(row: Measurement) -> str:
    return "" if row.steps is None else f"{row.sampler} {row.steps}"


XValue = Callable[[Measurement], float | None]
# (title, label of the x axis, scale of the x axis, function that returns x, functions that return the parts of a line's
# name)
AXES: tuple[tuple[str, str, str, XValue, tuple[Callable[[Measurement], str], ...]], ...] = (
    ("training", "training step", "linear", _training_step, (_sampled, _guided)),
    ("sampling steps", "sampling steps", "log", lambda row: row.steps, (_at, lambda row: row.sampler or "", _guided)),
    ("guidance", "guidance scale", "linear", lambda row: row.guidance, (_at, _sampled)),
)


def _lines(
    rows: Sequence[Measurement], value: XValue, others: Sequence[Callable[[Measurement], str]]
) -> list[PlotLine]:
    """Return a line for each model and each combination of the values of ``others``.

    Rows without an x are skipped. If several rows have the same x, the last one is used.
    """
    found: dict[tuple[str, ...], dict[float, Measurement]] = {}
    for row in rows:
        if (x := value(row)) is not None:
            seed = "" if row.seed in (None, 0) else f"seed {row.seed}"
            found.setdefault((_model(row), *(other(row) for other in others), seed), {})[x] = row
    return [
        PlotLine(
            ", ".join(filter(None, key)),
            [_point(x, at[x]) for x in sorted(at)],
            run=key[0],
        )
        for key, at in found.items()
    ]


def _point(x: float, row: Measurement) -> PlotPoint:
    low, high = row.interval or (None, None)
    return x, row.value, low, high


def _precision_recall(rows: Sequence[Measurement]) -> list[PlotLine]:
    """Return a line through the guidance scales for each model, checkpoint, number of steps and seed."""
    pairs: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Measurement]]] = {}
    for row in rows:
        if row.metric in ("precision", "recall"):
            key = (_model(row), _at(row), _sampled(row), "" if row.seed in (None, 0) else f"seed {row.seed}")
            place = (row.guidance or 0.0, row.samples_sha256)
            pairs.setdefault(key, {}).setdefault(place, {})[row.metric] = row
    lines = []
    for key, places in pairs.items():
        both = [(place, at) for place, at in sorted(places.items()) if len(at) == 2]
        points = [(at["recall"].value, at["precision"].value, None, None) for _, at in both]
        words = tuple(f"{guidance:g}" if guidance else "" for (guidance, _), _ in both)
        if points:
            lines.append(PlotLine(", ".join(filter(None, key)), points, words, key[0]))
    return lines


def _comparable(rows: Sequence[Measurement]) -> tuple[list[Measurement], list[str]]:
    """Keep the rows that are comparable with the last row of their metric. Return these rows, and messages about the
    others."""
    last = {row.metric: row for row in rows}
    kept, left_out = [], {}
    for row in rows:
        reasons = why_not_comparable(row, last[row.metric])
        if reasons:
            left_out.setdefault(f"{row.metric}: {'; '.join(reasons)}", []).append(row)
        else:
            kept.append(row)
    return kept, [f"{len(rows)} left out, which can't be compared: {reasons}" for reasons, rows in left_out.items()]


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average groups of neighbouring points, so that at most SMOOTH points are left."""
    size = -(-len(points) // SMOOTH) or 1
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


# ------------------------------------------------------------------------------------------ drawing


def plot(paths: Sequence[str | Path], output: Path, metrics: Sequence[str] = ()) -> list[str]:
    """Draw runs to a PNG, with all metrics or the given ones. Return messages about figures that were left out.

    Raises ValueError or OSError.
    """
    runs = [read_run(Path(path).expanduser()) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    known = dict.fromkeys(row.metric for run in runs for row in run.figures)
    for metric in metrics:
        if metric not in known:
            raise ValueError(f"--metrics {metric}: not measured; these runs have {', '.join(known) or 'no figures'}")
    found, notes = panels(runs, metrics)
    if not found:
        raise ValueError(
            "there is nothing to draw: of every metric there is one figure a run; evaluate other checkpoints, "
            "--cfg_scale or --num_sampling_steps"
        )
    _draw(found, output)
    return notes


def _draw(found: Sequence[PlotPanel], output: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure in memory and needs a display

    names = list(dict.fromkeys(line.run for panel in found for line in panel.lines))
    columns = min(ACROSS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    for panel, axes in zip(found, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        drawn: Counter[str] = Counter()  # run -> number of lines drawn so far
        for line in panel.lines:
            x, y, low, high = zip(*line.points, strict=True)
            number, style = drawn[line.run], {"color": f"C{names.index(line.run)}"}
            drawn[line.run] += 1
            style["linestyle"] = STYLES[number % len(STYLES)]
            style["marker"] = MARKERS[number % len(MARKERS)] if len(x) < SMOOTH // 2 else ""
            errors = None
            if any(value is not None for value in low):  # errorbar takes distances from the value, not end points
                ends = zip(low, y, high, strict=True)
                sides = [(0, 0) if a is None else (max(b - a, 0), max(c - b, 0)) for a, b, c in ends]
                errors = list(zip(*sides, strict=True))
            axes.errorbar(x, y, yerr=errors, markersize=4, capsize=2, **style, label=line.name)
            for word, *place in zip(line.words, x, y, strict=False):
                axes.annotate(word, place, textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xscale=panel.scale, yscale=panel.y_scale)
        if panel.ticks:
            values = sorted({x for line in panel.lines for x, *_ in line.points})
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in figure.axes[len(found) :]:
        axes.set_visible(False)
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=100)
    write_whole(output, memory.getvalue(), make=True)
