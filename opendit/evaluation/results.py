# pyright: standard
"""A figure with everything that decides it: as a line of JSON, as a row of a table, and beside other figures."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendit.common.safe_files import open_to_append, refuse_links
from opendit.config.names import DIGITS

FILE = "results.jsonl"
# Fields that two figures of one metric must share before their difference says anything of the samples -> their names.
MEASURED_ALIKE = {
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
OFTEN_UNKNOWN = ("labels", "rounding")  # of samples that somebody else has drawn; that alone is no difference


@dataclass(frozen=True)
class Measurement:
    """One figure.

    metric, value: by name. interval: low and high, or None; interval_by: how it was found. count: samples. size: of
    each. samples: the file, folder or weights, and samples_sha256 a hash of them (of weights, of their numbers). The
    reference and the features by name and SHA-256; features_known: whether that is a published file's. resize, feature_
    precision: of the network of features. sampler to vae: of samples that were drawn for it; drawn: all that
    decides them, as the parts of a job of sample.py know it. labels: "balanced" (each
    class as often), "drawn" (at random), "given" or "prompts". rounding: how pixels became uint8. truncated: captions
    that CLIP could not read to their end. of_real: the same figure of real samples, as a bound of what can be reached:
    of the digits' Fréchet distance training digits', of their accuracy held-out digits'. note: what a reader has to
    know.
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
        """One line, with all fields. Raises ValueError for a value that is not finite."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Measurement":
        """Read a line that :meth:`to_json` wrote, and leave out unknown fields. Raises ValueError."""
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
    """List, in words, all that keeps two figures of one metric from being compared; empty if they can be."""
    if one.metric != other.metric:
        return [f"metric {one.metric} against {other.metric}"]
    differing = []
    for name, words in MEASURED_ALIKE.items():
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
    """An aligned table, and below it a line for every row that can't be compared with the last one of its metric."""
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
    """Six figures: a metric of pictures has no more that mean anything."""
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
    """Adds lines to the folder's results; a figure that is there is not added again. Raises OSError.

    root: the folder below which no link is followed (opendit/common/safe_files.py); folders below it are made."""
    path = folder / FILE
    refuse_links(folder, [FILE])
    known = [without_time(row) for row in read_results(path)]
    rows = [row for row in rows if without_time(row) not in known]
    with open(open_to_append(path, root=root, make=root is not None), "a", encoding="utf-8") as file:
        file.write("".join(row.to_json() + "\n" for row in rows))
    return path


def without_time(row: Measurement) -> Measurement:
    """Return a measurement without its time: two lines that agree in all else are the same figure."""
    return dataclasses.replace(row, time=None)


def read_results(path: Path) -> list[Measurement]:
    """The lines of a file of results; those that are none, such as one that a full disk cut, are left out."""
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
