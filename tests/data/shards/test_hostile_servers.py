"""Web servers that break the rules, over real sockets, cause a one-line error after few bytes and seconds."""

import gzip
import re
import socket
import threading
import time
from contextlib import suppress

import pytest

from opendit.config.checks import check_data
from opendit.data import DataError, SampleKey, build_dataset
from opendit.data import files as media_files
from opendit.data.shards import store
from opendit.data.shards.program import make_indexes
from tests.data.shards.tars import captioned, write_tar


class Server:
    """A server of ``files`` on which ``hostile`` may answer a request instead."""

    def __init__(self, files):
        self.files, self.hostile, self.sent = files, lambda *_: False, 0
        self._own = threading.local()  # per thread: an endless answer must not reach the next request
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self.socket.accept()[0],), daemon=True).start()

    def _answer(self, connection):
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                if not (part := connection.recv(65536)):
                    return
                asked += part
            kind, path = asked.decode().split(" ")[:2]
            found = re.search(r"(?i)range: bytes=(\d+)-(\d+)", asked.decode())
            wanted = found and (int(found[1]), int(found[2]))
            self._own.connection = connection
            if self.hostile(self, path, wanted, kind):
                return
            content = self.files.get(path)
            if content is None:
                return self.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            if wanted is None:
                return self.start(200, len(content)) or kind == "HEAD" or self.send(content)
            part = content[wanted[0] : wanted[1] + 1]
            self.start(206, len(part), f"Content-Range: bytes {wanted[0]}-{wanted[1]}/{len(content)}")
            self.send(part)

    def send(self, content):
        self._own.connection.sendall(content)
        self.sent += len(content)

    def start(self, status, length=None, *headers):
        lines = [f"HTTP/1.1 {status} X", "Connection: close", *headers]
        lines += [] if length is None else [f"Content-Length: {length}"]
        self.send("\r\n".join([*lines, "", ""]).encode())


@pytest.fixture
def server(tmp_path, monkeypatch):
    tar = write_tar(tmp_path / "t.tar", captioned(4))
    make_indexes(str(tar), num_workers=1)
    found = Server({f"/{name}": (tmp_path / name).read_bytes() for name in ("t.tar", "t.tar.index")})
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(media_files, "PAUSES", (0.01,))
    monkeypatch.setattr(store, "TIME_LIMIT", 0.4)
    yield found
    found.socket.close()


def endless(server, pause=0.0, part=b"x" * 65536):
    while True:
        server.send(part)
        time.sleep(pause)


def of_ranges(answer):
    def hostile(server, path, wanted, kind):
        if wanted is None:
            return False
        answer(server, wanted, f"Content-Range: bytes {wanted[0]}-{wanted[1]}/{len(server.files['/t.tar'])}")
        return True

    return hostile


def of_indexes(answer):
    def hostile(server, path, wanted, kind):
        if not path.endswith(".index") or kind == "HEAD":
            return False
        answer(server)
        return True

    return hostile


def drips(server, wanted, right):
    server.start(206, wanted[1] - wanted[0] + 1, right)
    endless(server, 0.05, b"x")


def drips_headers(server, *_):
    server.send(b"HTTP/1.1 206 X\r\nA: ")
    endless(server, 0.05, b"x")


def whole_without_end(server, *_):
    server.start(200)
    endless(server)


def more_than_the_range(server, wanted, right):
    server.start(206, None, right, "Transfer-Encoding: chunked")
    endless(server, 0.0, b"10000\r\n" + b"x" * 65536 + b"\r\n")


def other_range(server, wanted, right):
    server.start(206, 5, f"Content-Range: bytes {wanted[0] + 1}-{wanted[1] + 1}/9")
    server.send(b"x" * 5)


def no_range(server, wanted, right):
    server.start(206, wanted[1] - wanted[0] + 1)
    server.send(b"x" * (wanted[1] - wanted[0] + 1))


def other_length(server, wanted, right):
    server.start(206, 5, re.sub(r"/\d+", "/999", right))


def cut_off(server, wanted, right):
    server.start(206, wanted[1] - wanted[0] + 1, right)
    server.send(b"x")


def packed(server, wanted, right):
    content = gzip.compress(bytes(1 << 24))
    server.start(206, len(content), right, "Content-Encoding: gzip")
    server.send(content)


def in_circles(server, *_):
    server.start(302, 0, f"Location: {server.address}/t.tar")


def to_nowhere(server, *_):
    server.start(302, 0, "Location: http://[/t.tar")


def no_http(server, *_):
    server.send(b"\0\xff hello\r\n\r\n" * 1000)


def silent(server, *_):
    time.sleep(2)


def headers_without_end(server, *_):
    server.send(b"HTTP/1.1 206 X\r\n")
    endless(server, 0.0, b"A: " + b"x" * 60000)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (drips, "t.tar can't be read, 2 attempts"),
        (drips_headers, "t.tar can't be read, 2 attempts"),
        (silent, "t.tar can't be read, 2 attempts"),
        (cut_off, "t.tar can't be read, 2 attempts"),
        (no_http, "t.tar can't be read, 2 attempts"),
        (headers_without_end, "t.tar can't be read, 2 attempts"),
        (whole_without_end, "t.tar: its server does not answer requests of ranges; take another one"),
        (more_than_the_range, "t.tar: it sent more than"),
        (other_range, "t.tar can't be read, 2 attempts: bytes .* were asked for, and bytes .*/9 came"),
        (no_range, "t.tar can't be read, 2 attempts: bytes .* were asked for, and None came"),
        (other_length, "t.tar: it has 999 bytes, its index says 20,480; index it again"),
        (packed, r"t.tar: it comes packed \(gzip\)"),
        (in_circles, "t.tar: it leads from one address to another without end"),
        (to_nowhere, "t.tar: it leads to .*which is no address"),
    ],
)
def test_answers_to_ranges(server, answer, says):
    data = build_dataset(f"{server.address}/t.tar", 8, seed=1)
    server.hostile, server.sent = of_ranges(answer), 0
    begin = time.monotonic()
    with pytest.raises(DataError, match=says) as caught:
        data[SampleKey(0, 0, 0)]
    assert time.monotonic() - begin < 30 and server.sent < 30 << 20
    assert str(caught.value).startswith(server.address) and "\n" not in str(caught.value)
    server.hostile = lambda *_: False
    assert data[SampleKey(0, 0, 0)].text == "a 0"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda server: server.start(200) or endless(server), "it sent more than 1,048,576 bytes"),
        (lambda server: server.start(200, 10**13), "it has 10,000,000,000,000 bytes; at most 1,048,576 are read"),
        (lambda server: server.start(200, 900) or endless(server, 0.05, b"x"), "can't be read, 2 attempts"),
        (
            lambda server: server.start(302, 0, f"Location: {server.address}/t.tar.index"),
            "it leads from one address to another without end",
        ),
        (in_circles, "what came is no index of a tar"),
        (lambda server: server.start(200, 99, "Content-Encoding: br"), r"it comes packed \(br\)"),
        (lambda server: server.start(206, 3) or server.send(b"abc"), "can't be read, 2 attempts: status 206"),
    ],
)
def test_answers_to_requests_of_an_index(server, answer, says, monkeypatch):
    monkeypatch.setattr(store, "MOST_INDEX", 1 << 20)
    server.hostile = of_indexes(answer)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"^--data_path {server.address}/t.tar: .*t.tar.index.*{says}") as caught:
        build_dataset(f"{server.address}/t.tar", 8, seed=1)
    assert time.monotonic() - begin < 30 and server.sent < 30 << 20 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (b"<a " + b" " * 500_000, "holds no .tar files"),
        (b'<a href="' * 50_000, "holds no .tar files"),
        (b'<a href="http://[x.tar"><a href="ftp://h/x.tar"><a href="http://other/x.tar">', "holds no .tar files"),
        (b"x" * 2_000_000, "at most 1,048,576 are read"),
    ],
)
def test_pages_of_folders(server, page, says, monkeypatch):
    monkeypatch.setattr(store, "MOST_PAGE", 1 << 20)
    server.files["/"] = page
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"^--data_path {server.address}/: .*{says}"):
        build_dataset(f"{server.address}/", 8, seed=1)
    assert time.monotonic() - begin < 30


def test_a_page_with_links_of_every_kind(server):
    server.files["/"] = b"""<a href="t.tar">t.tar</a> <A HREF = '/t.tar'> <a href="t.tar.index"> <a href="../">"""
    server.files["/"] += f"""<a href="{server.address}/t.tar">""".encode()
    assert len(build_dataset(f"{server.address}/", 8, seed=1)) == 4


@pytest.mark.parametrize(
    ("address", "says"),
    [
        *((address, "names no server") for address in ("http://", "https://", "http:///x.tar", "http://:80/x.tar")),
        *((address, "names no server") for address in ("https://?x", "http://#", "http://user@/x.tar", "HTTP://")),
        *((address, "names no bucket") for address in ("s3://", "s3:///x.tar", "gs://", "s3:// /x", "file://")),
        ("http://h:99999/x.tar", "is no address"),
        ("http://[::1/x.tar", "is no address"),
        ("http://h/\nx.tar", "no line breaks"),
        ("digits:0.5,http://:0.5", "names no server"),
    ],
)
def test_addresses_without_a_name_are_told_with_the_flags(address, says):
    with pytest.raises(ValueError, match=f"^--data_path .*{says}"):
        check_data(address, "--data_path")
    with pytest.raises(ValueError, match=f"^--data_path .*{says}"):
        build_dataset(address, 8, seed=1)


def test_addresses_that_may_be_right():
    for address in ("http://h/x.tar", "https://[::1]:80/", "s3://b/x.tar", "s3://b", "http://a@h/x", "file:///x.tar"):
        check_data(address, "--data_path")


@pytest.mark.parametrize("braces", ["{0..999999}{0..999999}", "{0..99}" * 200, f"{{{'9' * 5000}..{'9' * 5001}}}"])
def test_ranges_of_too_many_tars(braces):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"^--data_path http://h/.*(names more than|more than 18 digits)"):
        build_dataset(f"http://h/{braces}.tar", 8, seed=0)
    assert time.monotonic() - begin < 30
    assert store.expand(["s3://b/{08..10}-{1..2}.tar"]) == [
        f"s3://b/{n}-{k}.tar" for n in ("08", "09", "10") for k in "12"
    ]
