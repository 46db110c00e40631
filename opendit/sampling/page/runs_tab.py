"""Create the Runs tab, and read the runs' curves, starts and results of evaluations."""

import contextlib
import itertools
import json
import math
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from opendit.checkpoint.schema import RUN_CONFIG
from opendit.common.json_file import MIB
from opendit.common.json_models import read_file
from opendit.sampling.page import views
from opendit.sampling.page.catalog import Catalog
from opendit.sampling.page.drawing import Page
from opendit.sampling.page.views import HTML, PRIVATE

METRICS = {"loss": "loss", "grad_norm": "gradient norm", "samples_per_s": "samples a second"}
POINTS = 400  # points in a plotted curve, at most; longer curves are averaged
MOST_POINTS = 40_000  # a curve's points in memory, at most
RESULTS = ("results.jsonl", "evaluation/results.jsonl")
RESULT_BYTES = 4 * MIB
RESULT_FIELDS = ("metric", "value", "interval", "count", "samples", "reference", "sampler", "steps", "guidance", "time")
FIRST_RUNS = 8  # newest runs with curves at first
REFRESH_S = 10
COLORS = ["#4f46e5", "#ea580c", "#059669", "#db2777", "#0891b2", "#a16207", "#7c3aed", "#dc2626", "#65a30d", "#475569"]


def curves(catalog: Catalog, runs: list[str]) -> dict[str, list[tuple[int, float, str]]]:
    """Return the points (step, value, run) of all ``runs``, for every metric in ``METRICS``."""
    found: dict[str, list[tuple[int, float, str]]] = {metric: [] for metric in METRICS}
    for run in runs:
        if (log := catalog.file(run, "log.jsonl")) is not None:
            for metric, points in log_reader(log).points().items():
                found[metric] += [(step, value, run) for step, value in points]
    return found


class LogReader:
    """Reads a run's log. Every call reads only the lines since the last call."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._place, self._last = file, 0, b""
        self._points: dict[str, list[tuple[int, float]]] = {metric: [] for metric in METRICS}

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return the points (step, value) of every metric, at most ``POINTS`` per metric. Raises OSError."""
        with self._lock, open(self._path, "rb") as log:
            known = os.fstat(log.fileno())
            log.seek(self._place - len(self._last))
            if self._file != (known.st_dev, known.st_ino) or log.read(len(self._last)) != self._last:
                self._begin((known.st_dev, known.st_ino))  # the file was replaced, or truncated and has grown again
                log.seek(0)
            for line in log:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._place, self._last = self._place + len(line), line[-100:]
                self.add(line)
            return {metric: thinned(sorted(points)) for metric, points in self._points.items()}

    def add(self, line: bytes) -> None:
        """Add the values in a line of the log. A line without values is ignored."""
        try:
            entry = json.loads(line)
            step = entry["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if type(step) is not int or not 0 <= step < 2**53:
            return
        for metric, points in self._points.items():
            value = entry.get(metric)
            with contextlib.suppress(OverflowError):  # an integer outside the range of floats
                if type(value) in (int, float) and math.isfinite(float(value)):
                    points.append((step, float(value)))
            if len(points) > MOST_POINTS:
                points[:] = thinned(sorted(points), MOST_POINTS // 2)


log_reader = lru_cache(maxsize=64)(LogReader)  # one reader per path


def thinned(points: list[tuple[int, float]], most: int = POINTS) -> list[tuple[int, float]]:
    """Reduce a curve to at most ``most`` points: the mean value and the last step of each group of neighbours. The
    curve's last point does not change."""
    if len(points) <= most:
        return points
    *earlier, last = points
    edges = [round(i * len(earlier) / (most - 1)) for i in range(most)]
    groups = [earlier[low:high] for low, high in itertools.pairwise(edges)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups] + [last]


def read_results(catalog: Catalog, run: str, evaluations: Path | None = None) -> list[dict[str, Any]]:
    """Return a run's results of ``opendit evaluate``, newest first. They are in files in the run's folder, or in
    ``evaluations`` if the evaluated weights are in the run's folder."""
    found, root = [], catalog.run(run).resolve()
    for name in RESULTS:
        if (path := catalog.file(run, name)) is not None:
            found += _rows(path)
    if evaluations is not None and (path := evaluations / "results.jsonl").is_file():
        found += [row for row in _rows(path) if _lies_in(row["samples"], root)]
    unique = {json.dumps(row, sort_keys=True): row for row in found}
    return sorted(unique.values(), key=lambda row: str(row["time"]), reverse=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    with open(path, "rb") as file:
        for line in file.read(RESULT_BYTES).splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # still being written
                row = json.loads(line)
                if isinstance(row, dict) and "metric" in row and "value" in row:
                    rows.append({name: row.get(name) for name in RESULT_FIELDS})
    return rows


def _lies_in(samples: Any, folder: Path) -> bool:
    try:
        return isinstance(samples, str) and Path(samples).resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


def read_starts(catalog: Catalog, run: str) -> list[dict[str, Any]]:
    """Return a record for each start or resume of the run, in order. Raises ValueError for a damaged file. Early
    versions of OpenDiT stored only one record, as the content of config.json."""
    if (path := catalog.file(run, "config.json")) is None:
        return []
    content = read_file(path, RUN_CONFIG)
    return [start for start in content.get("starts") or [content] if isinstance(start, dict)]


def changed_flags(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a text for each flag that differs between two starts, such as "--lr 0.0001 -> 0.001"."""
    old, new = (flags if isinstance(flags := start.get("flags"), dict) else {} for start in (before, after))
    return [f"--{name} {old.get(name)} -> {new.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)]


def runs_tab(page: Page, blocks: gr.Blocks) -> None:
    """Create the tab Runs, with several runs' curves, and one run's grids, flags and starts."""
    catalog = page.catalog
    with gr.Row():
        shown = gr.Dropdown([], multiselect=True, label="Curves of", interactive=True, scale=6)
        live = gr.Checkbox(False, label=f"Refresh every {REFRESH_S} s", scale=0, min_width=190)
        refresh = gr.Button("Refresh", elem_id="refresh", scale=0, size="sm", min_width=90)
    with gr.Row():
        drawn = [gr.HTML("", **HTML, elem_id=f"plot-{metric}", min_width=280) for metric in METRICS]
    legend = gr.HTML("", **HTML)
    run = gr.Dropdown([], label="Run", interactive=True, elem_id="run")
    problem = gr.HTML("", **HTML)
    slider = gr.Slider(0, 1, value=0, step=1, label="Sample grid", interactive=True, visible=False, elem_id="slider")
    picture = gr.HTML("", **HTML, elem_id="grid")
    results = gr.HTML("", elem_id="results", **HTML)
    with gr.Accordion("Starts: when, where, and what each changed", open=True):
        starts = gr.HTML("", **HTML, elem_id="starts")
    with gr.Accordion("Flags of the newest start", open=False):
        flags = gr.HTML("", **HTML, elem_id="flags")
    timer = gr.Timer(REFRESH_S, active=False)

    def look(chosen: list[str] | None, one: str | None) -> list[Any]:
        runs = catalog.runs()
        chosen = [name for name in chosen or [] if name in runs] or runs[:FIRST_RUNS]
        one = one if one in runs else runs[0] if runs else None
        refused = catalog.refused()
        why = "not shown, since they lead out of the folder of runs or have names that are not UTF-8: "
        message = views.message(why + ", ".join(refused)) if refused else ""
        return [gr.Dropdown(runs, value=chosen), gr.Dropdown(runs, value=one), message]

    def draw(chosen: list[str] | None) -> list[Any]:
        runs = catalog.runs()
        shown, legend = plots(catalog, [name for name in chosen or [] if name in runs])
        return [*shown, legend]

    def tell(name: str | None) -> list[Any]:
        if name is None:
            return [gr.Slider(visible=False), views.grid("", None), "", "", ""]
        try:
            grids, found = catalog.grids(name), read_starts(catalog, name)
            figures = read_results(catalog, name, page.evaluations)
        except (ValueError, OSError) as error:
            return [gr.skip(), gr.skip(), "", views.error(views.error_line(error)), ""]
        last = len(grids) - 1
        sliding = gr.Slider(0, max(last, 1), value=max(last, 0), step=1, label=_label(grids, last), visible=last > 0)
        newest = found[-1].get("flags") if found else None
        details = views.flags(newest) if isinstance(newest, dict) else views.message("none known")
        picture = views.grid(name, grids[-1] if grids else None)
        return [sliding, picture, results_table(figures), starts_table(found), details]

    def slide(name: str | None, position: float) -> list[Any]:
        try:
            grids = catalog.grids(name or "")
        except (ValueError, OSError):
            return [gr.skip(), gr.skip()]
        number = min(max(int(position), 0), len(grids) - 1)
        return [gr.Slider(label=_label(grids, number)), views.grid(name or "", grids[number] if grids else None)]

    plotted = [*drawn, legend]
    every, details = [shown, run, problem], [slider, picture, results, starts, flags]
    for event in (blocks.load, refresh.click, timer.tick):
        listed = event(look, [shown, run], every, **PRIVATE)
        listed.then(draw, shown, plotted, **PRIVATE).then(tell, run, details, **PRIVATE)
    shown.input(draw, shown, plotted, **PRIVATE)
    run.input(tell, run, details, **PRIVATE)
    slider.input(slide, [run, slider], [slider, picture], trigger_mode="always_last", **PRIVATE)
    live.input(lambda on: gr.Timer(REFRESH_S, active=bool(on)), live, timer, **PRIVATE)


def plots(catalog: Catalog, runs: list[str]) -> tuple[list[str], str]:
    """Return a plot of the runs' curves for each metric, and the legend of all plots."""
    colors = dict(zip(runs, itertools.cycle(COLORS), strict=False))
    try:
        found = curves(catalog, runs)
    except (ValueError, OSError):  # a run was deleted while its files were read
        found = curves(catalog, [])
    return [views.plot(title, found[metric], colors) for metric, title in METRICS.items()], views.legend(colors)


def starts_table(starts: list[dict[str, Any]]) -> str:
    """Render the starts of a run as a table, newest first."""
    rows = []
    for number, start in enumerate(starts):
        changed = changed_flags(starts[number - 1], start) if number else ["the first start"]
        changes = start.get("changes")
        texts = [note for note in changes if isinstance(note, str)] if isinstance(changes, list) else []
        notes = [text.removeprefix("resume: ") for text in texts]
        rows.append(
            [
                str(start.get("time", "?")).replace("T", " ").removesuffix("+00:00"),
                str(start.get("first_step", "?")),
                f"{start.get('world_size', '?')} on {start.get('host', '?')}",
                f"OpenDiT {start.get('opendit', '?')}, torch {start.get('torch', '?')}",
                "; ".join(dict.fromkeys([*changed, *notes])) or "nothing",
            ]
        )
    return views.table(rows[::-1], ["Start (UTC)", "From step", "Processes", "Versions", "Changed"])


def results_table(figures: list[dict[str, Any]]) -> str:
    """Render the results of evaluations as a table; "" without results."""
    rows = []
    for row in figures:
        interval = row["interval"] if isinstance(row["interval"], list) else []
        rows.append(
            [
                str(row["metric"]),
                _number(row["value"]),
                " to ".join(map(_number, interval)) if len(interval) == 2 else "-",
                f"{row['count']:,}" if isinstance(row["count"], int) else "-",
                " ".join(f"{name} {row[name]}" for name in ("sampler", "steps", "guidance") if row[name] is not None),
                *(str(row[name] or "-") for name in ("reference", "samples", "time")),
            ]
        )
    heads = ["Metric", "Value", "Interval", "Samples", "Drawn with", "Reference", "Weights", "Time"]
    return views.table(rows, heads) if rows else ""


def _number(value: Any) -> str:
    try:
        return f"{value:.4g}" if isinstance(value, int | float) else str(value)
    except OverflowError:  # an integer outside the range of floats
        return str(value)


def _label(grids: list[str], number: int) -> str:
    return f"Sample grid: step {int(grids[number][:-4]):,} ({number + 1} of {len(grids)})" if grids else "Sample grid"
