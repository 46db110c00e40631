"""Files that grow by records on a disk that is full, read-only, without inodes, and then works again."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opendit.checkpoint.tensor_set import damage
from opendit.common import safe_files
from opendit.common.safe_files import RecordFile, WriteFailures
from opendit.training.monitor import Board, keep_up_to
from tests.checkpoint.test_checkpoint import ARGV

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def limit_size():
    """Return a function that limits file sizes, so that a real write fails in the middle of a record."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_that_failed_follow_in_order_and_none_is_cut(tmp_path, limit_size):
    file, lines = RecordFile(tmp_path / "log"), [b"%03d" % i + b"x" * 50 + b"\n" for i in range(30)]
    for i, line in enumerate(lines):
        limit_size(54 * 10 + 17 if 5 <= i < 20 else resource.RLIM_INFINITY)
        try:
            file.append(line)
        except OSError as error:
            assert error.errno == errno.EFBIG and error.filename == str(tmp_path / "log") and 10 <= i < 20
            assert (tmp_path / "log").read_bytes() == b"".join(lines[:10]) and file.waiting == i - 9
    file.close()
    assert (tmp_path / "log").read_bytes() == b"".join(lines) and file.lost == file.waiting == 0


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.sampled_from("ok write part truncate".split()))))
@settings(max_examples=200)
def test_whatever_fails_whole_records_stand_in_order(steps):
    """An in-memory file replaces the disk; with ``truncate`` it takes half of the record and can't be shortened."""
    disk, how = bytearray(), ["ok"]

    class System:
        O_RDWR = O_CREAT = O_APPEND = O_CLOEXEC = 0
        open, close = staticmethod(lambda *_: 3), staticmethod(lambda file: None)

        @staticmethod
        def fstat(file):
            return os.stat_result((0,) * 6 + (len(disk),) + (0,) * 3)

        @staticmethod
        def write(file, data):
            if how[0] == "ok":
                disk.extend(data)
                return len(data)
            if how[0] == "write" or len(data) < 2:
                raise OSError(errno.ENOSPC, "full")
            disk.extend(data[: len(data) // 2])
            return len(data) // 2

        @staticmethod
        def ftruncate(file, size):
            if how[0] == "truncate":
                raise OSError(errno.EIO, "no")
            del disk[size:]

    true_os, safe_files.os = safe_files.os, System
    true_open, safe_files.open_to_append = safe_files.open_to_append, lambda *_, **__: 3
    try:
        file, given_so_far = RecordFile(Path("/log")), b""
        for record, how[0] in steps:
            given_so_far += record
            before = file.waiting
            try:
                file.append(record)
                assert how[0] == "ok" and bytes(disk) == given_so_far
            except OSError:
                assert how[0] != "ok" and file.waiting == before + 1
                assert how[0] == "truncate" or given_so_far.startswith(bytes(disk))
        how[0] = "ok"
        file.close()
        assert bytes(disk) == given_so_far
    finally:
        safe_files.os, safe_files.open_to_append = true_os, true_open


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "MOST_WAITING", 100)
    (tmp_path / "log").mkdir()  # nothing can be written there
    file = RecordFile(tmp_path / "log")
    for i in range(20):
        with pytest.raises(OSError):
            file.append(b"%09d\n" % i)
    assert file.waiting == 10 and file.lost == 10
    (tmp_path / "log").rmdir()
    file.close()
    assert (tmp_path / "log").read_text().split() == [f"{i:09d}" for i in range(10, 20)]


def test_failures_are_told_once_a_kind_and_counted(caplog):
    failures = WriteFailures()
    for step, (what, number) in enumerate([("log", errno.ENOSPC), ("log", errno.ENOSPC), ("log", errno.EROFS)]):
        with failures.survive(what, step):
            raise OSError(number, os.strerror(number), "/x/log.jsonl")
    with failures.survive("samples"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(ZeroDivisionError), failures.survive("samples"):
        raise ZeroDivisionError  # a programming error is not caught
    assert failures.count == 4 and failures.describe() == "log 3 times, samples once"
    said = caplog.messages
    assert len(said) == 3 and said[0].startswith("step 0: log NOT WRITTEN, [Errno 28]") and "/x/log.jsonl" in said[0]


def test_tensorboard_reads_what_the_board_writes(tmp_path, limit_size):
    Image.new("RGB", (7, 5), "red").save(tmp_path / "picture.png")
    for start, first in enumerate((1, 4)):
        board = Board(tmp_path / "board", first)
        assert not board.complete
        for step in range(first, 7):
            # Both boards write to one file if they start in the same second.
            written = max((path for path in (tmp_path / "board").glob("*")), default=None)
            fails = start and step == 5 and written is not None
            limit_size(written.stat().st_size + 10 if fails else resource.RLIM_INFINITY)
            try:
                board.scalars({"loss": step / 8, "lr": start}, step)
                assert not (start and step == 5)
            except OSError:
                assert start and step == 5 and not board.complete
        board.picture("samples", (tmp_path / "picture.png").read_bytes(), 6)
        board.close()
        assert board.complete
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(step, step / 8) for step in range(1, 7)]
    assert [e.value for e in events.Scalars("lr")] == [0, 0, 0, 1, 1, 1]  # the second board's values hide the first's
    (picture,) = events.Images("samples")
    assert (picture.width, picture.height) == (7, 5)
    assert picture.encoded_image_string == (tmp_path / "picture.png").read_bytes()


def test_a_log_is_cut_where_the_run_goes_on(tmp_path):
    log, lines = tmp_path / "log.jsonl", [f'{{"step": {step}}}\n' for step in range(1, 9)]
    keep_up_to(log, 3)
    assert not log.exists()
    for content in ("".join(lines), "".join(lines[:5]) + '{"step": 3', "".join(lines[:4]) + "\udce9[]\n7\nnull\n{}\n"):
        log.write_text(content, errors="surrogateescape")
        keep_up_to(log, 4)
        assert log.read_text() == "".join(lines[:4])
    log.write_text("".join(lines[:4]) + "broken\n" + lines[2] + '{"step": 1}')
    keep_up_to(log, 3)
    assert log.read_text() == "".join([*lines[:3], lines[2]]) and os.listdir(tmp_path) == ["log.jsonl"]


DISK = """
mount -t tmpfs tmpfs {disk} || exit 99
mkdir {disk}/runs
{train} > {told}/said 2>&1 &
run={disk}/runs/000-DiT-Ti-2
until [ -e $run/checkpoints/latest ] || ! kill -0 $!; do sleep 0.05; done
mount --bind {disk}/runs {disk}/runs
mount -o remount,bind,ro {disk}/runs
until grep -q "samples NOT WRITTEN" {told}/said || ! kill -0 $!; do sleep 0.05; done
kill $!
wait $!
echo $? > {told}/code
cp -a $run {told}/run
"""


def test_a_disk_that_takes_nothing_more_ends_no_run(tmp_path, no_ranks):
    """A run's disk becomes read-only during the run, which then gets a SIGTERM."""
    disk, told = tmp_path / "disk", tmp_path / "told"
    disk.mkdir()
    told.mkdir()
    argv = [*ARGV, "--sample_every", "25", "--ckpt_every", "20", "--ckpt_keep", "1", "--outputs", str(disk / "runs")]
    train_py = " ".join([sys.executable, str(ROOT / "train.py"), *argv, "--sample_steps", "1"])
    script = DISK.format(disk=disk, told=told, train=train_py)
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    if not (told / "code").exists():
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    said = (told / "said").read_text()
    code = (told / "code").read_text()  # 1, or the signal that killed the process after its message
    assert code == "1\n" and "the exit code is 1" in said and "Traceback" not in said, (code, said)
    assert said.count("samples NOT WRITTEN, [Errno") == 1 and "NOT SAVED, rank 0" in said, said
    end = said.split("\nStopped: step ")[1]
    newest = os.readlink(told / "run" / "checkpoints" / "latest")
    assert f"{disk}/runs/000-DiT-Ti-2/checkpoints/{newest}\n" in end and "--load latest goes on" in end, said
    assert "  NOT WRITTEN " in end and "samples" in end.split("NOT WRITTEN")[1] and "  NOT SAVED " in end
    assert "  pictures " not in end or any((told / "run" / "samples").glob("*.png"))
    steps = [json.loads(line)["step"] for line in (told / "run" / "log.jsonl").read_bytes().splitlines(True)[:-1]]
    assert steps == list(range(1, len(steps) + 1))
    assert damage(told / "run" / "checkpoints" / newest) is None
