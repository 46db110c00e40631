"""The tab *Runs*: curves of all runs over each other; grids, flags and starts of one."""

import itertools
from typing import Any

import gradio as gr
import pandas

from opendit.sampling.page import run_history, views
from opendit.sampling.page.page import Page, said
from opendit.sampling.page.picker import HTML, PRIVATE

FIRST_RUNS = 8  # whose curves are shown before any is chosen: the newest
REFRESH_S = 10
COLORS = ["#4f46e5", "#ea580c", "#059669", "#db2777", "#0891b2", "#a16207", "#7c3aed", "#dc2626", "#65a30d", "#475569"]


def runs_tab(page: Page, blocks: gr.Blocks) -> None:
    catalog = page.catalog
    with gr.Row():
        shown = gr.Dropdown([], multiselect=True, label="Curves of", interactive=True, scale=6)
        live = gr.Checkbox(False, label=f"Refresh every {REFRESH_S} s", scale=0, min_width=190)
        refresh = gr.Button("Refresh", elem_id="refresh", scale=0, size="sm", min_width=90)
    with gr.Row():
        plots = [
            gr.LinePlot(
                None, x="step", y="value", color="run", title=title, y_title=title, x_title="step", height=250,
                min_width=280, colors_in_legend=[], elem_id=f"plot-{metric}",
            )
            for metric, title in run_history.METRICS.items()
        ]  # fmt: skip
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
        links = f"not shown, since they lead out of the folder of runs: {', '.join(refused)}" if refused else ""
        return [gr.Dropdown(runs, value=chosen), gr.Dropdown(runs, value=one), views.message(links) if links else ""]

    def draw(chosen: list[str] | None) -> list[Any]:
        runs = catalog.runs()
        drawn = [name for name in chosen or [] if name in runs]
        try:
            found = run_history.curves(catalog, drawn)
        except (ValueError, OSError):  # a run that goes while it is read
            found = run_history.curves(catalog, [])
        colors = dict(zip(drawn, itertools.cycle(COLORS), strict=False))
        frames = [pandas.DataFrame(points, columns=["step", "value", "run"]) for points in found.values()]
        return [*(gr.LinePlot(frame, color_map=colors) for frame in frames), views.legend(colors)]

    def tell(name: str | None) -> list[Any]:
        nothing = [gr.Slider(visible=False), views.grid("", None), "", "", ""]
        if name is None:
            return nothing
        try:
            grids, found = catalog.grids(name), run_history.starts(catalog, name)
            figures = run_history.results(catalog, name, page.evaluations)
        except (ValueError, OSError) as error:
            return [gr.skip(), gr.skip(), "", views.error(said(error)), ""]
        last = len(grids) - 1
        sliding = gr.Slider(0, max(last, 1), value=max(last, 0), step=1, label=_label(grids, last), visible=last > 0)
        newest = found[-1].get("flags") if found else None
        told = views.flags(newest) if isinstance(newest, dict) else views.message("none known")
        picture = views.grid(name, grids[-1] if grids else None)
        return [sliding, picture, results_table(figures), starts_table(found), told]

    def slide(name: str | None, position: float) -> list[Any]:
        try:
            grids = catalog.grids(name or "")
        except (ValueError, OSError):
            return [gr.skip(), gr.skip()]
        number = min(max(int(position), 0), len(grids) - 1)
        return [gr.Slider(label=_label(grids, number)), views.grid(name or "", grids[number] if grids else None)]

    curves = [*plots, legend]
    every, details = [shown, run, problem], [slider, picture, results, starts, flags]
    for event in (blocks.load, refresh.click, timer.tick):
        event(look, [shown, run], every, **PRIVATE).then(draw, shown, curves, **PRIVATE).then(
            tell, run, details, **PRIVATE
        )
    shown.input(draw, shown, curves, **PRIVATE)
    run.input(tell, run, details, **PRIVATE)
    slider.input(slide, [run, slider], [slider, picture], trigger_mode="always_last", **PRIVATE)
    live.input(lambda on: gr.Timer(REFRESH_S, active=bool(on)), live, timer, **PRIVATE)


def starts_table(starts: list[dict[str, Any]]) -> str:
    rows = []
    for number, start in enumerate(starts):
        before = starts[number - 1] if number else None
        changed = run_history.changed_flags(before, start) if before else ["the first start"]
        notes = [str(note).removeprefix("resume: ") for note in start.get("changes") or [] if isinstance(note, str)]
        rows.append(
            [
                str(start.get("time", "?")).replace("T", " ").removesuffix("+00:00"),
                str(start.get("first_step", "?")),
                f"{start.get('world_size', '?')} on {start.get('host', '?')}",
                f"OpenDiT {start.get('opendit', '?')}, torch {start.get('torch', '?')}",
                "; ".join(dict.fromkeys([*changed, *notes])) or "nothing",
            ]
        )
    return views.table(rows, ["Start (UTC)", "From step", "Processes", "Versions", "Changed"])


def results_table(figures: list[dict[str, Any]]) -> str:
    """The figures of evaluations; nothing where there are none."""
    rows = []
    for row in figures:
        interval, value = row["interval"], row["value"]
        between = (
            isinstance(interval, list) and len(interval) == 2 and all(isinstance(x, int | float) for x in interval)
        )
        rows.append(
            [
                str(row["metric"]),
                f"{value:.4g}" if isinstance(value, int | float) else str(value),
                f"{interval[0]:.4g} to {interval[1]:.4g}" if between else "-",
                f"{row['count']:,}" if isinstance(row["count"], int) else "-",
                " ".join(f"{name} {row[name]}" for name in ("sampler", "steps", "guidance") if row[name] is not None),
                str(row["reference"] or "-"),
                str(row["samples"] or "-"),
                str(row["time"] or "-"),
            ]
        )
    heads = ["Metric", "Value", "Interval", "Samples", "Drawn with", "Reference", "Weights", "Time"]
    return views.table(rows, heads) if rows else ""


def _label(grids: list[str], number: int) -> str:
    return f"Sample grid: step {int(grids[number][:-4]):,} ({number + 1} of {len(grids)})" if grids else "Sample grid"
