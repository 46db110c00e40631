"""Create the tabs Sample and Compare, and their fields for weights and for what to draw."""

import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import gradio as gr
import numpy as np

from opendit.sampling.output_files import VideoClip
from opendit.sampling.page import views
from opendit.sampling.page.catalog import NEWEST, ModelCard
from opendit.sampling.page.drawing import (
    CACHES,
    MOST_CAPTION,
    MOST_TEXT,
    Drawing,
    DrawingRequest,
    Page,
    SettingsForm,
    StoredSample,
    WhatForm,
    read_forms,
    same_conditions,
)
from opendit.sampling.page.views import HTML, PRIVATE, escaped
from opendit.sampling.pipeline import MOST_STEPS

FIRST_CLASSES = 10  # classes that are selected for a new model
SHOWN = 132  # smaller samples are enlarged to about this side in pixels
EXACT = (
    "<b>exact</b> evaluates the whole network, and guidance, at every step: the samples that sample.py draws. "
    "What leaves blocks or guidance out is faster, and draws other samples: Compare shows by how much."
)
# The browser reads and reduces the picture, so no file is uploaded.
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


@dataclass
class WeightsPicker:
    """Fields that choose weights. The fields appear where the picker is created."""

    page: Page
    guidance: float = 4.0

    def __post_init__(self) -> None:
        sources, loras = self.page.catalog.sources(), self.page.catalog.loras()
        with gr.Group():
            self.source = gr.Dropdown(
                sources, value=sources[0] if sources else None, label="Run or checkpoint", interactive=True
            )
            with gr.Row():
                self.checkpoint = gr.Dropdown([NEWEST], value=NEWEST, label="Step", interactive=True, min_width=110)
                self.average = gr.Dropdown(["ema"], value="ema", label="Weights", interactive=True, min_width=110)
            with gr.Row(visible=bool(loras)):
                self.loras = gr.Dropdown(loras, multiselect=True, label="LoRA", interactive=True, min_width=150)
                self.lora_weights = gr.Textbox(
                    "", label="Their weights", placeholder="1 each; or 0.8 0.5", max_length=100, min_width=110
                )
        self.card = gr.HTML("", **HTML)

    def settings(self) -> None:
        """Create the fields for the sampling settings. The fields appear where this is called."""
        with gr.Group():
            with gr.Row():
                self.sampler = gr.Dropdown([], label="Sampler", interactive=True, min_width=110)
                self.step_count = gr.Number(50, label="Steps", precision=0, minimum=1, maximum=MOST_STEPS, min_width=90)
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

    def refresh_sources(self, source: Any) -> Any:
        """Return an update of the list of sources. The choice ``source`` stays if the source still exists."""
        sources = self.page.catalog.sources()
        if source in sources:
            return gr.update(choices=sources)  # a value could undo a newer choice
        return gr.update(choices=sources, value=sources[0] if sources else None)

    def follow(self, source: Any, checkpoint: Any, average: Any) -> tuple[list[Any], ModelCard | None]:
        """Return updates of the fields source, checkpoint, average, card and sampler, and the chosen model's card. The
        card is None if it can't be read."""
        catalog, fields = self.page.catalog, [gr.skip()] * 3
        if source is None:
            train = "" if self.page.training is None else "; the tab Train makes one"
            return [
                *fields,
                views.message(f"no run with a checkpoint in {catalog.outputs} yet{train}"),
                gr.skip(),
            ], None
        try:
            steps = catalog.checkpoints(source)
            checkpoint = checkpoint if checkpoint in steps else NEWEST
            averages = catalog.averages(source, checkpoint)
            average = average if average in averages else averages[0]
            fields = [gr.skip(), gr.Dropdown(steps, value=checkpoint), gr.Dropdown(averages, value=average)]
            card = self.page.card(catalog.weights(source, checkpoint, average))
        except (ValueError, OSError) as error:  # such as a damaged checkpoint; the user can choose another
            return [*fields, views.error(views.error_line(error)), gr.skip()], None
        return [*fields, views.card(card), gr.Dropdown(list(card.samplers), value=card.samplers[0])], card


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

    def follow(self, card: ModelCard | None, chosen: Any) -> list[Any]:
        """Return updates of the fields classes, captions, negative and picture for a newly chosen model."""
        if card is None:
            return [gr.skip()] * 4
        choices = [(name if name == str(i) else f"{i} {name}", i) for i, name in enumerate(card.classes)]
        kept = [i for i in chosen or [] if type(i) is int and i < len(choices)]
        kept = kept or list(range(min(FIRST_CLASSES, len(choices))))
        return [
            gr.Dropdown(choices, value=[] if card.captions else kept, visible=not card.captions),
            gr.Textbox(visible=card.captions, placeholder="\n".join(card.examples) or "a seven moving left"),
            gr.Textbox(visible=card.captions),
            gr.HTML(visible=card.begins),
        ]


def connect(weights: WeightsPicker, what: WhatPicker | None, events: list[Callable[..., Any]]) -> None:
    """Update the fields of ``weights`` and ``what`` when a user chooses other weights, or when one of ``events``
    occurs. The events also update the list of sources."""
    inputs = [weights.source, weights.checkpoint, weights.average]
    outputs = [*inputs, weights.card, weights.sampler]
    chosen = list(inputs)
    if what is not None:
        inputs.append(what.classes)
        outputs += [what.classes, what.captions, what.negative, what.picture]

    def follow(*values: Any) -> list[Any]:
        fields, card = weights.follow(*values[:3])
        return fields if what is None else fields + what.follow(card, values[3])

    for field in chosen:
        field.input(follow, inputs, outputs, **PRIVATE)
    for event in events:
        listed = event(weights.refresh_sources, weights.source, weights.source, **PRIVATE)
        listed.then(follow, inputs, outputs, **PRIVATE)


def sample_tab(page: Page, blocks: gr.Blocks, tab: gr.Tab) -> None:
    """Create the tab Sample. It draws from one checkpoint."""
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

    def read(*values: Any) -> list[DrawingRequest]:
        count = len(weights.fields)
        return [_request(page, SettingsForm(*values[:count]), WhatForm(*values[count:]))]

    def show(drawings: list[Drawing]) -> tuple[str, str]:
        (drawing,) = drawings
        request = drawing.request
        text = f"{len(drawing.stored)} of seed {request.settings.seed} from {request.weights.name}"
        return views.message(text, drawing.notes), gallery_of(drawing.batch, drawing.stored)

    connect(weights, what, [blocks.load, tab.select])
    fields, outputs, start = [*weights.fields, *what.fields], [status, gallery], _starter(page, read, show)
    draw.click(start, fields, outputs, concurrency_limit=None, **PRIVATE)
    seeded = again.click(lambda: random.SystemRandom().randrange(2**31), None, what.seed, **PRIVATE)
    seeded.then(start, fields, outputs, concurrency_limit=None, **PRIVATE)
    cancel.click(_stopper(page), None, None, concurrency_limit=None, **PRIVATE)


def compare_tab(page: Page, blocks: gr.Blocks) -> None:
    """Create the tab Compare. It draws from two checkpoints, or with two settings, from one seed."""
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

    def read(*values: Any) -> list[DrawingRequest]:
        count = len(first.fields)
        hows, asked = (SettingsForm(*values[:count]), SettingsForm(*values[count : 2 * count])), values[2 * count :]
        cards = [page.card(how.choice(page.catalog)) for how in hows]
        same_conditions(cards[0], cards[1], WhatForm(*asked))
        return [_request(page, how, WhatForm(*asked)) for how in hows]

    def show(drawings: list[Drawing]) -> tuple[str, str]:
        a, b = drawings
        text = f"A: {a.request.weights.name}; B: {b.request.weights.name}; seed {a.request.settings.seed}"
        differences = list(map(difference, a.result(), b.result()))
        return views.message(text, dict.fromkeys(a.notes + b.notes)), pairs_of(a.stored, b.stored, differences)

    connect(first, what, [blocks.load])
    connect(second, None, [blocks.load])
    fields = [*first.fields, *second.fields, *what.fields]
    draw.click(_starter(page, read, show), fields, [status, gallery], concurrency_limit=None, **PRIVATE)
    cancel.click(_stopper(page), None, None, concurrency_limit=None, **PRIVATE)


def _request(page: Page, how: SettingsForm, what: WhatForm) -> DrawingRequest:
    choice = how.choice(page.catalog)
    return read_forms(what, how, choice, page.card(choice), page.most_samples)


def _starter(
    page: Page, read: Callable[..., list[DrawingRequest]], show: Callable[[list[Drawing]], tuple[str, str]]
) -> Callable[..., AsyncIterator[tuple[Any, Any]]]:
    """Return an event handler that draws the requests ``read(*values)`` and shows the drawings by ``show``."""

    async def start(request: gr.Request, *values: Any) -> AsyncIterator[tuple[Any, Any]]:
        try:
            requests = read(*values)
        except (ValueError, OSError) as error:
            yield views.error(views.error_line(error)), gr.skip()
            return
        async for shown in page.draw(str(request.session_hash), requests):
            yield (shown, gr.skip()) if isinstance(shown, str) else show(shown)

    return start


def _stopper(page: Page) -> Callable[[gr.Request], None]:
    def stop(request: gr.Request) -> None:
        page.queue.cancel(str(request.session_hash))

    return stop


def sample(stored: StoredSample, columns: int = 1) -> str:
    """Render a picture or a playing clip, with its label and a download link."""
    height, width = stored.size
    zoom = max(1, math.ceil(SHOWN / max(height, 1)) if height < SHOWN else 1)
    height, width = height * zoom, width * zoom
    if (largest := 512 // columns) < max(height, width):
        height, width = (round(side * largest / max(height, width)) for side in (height, width))
    source, label, small = f"/drawn/{quote(stored.token)}", escaped(stored.label), ' class="small"' if zoom > 1 else ""
    shown = f'{small} src="{source}" width="{width}" height="{height}"'
    if stored.is_clip:
        media, kind = f"<video{shown} autoplay loop muted playsinline></video>", "MP4"
    else:
        media, kind = f'<img{shown} alt="{label}">', "PNG"
    return (
        f'<figure style="width:{width}px">{media}<figcaption><span title="{label}">{label}</span>'
        f'<a href="{source}" download="{escaped(stored.name)}">{kind}</a></figcaption></figure>'
    )


def gallery_of(batch: str, stored: list[StoredSample]) -> str:
    everything = f'<a href="/drawn/{quote(batch)}.zip" download="samples.zip">download all {len(stored)} (ZIP)</a>'
    more = f'<div class="samples"><figcaption>{everything}</figcaption></div>' if len(stored) > 1 else ""
    return f'<div class="samples" data-count="{len(stored)}">{"".join(map(sample, stored))}</div>{more}'


def pairs_of(first: list[StoredSample], second: list[StoredSample], differences: list[str]) -> str:
    shown = [
        f'<div class="pair"><div>{sample(a, 2)}{sample(b, 2)}</div><p>A and B{escaped(text)}</p></div>'
        for a, b, text in zip(first, second, differences, strict=True)
    ]
    return f'<div class="samples" data-count="{len(shown)}">{"".join(shown)}</div>'


def difference(first: Any, second: Any) -> str:
    """Return a text with the mean difference between two samples; an empty text if their sizes differ."""
    a, b = (np.asarray(one.frames if isinstance(one, VideoClip) else one).astype(np.int16) for one in (first, second))
    return f" differ by {np.abs(a - b).mean():.1f} of 255 a pixel" if a.shape == b.shape else ""
