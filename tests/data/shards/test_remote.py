"""Tars behind a web server give the local samples despite faults, and the cache stays within its limit."""

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from opendit.data import DataError, SampleKey, build_dataset, build_loader, build_schedule
from opendit.data import files as media_files
from opendit.data.base import SampleReader, to_pixels
from opendit.data.held_out import hold_out
from opendit.data.loader import read_batches
from opendit.data.shards import store
from opendit.data.shards.program import make_indexes
from opendit.data.shards.store import ByteRange, FetchAhead, grouped
from tests.data.shards.tars import captioned, picture, write_tar


class Handler(SimpleHTTPRequestHandler):
    """Serves ranges of files. Each request for a range uses up one of the server's ``faults``, if any are left."""

    def do_GET(self):
        path, wanted = self.translate_path(self.path), re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not os.path.isfile(path) or wanted is None:
            return super().do_GET()
        self.server.ranges += 1
        with open(path, "rb") as file:
            content = file.read()
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "whole":
            return super().do_GET()
        first, last = int(wanted[1]), int(wanted[2])
        body = content[first : last + 1]
        if fault == "less":
            body = body[:-3]
        if fault == "500":
            return self.send_error(500)
        if fault == "hang":
            time.sleep(0.6)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "short" else body)

    def log_message(self, *_):
        pass


class Meeting(Handler):
    """Makes requests for ranges wait for each other at the server's ``barrier``."""

    def do_GET(self):
        if "Range" in self.headers:
            with suppress(threading.BrokenBarrierError):
                self.server.barrier.wait()
        super().do_GET()


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "tars").mkdir()
    for i in range(2):
        write_tar(tmp_path / "tars" / f"t-{i:02d}.tar", captioned(6, 6 * i))
    make_indexes(str(tmp_path / "tars"), num_workers=1)
    found = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "tars")))
    found.faults, found.ranges = [], 0
    threading.Thread(target=found.serve_forever, daemon=True).start()
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(media_files, "PAUSES", (0.01,) * 4)
    found.address = f"http://127.0.0.1:{found.server_port}"
    yield found
    found.shutdown()
    found.server_close()


def opened(server, name="/t-{00..01}.tar"):
    return build_dataset(server.address + name, 8, seed=1)


def test_samples_are_the_local_ones_and_come_once(server, tmp_path):
    local = build_dataset(str(tmp_path / "tars"), 8, seed=1)
    for name in ("/t-{00..01}.tar", "/"):
        data = opened(server, name)
        assert len(data) == len(local) == 12 and data.fingerprint().identity == local.fingerprint().identity
        for row in range(12):
            one, other = data[SampleKey(row, 0, row)], local[SampleKey(row, 0, row)]
            assert torch.equal(one.x, other.x) and one.text == other.text
        assert server.ranges == 12  # one request for a picture and its caption; the second read uses the cache
    with build_loader(
        data, build_schedule(data, 4, 1, 0), dp_rank=0, dp_size=1, batch_size=4, end_step=2, num_workers=2
    ) as batches:
        assert [len(batch.text) for batch in batches] == [4, 4]


@pytest.mark.parametrize("fault", ["500", "short", "less", "hang"])
def test_faults_that_pass_are_waited_for_and_others_named(server, monkeypatch, fault):
    monkeypatch.setattr(store, "TIME_LIMIT", 0.4)
    data = opened(server)
    server.faults = [fault] * 2
    assert data[SampleKey(0, 0, 0)].text == "a 0" and not server.faults
    server.faults = [fault] * 50
    monkeypatch.setattr(media_files, "PAUSES", (0.01,))
    with pytest.raises(DataError, match=rf"^{server.address}/t-00.tar can't be read, 2 attempts: "):
        data[SampleKey(1, 0, 0)]


def test_a_file_system_without_asyncio_has_the_same_time_limit(tmp_path, monkeypatch):
    """fsspec's local file system has no asyncio. Its first two reads take longer than the limit."""
    from fsspec.implementations.local import LocalFileSystem

    (tmp_path / "tar").write_bytes(b"0123456789")
    hanging, released, read = [True, True], threading.Event(), LocalFileSystem.cat_file

    def cat_file(*args, **options):
        if hanging:
            hanging.pop()
            released.wait(60)
        return read(*args, **options)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(store, "TIME_LIMIT", 0.2)
    monkeypatch.setattr(media_files, "PAUSES", (0.01,) * 4)
    address = f"file://{tmp_path}/tar"
    try:
        assert store.Remote(address).read(address, 2, 5) == b"23456" and not hanging
        hanging[:] = [True] * 50
        with pytest.raises(DataError, match=rf"^{address} can't be read, 5 attempts: no answer in 0.2"):
            store.Remote(address).read(address, 2, 5)
    finally:
        released.set()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_fetched_at_once_and_is_the_same(server, tmp_path, workers):
    local = build_dataset(str(tmp_path / "tars"), 8, seed=1)
    held, _ = hold_out(opened(server), 0.1)  # a wrapper around the data set
    rows = held.rows[:8].tolist()
    server.barrier = threading.Barrier(4, timeout=5)
    server.RequestHandlerClass = partial(Meeting, directory=str(tmp_path / "tars"))
    with read_batches(held, [[SampleKey(row, 0, row) for row in range(8)]], num_workers=workers) as batches:
        batch = next(batches)
    assert not server.barrier.broken and server.ranges == 8  # two rounds with four requests at a time
    for place, row in enumerate(rows):
        one = local[SampleKey(row, 0, place)]
        assert batch.text[place] == one.text and torch.equal(to_pixels(batch.x[place]), one.x)


def test_what_is_fetched_ahead_fails_as_what_is_not(server, tmp_path, monkeypatch):
    data = opened(server)
    monkeypatch.setattr(media_files, "PAUSES", (0.01,))
    keys = [SampleKey(row, 0, row) for row in (0, 7, 8)]
    (tmp_path / "tars" / "t-01.tar").rename(tmp_path / "gone")
    samples = SampleReader(data).items(keys)
    assert next(samples).text == "a 0"
    with pytest.raises(DataError, match="t-01.tar doesn't exist"):
        next(samples)
    (tmp_path / "gone").rename(tmp_path / "tars" / "t-01.tar")
    again = SampleReader(data).items(keys)  # the error left nothing behind
    assert [item.text for item in again] == ["a 0", "a 7", "a 8"]


def test_a_forked_process_fetches_for_itself(server):
    data = opened(server)
    next(SampleReader(data).items([SampleKey(row, 0, row) for row in range(6)]))  # this process is fetching five
    with read_batches(data, [[SampleKey(row, 0, row) for row in range(6)]], num_workers=1, patience=20) as batches:
        assert next(batches).text == tuple(f"a {row}" for row in range(6))
    assert pickle.loads(pickle.dumps(data)).caption(3) == "a 3"


def test_what_is_not_there_is_told_at_the_start(server, tmp_path):
    with pytest.raises(ValueError, match=r"--data_path http.*t-02.tar.index doesn't exist; every tar needs its index"):
        opened(server, "/t-{00..02}.tar")
    with pytest.raises(ValueError, match="holds no .tar files"):
        (tmp_path / "tars" / "empty").mkdir()
        opened(server, "/empty/")
    with pytest.raises(ValueError, match="addresses of nowhere:// need fsspec"):
        build_dataset("nowhere://a/b.tar", 8, seed=0)


def test_an_index_that_was_made_anew_is_fetched_anew(server, tmp_path):
    """This also works with a server that reports only when a file was changed."""
    assert opened(server).caption(0) == "a 0"
    tar = write_tar(tmp_path / "tars" / "t-00.tar", captioned(6, 3))
    make_indexes(str(tar), force=True)
    os.utime(f"{tar}.index", (2**31, 2**31))
    assert opened(server).caption(0) == "a 3"


def test_an_index_that_came_in_part_is_not_kept(server, tmp_path, monkeypatch):
    read = store.Remote.call
    left = [3]

    def cut(self, name, *args, **options):
        content = read(self, name, *args, **options)
        if name == "cat_file" and args[0].endswith(".index") and left[0]:
            left[0] -= 1
            return content[:-5]
        return content

    monkeypatch.setattr(store.Remote, "call", cut)
    assert opened(server, "/t-00.tar").caption(5) == "a 5" and left == [0]  # at the fourth attempt
    left[0] = 99
    with pytest.raises(ValueError, match=r"t-01.tar.index can't be read, 5 attempts: .* not a whole index"):
        opened(server, "/t-01.tar")
    left[0] = 0
    assert opened(server, "/t-01.tar").caption(0) == "a 6"
    for path in (tmp_path / "cache" / "indexes").iterdir():  # as an earlier version or a damaged disk leaves them
        path.write_bytes(path.read_bytes()[:-1])
    assert opened(server).caption(11) == "a 11"


def test_a_server_that_fails_when_asked_about_an_index(server, monkeypatch):
    """fsspec reports any failure as a missing file. A forbidden file is not tried again."""
    read, asked = store.Remote.call, []

    def fail(self, name, *args, **options):
        asked.append(name)
        if name == "info":
            raise FileNotFoundError(args[0])
        if args[0].endswith("t-01.tar.index"):
            error = OSError("403, message='Forbidden'")
            error.status = 403
            raise error
        return read(self, name, *args, **options)

    monkeypatch.setattr(store.Remote, "call", fail)
    for _ in range(2):  # an index without a known version is fetched again
        assert opened(server, "/t-00.tar").caption(2) == "a 2"
    assert asked.count("cat_file") >= 2
    asked.clear()
    with pytest.raises(ValueError, match="t-01.tar.index may not be read"):
        opened(server, "/t-01.tar")
    assert asked.count("cat_file") == 1


def test_a_cache_that_takes_no_indexes(server, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = opened(server)
    assert data[SampleKey(3, 0, 0)].text == "a 3"
    assert (
        f"{tmp_path}/file/indexes (OPENDIT_SHARD_CACHE): Not a directory; the tars' indexes" in capsys.readouterr().err
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        ValueError, match="no room for the tars' indexes in .*set OPENDIT_SHARD_CACHE to a folder on another"
    ):
        opened(server)


def test_a_server_without_ranges_is_told_of(server):
    data = opened(server)
    server.faults = ["whole"]
    with pytest.raises(DataError, match="t-00.tar: its server does not answer requests of ranges"):
        data[SampleKey(0, 0, 0)]


def test_names_of_classes_come_with_the_tars(server, tmp_path):
    write_tar(tmp_path / "tars" / "c.tar", [("a.png", picture(0)), ("a.cls", b"1")])
    make_indexes(str(tmp_path / "tars" / "c.tar"))
    assert opened(server, "/c.tar").class_names == ["0", "1"]
    (tmp_path / "tars" / "class_names.json").write_text('["cat", "dog"]')
    assert opened(server, "/c.tar").class_names == ["cat", "dog"]


def test_a_damaged_copy_is_fetched_again(server, tmp_path):
    data = opened(server)
    expected = data[SampleKey(3, 0, 0)].x
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and path.parent.name != "indexes":
            content = path.read_bytes()
            path.write_bytes(content[:-1] + b"?" if len(content) > 9 else content)
    item = data[SampleKey(3, 0, 0)]
    assert torch.equal(item.x, expected) and not item.skipped and server.ranges == 2


def test_the_cache_keeps_to_its_size_and_what_was_used_last(tmp_path):
    kept = store.FileCache(tmp_path, 10_000)
    for number in range(40):
        kept.put(str(number), bytes([number]) * 500)
        assert kept.get("0") == bytes(500)
        os.utime(kept.path("0"), (2**31, 2**31))  # the clock of the file system is coarse
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 10_000
    assert kept.get("39") == bytes([39]) * 500 and kept.get("1") is None
    kept.put("large", bytes(10_001))
    assert kept.get("large") is None


def test_a_killed_writer_leaves_only_whole_contents(tmp_path):
    def write():
        kept = store.FileCache(tmp_path, 10**9)
        for number in range(10**6):
            kept.put(str(number % 50), bytes([number % 50]) * 200_000)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = [(number, store.FileCache(tmp_path, 10**9).get(str(number))) for number in range(50)]
    contents = [(number, content) for number, content in found if content is not None]
    assert contents and all(content == bytes([number]) * 200_000 for number, content in contents)


def test_a_disk_that_takes_nothing_is_told_of_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    kept = store.FileCache(tmp_path / "file", 1000)
    kept.put("a", b"1")
    kept.put("b", b"1")
    assert kept.get("a") is None and capsys.readouterr().err.count("is not kept there") == 1


# ------------------------------------------------------------------------------------------ fetching ahead


def test_neighbours_are_one_request():
    picture, caption, far = ByteRange(0, 10_000, 900), ByteRange(0, 9_000, 20), ByteRange(0, 40_000, 5)
    assert grouped([picture, caption]) == [[picture, caption]]
    assert grouped([picture, far]) == [[picture], [far]]
    assert grouped([far, picture]) == [[far], [picture]]  # in the order of reading


def test_only_so_much_is_fetched_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(store, "BYTES", 100)
    begun, go = [], threading.Event()

    def fetch(group):
        begun.append(group[0].at)
        assert go.wait(10)
        return {part: bytes(part.size) for part in group}

    fetched = FetchAhead(fetch)
    ranges = [ByteRange(0, at, 40) for at in range(6)]
    fetched.begin([[part] for part in ranges])
    assert len(fetched.begun) == 2
    go.set()
    assert fetched.take(ranges[0]) == bytes(40) and fetched.take(ranges[0]) is None  # once
    assert fetched.take(ranges[2]) == bytes(40)  # 1 was skipped, as if its sample could not be read
    assert fetched.take(ranges[1]) is None
    assert [fetched.take(part) for part in ranges[3:]] == [bytes(40)] * 3
    assert sorted(begun) == list(range(6))
    fetched.begin([[ByteRange(0, 0, 500)], [ByteRange(0, 1, 1)]])  # a range above the limit is fetched alone
    assert fetched.take(ByteRange(0, 0, 500)) == bytes(500) and fetched.take(ByteRange(0, 1, 1)) == bytes(1)


def test_an_error_comes_with_its_own_place():
    def fetch(group):
        if group[0].at == 1:
            raise ValueError("broken")
        return {part: b"" for part in group}

    fetched = FetchAhead(fetch)
    fetched.begin([[ByteRange(0, at, 0)] for at in range(3)])
    assert fetched.take(ByteRange(0, 0, 0)) == b""
    with pytest.raises(ValueError, match="broken"):
        fetched.take(ByteRange(0, 1, 0))
    assert fetched.take(ByteRange(0, 2, 0)) == b""
