"""Runs survive failing writes, full disks, gradients that are not finite, killed processes and signals."""

import contextlib
import errno
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import pytest
import torch

import train
from opendit.checkpoint import save
from opendit.checkpoint.tensor_set import damage, read_state
from opendit.common.stages import process_seconds
from opendit.parallel.mesh import Mesh
from opendit.training.interrupt import Interrupt
from tests.checkpoint.test_checkpoint import ARGV, run_to, steps_in
from tests.checkpoint.test_resume import assert_same_bits
from tests.ranks import context, free_port, run_ranks, several_programs
from train import Inputs

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------ failing writes


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_full_disk_leaves_the_last_checkpoint_and_fails_the_exit_code(kind, tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 2, "--checkpoint_format", kind)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # writing really fails in the middle of a file
    try:
        with pytest.raises(SystemExit) as stop:
            run_to(tmp_path, 4, "--load", "latest", "--checkpoint_format", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 1
    output = capsys.readouterr()
    said = output.out + output.err
    assert "step 3: NOT SAVED, rank 0" in said and "safetensors" in said and os.strerror(errno.EFBIG) in said
    assert steps_in(checkpoints) == [1, 2] and not list(checkpoints.glob(".step*"))
    assert os.readlink(checkpoints / "latest") == "step_0000002" and damage(checkpoints / "latest") is None
    lines = [json.loads(line) for line in (checkpoints.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # training continued
    run_to(tmp_path, 4, "--load", "latest")  # with room on the disk it resumes
    assert steps_in(checkpoints) == [1, 2, 3, 4]


FULL_DISK = """
mount -t tmpfs -o size={size} tmpfs {disk} || exit 99
{train} --max_steps 4
echo $? > {told}/code
cp -a {disk}/000-DiT-Ti-2 {told}/run
mount -o remount,size={room} {disk}
{train} --max_steps 5 --load latest >&2 || exit 98
ls {disk}/000-DiT-Ti-2/checkpoints > {told}/after
"""


def test_a_disk_that_is_really_full(tmp_path, no_ranks):
    """Fill a small tmpfs that only the child process sees and that has room for two and a half checkpoints."""
    environment = dict(os.environ)  # copied before training in this process sets its rank there
    one = sum(path.stat().st_size for path in (run_to(tmp_path / "elsewhere", 1) / "latest").iterdir())
    disk, told = tmp_path / "disk", tmp_path / "told"
    disk.mkdir()
    told.mkdir()
    train_py = [sys.executable, ROOT / "train.py", *ARGV, "--ckpt_every", "1", "--outputs", disk]
    script = FULL_DISK.format(
        size=int(2.5 * one), room=10 * one, disk=disk, told=told, train=" ".join(map(str, train_py))
    )
    command = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not (told / "code").exists():
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert (told / "code").read_text() == "1\n"
    assert f"GiB are free under {disk}, but 4 checkpoints take about {4 * one / 2**30:.2f} GiB; " in done.stdout
    assert "note: disk" not in done.stderr  # after the disk has grown
    for step in (3, 4):
        assert f"step {step}: NOT SAVED, rank 0: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: " in done.stdout
        assert f"{disk}/000-DiT-Ti-2/checkpoints/.step_000000{step}.incomplete/" in done.stdout
    checkpoints = told / "run" / "checkpoints"
    assert steps_in(checkpoints) == [1, 2] and not list(checkpoints.glob(".step*"))
    assert os.readlink(checkpoints / "latest") == "step_0000002" and damage(checkpoints / "latest") is None
    lines = [json.loads(line) for line in (told / "run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # training continued
    assert "resumed from" in done.stderr and "step_0000005" in (told / "after").read_text()


def one_rank_fails(mesh, outputs: str) -> list[int | None]:
    several_programs()
    return [fails_at_step_1(mesh, Path(outputs, kind), kind) for kind in ("whole", "sharded")]


def fails_at_step_1(mesh, outputs: Path, kind: str) -> int | None:
    write = save.write_tensors

    def full_at_step_1(path, *args, **options):
        if mesh.rank == 1 and "step_0000001" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **options)

    save.write_tensors = full_at_step_1
    try:
        run_to(outputs, 2, "--checkpoint_format", kind)
    except SystemExit as stop:
        return stop.code
    return None


def test_a_failure_on_one_rank_is_every_ranks(tmp_path):
    assert run_ranks(2, one_rank_fails, str(tmp_path)) == [[1, 1]] * 2
    for kind in ("whole", "sharded"):
        checkpoints = tmp_path / kind / "000-DiT-Ti-2" / "checkpoints"
        assert steps_in(checkpoints) == [2] and damage(checkpoints / "step_0000002") is None
        assert not list(checkpoints.glob(".step*"))


# ------------------------------------------------------------------------------------------ steps that are skipped


def bad_steps(mesh, outputs: str) -> str:
    """Make rank 1's noise infinite in steps 3 and 4, and then from step 8 on. The other rank's noise stays finite."""
    several_programs()
    true_inputs, bad = Inputs.of, {3, 4}

    def inputs(self, batch):
        given = true_inputs(self, batch)
        worse = float("inf") if mesh.rank == 1 and batch.step + 1 in bad else 1.0
        return given._replace(noise=given.noise * worse)

    Inputs.of = inputs
    run_to(Path(outputs), 7, "--ckpt_every", "3")
    bad = set(range(8, 100))
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()) as err:
        run_to(Path(outputs), 20, "--load", "latest", "--max_bad_steps", "3")
    assert stop.value.code == 1
    return err.getvalue()


def test_no_save_while_steps_are_skipped(tmp_path):
    said = "".join(run_ranks(2, bad_steps, str(tmp_path)))
    assert said.count("3 steps in a row had non-finite gradients") == 1
    assert "on rank 1 the noise was not finite for 4 of 4 samples (row " in said
    checkpoints = tmp_path / "000-DiT-Ti-2" / "checkpoints"
    # Steps 3 and 4 were skipped, so the save due at step 3 came after step 5. No later step was good.
    assert steps_in(checkpoints) == [5, 6, 7]
    states = [read_state(path) for path in sorted(checkpoints.glob("step_*"))]
    assert [(state["optimizer_steps"], state["skipped"]) for state in states] == [(3, 2), (4, 2), (5, 2)]
    assert os.readlink(checkpoints / "latest") == "step_0000007" and damage(checkpoints / "latest") is None
    assert not list(checkpoints.glob(".step*"))
    run_ranks(2, resume_to_9, str(tmp_path))
    assert steps_in(checkpoints) == [5, 6, 7, 8, 9]


def resume_to_9(mesh, outputs: str) -> None:
    run_to(Path(outputs), 9, "--load", "latest")


# ------------------------------------------------------------------------------------------ kills and signals


def train_alone(argv: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as sys.stdout, open(os.devnull, "w") as sys.stderr:
        train.main(argv)


@pytest.fixture
def launch():
    """Return a function that starts two ranks. They are killed after the test."""
    started = []

    def start(argv: list[str]) -> list[Process]:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        processes = [context().Process(target=train_alone, args=(argv, each)) for each in environments]
        started.extend(processes)
        for process in processes:
            process.start()
        return processes

    yield start
    kill(started)


def wait_for(condition, processes: list[Process]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and all(process.is_alive() for process in processes)
        time.sleep(0.0005)


def exit_codes(processes: list[Process], timeout: float) -> list[int | None]:
    for process in processes:
        process.join(timeout)
    return [process.exitcode for process in processes]


def kill(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
        process.join()


def test_kills_in_a_save_and_a_sigterm_change_nothing(tmp_path, launch):
    """One run saves checkpoints of both kinds, one after the other."""
    steps = 16
    argv = [*ARGV, "--max_steps", str(steps), "--ckpt_every", "1", "--ckpt_keep", "2"]
    argv += ["--checkpoint_format", "sharded"]
    assert exit_codes(launch([*argv, "--outputs", str(tmp_path / "whole")]), 200) == [0, 0]
    outputs = tmp_path / "parts"
    checkpoints = outputs / "000-DiT-Ti-2" / "checkpoints"
    again = [*argv, "--outputs", str(outputs), "--load", "latest"]
    for victim, (at_least, kind) in enumerate(((2, "sharded"), (5, "whole"))):
        processes = launch([*again, "--checkpoint_format", kind])
        wait_for(lambda bar=at_least: max(steps_in(checkpoints), default=0) >= bar, processes)
        wait_for(lambda: any(checkpoints.glob(".step_*.incomplete")), processes)
        processes[victim % 2].kill()  # kill one rank in the middle of a save, then the other, as torchrun does
        kill(processes)
    processes = launch(again)
    wait_for(lambda: max(steps_in(checkpoints)) >= 8, processes)
    processes[1].terminate()  # one rank gets the signal, and both stop after the same step
    assert exit_codes(processes, 100) == [0, 0]
    log = checkpoints.parent / "log.jsonl"
    stopped = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert stopped[-1] < steps and os.readlink(checkpoints / "latest") == f"step_{stopped[-1]:07d}"
    assert exit_codes(launch(again), 200) == [0, 0]
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, steps + 1))
    undisturbed = tmp_path / "whole/000-DiT-Ti-2"
    assert_same_bits(undisturbed / "checkpoints/latest", checkpoints / "latest")
    curves = [
        [json.loads(line)["loss"] for line in open(run / "log.jsonl")] for run in (undisturbed, checkpoints.parent)
    ]
    assert curves[0] == curves[1]


def two_signals(log: str, second: str, environment: dict[str, str]) -> None:
    """Get a SIGTERM, then a SIGINT: at once, or from outside during a call that blocks Python's handlers."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores SIGINT
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    with Interrupt(Mesh(0, 1, 0, torch.device("cpu"))) as interrupt:
        interrupt.ask()
        assert not interrupt.answer()
        os.kill(os.getpid(), signal.SIGTERM)
        interrupt.ask()
        assert interrupt.answer()
        print("noted", flush=True)
        if second == "outside":
            hashlib.pbkdf2_hmac("md5", b"", b"", 2**31 - 1)
        os.kill(os.getpid(), signal.SIGINT)
        print("still here", flush=True)


@pytest.mark.parametrize(
    ("second", "environment"),
    [("at once", {}), ("outside", {}), ("at once", {"TORCHELASTIC_RUN_ID": "x"})],
    ids=["at once", "in a call", "under torchrun"],
)
def test_a_second_signal_quits_at_once(tmp_path, second, environment):
    """This works even if Python never reaches a handler, as in a collective whose peer is gone. Under torchrun, a
    repeated signal within a second counts as one, because torchrun forwards a Ctrl-C that its processes got already."""
    log = tmp_path / "log"
    process = context().Process(target=two_signals, args=(str(log), second, environment))
    process.start()
    try:
        wait_for(lambda: log.exists() and "noted\n" in log.read_text(), [] if second == "at once" else [process])
        if second == "outside":
            time.sleep(0.5)  # the process is inside the call now
            os.kill(process.pid, signal.SIGINT)
        process.join(30)
        said = log.read_text()
        assert process.exitcode == (0 if environment else -signal.SIGINT)
        assert "SIGTERM: finishing the step and saving" in said and ("still here" in said) == bool(environment)
    finally:
        kill([process])


def test_the_hours_leave_time_for_a_step_and_a_save():
    """With 20 s left the run continues, unless a save would take longer than that."""
    mesh, hours = Mesh(0, 1, 0, torch.device("cpu")), (process_seconds() + 20) / 3600
    for save_seconds, why in ((1.0, None), (30.0, "hours_up")):
        with Interrupt(mesh, hours, partial(float, save_seconds)) as interrupt:
            assert interrupt.why is None
            interrupt.ask()
            assert interrupt.answer() == (why is not None) and interrupt.why == why
    with Interrupt(mesh, hours, lambda: 30.0) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        interrupt.ask()
        assert interrupt.answer() and interrupt.why == "stopped"


def failing_rank(mesh) -> bool:
    """Return True if a failing rank survives torchrun's SIGTERM while it prints its error."""
    try:
        with Interrupt(mesh):
            raise RuntimeError("the other rank is gone")
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def test_a_failing_rank_is_not_silenced_by_torchrun():
    assert run_ranks(2, failing_rank) == [True, True]
