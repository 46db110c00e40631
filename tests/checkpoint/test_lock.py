"""Folder locks: who is refused, which locks are taken over, and what happens after the owner's death."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opendit.checkpoint import run_folders as locking
from opendit.checkpoint.run_folders import LOCK, FolderLock, Locked, lock_folder
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, sys, time
from pathlib import Path
from opendit.checkpoint import run_folders as locking
if sys.argv[2] == "without flock":
    locking.HEARTBEAT_S, locking.PATIENCE_S = 0.1, 2.0
    def none(*args): raise OSError(95, "not supported")
    locking.fcntl.flock = none
held = locking.FolderLock(Path(sys.argv[1]), "--load", "stop it")
if sys.argv[2] == "and a child":
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(0.5)  # it has begun
print(held.note or "held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """Return a function that starts another process that takes the lock."""
    started = []

    def start(how: str = "") -> subprocess.Popen:
        command = [sys.executable, "-c", OWNER, str(tmp_path), how]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(params=["", "without flock"])
def flocks(request, monkeypatch):
    if request.param:

        def none(*args):
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(locking.fcntl, "flock", none)
        monkeypatch.setattr(locking, "PATIENCE_S", 2.0)
    return request.param


def take(folder: Path) -> FolderLock:
    return FolderLock(folder, "--load latest", "stop it")


def test_a_second_writer_is_refused_with_the_owners_name(tmp_path, owner, flocks):
    process = owner(flocks)
    host = os.uname().nodename
    message = f"--load latest: {tmp_path} is in use: process {process.pid} on {host} writes to it; stop it$"
    with pytest.raises(Locked, match=message):
        take(tmp_path)
    process.kill()
    process.wait()
    with take(tmp_path) as lock:
        gone = "has not been seen for 2 s" if flocks else "is gone"
        assert lock.note == f"{tmp_path} was locked by process {process.pid} on {host}, which {gone}: taken over"
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())
    with take(tmp_path) as lock:
        assert lock.note is None


def test_a_lock_does_not_live_on_in_its_owners_children(tmp_path, owner):
    process = owner("and a child")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    take(tmp_path).release()


def other_machine(folder: Path) -> None:
    (folder / LOCK).touch()
    owner = {"host": "far-away", "boot": "other", "pid": 1}
    (folder / LOCK).write_text(json.dumps({**owner, "inode": (folder / LOCK).stat().st_ino}))


def test_another_machines_lock_is_taken_over_when_nobody_touches_it(tmp_path, flocks, monkeypatch):
    monkeypatch.setattr(locking, "PATIENCE_S", 0.3)
    other_machine(tmp_path)
    with take(tmp_path) as lock:
        assert "process 1 on far-away, which has not been seen for" in lock.note
    other_machine(tmp_path)
    monkeypatch.setattr(locking, "PATIENCE_S", 30)
    began, true_sleep = time.monotonic(), time.sleep

    def touched(seconds):
        os.utime(tmp_path / LOCK)
        true_sleep(0.01)

    monkeypatch.setattr(locking.time, "sleep", touched)
    with pytest.raises(Locked, match=f"process 1 on far-away writes to it; stop it; .*delete {tmp_path}/{LOCK}"):
        take(tmp_path)
    assert time.monotonic() - began < 20


def test_an_owner_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "HEARTBEAT_S", 0.01)
    with take(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        end = time.monotonic() + 20
        while (tmp_path / LOCK).stat().st_mtime < 1000:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}', "\x00" * 99, "[" * 4096])
def test_a_damaged_lock_is_nobodys(content, tmp_path, flocks, monkeypatch):
    monkeypatch.setattr(locking, "EMPTY_S", 0.1)
    (tmp_path / LOCK).write_text(content)
    with take(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_disk_that_takes_no_lock_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locking.os, "open", full)
    with take(tmp_path) as lock:
        assert f"{tmp_path}/{LOCK} can't be made (No space left on device)" in lock.note


def all_ranks_are_refused(mesh, folder: str) -> str:
    try:
        lock_folder(Path(folder), mesh, "--output", "take another")
    except Locked as error:
        return str(error)
    return ""


def test_all_ranks_are_refused(tmp_path, owner):
    owner()
    one, two = run_ranks(2, all_ranks_are_refused, str(tmp_path))
    assert one == two and "is in use" in one


def two_at_once(folder: str) -> int:
    """Return how many of three processes that start together get the lock."""
    code = OWNER.replace("time.sleep(60)\n", "sys.stdin.read()\n")
    run = [sys.executable, "-c", code, folder, "without flock"]
    piped = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    processes = [subprocess.Popen(run, **piped) for _ in range(3)]
    try:
        return sum(process.stdout.readline() != "" for process in processes)
    finally:
        for process in processes:
            process.communicate()


def test_of_several_that_take_a_dead_ones_lock_over_one_gets_it(tmp_path, owner):
    process = owner("without flock")
    process.kill()
    process.wait()
    assert two_at_once(str(tmp_path)) == 1
