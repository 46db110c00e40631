"""Read a run's history: the curves of log.jsonl, and the flags and changes of every start in config.json."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from opendit.checkpoint.schema import RUN_CONFIG
from opendit.common.json_file import MIB, read_file
from opendit.sampling.page.catalog import Catalog

METRICS = {"loss": "loss", "grad_norm": "gradient norm", "samples_per_s": "samples a second"}
POINTS = 400  # of a curve that are drawn; each is the mean of its neighbours where there are more
LOG_BYTES, LINE_BYTES = 512 * MIB, MIB


def curves(catalog: Catalog, runs: list[str]) -> dict[str, list[tuple[int, float, str]]]:
    """Return, for each of ``METRICS``, the points (step, value, run) of all these runs."""
    found: dict[str, list[tuple[int, float, str]]] = {metric: [] for metric in METRICS}
    for run in runs:
        if (log := catalog.file(run, "log.jsonl")) is None:
            continue
        known = log.stat()
        for metric, points in _points(log, known.st_mtime_ns, known.st_size).items():
            found[metric] += [(step, value, run) for step, value in points]
    return found


@lru_cache(maxsize=64)
def _points(log: Path, mtime_ns: int, size: int) -> dict[str, list[tuple[int, float]]]:
    """The points of one run; ``mtime_ns`` and ``size`` say which state of the file."""
    points: dict[str, list[tuple[int, float]]] = {metric: [] for metric in METRICS}
    with open(log, "rb") as file:
        if size > LOG_BYTES:
            file.seek(size - LOG_BYTES)
        while line := file.readline(LINE_BYTES):
            try:
                entry = json.loads(line)
                step = entry["step"]
            except (ValueError, TypeError, KeyError, RecursionError):  # the line that is being written
                continue
            if type(step) is not int:
                continue
            for metric, values in points.items():
                value = entry.get(metric)
                if type(value) in (int, float) and math.isfinite(value):
                    values.append((step, float(value)))
    return {metric: thinned(sorted(values)) for metric, values in points.items()}


def thinned(points: list[tuple[int, float]], most: int = POINTS) -> list[tuple[int, float]]:
    """At most ``most`` points: means over neighbours, each at its last step; the last point stays as it is."""
    if len(points) <= most:
        return points
    *earlier, last = points
    edges = [round(i * len(earlier) / (most - 1)) for i in range(most)]
    groups = [earlier[low:high] for low, high in zip(edges, edges[1:], strict=False)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups] + [last]


RESULTS = ("results.jsonl", "evaluation/results.jsonl")
RESULT_BYTES = 4 * MIB
RESULT_FIELDS = ("metric", "value", "interval", "count", "samples", "reference", "sampler", "steps", "guidance", "time")


def results(catalog: Catalog, run: str, evaluations: Path | None = None) -> list[dict[str, Any]]:
    """The figures that ``opendit evaluate`` found for a run, the newest first, as far as they are kept in its folder,
    or in the folder ``evaluations`` for weights that lie in it."""
    found, root = [], catalog.run(run).resolve()
    for name in RESULTS:
        if (path := catalog.file(run, name)) is not None:
            found += _rows(path)
    if evaluations is not None and (path := evaluations / "results.jsonl").is_file():
        found += [row for row in _rows(path) if _lies_in(row.get("samples"), root)]
    unique = {json.dumps(row, sort_keys=True): row for row in found}
    return sorted(unique.values(), key=lambda row: str(row.get("time")), reverse=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines that hold a figure, of a file's first RESULT_BYTES."""
    rows = []
    with open(path, "rb") as file:
        for line in file.read(RESULT_BYTES).splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # the line that is being written
                continue
            if isinstance(row, dict) and "metric" in row and "value" in row:
                rows.append({name: row.get(name) for name in RESULT_FIELDS})
    return rows


def _lies_in(samples: Any, folder: Path) -> bool:
    try:
        return isinstance(samples, str) and Path(samples).resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


def starts(catalog: Catalog, run: str) -> list[dict[str, Any]]:
    """The starts of a run, the first one first, as its config.json has them; one of an early version of OpenDiT has the
    flags alone. Raises ValueError for a file that is damaged."""
    if (path := catalog.file(run, "config.json")) is None:
        return []
    content = read_file(path, RUN_CONFIG)
    found = content.get("starts") or [content]
    return [start for start in found if isinstance(start, dict)]


def changed_flags(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The flags of which two starts had other values, "--lr 0.0001 -> 0.001"."""
    old, new = (flags if isinstance(flags := start.get("flags"), dict) else {} for start in (before, after))
    return [f"--{name} {old.get(name)} -> {new.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)]
