"""The tab *Compare*: two checkpoints, or two settings, from the same seed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
import numpy as np

from opendit.sampling.output_files import VideoClip
from opendit.sampling.page import views
from opendit.sampling.page.forms import SettingsForm, WhatForm, read_forms, same_conditions
from opendit.sampling.page.page import Page, said
from opendit.sampling.page.picker import HTML, PRIVATE, WeightsPicker, WhatPicker


def compare_tab(page: Page, blocks: gr.Blocks) -> None:
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
            yield views.error(said(error)), gr.skip()
            return
        async for shown in page.draw(str(request.session_hash), asked):
            if isinstance(shown, str):
                yield shown, gr.skip()
                continue
            drawn = [pending.samples for pending in shown]
            stored = [
                (await asyncio.to_thread(page.store.add, samples, one.labels, one.settings))[1]
                for samples, one in zip(drawn, asked, strict=True)
            ]
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
    for picker, follow, given, taken in (
        (first, follow_first, inputs, followed),
        (second, follow_second, second.chosen, second.followed),
    ):
        loaded = blocks.load(picker.refresh_sources, picker.source, picker.source, **PRIVATE)
        loaded.then(follow, given, taken, **PRIVATE)
    fields = [*first.fields, *second.fields, *what.fields]
    draw.click(start, fields, [status, gallery], concurrency_limit=None, **PRIVATE)
    cancel.click(stop, None, None, concurrency_limit=None, **PRIVATE)


def difference(first: Any, second: Any) -> str:
    """Describe the difference of two samples of one size; empty for two of different sizes."""
    a, b = (np.asarray(one.frames if isinstance(one, VideoClip) else one).astype(np.int16) for one in (first, second))
    return f" differ by {np.abs(a - b).mean():.1f} of 255 a pixel" if a.shape == b.shape else ""
