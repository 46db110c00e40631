"""The page's guard: which requests are answered."""

import asyncio
import base64
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from opendit.sampling.page import server
from opendit.sampling.page.__main__ import listen
from opendit.sampling.page.server import BODY_BYTES, LOCAL, Guard


def ask(path="/", method="GET", headers=(), body=b"", *, password=None, hosts=LOCAL, kind="http"):
    """Send a request; return its status and headers, and what reached the page."""
    seen, sent = [], []

    async def page(scope, receive, send):
        content = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen.append((scope["path"], content))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"page"})

    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    given = {"host": "127.0.0.1:7860", **dict(headers)}
    scope = {"type": kind, "method": method, "path": path}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    with ThreadPoolExecutor(1) as thread:  # another thread, because the browser tests' event loop may run in this one
        thread.submit(asyncio.run, Guard(page, password, hosts)(scope, receive, send)).result()
    start = next((message for message in sent if message["type"] == "http.response.start"), None)
    return (start["status"], dict(start["headers"]), seen) if start else (None, {}, seen)


USED = ["/", "/config", "/theme.css", "/assets/index-D_a.b@1.js", "/gradio_api/queue/data",
        "/gradio_api/heartbeat/abc1", "/drawn/" + "a-_" * 7 + "b",
        "/drawn/" + "a" * 22 + ".zip", "/grid/000-DiT-Ti-2/0000010.png"]  # fmt: skip
UNUSED = ["/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/proxy=http://x",
          "/gradio_api/upload_progress", "/gradio_api/info", "/gradio_api/call/x/y",
          "/assets/../../etc/passwd", "/static/..", "/grid/../0000010.png",
          "/grid/a/b/0000010.png", "/grid/a/../../x.png", "/drawn/../x", "/drawn/a.png", "//etc/passwd", "/docs", "",
          "/grid/a/0.png\n", "/openapi.json", "/monitoring", "/gradio_api/vibe-code", "/login",
          "/gradio_api/runs"]  # fmt: skip


@pytest.mark.parametrize("path", USED)
def test_what_the_page_uses(path):
    status, headers, seen = ask(path)
    assert status == 200 and seen == [(path, b"")] and headers[b"a"] == b"b"
    assert (
        headers[b"x-content-type-options"] == b"nosniff"
        and b"default-src 'self'" in headers[b"content-security-policy"]
    )


@pytest.mark.parametrize("path", UNUSED)
def test_what_nobody_reaches(path):
    for method in ("GET", "POST", "HEAD"):
        status, _, seen = ask(path, method)
        assert status == 404 and not seen


def test_methods():
    assert ask("/gradio_api/queue/join", "POST", body=b"{}")[2] == [("/gradio_api/queue/join", b"{}")]
    assert ask("/gradio_api/queue/join")[0] == ask("/", "POST")[0] == ask("/gradio_api/upload", "POST")[0] == 404
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"):
        assert ask("/", method)[0] == 405
    assert ask("/", kind="websocket") == (None, {}, [])


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("localhost:1", 200), ("[::1]:7860", 200), ("LOCALHOST", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("evil.example@127.0.0.1.x", 403), ("", 403), (None, 403), ("[", 403)],
)  # fmt: skip
def test_names_of_this_machine(host, status):
    assert ask(headers={"host": host})[0] == status
    assert ask(headers={"host": host}, hosts=None)[0] == 200


def test_other_sites_can_not_use_it():
    same = {"origin": "http://127.0.0.1:7860"}
    assert ask("/gradio_api/queue/join", "POST", same)[0] == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example:7860", ""):
        assert ask("/gradio_api/queue/join", "POST", {"origin": origin})[0] == 403


def basic(text: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def test_password(monkeypatch):
    monkeypatch.setattr(server, "WRONG_PASSWORD_S", 0.0)
    for path in (*USED, *UNUSED):  # without the password nothing is answered
        status, headers, seen = ask(path, password="a:bc ü", hosts=None)
        assert status == 401 and headers[b"www-authenticate"].startswith(b"Basic") and not seen
    for wrong in ("x:", "x:a:bc", "a:bc ü", "x:a:bc ü ", "", ":"):
        assert ask(headers=basic(wrong), password="a:bc ü")[0] == 401
    for nonsense in ("Basic", "Basic !!", "Bearer x", "Basic " + "A" * 9, "basic é"):
        assert ask(headers={"authorization": nonsense}, password="a:bc ü")[0] == 401
    assert ask(headers=basic("anybody:a:bc ü"), password="a:bc ü")[0] == 200
    assert ask("/docs", headers=basic(":a:bc ü"), password="a:bc ü")[0] == 404


def test_bodies_are_bounded():
    join = "/gradio_api/queue/join"
    assert ask(join, "POST", {"content-length": str(BODY_BYTES)}, b"x" * BODY_BYTES)[0] == 200
    assert ask(join, "POST", {"content-length": str(BODY_BYTES + 1)})[0] == 413
    assert ask(join, "POST", {"content-length": "-1"})[0] == ask(join, "POST", {"content-length": "x"})[0] == 413
    assert ask(join, "POST", body=b"x" * (BODY_BYTES + 1))[2] == []  # without a content-length


def test_an_origin_that_is_none_is_refused():
    for origin in ("http://[", "http://[::1", "http://[x]:1"):
        assert ask(headers={"origin": origin})[0] == 400


def test_a_body_that_does_not_arrive_ends(monkeypatch):
    monkeypatch.setattr(server, "BODY_S", 0.05)

    async def never():
        await asyncio.Event().wait()

    async def page(scope, receive, send):
        received.append(await receive())

    received = []
    scope = {"type": "http", "method": "POST", "path": "/gradio_api/queue/join", "headers": [(b"host", b"localhost")]}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, asyncio.wait_for(Guard(page)(scope, never, None), 10)).result()
    assert received == [{"type": "http.disconnect"}]


def test_requests_at_a_time_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "MOST_REQUESTS", 0)
    assert ask()[0] == 503


def test_silent_connections_keep_nobody_out(monkeypatch):
    """More connections than the page keeps open send nothing, part of a head, or nothing after an answer."""
    monkeypatch.setattr(server, "MOST_SILENT", 20)
    monkeypatch.setattr(server, "REQUEST_S", 1.0)

    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listening = listen("127.0.0.1", 0)
    serving = server.PageServer(Guard(page))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
    thread.start()
    place = listening.getsockname()
    request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    opened = []
    try:
        while not serving.started:
            time.sleep(0.01)
        for number in range(300):
            opened.append(socket.create_connection(place, timeout=10))
            opened[-1].sendall((b"", b"GET / HT", request)[number % 3])
            if number % 3 == 2:
                assert b"200" in opened[-1].recv(1000)
        with socket.create_connection(place, timeout=10) as one:
            one.sendall(request)
            assert b"200" in one.recv(1000)
        assert len(serving.server_state.connections) <= 22
        deadline = time.monotonic() + 10
        while serving.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not serving.server_state.connections
    finally:
        serving.should_exit = True
        thread.join(20)
        for each in opened:
            each.close()
