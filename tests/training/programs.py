"""Start training with one or more ranks, as a user does, and inject faults."""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

import train
from tests.checkpoint.test_checkpoint import ARGV
from tests.ranks import context, free_port
from train import Inputs

ROOT = Path(__file__).resolve().parents[2]
SOON = 15.0  # at most this many seconds may pass from the fault to the end of the last process
LONG = [*ARGV, "--max_steps", "1000000", "--ckpt_every", "0"]

# ------------------------------------------------------------------------------------------ running


def program(argv: list[str], environment: dict[str, str], log: str, fault: Callable[[], None] | None) -> None:
    """Call ``fault``, which breaks something, then run one rank in this process. Output goes to the file ``log``."""
    os.environ.update(environment)
    # A program started from a shell forks by default (up to Python 3.13). This process would use forkserver instead.
    multiprocessing.set_start_method(os.environ.get("START_METHOD", "fork"), force=True)
    torch.set_num_threads(1)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    if fault is not None:
        fault()
    sys.exit(train.main(argv))


class Run:
    """The processes of a training run: its ranks and their child processes."""

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
        """Wait until ``done()`` is true."""
        end = time.monotonic() + 120
        while not done():
            alive = all(rank.is_alive() for rank in self.ranks)
            assert time.monotonic() < end and (alive or done()), self.texts()
            self.look()
            time.sleep(0.02)
        self.look()

    def look(self) -> None:
        """Record all current processes of the run."""
        for rank in self.ranks:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                for each in [process, *process.children(recursive=True)]:
                    self.family[each.pid] = each

    def workers(self, rank: int) -> list[psutil.Process]:
        return psutil.Process(self.ranks[rank].pid).children()

    def ended(self, since: float, soon: float = SOON) -> list[int]:
        """Return the ranks' exit codes. All processes must have ended ``soon`` seconds after ``since``."""
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
    """Return a function that starts a run. All of its processes are killed after the test."""
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
    """Return a replacement for ``Inputs.of`` that calls ``what`` from step number ``steps`` on."""
    true_inputs = Inputs.of

    def inputs(self, batch):
        if batch.step >= steps:
            what()
        return true_inputs(self, batch)

    return inputs
