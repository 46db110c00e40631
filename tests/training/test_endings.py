"""How a run ends: whatever goes wrong, on one rank or two, all of its processes are gone within seconds, the exit code
is not 0 and the last line says why."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

import opendit.parallel.supervisor
import opendit.training.drawing
import opendit.training.run
import train
from opendit.data.digits import DigitsDataset
from opendit.training import loop
from tests.ranks import context, free_port
from tests.state.test_checkpoint import ARGV, steps_in

ROOT = Path(__file__).resolve().parents[2]
SOON = 15.0  # seconds from the fault to the end of the last process: what is promised
LONG = [*ARGV, "--max_steps", "1000000", "--ckpt_every", "0"]

# ------------------------------------------------------------------------------------------ running


def program(argv: list[str], environment: dict[str, str], log: str, fault: Callable[[], None] | None) -> None:
    """A rank in a process of its own, whose stderr goes to ``log``; ``fault`` spoils something in it first."""
    os.environ.update(environment)
    # As a program started from a shell has it (up to Python 3.13); here it would be the fork server's.
    multiprocessing.set_start_method(os.environ.get("START_METHOD", "fork"), force=True)
    torch.set_num_threads(1)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    if fault is not None:
        fault()
    train.main(argv)


class Run:
    """The processes of a training run: its ranks and all that they started."""

    def __init__(self, folder: Path, ranks: int, argv: list[str], faults: dict[int, Callable] | None = None):
        self.outputs = folder / "out"
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self.ranks: list[BaseProcess] = []
        for rank, log in enumerate(self.logs):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            environment |= {name: os.environ[name] for name in ("START_METHOD",) if name in os.environ}
            args = ([*argv, "--outputs", str(self.outputs)], environment, str(log), (faults or {}).get(rank))
            self.ranks.append(context().Process(target=program, args=args))
            self.ranks[-1].start()
        self.family: dict[int, psutil.Process] = {}

    def steps(self) -> int:
        log = self.outputs / "000-DiT-Ti-2" / "log.jsonl"
        lines = log.read_text().splitlines() if log.is_file() else []
        return len(lines)

    def until(self, done: Callable[[], bool]) -> None:
        """Until the run has come so far."""
        end = time.monotonic() + 120
        while not done():
            alive = all(rank.is_alive() for rank in self.ranks)
            assert time.monotonic() < end and (alive or done()), self.texts()
            self.look()
            time.sleep(0.02)
        self.look()

    def look(self) -> None:
        """Notes the processes that there are."""
        for rank in self.ranks:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                for each in [process, *process.children(recursive=True)]:
                    self.family[each.pid] = each

    def workers(self, rank: int) -> list[psutil.Process]:
        return psutil.Process(self.ranks[rank].pid).children()

    def ended(self, since: float, soon: float = SOON) -> list[int]:
        """The ranks' exit codes; all processes must be gone ``soon`` seconds after ``since``."""
        while any(rank.is_alive() for rank in self.ranks) and time.monotonic() < since + soon:
            self.look()
            time.sleep(0.02)
        codes = [rank.exitcode for rank in self.ranks]
        assert None not in codes, f"{codes} after {soon} s: {self.texts()}"
        left = psutil.wait_procs(self.family.values(), timeout=max(0.1, since + soon - time.monotonic()))[1]
        assert not left, left
        return codes

    def texts(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in self.logs if log.exists())

    def last_line(self, rank: int) -> str:
        return (self.logs[rank].read_text().splitlines() or [""])[-1]


@pytest.fixture
def start(tmp_path):
    """Starts a run; nothing of it outlives the test."""
    runs = []

    def begin(ranks: int, argv: list[str], faults: dict[int, Callable] | None = None) -> Run:
        runs.append(Run(tmp_path, ranks, argv, faults))
        return runs[-1]

    yield begin
    for run in runs:
        run.look()
        for process in run.family.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for rank in run.ranks:
            rank.kill()
            rank.join()


def after(steps: int, what: Callable[[], None]) -> Callable:
    """``loop.inputs`` that does ``what`` in the step of this number."""
    true_inputs = loop.inputs

    def inputs(job, batch):
        if batch.step >= steps:
            what()
        return true_inputs(job, batch)

    return inputs


# ------------------------------------------------------------------------------------------ one rank's error


def raise_at_step_3() -> None:
    def fail():
        raise KeyError("a defect")

    loop.inputs = after(3, fail)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_on_one_rank_ends_all_of_them(start, ranks):
    run = start(ranks, [*LONG, "--num_workers", "1"], {ranks - 1: raise_at_step_3})
    run.until(lambda: run.steps() >= 3)
    codes = run.ended(time.monotonic())
    assert codes == [1] if ranks == 1 else codes == [3, 1]
    text = run.logs[-1].read_text()
    assert "Traceback" in text  # a defect of the program
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
    true_inputs = loop.inputs

    def inputs(job, batch):
        latents, t, noise, y = true_inputs(job, batch)
        return latents, t, noise * (float("nan") if batch.step >= 3 else 1.0), y

    loop.inputs = inputs


def fail_to_draw() -> None:
    def draw(*_):
        raise RuntimeError("no picture")

    opendit.training.drawing.draw = draw


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_in_drawing_ends_the_run(start, ranks):
    run = start(ranks, [*LONG, "--num_workers", "1", "--sample_every", "2"], {0: fail_to_draw})
    run.until(lambda: run.steps() >= 2)
    assert run.ended(time.monotonic()) == [1, 3][:ranks]
    assert run.last_line(0).endswith("RuntimeError: no picture")


# ------------------------------------------------------------------------------------------ loader processes


def no_memory_at_row_7() -> None:
    true_load = DigitsDataset.load

    def load(self, row, flip):
        if row % 50 == 7:
            raise MemoryError
        return true_load(self, row, flip)

    DigitsDataset.load = load


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_process_that_runs_out_of_memory(start, ranks):
    run = start(ranks, [*LONG, "--num_workers", "2"], {ranks - 1: no_memory_at_row_7})
    run.until(lambda: (run.outputs / "000-DiT-Ti-2" / "log.jsonl").exists())
    assert run.ended(time.monotonic())[-1] == 1
    line = run.last_line(ranks - 1)
    assert "a loader process ran out of memory at row " in line and "lower --num_workers" in line
    assert "Traceback" not in run.logs[-1].read_text()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])  # of the kernel without memory, without /dev/shm
def test_a_killed_loader_process_ends_the_run(start, ranks, number):
    run = start(ranks, [*LONG, "--num_workers", "2"])
    run.until(lambda: run.steps() >= 2)
    run.workers(ranks - 1)[0].send_signal(number)
    assert run.ended(time.monotonic())[-1] == 1
    assert f"a process that reads the data died, exit code -{number:d}" in run.last_line(ranks - 1)


def test_a_stopped_loader_process_is_named_with_its_file(start):
    run = start(2, [*LONG, "--num_workers", "1", "--data_timeout", "3"])
    run.until(lambda: run.steps() >= 2)
    (worker,) = run.workers(1)
    worker.suspend()
    assert run.ended(time.monotonic(), SOON + 3) == [3, 1]
    assert f"loader process {worker.pid} (stopped)" in run.last_line(1) and "--data_timeout" in run.last_line(1)


def hang_at_step_3() -> None:
    true_load = DigitsDataset.load

    def load(self, row, flip):
        load.read += 1
        if load.read > 20:
            time.sleep(1000)
        return true_load(self, row, flip)

    load.read = 0
    DigitsDataset.load = load


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


def test_a_rank_killed_before_the_first_step_ends_the_other(start):
    run = start(2, [*LONG, "--num_workers", "0"], {0: wait_in_prepare, 1: wait_in_prepare})
    run.until(lambda: all(log.exists() and "preparing" in log.read_text() for log in run.logs))
    run.ranks[1].kill()
    assert run.ended(time.monotonic())[1] == -signal.SIGKILL
    assert run.last_line(0).endswith("was lost: killed, crashed or cut off")


def wait_in_prepare() -> None:
    def prepare(flags, mesh):
        print("preparing", flush=True)
        time.sleep(1000)

    opendit.training.run.prepare = prepare


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
    checkpoints = run.outputs / "000-DiT-Ti-2" / "checkpoints"
    assert steps_in(checkpoints) == [run.steps()]


def slow_steps() -> None:
    loop.inputs = after(1, lambda: time.sleep(4))


def test_a_rank_lost_under_torchrun_ends_the_run(tmp_path):
    """kill -9 took 33 s: torchrun's SIGTERM means "finish the step and save" to the rank that is left."""
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
            if each.pid == agent.pid or "train.py" in " ".join(each.cmdline()):
                each.kill()


# ------------------------------------------------------------------------------------------ what the log says


def weight_spoilt_from_step_3() -> None:
    """One weight of rank 1's third block becomes infinite, in the place from which the forward pass reads it."""
    true_build, true_inputs, engines = loop.build_model_and_engine, loop.inputs, []

    def build(job):
        engines.append(true_build(job))
        return engines[0]

    def inputs(job, batch):
        if batch.step >= 3:
            engines[0].module.blocks[2].mlp.fc1.weight.data[0, 0] = float("inf")
        return true_inputs(job, batch)

    loop.build_model_and_engine, loop.inputs = build, inputs


@pytest.mark.parametrize("plugin", ["zero2", "ddp", "gemini"])
def test_the_first_module_that_is_not_finite_is_named(start, plugin):
    faults = {0: latents_spoilt_from_step_3} if plugin == "gemini" else {1: weight_spoilt_from_step_3}
    argv = [*LONG, "--max_bad_steps", "3", "--plugin", plugin, "--mixed_precision", "bf16"]
    run = start(2, argv, faults)
    run.until(lambda: run.steps() >= 3)
    assert set(run.ended(time.monotonic())) <= {1, 3}
    (line,) = [line for line in map(run.last_line, range(2)) if "3 steps in a row" in line][:1]
    if plugin == "gemini":
        assert "on rank 0 the latents were not finite for 1 of 4 samples (row " in line
    else:
        assert "on rank 1 the output of blocks.2.mlp.fc1 was not finite for 4 of 4 samples (row " in line
        assert "skipped, its gradients were not finite: on rank 1 the output of blocks.2.mlp.fc1" in run.texts()


def latents_spoilt_from_step_3() -> None:
    true_inputs = loop.inputs

    def inputs(job, batch):
        latents, t, noise, y = true_inputs(job, batch)
        if batch.step >= 3:
            latents[2] = float("inf")
        return latents, t, noise, y

    loop.inputs = inputs


def slow_rank() -> None:
    loop.inputs = after(0, lambda: time.sleep(0.5))


def test_a_rank_that_is_slow_is_named_in_the_log(start):
    run = start(2, [*ARGV, "--max_steps", "8", "--log_every", "4", "--ckpt_every", "0"], {1: slow_rank})
    assert run.ended(time.monotonic(), 120) == [0, 0]
    lines = [json.loads(line) for line in (run.outputs / "000-DiT-Ti-2" / "log.jsonl").read_text().splitlines()]
    assert all(line["slowest_rank"] == 1 and line["slowest_x"] > 1.5 for line in lines)
    assert "rank 1 (" in run.logs[0].read_text() and "holds the others up" in run.logs[0].read_text()


# ------------------------------------------------------------------------------------------ the environment


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0 in the environment must be"),
        ({"WORLD_SIZE": "4"}, "RANK is not: start 4 processes with torchrun"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment must be a whole number from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 in the environment must be"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "MASTER_PORT=x in the environment must be",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "b"}, "LOCAL_RANK=b in the environment must be"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"},
            "rank 1 looked for rank 0 at MASTER_ADDR=no.such.host.invalid",
        ),
    ],
)
def test_an_environment_that_is_wrong_is_one_line(no_ranks, monkeypatch, capsys, environment, said):
    monkeypatch.setattr("opendit.parallel.rendezvous.TELL", 1.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    with pytest.raises(SystemExit) as stop:
        train.main([*ARGV, "--max_steps", "1"])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert "error: " in line and said in line


def test_a_used_port_is_one_line(no_ranks, capfd):
    import socket

    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(SystemExit) as stop:
            train.main([*ARGV, "--max_steps", "1"])
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: MASTER_PORT={port} is used by another program")


def test_processes_that_do_not_come_are_named(no_ranks, monkeypatch, capsys):
    monkeypatch.setattr("opendit.parallel.rendezvous.TELL", 0.5)
    monkeypatch.setattr("opendit.parallel.rendezvous.PATIENCE", 1.0)
    os.environ.update(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with pytest.raises(SystemExit):
        train.main([*ARGV, "--max_steps", "1"])
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: rank 1, 2 of the 3 processes did not come within 1 s")
