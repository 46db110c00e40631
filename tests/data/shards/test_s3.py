"""Tars in an S3-compatible store, moto's server over HTTP, with faults in front of it."""

import io
import threading
import time

import boto3
import pytest
import torch
from moto.server import create_backend_app
from werkzeug.serving import make_server

from opendit.data import DataError, SampleKey, build_dataset, build_loader, build_schedule
from opendit.data import files as media_files
from opendit.data.shards import store as stores
from opendit.data.shards.program import make_indexes
from tests.data.shards.tars import captioned, write_tar

BUCKET = "data"


class Faulty:
    """A WSGI program in front of the store. Each request for a range uses up one of the ``faults``, if any are left."""

    def __init__(self, store):
        self.store, self.faults, self.ranges = store, [], 0

    def __call__(self, environ, start_response):
        if "HTTP_RANGE" not in environ:
            return self.store(environ, start_response)
        self.ranges += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]
        if fault == "hang":
            time.sleep(0.8)
        found = []
        body = b"".join(self.store(environ, lambda status, headers, *_: found.append((status, headers))))
        status, headers = found[0]
        if fault == "less":
            body = body[:-3]
            headers = [(name, str(len(body)) if name.lower() == "content-length" else value) for name, value in headers]
        start_response(status, headers)
        return [body[: len(body) // 2] if fault == "short" else body]


@pytest.fixture(scope="module")
def program():
    """Start the server with an empty bucket, and set its address in the environment."""
    faulty = Faulty(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, faulty, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
            patch.setenv(f"AWS_{name}", value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield faulty
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(program, tmp_path, monkeypatch):
    """Put two tars and their indexes into the bucket, and into a local folder."""
    (tmp_path / "tars").mkdir()
    for i in range(2):
        write_tar(tmp_path / "tars" / f"t-{i:02d}.tar", captioned(6, 6 * i))
    make_indexes(str(tmp_path / "tars"), num_workers=1)
    for path in (tmp_path / "tars").iterdir():
        boto3.client("s3").put_object(Bucket=BUCKET, Key=f"set/{path.name}", Body=path.read_bytes())
    monkeypatch.setenv(stores.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(media_files, "PAUSES", (0.01,) * 4)
    program.faults, program.ranges = [], 0
    return program


def opened(name="set/t-{00..01}.tar"):
    return build_dataset(f"s3://{BUCKET}/{name}", 8, seed=1)


def test_samples_are_the_local_ones_and_come_once(store, tmp_path):
    local = build_dataset(str(tmp_path / "tars"), 8, seed=1)
    for name in ("set/t-{00..01}.tar", "set/"):
        data = opened(name)
        assert len(data) == len(local) == 12 and data.fingerprint().identity == local.fingerprint().identity
        for row in range(12):
            one, other = data[SampleKey(row, 0, row)], local[SampleKey(row, 0, row)]
            assert torch.equal(one.x, other.x) and one.text == other.text
        assert store.ranges == 12  # one request for a picture and its caption; the second read uses the cache
    (tmp_path / "cache").rename(tmp_path / "other")  # without the cache, workers open their own connections
    with build_loader(
        opened(), build_schedule(data, 4, 1, 0), dp_rank=0, dp_size=1, batch_size=4, end_step=3, num_workers=2
    ) as batches:
        assert sorted(text for batch in batches for text in batch.text) == sorted(f"a {i}" for i in range(12))


@pytest.mark.parametrize("fault", ["503", "short", "less", "hang"])
def test_faults_that_pass_are_waited_for_and_others_named(store, monkeypatch, fault):
    monkeypatch.setattr(stores, "TIME_LIMIT", 0.5)
    data = opened()
    store.faults = [fault] * 2
    assert data[SampleKey(0, 0, 0)].text == "a 0" and not store.faults
    store.faults = [fault] * 500
    monkeypatch.setattr(media_files, "PAUSES", (0.01,))
    with pytest.raises(DataError, match=rf"^s3://{BUCKET}/set/t-00.tar can't be read, 2 attempts: "):
        data[SampleKey(1, 0, 0)]
    store.faults = []


def test_what_is_not_there_is_told_at_the_start(store):
    with pytest.raises(ValueError, match=r"s3://data/set/t-02.tar.index doesn't exist; every tar needs its index"):
        opened("set/t-{00..02}.tar")
    for name in ("nothing", "set/t-00.tar.index"):
        with pytest.raises(ValueError, match="holds no .tar files|doesn't exist"):
            opened(name)


def test_an_index_of_another_tar_is_told_by_the_checksum(store, tmp_path):
    """The tar in the store is newer than the index beside it but has the same size."""
    path = write_tar(tmp_path / "new.tar", captioned(6, 600))
    content, old = path.read_bytes(), (tmp_path / "tars" / "t-00.tar").stat().st_size
    boto3.client("s3").put_object(Bucket=BUCKET, Key="set/t-00.tar", Body=io.BytesIO(content[:old].ljust(old, b"\0")))
    item = opened()[SampleKey(0, 0, 0)]
    assert item.text == "a 6" and len(item.skipped) == 6
    assert item.skipped[0] == f"s3://{BUCKET}/set/t-00.tar: 0000.png: damaged: its checksum is not the index's"


def test_a_full_disk_does_not_end_the_reading(store, monkeypatch, capsys):
    data = opened()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "replacing", full)
    assert [data[SampleKey(row, 0, row)].text for row in (0, 1, 0)] == ["a 0", "a 1", "a 0"]
    assert capsys.readouterr().err.count("No space left on device; what is read is not kept there") == 1
    assert store.ranges == 3
