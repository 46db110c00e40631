"""The tab *Sample*: from one checkpoint to pictures or clips."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from opendit.sampling.page import views
from opendit.sampling.page.forms import SettingsForm, WhatForm, another_seed, read_forms
from opendit.sampling.page.page import Page, said
from opendit.sampling.page.picker import HTML, PRIVATE, WeightsPicker, WhatPicker


def sample_tab(page: Page, blocks: gr.Blocks) -> None:
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
            yield views.error(said(error)), gr.skip()
            return
        async for shown in page.draw(str(request.session_hash), [asked]):
            if isinstance(shown, str):
                yield shown, gr.skip()
                continue
            batch, stored = await asyncio.to_thread(page.store.add, shown[0].samples, asked.labels, asked.settings)
            text = f"{len(stored)} of seed {asked.request.settings.seed} from {choice.name}"
            yield views.message(text, shown[0].notes), views.gallery(batch, stored)

    def stop(request: gr.Request) -> None:
        page.cancel(str(request.session_hash))

    followed = [*weights.followed, *what.followed]
    inputs = [*weights.chosen, what.classes]
    for chosen in weights.chosen:
        chosen.input(follow, inputs, followed, **PRIVATE)
    loaded = blocks.load(weights.refresh_sources, weights.source, weights.source, **PRIVATE)
    loaded.then(follow, inputs, followed, **PRIVATE)
    fields, outputs = [*weights.fields, *what.fields], [status, gallery]
    draw.click(start, fields, outputs, concurrency_limit=None, **PRIVATE)
    again.click(another_seed, None, what.seed, **PRIVATE).then(
        start, fields, outputs, concurrency_limit=None, **PRIVATE
    )
    cancel.click(stop, None, None, concurrency_limit=None, **PRIVATE)
