"""Starts the page: loads what has to be known, and serves until it is told to stop."""

import contextlib
import socket
from pathlib import Path
from typing import Any

import uvicorn

from opendit.checkpoint.pretrained import find_weights, read_info
from opendit.sampling.conditioning_frames import note_on_missing_frames
from opendit.sampling.page.application import application
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice
from opendit.sampling.page.drawing_queue import DrawingQueue
from opendit.sampling.page.guard import Guard
from opendit.sampling.page.page import Page
from opendit.sampling.page.sample_store import SampleStore
from opendit.sampling.pipeline import Pipeline, load

MOST_CONNECTIONS = 256
GOODBYE_S = 2  # that answers under way have when the page is told to stop


class Loader:
    """Loads what the page draws from, with the flags that it was started with."""

    def __init__(self, options: dict[str, Any]):
        self._options = options

    def __call__(self, choice: WeightsChoice) -> Pipeline:
        """Raises ValueError or OSError, with one line for people."""
        options, arguments = self._options, {}
        file = find_weights(choice.path, choice.which)
        info = read_info(file)
        text = info.get("config", {}).get("text")
        if options["vae"] is not None and info.get("vae") != "none":
            arguments["vae"] = options["vae"]
        if options["text_encoder"] is not None and text and text["name"] != "bytes":
            arguments["text_encoder"] = options["text_encoder"]
        if options["model"] is not None and not info:
            arguments["model"] = options["model"]
        pipe = load(
            choice.path,
            weights=choice.which,
            precision=options["mixed_precision"],
            vae_tiling=options["vae_tiling"],
            fp8=options["fp8"],
            **arguments,
        )
        pipe.notes += note_on_missing_frames(pipe.config)
        return pipe


@contextlib.contextmanager
def opened(options: dict[str, Any]):
    """A :class:`Page` of these flags, closed at the end. Raises ValueError or OSError for a ``--ckpt`` that can't be
    read."""
    extra = {}
    for name in options["ckpt"]:
        path = Path(name).expanduser()
        extra[path.name if path.name not in extra else str(path)] = path
    catalog, loader = Catalog(Path(options["outputs"]).expanduser(), extra), Loader(options)
    cards = {}
    for name in extra:
        choice = catalog.weights(name, catalog.checkpoints(name)[0], "ema")
        if catalog.card(choice) is None:
            pipe = loader(choice)  # Meta's, diffusers': what they hold is known when they are loaded
            cards[name] = ModelCard.of(pipe.config, pipe.weights, pipe.objective)
            del pipe

    with SampleStore() as store, DrawingQueue(loader, options["batch_size"]) as queue:
        evaluations = Path(options["evaluation"]).expanduser()
        yield Page(catalog, queue, store, cards, options["most_samples"], evaluations)


class PageServer(uvicorn.Server):
    """Serves a page until it is told to stop, by SIGINT or SIGTERM in a program's main thread."""

    def __init__(self, app: Guard):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=GOODBYE_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):  # some last as long as a browser looks at the page
            connection.transport.close()
        await super().shutdown(sockets)


def serve(options: dict[str, Any], listening: socket.socket, hosts: tuple[str, ...] | None) -> None:
    """Serves until SIGINT or SIGTERM. hosts: as of :class:`Guard`. Raises as :func:`opened`."""
    with opened(options) as page:
        server = PageServer(application(page, options["password"], hosts))
        host, port = listening.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}  (Ctrl-C ends it)")
        if options["password"]:
            print(f"password: {options['password']}  (any user name)")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
