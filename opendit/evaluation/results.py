# pyright: standard
"""Store and show results of evaluations: metric values with their settings, as lines of JSON, tables and plots."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendit.common.safe_files import open_to_append, refuse_links, write_whole
from opendit.config.names import DIGITS
from opendit.data.files import printable

FILE, SWEEP_FILE = "results.jsonl", "sweep.csv"
SWEEP_COLUMNS = ("metric", "steps", "guidance", "value", "low", "high", "count", "sampler", "seed", "samples")
# Field -> name in messages. Two values are comparable only if all these fields are equal.
COMPARED_FIELDS = {
    "count": "samples",
    "reference_sha256": "reference",
    "reference_count": "samples of the reference",
    "features_sha256": "network of features",
    "resize": "resize filter",
    "feature_precision": "precision of the features",
    "size": "size of the samples",
    "labels": "labels",
    "rounding": "rounding",
}
# Fields to compare only if both results have a value, because samples from other programs have none.
OFTEN_UNKNOWN = ("labels", "rounding")


@dataclass(frozen=True)
class Measurement:
    """A metric's value, and all settings that affect it.

    Attributes:
        interval_by: the method that computed the interval (low, high).
        samples: name of the file, folder or weights.
        samples_sha256: hash of the samples, or of the weights' values.
        features_known: True if the feature network's file is a published one.
        resize, feature_precision: settings of the feature network.
        sampler, ..., seed, precision, vae: settings for drawing the samples; None for samples from files.
        labels: "balanced" (each class equally often), "drawn" (at random), "given" or "prompts".
        rounding: the method of rounding pixels to uint8.
        drawn: all settings that affect the samples, as in a sampling job's manifest.
        truncated: number of captions that CLIP truncates.
        of_real: the metric's value for real samples: training digits for the Fréchet distance, else held-out digits.
    """

    metric: str
    value: float
    count: int
    size: str
    samples: str
    samples_sha256: str
    interval: tuple[float, float] | None = None
    interval_by: str | None = None
    reference: str | None = None
    reference_sha256: str | None = None
    reference_count: int | None = None
    features: str | None = None
    features_sha256: str | None = None
    features_known: bool | None = None
    resize: str | None = None
    feature_precision: str | None = None
    sampler: str | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    guidance_channels: int | None = None
    seed: int | None = None
    labels: str | None = None
    precision: str | None = None
    vae: str | None = None
    rounding: str | None = None
    drawn: dict[str, str] | None = None
    truncated: int | None = None
    of_real: float | None = None
    commit: str | None = None
    torch: str | None = None
    time: str | None = None
    note: str | None = None

    def to_json(self) -> str:
        """Return one line with all fields. Raises ValueError for a value that is not finite."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Measurement":
        """Read a line that :meth:`to_json` wrote. Unknown fields are ignored. Raises ValueError for an invalid line."""
        found = json.loads(line)
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            values = {name: value for name, value in found.items() if name in known}
            for name in ("interval", "guidance_interval"):
                values[name] = tuple(values[name]) if values.get(name) else None
            return cls(**values)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"no result of an evaluation: {error}") from error


def why_not_comparable(one: Measurement, other: Measurement) -> list[str]:
    """Return a message for each difference that makes two measurements incomparable."""
    if one.metric != other.metric:
        return [f"metric {one.metric} against {other.metric}"]
    differing = []
    for name, words in COMPARED_FIELDS.items():
        first, second = getattr(one, name), getattr(other, name)
        if first != second and not (name in OFTEN_UNKNOWN and None in (first, second)):
            differing.append(f"{words} {_shown(name, first)} against {_shown(name, second)}")
    return differing


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not known"
    if name.endswith("sha256"):
        return value[:12]
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(rows: Sequence[Measurement]) -> str:
    """Format an aligned table. Notes below name the rows that are not comparable with the metric's last row."""
    lines = [["", "metric", "value", "95 % or spread", "samples", "count", "drawn with", "reference", "features"]]
    for number, row in enumerate(rows, 1):
        interval = "-"
        if row.interval is not None:
            interval = f"{figure_text(row.interval[0])} to {figure_text(row.interval[1])}"
        reference = "-" if row.reference is None else f"{row.reference} ({_shown('', row.reference_count)})"
        features = "-" if row.features is None else f"{row.features} {(row.features_sha256 or '')[:8]}"
        lines.append(
            [str(number), row.metric, figure_text(row.value), interval, row.samples, f"{row.count:,}", _drawn_with(row)]
            + [reference, features]
        )
    return "\n".join([*_aligned(lines), *_remarks(rows)])


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _remarks(rows: Sequence[Measurement]) -> Iterable[str]:
    last = {row.metric: number for number, row in enumerate(rows)}
    pairs: dict[str, list[str]] = {}
    for number, row in enumerate(rows):
        if number != last[row.metric] and (reasons := why_not_comparable(row, rows[last[row.metric]])):
            pairs.setdefault("; ".join(reasons), []).append(f"{number + 1} with {last[row.metric] + 1}")
    for reasons, numbers in pairs.items():
        yield f"can't be compared: {', '.join(numbers)}: {reasons}"
    for note in dict.fromkeys(row.note for row in rows if row.note):
        yield f"note: {note}"


def _drawn_with(row: Measurement) -> str:
    if row.sampler is None:
        return "-"
    interval = (
        "" if row.guidance_interval is None else f" in {row.guidance_interval[0]:g}..{row.guidance_interval[1]:g}"
    )
    return f"{row.sampler} {row.steps}, guidance {row.guidance:g}{interval}, seed {row.seed}, {row.labels}"


def figure_text(value: float) -> str:
    """Format a metric's value with six significant digits, or four if the value is very large or small."""
    return f"{value:.6g}" if value and abs(math.log10(abs(value))) < 5 else f"{value:.3e}" if value else "0"


def digits_line(rows: Sequence[Measurement]) -> str | None:
    """Summarise measurements with --features digits in one line; None if there are none."""
    found = {row.metric: row for row in rows if row.features == DIGITS}
    said = []
    for metric, words in (("accuracy", "named as the digit asked for"), ("direction", "move as asked")):
        if row := found.get(metric):
            said.append(f"{row.value:.1%} {words} (held-out digits {row.of_real:.1%})")
    if row := found.get("frechet_distance"):
        said.append(f"Fréchet distance {figure_text(row.value)} to {row.reference}")
        if row.of_real is not None:
            said[-1] += f", {row.value / row.of_real:.2f} x that of as many training digits, {figure_text(row.of_real)}"
    if row := found.get("copies"):
        said.append(f"{row.value:.1%} copies (held-out digits {row.of_real:.1%})")
    return f"digits: {'; '.join(said)}" if said else None


def append_results(folder: Path, rows: Iterable[Measurement], root: Path | None = None) -> Path:
    """Append measurements to the folder's ``results.jsonl``, and return the file's path. root: below this folder, no
    link is followed, and missing folders are created."""
    path = folder / FILE
    refuse_links(folder, [FILE])
    known = [without_time(row) for row in read_results(path)]
    rows = [row for row in rows if without_time(row) not in known]
    with open(open_to_append(path, root=root, make=root is not None), "a", encoding="utf-8") as file:
        file.write("".join(row.to_json() + "\n" for row in rows))
    return path


def without_time(row: Measurement) -> Measurement:
    """Return a measurement without its time, to compare it with others."""
    return dataclasses.replace(row, time=None)


def read_results(path: Path) -> list[Measurement]:
    """Read a file of results; [] if it does not exist. Invalid lines, such as truncated ones, are skipped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(Measurement.from_json(line))
    return found


# ------------------------------------------------------------------------------------------ sweeps


def sweep_table(rows: Sequence[Measurement]) -> str:
    """Format a table of the last values for each metric: a line per guidance scale, a column per number of steps."""
    parts = []
    for metric in dict.fromkeys(row.metric for row in rows):
        of_metric = [row for row in rows if row.metric == metric]
        values = {(row.guidance, row.steps): figure_text(row.value) for row in of_metric}
        steps = list(dict.fromkeys(row.steps for row in of_metric))
        lines = [[metric, *(f"{count} steps" for count in steps)]]
        for scale in dict.fromkeys(row.guidance for row in of_metric):
            lines.append([f"guidance {scale:g}", *(values.get((scale, count), "-") for count in steps)])
        parts += [*_aligned(lines), ""]
    return "\n".join(parts)


def write_sweep(folder: Path, rows: Sequence[Measurement]) -> Path:
    """Write a sweep's measurements to ``sweep.csv`` in a folder. Return the file's path. Raises OSError."""
    path = folder / SWEEP_FILE
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(SWEEP_COLUMNS)
    for row in rows:
        low, high = row.interval or (None, None)
        cells = (row.metric, row.steps, row.guidance, row.value, low, high)
        writer.writerow([*cells, row.count, row.sampler, row.seed, row.samples])
    write_whole(path, text.getvalue().encode())
    return path


# ------------------------------------------------------------------------------------------ plots

LOG, RUN_FOLDER = "log.jsonl", "evaluation"  # a run's log, and its subfolder for evaluation results
ACROSS = 4  # maximum number of panels in a row
STEP = re.compile(r"(?:^|/)step_(\d+)$")
STYLES, MARKERS = ("-", "--", ":", "-."), "osD^vPX"  # distinguish a run's lines, which have one colour
SMOOTH = 50  # maximum number of points in a training loss curve


@dataclass
class PlottedRun:
    """A run's evaluation results (``figures``) and losses. loss: (step, training loss). held_out: (step, held-out
    loss). by_noise: (noise level sigma, held-out loss) in the last validation."""

    name: str
    figures: list[Measurement]
    loss: list[tuple[float, float]] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    by_noise: list[tuple[float, float]] = field(default_factory=list)


PlotPoint = tuple[float, float, float | None, float | None]  # (x, y, low, high)


@dataclass(frozen=True)
class PlotLine:
    """A line in a panel. points: (x, y, low, high), sorted by x; points of precision against recall are sorted by
    guidance scale. words: a text for each point, or empty. run: name of the run; each run has one colour."""

    name: str
    points: Sequence[PlotPoint]
    words: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class PlotPanel:
    """A panel of the plot. x, y: labels of the axes."""

    title: str
    x: str
    y: str
    lines: list[PlotLine]
    scale: str = "linear"  # scale of the x axis
    y_scale: str = "linear"
    ticks: bool = False  # True for x ticks only at the points


def read_run(path: Path) -> PlottedRun:
    """Read a run's folder (log.jsonl, evaluation/results.jsonl), an evaluation's folder, or a results.jsonl. Raises
    ValueError if there are neither evaluation results nor losses."""
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else [folder / FILE, folder / RUN_FOLDER / FILE]
    run = PlottedRun(folder.resolve().name, [row for file in files for row in read_results(file)])
    if path.is_dir() and (folder / LOG).is_file():
        for line in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
            # Skip truncated lines and lines from other programs.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                _add_line(run, json.loads(line))
    if not (run.figures or run.loss or run.held_out):
        raise ValueError(f"{printable(path)} holds neither {FILE} with figures nor {LOG} of a run")
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
    """Return (panels for the chosen metrics and the losses, messages). By default, all metrics are chosen. Measurements
    that are not comparable with their metric's last one are left out, with a message."""
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
# x axes of a metric's panels: (title, label, scale, function for x, functions for the parts of a line's name).
AXES: tuple[tuple[str, str, str, XValue, tuple[Callable[[Measurement], str], ...]], ...] = (
    ("training", "training step", "linear", _training_step, (_sampled, _guided)),
    ("sampling steps", "sampling steps", "log", lambda row: row.steps, (_at, lambda row: row.sampler or "", _guided)),
    ("guidance", "guidance scale", "linear", lambda row: row.guidance, (_at, _sampled)),
)


def _lines(
    rows: Sequence[Measurement], value: XValue, others: Sequence[Callable[[Measurement], str]]
) -> list[PlotLine]:
    """Return one line of a plot for each combination of model, seed and the texts from ``others``. ``value`` maps a row
    to its x, or to None to leave the row out. Of rows with equal x, the last one is used."""
    found: dict[tuple[str, ...], dict[float, Measurement]] = {}
    for row in rows:
        if (x := value(row)) is not None:
            seed = "" if row.seed in (None, 0) else f"seed {row.seed}"
            found.setdefault((_model(row), *(other(row) for other in others), seed), {})[x] = row
    return [
        PlotLine(", ".join(filter(None, key)), [_point(x, at[x]) for x in sorted(at)], run=key[0])
        for key, at in found.items()
    ]


def _point(x: float, row: Measurement) -> PlotPoint:
    low, high = row.interval or (None, None)
    return x, row.value, low, high


def _precision_recall(rows: Sequence[Measurement]) -> list[PlotLine]:
    """Return a line for each model, checkpoint, sampler, number of steps and seed. Each point is a guidance scale."""
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
    """Return the rows that are comparable with their metric's last row, and messages about all other rows."""
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
    """Draw runs to the PNG ``output``. Return messages about measurements that were left out. metrics: the metrics to
    draw; if empty, all. Raises ValueError or OSError."""
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
    from matplotlib.figure import Figure  # not pyplot: it keeps every figure in memory and needs a display

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
            if any(value is not None for value in low):  # errorbar takes distances from y
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
