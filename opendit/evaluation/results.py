# pyright: standard
"""Store and show results of evaluations: figures and their settings, as lines of JSON and in tables."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendit.common.safe_files import open_to_append, refuse_links, write_whole
from opendit.config.names import DIGITS

FILE, SWEEP_FILE = "results.jsonl", "sweep.csv"
SWEEP_COLUMNS = ("metric", "steps", "guidance", "value", "low", "high", "count", "sampler", "seed", "samples")
# Field -> name in messages. Two figures of a metric are comparable only if all these fields are equal.
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
# compared only if both results have these fields; samples of other programs lack them
OFTEN_UNKNOWN = ("labels", "rounding")


@dataclass(frozen=True)
class Measurement:
    """One figure and all settings that affect it.

    Attributes:
        interval: (low, high), or None.
        interval_by: the method that gave the interval.
        size: size of each sample, as text.
        samples: name of the file, folder or weights.
        samples_sha256: hash of the samples; for weights, hash of the numbers in them.
        features_known: True if the feature network's file is a published one.
        resize, feature_precision: settings of the feature network.
        sampler, steps, guidance, guidance_interval, guidance_channels, seed, precision, vae: settings with which the
            evaluation drew the samples.
        labels: "balanced" (each class equally often), "drawn" (at random), "given" or "prompts".
        rounding: the method of rounding pixels to uint8.
        drawn: all settings that affect the samples, as in the manifest of a sampling job.
        truncated: number of captions that CLIP truncates.
        of_real: the same figure for real samples, as a bound of what samples can reach. The real samples are training
            digits for the Fréchet distance, and held-out digits for the accuracy.
        note: a remark for the user.
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
    """Return a message for each difference that makes two figures incomparable; an empty list if there is none."""
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
    """Format an aligned table. Below it, add a line for each row that is not comparable with the last row of its
    metric."""
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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *_remarks(rows)])


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
    """Format a value with six significant digits, because further digits of the metrics have no meaning."""
    return f"{value:.6g}" if value and abs(math.log10(abs(value))) < 5 else f"{value:.3e}" if value else "0"


def digits_line(rows: Sequence[Measurement]) -> str | None:
    """Summarise the figures of the built-in digits' features in a line; None if there are none."""
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
    """Append figures to the folder's results, except for figures that the file already has. Raises OSError.

    Args:
        root: a folder below which no link is followed (opendit/common/safe_files.py). Missing folders below it are
            created.
    """
    path = folder / FILE
    refuse_links(folder, [FILE])
    known = [without_time(row) for row in read_results(path)]
    rows = [row for row in rows if without_time(row) not in known]
    with open(open_to_append(path, root=root, make=root is not None), "a", encoding="utf-8") as file:
        file.write("".join(row.to_json() + "\n" for row in rows))
    return path


def without_time(row: Measurement) -> Measurement:
    """Return a measurement without its time. Two lines that differ only in time are the same figure."""
    return dataclasses.replace(row, time=None)


def read_results(path: Path) -> list[Measurement]:
    """Read a file of results. Invalid lines are skipped, such as a line that a full disk has truncated."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            found.append(Measurement.from_json(line))
        except ValueError:
            continue
    return found


# ------------------------------------------------------------------------------------------ sweeps


def sweep_table(rows: Sequence[Measurement]) -> str:
    """Format a table for each metric, with a line for each guidance scale and a column for each number of steps.

    Lines and columns are in the order of ``rows``. If a cell has several figures, the last one is shown.
    """
    parts = []
    for metric in dict.fromkeys(row.metric for row in rows):
        of_metric = [row for row in rows if row.metric == metric]
        values = {(row.guidance, row.steps): figure_text(row.value) for row in of_metric}
        steps = list(dict.fromkeys(row.steps for row in of_metric))
        lines = [[metric, *(f"{count} steps" for count in steps)]]
        for scale in dict.fromkeys(row.guidance for row in of_metric):
            lines.append([f"guidance {scale:g}", *(values.get((scale, count), "-") for count in steps)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        parts.append("")
    return "\n".join(parts)


def write_sweep(folder: Path, rows: Sequence[Measurement]) -> Path:
    """Write the figures of a sweep to ``sweep.csv`` in a folder, one line each. Raises OSError."""
    path = folder / SWEEP_FILE
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(SWEEP_COLUMNS)
    for row in rows:
        low, high = row.interval or (None, None)
        told = (row.metric, row.steps, row.guidance, row.value, low, high)
        writer.writerow([*told, row.count, row.sampler, row.seed, row.samples])
    write_whole(path, text.getvalue().encode())
    return path
