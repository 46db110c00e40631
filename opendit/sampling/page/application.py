"""The page as a web application: Gradio's tabs, the addresses of samples and grids, and the guard before all of it."""

import os
from urllib.parse import quote

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before it is imported: it asks at that moment

import gradio as gr  # noqa: E402
from fastapi import FastAPI, HTTPException  # noqa: E402
from fastapi.responses import FileResponse, Response  # noqa: E402

from opendit.sampling.page import views  # noqa: E402
from opendit.sampling.page.compare_tab import compare_tab  # noqa: E402
from opendit.sampling.page.guard import LOCAL, Guard  # noqa: E402
from opendit.sampling.page.page import Page  # noqa: E402
from opendit.sampling.page.picker import HTML  # noqa: E402
from opendit.sampling.page.runs_tab import runs_tab  # noqa: E402
from opendit.sampling.page.sample_store import is_token  # noqa: E402
from opendit.sampling.page.sample_tab import sample_tab  # noqa: E402

MOST_EVENTS = 64  # of all browsers that wait for an answer; further ones are told to try again
FONT, FIXED = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # none is fetched from elsewhere


def build(page: Page) -> gr.Blocks:
    """The three tabs."""
    with gr.Blocks(title="OpenDiT", analytics_enabled=False, delete_cache=(600, 600)) as blocks:
        folder = views.escaped(page.catalog.outputs)
        gr.HTML(f'<div id="title"><h1>OpenDiT</h1><p>{folder}</p></div>', **HTML)
        with gr.Tab("Sample"):
            sample_tab(page, blocks)
        with gr.Tab("Runs"):
            runs_tab(page, blocks)
        with gr.Tab("Compare"):
            compare_tab(page, blocks)

        def leave(request: gr.Request) -> None:
            page.cancel(str(request.session_hash))

        blocks.unload(leave)
    blocks.queue(max_size=MOST_EVENTS, default_concurrency_limit=4)
    return blocks


def application(page: Page, password: str | None, hosts: tuple[str, ...] | None = LOCAL) -> Guard:
    """The ASGI application; ``password`` and ``hosts`` as of :class:`Guard`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/drawn/{name}")
    def drawn(name: str) -> Response:
        token, dot, ending = name.partition(".")
        if not is_token(token) or ending not in ("", "zip"):
            raise HTTPException(404)
        if dot:
            if (content := page.store.archive(token)) is None:
                raise HTTPException(404)
            return Response(content, media_type="application/zip")
        if (found := page.store.find(token)) is None:
            raise HTTPException(404)
        sample, path = found
        kind = "video/mp4" if sample.is_clip else "image/png"
        # The file's name in RFC 5987's form: a caption may be in any script.
        place = f"inline; filename*=UTF-8''{quote(sample.name, safe='')}"
        return FileResponse(path, media_type=kind, headers={"Content-Disposition": place})

    @app.get("/grid/{run}/{name}")
    def grid(run: str, name: str) -> Response:
        try:
            path = page.catalog.grid(run, name)
        except (ValueError, OSError):
            raise HTTPException(404) from None
        return FileResponse(path, media_type="image/png")

    theme = gr.themes.Default(  # pyright: ignore[reportPrivateImportUsage] gradio's way to write it
        primary_hue="indigo", secondary_hue="indigo", font=FONT, font_mono=FIXED
    )
    theme = theme.set(layout_gap="10px", block_padding="7px 12px", button_large_padding="7px 12px")
    app = gr.mount_gradio_app(
        app,
        build(page),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=1,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css=views.CSS,
    )
    return Guard(app, password, hosts)
