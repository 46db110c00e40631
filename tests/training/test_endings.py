"""When a run of one or two ranks fails, all processes end within seconds, the exit code is not 0, and the last line
gives the reason."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

import opendit.parallel.supervisor
import opendit.training.drawing
import opendit.training.prepare
from opendit.common import safe_files
from opendit.common.safe_files import WriteFailures
from opendit.data.digits import DigitsDataset
from opendit.training import build
from opendit.training.monitor import Monitor
from tests.checkpoint.test_checkpoint import steps_in
from tests.training.programs import LONG, ROOT, SOON, after
from train import Inputs


def test_two_threads_that_record_the_end_take_turns(tmp_path, monkeypatch):
    """When another rank is lost, the main thread and the supervisor's may record the end at the same time."""
    closing, failures, both, rename = [], WriteFailures(), threading.Barrier(2), safe_files._replace

    def rename_together(*args) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until the other thread also has written its temporary file
        rename(*args)

    monkeypatch.setattr(safe_files, "_replace", rename_together)
    monitor = SimpleNamespace(failures=failures)
    run = SimpleNamespace(mesh=SimpleNamespace(is_main=True), monitor=monitor, folder=tmp_path, done=3, last_step=5)
    with pytest.raises(RuntimeError), build.recorded_end(run, SimpleNamespace(closes=closing.append)):
        supervisor = threading.Thread(target=closing[0], args=(1.0,))
        supervisor.start()
        raise RuntimeError("a rank was lost")
    supervisor.join()
    assert failures.count == 0 and json.loads((tmp_path / "ended.json").read_text())["failed"]


# ------------------------------------------------------------------------------------------ one rank's error


def raise_at_step_3() -> None:
    def fail():
        raise KeyError("a defect")

    Inputs.of = after(3, fail)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_on_one_rank_ends_all_of_them(start, ranks):
    run = start(ranks, [*LONG, "--num_workers", "1"], {ranks - 1: raise_at_step_3})
    run.until(lambda: run.steps() >= 3)
    codes = run.ended(time.monotonic())
    assert codes == [1] if ranks == 1 else codes == [3, 1]
    ended = json.loads((run.outputs / "000-DiT-Ti-2" / "ended.json").read_text())
    assert (ended["failed"], ended["done"], ended["stopped"]) == (True, False, False)
    text = run.logs[-1].read_text()
    assert "Traceback" in text  # a traceback, because this is a bug in the program
    assert run.last_line(ranks - 1) == ("error: " if ranks == 1 else "error: rank 1: ") + "KeyError: 'a defect'"
    assert text.count("error: ") == 1
    if ranks == 2:
        line, other = run.last_line(0), run.ranks[1].pid
        assert line.startswith("error: rank 1 (") and line.endswith(f"pid {other}) failed: KeyError: 'a defect'")
        assert "Traceback" not in run.logs[0].read_text()


def test_a_run_stopped_by_steps_that_are_not_finite_leaves_no_process(start):
    run = start(2, [*LONG, "--num_workers", "2", "--max_bad_steps", "3"], {1: nan_from_step_3})
    run.until(lambda: run.steps() >= 3)
    assert set(run.ended(time.monotonic())) <= {1, 3}
    assert "Traceback" not in run.texts()
    assert any("3 steps in a row had non-finite gradients" in run.last_line(rank) for rank in range(2))


def nan_from_step_3() -> None:
    true_inputs = Inputs.of

    def inputs(self, batch):
        given = true_inputs(self, batch)
        return given._replace(noise=given.noise * (float("nan") if batch.step >= 3 else 1.0))

    Inputs.of = inputs


def fail_to_draw() -> None:
    def draw(*_):
        raise RuntimeError("no picture")

    opendit.training.drawing.SampleGrids.draw_of = draw


def test_an_error_in_drawing_ends_the_run(start):
    run = start(2, [*LONG, "--num_workers", "1", "--sample_every", "2"], {0: fail_to_draw})
    run.until(lambda: run.steps() >= 2)
    assert run.ended(time.monotonic()) == [1, 3]
    assert run.last_line(0).endswith("RuntimeError: no picture")


# ------------------------------------------------------------------------------------------ loader processes


def no_memory_at_row_7() -> None:
    true_read = DigitsDataset.read

    def read(self, row, *view):
        if row % 50 == 7:
            raise MemoryError
        return true_read(self, row, *view)

    DigitsDataset.read = read


def test_a_loader_process_that_runs_out_of_memory(start):
    run = start(2, [*LONG, "--num_workers", "2"], {1: no_memory_at_row_7})
    run.until(lambda: (run.outputs / "000-DiT-Ti-2" / "log.jsonl").exists())
    assert run.ended(time.monotonic())[-1] == 1
    line = run.last_line(1)
    assert "a loader process ran out of memory at row " in line and "lower --num_workers" in line
    assert "Traceback" not in run.logs[-1].read_text()


@pytest.mark.parametrize(  # the kernel sends these when memory or /dev/shm is full
    ("ranks", "number"), [(2, signal.SIGKILL), (1, signal.SIGBUS)]
)
def test_a_killed_loader_process_ends_the_run(start, ranks, number):
    run = start(ranks, [*LONG, "--num_workers", "2"])
    run.until(lambda: run.steps() >= 2)
    run.workers(ranks - 1)[0].send_signal(number)
    assert run.ended(time.monotonic())[-1] == 1
    assert f"a process that reads the data died, exit code -{number:d}" in run.last_line(ranks - 1)


def test_a_stopped_loader_process_is_named_with_its_file(start):
    run = start(2, [*LONG, "--num_workers", "1", "--data_timeout", "2"])
    run.until(lambda: run.steps() >= 2)
    (worker,) = run.workers(1)
    worker.suspend()
    assert run.ended(time.monotonic(), SOON + 2) == [3, 1]
    assert f"loader process {worker.pid} (stopped)" in run.last_line(1) and "--data_timeout" in run.last_line(1)


def hang_at_step_3() -> None:
    true_read = DigitsDataset.read

    def read(self, row, *view):
        read.count += 1
        if read.count > 20:
            time.sleep(1000)
        return true_read(self, row, *view)

    read.count = 0
    DigitsDataset.read = read


@pytest.mark.parametrize("workers", [0, 1])
def test_a_read_that_hangs_is_named(start, workers):
    run = start(1, [*LONG, "--num_workers", str(workers), "--data_timeout", "2"], {0: hang_at_step_3})
    run.until(lambda: run.steps() >= 1)
    assert run.ended(time.monotonic(), SOON + 2) == [1]
    assert run.last_line(0).startswith("error: no data came for 2 s (--data_timeout): ")
    assert "row " in run.last_line(0)


# ------------------------------------------------------------------------------------------ lost ranks


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other(start, victim):
    run = start(2, [*LONG, "--num_workers", "2"])
    run.until(lambda: run.steps() >= 3)
    run.ranks[victim].kill()
    codes = run.ended(time.monotonic())
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 3
    line = run.last_line(1 - victim)
    assert line.startswith(f"error: rank {victim} (") and f"pid {run.ranks[victim].pid}) was lost" in line
    assert "Traceback" not in run.logs[1 - victim].read_text()


def test_what_can_not_be_closed_does_not_hold_up_the_end(start):
    run = start(2, [*LONG, "--num_workers", "0"], {1: close_for_ever})
    run.until(lambda: run.steps() >= 3)
    run.ranks[0].kill()
    assert run.ended(time.monotonic()) == [-signal.SIGKILL, 3]
    assert "pid " in run.last_line(1) and run.last_line(1).endswith("was lost: killed, crashed or cut off")


def test_an_error_is_told_even_if_something_can_not_be_closed(start):
    run = start(2, [*LONG, "--num_workers", "0"], {1: raise_and_close_for_ever})
    run.until(lambda: run.steps() >= 3)
    assert run.ended(time.monotonic()) == [3, 1]
    assert run.last_line(1) == "error: rank 1: KeyError: 'a defect'"


def raise_and_close_for_ever() -> None:
    raise_at_step_3()
    close_for_ever()
    opendit.parallel.supervisor.LAST = 1.0


def close_for_ever() -> None:
    """Block in close, as a thread that pins memory does while the device waits for a lost rank."""
    Monitor.close = lambda self: time.sleep(1000)
    opendit.parallel.supervisor.CLOSING = 1000.0  # that time limit is for runs that lost no rank


def test_a_rank_killed_before_the_first_step_ends_the_other(start):
    run = start(2, [*LONG, "--num_workers", "0"], {0: wait_in_prepare, 1: wait_in_prepare})
    run.until(lambda: all(log.exists() and "preparing" in log.read_text() for log in run.logs))
    run.ranks[1].kill()
    assert run.ended(time.monotonic())[1] == -signal.SIGKILL
    assert run.last_line(0).endswith("was lost: killed, crashed or cut off")


def wait_in_prepare() -> None:
    def prepare(*_):
        print("preparing", flush=True)
        time.sleep(1000)

    opendit.training.prepare.prepare = prepare


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_process_takes_its_loaders_along(start, monkeypatch, method):
    monkeypatch.setenv("START_METHOD", method)
    run = start(1, [*LONG, "--num_workers", "2"])
    run.until(lambda: run.steps() >= 2)
    if method == "fork":
        run.workers(0)[0].suspend()
    run.ranks[0].kill()
    assert run.ended(time.monotonic()) == [-signal.SIGKILL]


def test_sigterm_still_saves_however_long_the_step_takes(start):
    run = start(2, [*LONG, "--num_workers", "1"], {0: slow_steps, 1: slow_steps})
    run.until(lambda: run.steps() >= 1)
    run.ranks[1].terminate()
    assert run.ended(time.monotonic(), 60) == [0, 0]
    folder = run.outputs / "000-DiT-Ti-2"
    assert steps_in(folder / "checkpoints") == [run.steps()]
    how = {"step": run.steps(), "done": False, "stopped": True, "hours_up": False, "failed": False}
    assert json.loads((folder / "ended.json").read_text()) == how


def slow_steps() -> None:
    Inputs.of = after(1, lambda: time.sleep(4))


def test_a_rank_lost_under_torchrun_ends_the_run(tmp_path):
    """torchrun's SIGTERM must not make the rank that is left finish its step and save."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    log, outputs = tmp_path / "log", tmp_path / "out"
    with open(log, "w") as file:
        agent = subprocess.Popen(
            [*torchrun, *LONG, "--num_workers", "1", "--outputs", str(outputs)], cwd=ROOT, stdout=file, stderr=file
        )
    try:
        lines = outputs / "000-DiT-Ti-2" / "log.jsonl"
        end = time.monotonic() + 120
        while not (lines.is_file() and len(lines.read_text().splitlines()) >= 3):
            assert agent.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        family = psutil.Process(agent.pid).children(recursive=True)
        ranks = [each for each in psutil.Process(agent.pid).children() if "train.py" in each.cmdline()]
        (victim,) = [each for each in ranks if each.environ()["RANK"] == "1"]
        victim.kill()
        killed = time.monotonic()
        assert agent.wait(SOON) != 0
        assert not psutil.wait_procs(family, timeout=max(0.1, killed + SOON - time.monotonic()))[1]
        text = log.read_text()
        assert (
            f"pid {victim.pid}) was lost" in text
            and "Traceback (most recent call last)" not in text.split("was lost")[0]
        )
    finally:
        for each in [*psutil.Process(os.getpid()).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it may have ended meanwhile
                if each.pid == agent.pid or "train.py" in " ".join(each.cmdline()):
                    each.kill()
