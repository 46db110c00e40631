"""The fields by which a tab chooses weights and says how to draw."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from opendit.sampling.page import views
from opendit.sampling.page.catalog import NEWEST, ModelCard
from opendit.sampling.page.forms import CACHES, MOST_CAPTION, MOST_TEXT
from opendit.sampling.page.page import Page, said
from opendit.sampling.pipeline import MOST_STEPS

# Of every event: none is offered to other programs. Of every piece of HTML: no script, and no style but the page's.
PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
HTML: dict[str, Any] = {"js_on_load": None, "apply_default_css": False}
FIRST_CLASSES = 10  # that are chosen when a model is


@dataclass
class WeightsPicker:
    """Choose weights, and how to draw from them. Make it where its fields should appear."""

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
        self.card = gr.HTML("", **HTML)

    def settings(self) -> None:
        """Makes the fields that say how to draw, where they are to stand."""
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

    @property
    def fields(self) -> list[Any]:
        """In the order of :class:`SettingsForm`."""
        return [
            *(self.source, self.checkpoint, self.average),
            *(self.sampler, self.step_count, self.scale, self.interval, self.cache, self.every),
        ]

    @property
    def chosen(self) -> list[Any]:
        return [self.source, self.checkpoint, self.average]

    def refresh_sources(self, source: Any) -> Any:
        """The list of sources as it is now; the choice stays if it can."""
        sources = self.page.catalog.sources()
        return gr.Dropdown(sources, value=source if source in sources else sources[0] if sources else None)

    def follow(self, source: Any, checkpoint: Any, average: Any) -> tuple[list[Any], ModelCard | None]:
        """(what the fields ``chosen``, ``card`` and ``sampler`` become, the model's card) of what stands in them."""
        catalog = self.page.catalog
        if source is None:
            text = f"no run with a checkpoint in {catalog.outputs} yet"
            return [gr.skip(), gr.skip(), gr.skip(), views.message(text), gr.skip()], None
        try:
            steps = catalog.checkpoints(source)
            checkpoint = checkpoint if checkpoint in steps else NEWEST
            averages = catalog.averages(source, checkpoint)
            average = average if average in averages else averages[0]
        except (ValueError, OSError) as error:
            return [gr.skip(), gr.skip(), gr.skip(), views.error(said(error)), gr.skip()], None
        fields = [gr.skip(), gr.Dropdown(steps, value=checkpoint), gr.Dropdown(averages, value=average)]
        try:
            card = self.page.card(catalog.weights(source, checkpoint, average))
        except (ValueError, OSError) as error:  # a broken checkpoint: another one can be chosen
            return [*fields, views.error(said(error)), gr.skip()], None
        return [*fields, views.card(card), gr.Dropdown(list(card.samplers), value=card.samplers[0])], card

    @property
    def followed(self) -> list[Any]:
        return [*self.chosen, self.card, self.sampler]


@dataclass
class WhatPicker:
    """Choose what is drawn, and from which seed."""

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
            with gr.Row():
                self.number = gr.Number(
                    min(self.count, most), label="Count", precision=0, minimum=1, maximum=most, min_width=90
                )
                self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=90)

    @property
    def fields(self) -> list[Any]:
        """In the order of :class:`WhatForm`."""
        return [self.classes, self.captions, self.negative, self.number, self.seed]

    @property
    def followed(self) -> list[Any]:
        return [self.classes, self.captions, self.negative]

    def follow(self, card: ModelCard | None, chosen: Any) -> list[Any]:
        """Return updates of the fields ``followed`` for another model."""
        if card is None:
            return [gr.skip()] * 3
        choices = [(_class_label(number, name), number) for number, name in enumerate(card.classes)]
        kept = [n for n in chosen or [] if type(n) is int and n < len(choices)] or list(
            range(min(FIRST_CLASSES, len(choices)))
        )
        return [
            gr.Dropdown(choices, value=[] if card.captions else kept, visible=not card.captions),
            gr.Textbox(visible=card.captions),
            gr.Textbox(visible=card.captions),
        ]


def _class_label(number: int, name: str) -> str:
    return name if name == str(number) else f"{number} {name}"
