"""Create three tabs of the page in Gradio: Sample, Runs and Compare. Sample and Compare share the fields that choose
weights and what to draw.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr
import numpy as np

from opendit.sampling.output_files import VideoClip
from opendit.sampling.page import views
from opendit.sampling.page.catalog import METRICS, NEWEST, Catalog, ModelCard, changed_flags, curves
from opendit.sampling.page.catalog import results as read_results
from opendit.sampling.page.catalog import starts as read_starts
from opendit.sampling.page.drawing_queue import Page
from opendit.sampling.page.forms import (
    CACHES,
    MOST_CAPTION,
    MOST_TEXT,
    SettingsForm,
    WhatForm,
    another_seed,
    read_forms,
    same_conditions,
)
from opendit.sampling.pipeline import MOST_STEPS

# PRIVATE: options of all events, which keep them out of a public API. HTML: options that allow no scripts and only our
# styles.
PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
HTML: dict[str, Any] = {"js_on_load": None, "apply_default_css": False}
FIRST_CLASSES = 10  # number of classes that are selected when a user chooses a model
FIRST_RUNS = 8  # number of the newest runs whose curves are shown until a user chooses runs
REFRESH_S = 10
EXACT = (
    "<b>exact</b> evaluates the whole network, and guidance, at every step: the samples that sample.py draws. "
    "What leaves blocks or guidance out is faster, and draws other samples: Compare shows by how much."
)
# The browser itself reads the picture and reduces it, so no file is uploaded.
PICTURE_HTML = (
    '<label>Clips begin with a picture <input type="file" accept="image/*"></label>'
    '${value ? `<img class="begins" alt="the first frame" src="${value}">` : ""}'
)
PICTURE_SCRIPT = """
element.addEventListener("change", async (event) => {
  const file = event.target.files[0];
  if (!file) { props.value = ""; return; }
  let url = "data:image/png;base64,";  // of what is no picture: the page says so
  try {
    const picture = await createImageBitmap(file);
    const scale = Math.min(1, 1280 / Math.max(picture.width, picture.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(picture.width * scale));
    canvas.height = Math.max(1, Math.round(picture.height * scale));
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    url = canvas.toDataURL("image/png");
    for (let quality = 0.95; url.length > 700000 && quality > 0.2; quality -= 0.15)
      url = canvas.toDataURL("image/jpeg", quality);
  } catch (error) {}
  props.value = url;
});
"""
COLORS = ["#4f46e5", "#ea580c", "#059669", "#db2777", "#0891b2", "#a16207", "#7c3aed", "#dc2626", "#65a30d", "#475569"]


@dataclass
class WeightsPicker:
    """Fields that choose weights. The fields appear where the picker is created."""

    page: Page
    steps: int = 50
    guidance: float = 4.0

    def __post_init__(self) -> None:
        sources = self.page.catalog.sources()
        source = sources[0] if sources else None
        with gr.Group():
            self.source = gr.Dropdown(sources, value=source, label="Run or checkpoint", interactive=True)
            with gr.Row():
                self.checkpoint = gr.Dropdown([NEWEST], value=NEWEST, label="Step", interactive=True, min_width=110)
                self.average = gr.Dropdown(["ema"], value="ema", label="Weights", interactive=True, min_width=110)
            with gr.Row(visible=bool(self.page.catalog.loras())):
                self.loras = gr.Dropdown(
                    self.page.catalog.loras(), multiselect=True, label="LoRA", interactive=True, min_width=150
                )
                self.lora_weights = gr.Textbox(
                    "", label="Their weights", placeholder="1 each; or 0.8 0.5", max_length=100, min_width=110
                )
        self.card = gr.HTML("", **HTML)

    def settings(self) -> None:
        """Create the fields for the sampling settings. The fields appear where this is called."""
        with gr.Group():
            with gr.Row():
                self.sampler = gr.Dropdown([], label="Sampler", interactive=True, min_width=110)
                self.step_count = gr.Number(
                    self.steps, label="Steps", precision=0, minimum=1, maximum=MOST_STEPS, min_width=90
                )
            self.scale = gr.Slider(0, 10, value=self.guidance, step=0.1, label="Guidance (1: none)")
            self.interval = gr.Textbox(
                "", label="Noise levels with guidance", placeholder="all; or from and to: 0.3 5", max_length=100
            )
            with gr.Row():
                self.cache = gr.Dropdown(
                    ["exact", *CACHES], value="exact", label="Blocks left out", interactive=True, min_width=130
                )
                self.every = gr.Number(
                    1, label="Guide every ... steps", precision=0, minimum=1, maximum=MOST_STEPS, min_width=110
                )
            gr.HTML(EXACT, elem_classes="in-group", **HTML)

    @property
    def fields(self) -> list[Any]:
        """The fields that fill a :class:`SettingsForm`, in its order."""
        return [
            *(self.source, self.checkpoint, self.average),
            *(self.sampler, self.step_count, self.scale, self.interval, self.cache, self.every),
            *(self.loras, self.lora_weights),
        ]

    @property
    def chosen(self) -> list[Any]:
        return [self.source, self.checkpoint, self.average]

    def refresh_sources(self, source: Any) -> Any:
        """Return an update of the list of sources, which keeps the choice ``source`` if it still exists."""
        sources = self.page.catalog.sources()
        if source in sources:
            return gr.update(choices=sources)  # without a value, which could undo a choice that was made meanwhile
        return gr.update(choices=sources, value=sources[0] if sources else None)

    def follow(self, source: Any, checkpoint: Any, average: Any) -> tuple[list[Any], ModelCard | None]:
        """Return updates of the fields in :attr:`followed` for the chosen weights, and the model's card."""
        catalog = self.page.catalog
        if source is None:
            train = "" if self.page.training is None else "; the tab Train makes one"
            text = f"no run with a checkpoint in {catalog.outputs} yet{train}"
            return [gr.skip(), gr.skip(), gr.skip(), views.message(text), gr.skip()], None
        try:
            steps = catalog.checkpoints(source)
            checkpoint = checkpoint if checkpoint in steps else NEWEST
            averages = catalog.averages(source, checkpoint)
            average = average if average in averages else averages[0]
        except (ValueError, OSError) as error:
            return [gr.skip(), gr.skip(), gr.skip(), views.error(views.error_line(error)), gr.skip()], None
        fields = [gr.skip(), gr.Dropdown(steps, value=checkpoint), gr.Dropdown(averages, value=average)]
        try:
            card = self.page.card(catalog.weights(source, checkpoint, average))
        except (ValueError, OSError) as error:  # the checkpoint is damaged; the user can choose another
            return [*fields, views.error(views.error_line(error)), gr.skip()], None
        return [*fields, views.card(card), gr.Dropdown(list(card.samplers), value=card.samplers[0])], card

    @property
    def followed(self) -> list[Any]:
        return [*self.chosen, self.card, self.sampler]


@dataclass
class WhatPicker:
    """Fields that choose what to draw and the seed."""

    page: Page
    count: int = 10

    def __post_init__(self) -> None:
        most = self.page.most_samples
        with gr.Group():
            self.classes = gr.Dropdown(
                [],
                multiselect=True,
                label="Classes",
                info="none: drawn without a class",
                interactive=True,
                visible=False,
            )
            self.captions = gr.Textbox(
                label="Captions, one a line", lines=3, max_lines=8, max_length=MOST_TEXT, visible=False,
                placeholder="a seven moving left",
            )  # fmt: skip
            self.negative = gr.Textbox(
                label="Guide away from", max_length=MOST_CAPTION, visible=False, placeholder="nothing"
            )
            self.picture = gr.HTML(
                "", html_template=PICTURE_HTML, js_on_load=PICTURE_SCRIPT, apply_default_css=False, visible=False,
                elem_classes="in-group",
                elem_id=f"picture-{self.count}",
            )  # fmt: skip
            with gr.Row():
                self.number = gr.Number(
                    min(self.count, most), label="Count", precision=0, minimum=1, maximum=most, min_width=90
                )
                self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=90)

    @property
    def fields(self) -> list[Any]:
        """The fields that fill a :class:`WhatForm`, in its order."""
        return [self.classes, self.captions, self.negative, self.number, self.seed, self.picture]

    @property
    def followed(self) -> list[Any]:
        return [self.classes, self.captions, self.negative, self.picture]

    def follow(self, card: ModelCard | None, chosen: Any) -> list[Any]:
        """Return updates of the fields in :attr:`followed` for a newly chosen model."""
        if card is None:
            return [gr.skip()] * 4
        choices = [(_class_label(number, name), number) for number, name in enumerate(card.classes)]
        kept = [n for n in chosen or [] if type(n) is int and n < len(choices)] or list(
            range(min(FIRST_CLASSES, len(choices)))
        )
        return [
            gr.Dropdown(choices, value=[] if card.captions else kept, visible=not card.captions),
            gr.Textbox(visible=card.captions, placeholder="\n".join(card.examples) or "a seven moving left"),
            gr.Textbox(visible=card.captions),
            gr.HTML(visible=card.begins),
        ]


def _class_label(number: int, name: str) -> str:
    return name if name == str(number) else f"{number} {name}"


def sample_tab(page: Page, blocks: gr.Blocks, tab: gr.Tab) -> None:
    """Create the tab Sample, which draws pictures or clips from one checkpoint.

    tab: the tab to fill. Whenever a user selects the tab, the list of runs is updated.
    """
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            weights = WeightsPicker(page)
            what = WhatPicker(page)
            weights.settings()
            with gr.Row():
                draw = gr.Button("Draw", variant="primary", size="md", elem_id="draw", min_width=90)
                again = gr.Button("Another seed", size="md", elem_id="again", min_width=130)
                cancel = gr.Button("Cancel", size="md", elem_id="cancel", min_width=90)
        with gr.Column(scale=5, min_width=360):
            status = gr.HTML(views.message(), **HTML, elem_id="sample-status")
            gallery = gr.HTML("", **HTML, elem_id="sample-gallery")

    def follow(source: Any, checkpoint: Any, average: Any, classes: Any) -> list[Any]:
        fields, card = weights.follow(source, checkpoint, average)
        return fields + what.follow(card, classes)

    async def start(request: gr.Request, *values: Any) -> AsyncIterator[tuple[Any, Any]]:
        count = len(weights.fields)
        try:
            how, asked_for = SettingsForm(*values[:count]), WhatForm(*values[count:])
            choice = how.choice(page.catalog)
            asked = read_forms(asked_for, how, choice, page.card(choice), page.most_samples)
        except (ValueError, OSError) as error:
            yield views.error(views.error_line(error)), gr.skip()
            return
        async for shown in page.draw(str(request.session_hash), [asked]):
            if isinstance(shown, str):
                yield shown, gr.skip()
                continue
            try:
                batch, stored = await asyncio.to_thread(page.store.add, shown[0].samples, asked.labels, asked.settings)
            except OSError as error:
                yield views.error(f"the samples can't be kept: {error}"), gr.skip()
                return
            text = f"{len(stored)} of seed {asked.request.settings.seed} from {choice.name}"
            yield views.message(text, shown[0].notes), views.gallery(batch, stored)

    def stop(request: gr.Request) -> None:
        page.cancel(str(request.session_hash))

    followed = [*weights.followed, *what.followed]
    inputs = [*weights.chosen, what.classes]
    for chosen in weights.chosen:
        chosen.input(follow, inputs, followed, **PRIVATE)
    for event in (blocks.load, tab.select):
        listed = event(weights.refresh_sources, weights.source, weights.source, **PRIVATE)
        listed.then(follow, inputs, followed, **PRIVATE)
    fields, outputs = [*weights.fields, *what.fields], [status, gallery]
    draw.click(start, fields, outputs, concurrency_limit=None, **PRIVATE)
    again.click(another_seed, None, what.seed, **PRIVATE).then(
        start, fields, outputs, concurrency_limit=None, **PRIVATE
    )
    cancel.click(stop, None, None, concurrency_limit=None, **PRIVATE)


def runs_tab(page: Page, blocks: gr.Blocks) -> None:
    """Create the tab Runs, which shows curves of several runs in one plot, and grids, flags and starts of one run."""
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
        told = views.message(why + ", ".join(refused)) if refused else ""
        return [gr.Dropdown(runs, value=chosen), gr.Dropdown(runs, value=one), told]

    def draw(chosen: list[str] | None) -> list[Any]:
        runs = catalog.runs()
        shown, legend = plots(catalog, [name for name in chosen or [] if name in runs])
        return [*shown, legend]

    def tell(name: str | None) -> list[Any]:
        nothing = [gr.Slider(visible=False), views.grid("", None), "", "", ""]
        if name is None:
            return nothing
        try:
            grids, found = catalog.grids(name), read_starts(catalog, name)
            figures = read_results(catalog, name, page.evaluations)
        except (ValueError, OSError) as error:
            return [gr.skip(), gr.skip(), "", views.error(views.error_line(error)), ""]
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

    plotted = [*drawn, legend]
    every, details = [shown, run, problem], [slider, picture, results, starts, flags]
    for event in (blocks.load, refresh.click, timer.tick):
        event(look, [shown, run], every, **PRIVATE).then(draw, shown, plotted, **PRIVATE).then(
            tell, run, details, **PRIVATE
        )
    shown.input(draw, shown, plotted, **PRIVATE)
    run.input(tell, run, details, **PRIVATE)
    slider.input(slide, [run, slider], [slider, picture], trigger_mode="always_last", **PRIVATE)
    live.input(lambda on: gr.Timer(REFRESH_S, active=bool(on)), live, timer, **PRIVATE)


def plots(catalog: Catalog, runs: list[str]) -> tuple[list[str], str]:
    """Return one plot of the runs' curves for each of ``METRICS``, and the legend of all plots."""
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
        before = starts[number - 1] if number else None
        changed = changed_flags(before, start) if before else ["the first start"]
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
    """Render the results of evaluations as a table. Return an empty text if there are no results."""
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
                str(row["reference"] or "-"),
                str(row["samples"] or "-"),
                str(row["time"] or "-"),
            ]
        )
    heads = ["Metric", "Value", "Interval", "Samples", "Drawn with", "Reference", "Weights", "Time"]
    return views.table(rows, heads) if rows else ""


def _number(value: Any) -> str:
    """Format a number with four digits, and any other value by ``str``."""
    try:
        return f"{value:.4g}" if isinstance(value, int | float) else str(value)
    except OverflowError:  # the value is an integer outside the range of floats
        return str(value)


def _label(grids: list[str], number: int) -> str:
    return f"Sample grid: step {int(grids[number][:-4]):,} ({number + 1} of {len(grids)})" if grids else "Sample grid"


def compare_tab(page: Page, blocks: gr.Blocks) -> None:
    """Create the tab Compare, which draws from two checkpoints, or with two settings, from the same seed."""
    with gr.Row():
        with gr.Column(min_width=280):
            gr.HTML('<div class="card"><b>A</b></div>', **HTML)
            first = WeightsPicker(page)
            first.settings()
        with gr.Column(min_width=280):
            gr.HTML('<div class="card"><b>B</b></div>', **HTML)
            second = WeightsPicker(page, guidance=1.5)
            second.settings()
        with gr.Column(min_width=280):
            gr.HTML('<div class="card"><b>Both</b></div>', **HTML)
            what = WhatPicker(page, count=8)
            with gr.Row():
                draw = gr.Button("Compare", variant="primary", size="md", elem_id="compare", min_width=100)
                cancel = gr.Button("Cancel", size="md", elem_id="compare-cancel", min_width=100)
    status = gr.HTML(views.message(), **HTML, elem_id="compare-status")
    gallery = gr.HTML("", **HTML, elem_id="compare-gallery")

    def follow_first(source: Any, checkpoint: Any, average: Any, classes: Any) -> list[Any]:
        fields, card = first.follow(source, checkpoint, average)
        return fields + what.follow(card, classes)

    def follow_second(source: Any, checkpoint: Any, average: Any) -> list[Any]:
        return second.follow(source, checkpoint, average)[0]

    async def start(request: gr.Request, *values: Any) -> AsyncIterator[tuple[Any, Any]]:
        count = len(first.fields)
        try:
            hows = SettingsForm(*values[:count]), SettingsForm(*values[count : 2 * count])
            asked_for = WhatForm(*values[2 * count :])
            choices = [how.choice(page.catalog) for how in hows]
            cards = [page.card(choice) for choice in choices]
            same_conditions(cards[0], cards[1], asked_for)
            asked = [
                read_forms(asked_for, how, choice, card, page.most_samples)
                for how, choice, card in zip(hows, choices, cards, strict=True)
            ]
        except (ValueError, OSError) as error:
            yield views.error(views.error_line(error)), gr.skip()
            return
        async for shown in page.draw(str(request.session_hash), asked):
            if isinstance(shown, str):
                yield shown, gr.skip()
                continue
            drawn = [pending.samples for pending in shown]
            try:
                stored = [
                    (await asyncio.to_thread(page.store.add, samples, one.labels, one.settings))[1]
                    for samples, one in zip(drawn, asked, strict=True)
                ]
            except OSError as error:
                yield views.error(f"the samples can't be kept: {error}"), gr.skip()
                return
            text = f"A: {choices[0].name}; B: {choices[1].name}; seed {asked[0].request.settings.seed}"
            notes = [note for pending in shown for note in pending.notes]
            yield (
                views.message(text, dict.fromkeys(notes)),
                views.pairs(stored[0], stored[1], list(map(difference, *drawn))),
            )

    def stop(request: gr.Request) -> None:
        page.cancel(str(request.session_hash))

    followed, inputs = [*first.followed, *what.followed], [*first.chosen, what.classes]
    for chosen in first.chosen:
        chosen.input(follow_first, inputs, followed, **PRIVATE)
    for chosen in second.chosen:
        chosen.input(follow_second, second.chosen, second.followed, **PRIVATE)
    for picker, follow, sources, targets in (
        (first, follow_first, inputs, followed),
        (second, follow_second, second.chosen, second.followed),
    ):
        loaded = blocks.load(picker.refresh_sources, picker.source, picker.source, **PRIVATE)
        loaded.then(follow, sources, targets, **PRIVATE)
    fields = [*first.fields, *second.fields, *what.fields]
    draw.click(start, fields, [status, gallery], concurrency_limit=None, **PRIVATE)
    cancel.click(stop, None, None, concurrency_limit=None, **PRIVATE)


def difference(first: Any, second: Any) -> str:
    """Return a text with the mean difference between two samples; an empty text if their sizes differ."""
    a, b = (np.asarray(one.frames if isinstance(one, VideoClip) else one).astype(np.int16) for one in (first, second))
    return f" differ by {np.abs(a - b).mean():.1f} of 255 a pixel" if a.shape == b.shape else ""
