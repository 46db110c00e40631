"""Check every request to the page: who may ask, and for what."""

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

# Everything the page asks for. Gradio has more entrances (uploads, files, a proxy, other programs' calls), which this
# page has no use for, and they are not there for anybody.
GET = re.compile(
    r"/|/config|/theme\.css|/manifest\.json|/favicon\.ico|/robots\.txt|/(assets|static|svelte)/[\w./@-]+"
    r"|/gradio_api/(queue/data|startup-events|heartbeat/\w+)|/drawn/[\w-]+(\.zip)?|/grid/[^/]+/\d+\.png"
)
POST = re.compile(r"/gradio_api/(queue/join|cancel|reset)/?")
BODY_BYTES = 256 * 1024  # of a request: the longest prompts take a tenth of it
WRONG_PASSWORD_S = 1.0  # that an answer takes
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


class Guard:
    """ASGI middleware that answers what must not reach the page.

    Args:
        app: the page.
        password: who asks must know it (HTTP's basic authentication, with any name); None for none.
        hosts: the names by which a browser may call the page; None for any. Those of this machine alone keep a foreign
            site whose name was made to lead here from using the page ("DNS rebinding").
    """

    def __init__(self, app: Any, password: str | None = None, hosts: tuple[str, ...] | None = LOCAL):
        self._app, self._hosts = app, hosts
        self._password = None if password is None else password.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no websockets: the connection is refused
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := self._refusal(scope["method"], scope["path"], headers):
            if refusal[0] == 401 and "authorization" in headers:
                await asyncio.sleep(WRONG_PASSWORD_S)
            return await _answer(send, *refusal)
        return await self._app(scope, _bounded(receive), _with_headers(send))

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """(status, text) for what is refused."""
        host = headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            return 403, "this page answers to its own machine's name only"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
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
            given = base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return False
        return secrets.compare_digest(given, self._password)


def _name_of(host: str) -> str:
    """localhost of "localhost:7860", ::1 of "[::1]:7860"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _bounded(receive: Receive) -> Receive:
    """A body that is longer than it may be, whatever length it named, ends as if the browser had gone."""
    seen = 0

    async def limited() -> dict[
        str, Any
    ]:  # (what does not wait must not wait here: Gradio asks so whether a browser has gone)
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
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
