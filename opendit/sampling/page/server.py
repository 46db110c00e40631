"""Serve the page: a guard that checks every request, the web application with the tabs, and the server."""

import asyncio
import base64
import binascii
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # Gradio reads this variable on import

import gradio as gr  # noqa: E402
import uvicorn  # noqa: E402
from fastapi import FastAPI, HTTPException  # noqa: E402
from fastapi.responses import FileResponse, Response  # noqa: E402
from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: E402

from opendit.checkpoint.pretrained import find_weights, read_info  # noqa: E402
from opendit.sampling.page import views  # noqa: E402
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice  # noqa: E402
from opendit.sampling.page.drawing import DrawingQueue, Page, SampleStore  # noqa: E402
from opendit.sampling.page.drawing_tabs import compare_tab, sample_tab  # noqa: E402
from opendit.sampling.page.runs_tab import runs_tab  # noqa: E402
from opendit.sampling.page.training_queue import TrainingQueue  # noqa: E402
from opendit.sampling.page.training_tab import train_tab  # noqa: E402
from opendit.sampling.pipeline import Pipeline, load  # noqa: E402

MOST_EVENTS = 64  # waiting events, at most
MOST_REQUESTS = 256  # running requests, at most; every browser keeps one open
MOST_SILENT = 128  # open connections that wait for a request, at most
REQUEST_S = 10  # seconds to wait for a request's headers
BODY_S = 30  # seconds to wait for a request's body
GOODBYE_S = 2  # seconds for running requests when the page stops
FONT, FIXED = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # system fonts
# All requests of the page. The guard refuses others, such as uploads.
GET = re.compile(
    r"/|/config|/theme\.css|/manifest\.json|/favicon\.ico|/robots\.txt|/(assets|static|svelte)/[\w./@-]+"
    r"|/gradio_api/(queue/data|startup-events|heartbeat/\w+)|/drawn/[\w-]+(\.zip)?|/grid/[^/]+/\d+\.png"
)
POST = re.compile(r"/gradio_api/(queue/join|cancel|reset)/?")
BODY_BYTES = 1024 * 1024  # largest request body; the largest picture takes four fifths of it
WRONG_PASSWORD_S = 1.0  # seconds until a wrong password is refused
LOCAL = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; object-src "
    "'none'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# ------------------------------------------------------------------------------------------------------------ the guard


class Guard:
    """ASGI middleware that refuses requests that must not reach the page. password: for HTTP basic authentication with
    any user name; None for no password. hosts: names by which a browser may address the page, against DNS rebinding;
    None for any name."""

    def __init__(self, app: Any, password: str | None = None, hosts: tuple[str, ...] | None = LOCAL):
        self._app, self._hosts, self._running = app, hosts, 0
        self._password = None if password is None else password.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # refuse websockets; the page uses none
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := self._refusal(scope["method"], scope["path"], headers):
            if refusal[0] == 401 and "authorization" in headers:
                await asyncio.sleep(WRONG_PASSWORD_S)
            return await _answer(send, *refusal)
        if self._running >= MOST_REQUESTS:
            return await _answer(send, 503, "too many requests: try again in a moment")
        self._running += 1
        try:
            return await self._app(scope, _bounded(receive), _with_headers(send))
        finally:
            self._running -= 1

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return (status, text) if the request must be refused, else None."""
        host = headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            return 403, "this page answers to its own machine's name only"
        origin = headers.get("origin")
        if origin is not None:
            try:
                site = urlsplit(origin).netloc
            except ValueError:
                return 400, "no origin"
            if site != host:
                return 403, "another site must not use this page"
        if self._password is not None and not self._knows_password(headers.get("authorization", "")):
            return 401, "password needed"
        allowed = POST if method == "POST" else GET if method in ("GET", "HEAD") else None
        if allowed is None:
            return 405, "no such method"
        if not allowed.fullmatch(path) or ".." in path:
            return 404, "nothing here"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_BYTES:
            return 413, "too long"
        return None

    def _knows_password(self, authorization: str) -> bool:
        assert self._password is not None
        kind, _, credentials = authorization.partition(" ")
        if kind.lower() != "basic":
            return False
        try:
            sent = base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return False
        return secrets.compare_digest(sent, self._password)


def _name_of(host: str) -> str:
    """Return the host name without port: "localhost" for "localhost:7860", "::1" for "[::1]:7860"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _bounded(receive: Receive) -> Receive:
    """Wrap ``receive``. Report a disconnection if a body exceeds BODY_BYTES, or is incomplete after BODY_S."""
    seen, complete, latest = 0, False, asyncio.get_running_loop().time() + BODY_S

    async def limited() -> dict[str, Any]:
        nonlocal seen, complete
        if complete:  # Gradio polls this function to notice a disconnection
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), latest - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            return {"type": "http.disconnect"}
        seen += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        return {"type": "http.disconnect"} if seen > BODY_BYTES else message

    return limited


def _with_headers(send: Send) -> Send:
    extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="OpenDiT", charset="UTF-8"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


# ------------------------------------------------------------------------------------------------------ the application


def build(page: Page) -> gr.Blocks:
    """Create the page with all tabs."""
    with gr.Blocks(title="OpenDiT", analytics_enabled=False, delete_cache=(600, 600)) as blocks:
        folder = views.escaped(page.catalog.outputs)
        gr.HTML(f'<div id="title"><h1>OpenDiT</h1><p>{folder}</p></div>', **views.HTML)
        with gr.Tab("Sample") as tab:
            sample_tab(page, blocks, tab)
        with gr.Tab("Runs"):
            runs_tab(page, blocks)
        with gr.Tab("Compare"):
            compare_tab(page, blocks)
        if page.training is not None:
            with gr.Tab("Train") as tab:
                train_tab(page, tab)

        def leave(request: gr.Request) -> None:
            page.queue.cancel(str(request.session_hash))

        blocks.unload(leave)
    blocks.queue(max_size=MOST_EVENTS, default_concurrency_limit=4)
    return blocks


def application(page: Page, password: str | None, hosts: tuple[str, ...] | None = LOCAL) -> Guard:
    """Return the ASGI application. password, hosts: see :class:`Guard`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/drawn/{batch}.zip")
    def archive(batch: str) -> Response:
        if (content := page.store.archive(batch)) is None:
            raise HTTPException(404)
        return Response(content, media_type="application/zip")

    @app.get("/drawn/{token}")
    def drawn(token: str) -> Response:
        if (sample := page.store.find(token)) is None:
            raise HTTPException(404)
        kind = "video/mp4" if sample.is_clip else "image/png"
        # RFC 5987's form of a file name, because captions may have letters that are not Latin
        place = f"inline; filename*=UTF-8''{quote(sample.name, safe='')}"
        return FileResponse(sample.path, media_type=kind, headers={"Content-Disposition": place})

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


# ----------------------------------------------------------------------------------------------------------- the server


def load_choice(options: dict[str, Any], choice: WeightsChoice) -> Pipeline:
    """Load the chosen weights with the page's flags. Raises ValueError or OSError, with a line for the user."""
    info, arguments = read_info(find_weights(choice.path, choice.which)), {}
    text = info.get("config", {}).get("text")
    if options["vae"] is not None and info.get("vae") != "none":
        arguments["vae"] = options["vae"]
    if text and text["name"] != "bytes":
        arguments["text_precision"] = options["text_precision"]
        if options["text_encoder"] is not None:
            arguments["text_encoder"] = options["text_encoder"]
    if options["model"] is not None and not info:
        arguments["model"] = options["model"]
    return load(
        choice.path,
        weights=choice.which,
        lora=list(choice.lora),
        precision=options["mixed_precision"],
        vae_tiling=options["vae_tiling"],
        fp8=options["fp8"],
        **arguments,
    )


@contextlib.contextmanager
def opened(options: dict[str, Any]):
    """Yield the :class:`Page` for these flags, and close the page on exit. Raises ValueError or OSError if a ``--ckpt``
    can't be read, or another page uses ``--allow_train``."""
    extra, lora = _named(options["ckpt"]), _named(options["lora"])
    catalog, loader = Catalog(Path(options["outputs"]).expanduser(), extra, lora), partial(load_choice, options)
    cards = {}
    for name in extra:
        choice = catalog.weights(name, catalog.checkpoints(name)[0], "ema")
        if catalog.card(choice) is None:
            pipe = loader(choice)  # without OpenDiT's metadata, only the loaded model gives a card
            cards[name] = ModelCard.of(pipe.config, pipe.weights, pipe.objective)
            del pipe

    with contextlib.ExitStack() as stack:
        training = None
        if (root := options["allow_train"]) is not None:
            training = stack.enter_context(TrainingQueue(Path(root).expanduser(), catalog))
        store = stack.enter_context(SampleStore())
        queue = stack.enter_context(DrawingQueue(loader, options["batch_size"]))
        evaluations = Path(options["evaluation"]).expanduser()
        yield Page(catalog, queue, store, cards, options["most_samples"], evaluations, training)


def _named(paths: list[str]) -> dict[str, Path]:
    """Return name -> path. The name is the path's last component, or the full path if that name is in use."""
    found: dict[str, Path] = {}
    for path in (Path(name).expanduser() for name in paths):
        found[path.name if path.name not in found else str(path)] = path
    return found


class PatientProtocol(H11Protocol):
    """HTTP/1.1 protocol of uvicorn that closes silent connections, so that they can't block other users.

    A connection is closed if its request headers are incomplete after ``REQUEST_S``. If more than ``MOST_SILENT``
    connections are silent, the longest silent one is closed. uvicorn itself would wait forever."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        """Start the timer, unless it is running or a request is being answered. Slow headers get no extra time."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return self._stop_waiting()
        if self._silence is not None:
            return
        self._silence = self.loop.call_later(REQUEST_S, self.transport.abort)
        silent = [each for each in self.connections if isinstance(each, PatientProtocol) and each._silence is not None]
        if len(silent) > MOST_SILENT:
            longest = min(silent, key=lambda each: each._silence.when() if each._silence else 0)
            # so that the closing connection is not chosen again
            longest._stop_waiting()
            longest.transport.abort()

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None


class PageServer(uvicorn.Server):
    """uvicorn server with :class:`PatientProtocol`. When the server stops, it closes open connections."""

    def __init__(self, app: Guard):
        options: dict[str, Any] = {"log_level": "warning", "server_header": False}
        super().__init__(uvicorn.Config(app, http=PatientProtocol, timeout_graceful_shutdown=GOODBYE_S, **options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would wait for the connection that every browser keeps open
        for connection in list(self.server_state.connections):
            connection.transport.close()
        await super().shutdown(sockets)


def serve(options: dict[str, Any], listening: socket.socket, hosts: tuple[str, ...] | None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then delete the samples. hosts: see :class:`Guard`."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)  # uvicorn stops at SIGTERM, and then sends the signal to the process again
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with opened(options) as page:
        server = PageServer(application(page, options["password"], hosts))
        host, port = listening.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}  (Ctrl-C ends it)")
        if options["password"]:
            print(f"password: {options['password']}  (any user name)")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
