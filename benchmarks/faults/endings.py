"""Faults: a process is killed, stopped or told to leave, or raises an exception."""

import os
import signal
import socket
import sys
from typing import Any

from benchmarks.faults.lab import TRAIN, Lab, NotHere, fault
from benchmarks.faults.processes import ROOT, Program

EARLY = 8  # faults happen after this step
PICTURES = "--sample_every 8 --sample_steps 2 --sample_cfg_scale 1".split()


def trained(lab: Lab, *more: object, world: int = 1, **options) -> list[Program]:
    """Start a run and return when it has reached step EARLY."""
    programs = lab.train(*more, world=world, **options)
    lab.reach(EARLY, programs)
    return programs


# ------------------------------------------------------------------------------------------ processes that read


def with_reader(lab: Lab, *more: object, **options) -> tuple[list[Program], int]:
    programs = trained(lab, *more, **options)
    lab.programs.wait(programs[0].workers, 10, "a process that reads")
    return programs, programs[0].workers()[0]


@fault("kill -9 of a process that reads the data")
def reader_killed(lab: Lab) -> None:
    programs, reader = with_reader(lab)
    lab.now()
    os.kill(reader, signal.SIGKILL)
    lab.ends(programs, {1}, "error: .*-9")
    lab.loses_nothing()


@fault("kill -9 of a process that reads for one of two ranks")
def reader_of_a_rank_killed(lab: Lab) -> None:
    programs, reader = with_reader(lab, world=2)
    lab.now()
    os.kill(reader, signal.SIGKILL)
    lab.ends(programs, {1, 3}, "error: .*-9")
    lab.loses_nothing(2)


# Digits that become unreadable after 60 reads.
READ = """
import itertools, opendit.data.digits as digits
true_read, count = digits.DigitsDataset.read, itertools.count()
def read(self, row, *view):
    if next(count) == 60:
        {what}
    return true_read(self, row, *view)
digits.DigitsDataset.read = read
"""


@fault("a process that reads runs out of memory (MemoryError)")
def reader_memory_error(lab: Lab) -> None:
    programs = trained(lab, prelude=READ.format(what="raise MemoryError"))
    lab.now()
    lab.ends(programs, {1}, "error: .*[Mm]emory")
    lab.loses_nothing()


@fault("an unforeseen exception in a process that reads")
def reader_exception(lab: Lab) -> None:
    programs = trained(lab, prelude=READ.format(what="raise RuntimeError('bit by a fault')"))
    lab.now()
    lab.ends(programs, {1}, "error: .*bit by a fault", tracebacks=True)
    lab.loses_nothing()


@fault("a process that reads is stopped (SIGSTOP) for good, --data_timeout 3")
def reader_stopped(lab: Lab) -> None:
    programs, reader = with_reader(lab, "--data_timeout", 3)
    lab.now()
    os.kill(reader, signal.SIGSTOP)
    lab.ends(programs, {1}, "error: .*data_timeout")
    lab.loses_nothing()


@fault("/dev/shm of 2 MB under --num_workers 2")
def small_shared_memory(lab: Lab) -> None:
    pictures = "--model DiT-Ti/8 --image_size 64 --batch_size 128 --num_workers 2".split()
    script = 'mount -t tmpfs -o size=2m tmpfs /dev/shm || exit 99; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, ROOT / "train.py"]
    lab.now()
    program = lab.programs.run(*command, *TRAIN, *pictures, "--outputs", lab.outputs)
    lab.programs.wait(lambda: program.code() is not None or "run folder" in program.said(), 60, "the start")
    if program.code() == 99:
        raise NotHere("no small /dev/shm can be mounted")
    lab.now()
    lab.ends(program, {1}, "error: .*/dev/shm")


# ------------------------------------------------------------------------------------------ ranks


@fault("kill -9 of rank 0 of two")
def rank_0_killed(lab: Lab) -> None:
    rank_killed(lab, 0)


@fault("kill -9 of rank 1 of two")
def rank_1_killed(lab: Lab) -> None:
    rank_killed(lab, 1)


def rank_killed(lab: Lab, rank: int) -> None:
    programs = trained(lab, world=2)
    lab.now()
    programs[rank].send(signal.SIGKILL)
    lab.ends(programs, {3, -9}, f"error: .*rank {rank}", first=1 - rank)
    lab.loses_nothing(2)


@fault("kill -9 of the only process")
def all_killed(lab: Lab) -> None:
    programs, _ = with_reader(lab)
    lab.now()
    programs[0].send(signal.SIGKILL)
    lab.ends(programs, {-9})
    lab.loses_nothing()


@fault("kill -9 of rank 1 under torchrun")
def rank_of_torchrun_killed(lab: Lab) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    agent = lab.programs.run(*torchrun, ROOT / "train.py", *TRAIN, "--outputs", lab.outputs)
    lab.reach(EARLY, [agent])
    victim = agent.workers()[-1]
    lab.now()
    os.kill(victim, signal.SIGKILL)
    lab.ends(agent, {1}, r"error: .*rank \d|local_rank: 1", anywhere=True, tracebacks=True)  # torchrun adds its own
    lab.loses_nothing(2)


# From step 10 on, one rank raises an exception, or gets noise that makes loss and gradients infinite.
FROM_STEP_10 = """
import os
from opendit.training.build import Run
true_count = Run.count
def count(self, batch, micro_batch):
    true_count(self, batch, micro_batch)
    if batch.step >= 10 and os.environ.get("RANK", "0") == "{rank}":
        {what}
Run.count = count
"""
INFINITE = "micro_batch.noise.mul_(float('inf'))"


@fault("an exception in a step of rank 1 of two")
def exception_on_a_rank(lab: Lab) -> None:
    prelude = FROM_STEP_10.format(rank=1, what="raise RuntimeError('bit by a fault')")
    programs = trained(lab, world=2, prelude=prelude)
    lab.now()
    lab.ends(programs, {1, 3}, "error: .*rank 1.*bit by a fault", tracebacks=True)
    lab.loses_nothing(2)


@fault("gradients that stay infinite, --max_bad_steps 5")
def never_finite(lab: Lab) -> None:
    prelude = FROM_STEP_10.format(rank=0, what=INFINITE)
    programs = trained(lab, "--max_bad_steps", 5, prelude=prelude)
    lab.now()
    lab.ends(programs, {1}, "error: .*non-finite")
    lab.loses_nothing()


@fault("gradients that stay infinite on one of two ranks, --max_bad_steps 5")
def never_finite_on_a_rank(lab: Lab) -> None:
    prelude = FROM_STEP_10.format(rank=1, what=INFINITE)
    programs = trained(lab, "--max_bad_steps", 5, world=2, prelude=prelude)
    lab.now()
    lab.ends(programs, {1}, "error: .*non-finite")
    lab.loses_nothing(2)


@fault("the last step of a run is one of many that are skipped")
def ends_while_skipping(lab: Lab) -> None:
    programs = trained(lab, prelude=FROM_STEP_10.format(rank=0, what=INFINITE))
    lab.ends(programs, {1}, "", within=None)
    lab.loses_nothing()


# ------------------------------------------------------------------------------------------ drawing and starting


@fault("an exception while a grid is drawn")
def exception_while_drawing(lab: Lab) -> None:
    prelude = """
import opendit.training.drawing as drawing
def fails(*_, **__): raise RuntimeError("bit by a fault")
drawing.SamplingEngine = fails
"""
    programs = lab.train(*PICTURES, prelude=prelude)
    lab.ends(programs, {1}, "error: .*bit by a fault", tracebacks=True, within=None)
    lab.loses_nothing()


@fault("the port of the ranks is used by another program")
def used_port(lab: Lab) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        ranks: dict[str, Any] = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", **address)
        lab.refused(lab.train(**ranks), "error: .*port")


BAD_WORLDS = {
    "world_size_abc": dict(WORLD_SIZE="abc", RANK="0"),
    "rank_above_world": dict(WORLD_SIZE="2", RANK="5", LOCAL_RANK="5", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"),
    "world_size_0": dict(WORLD_SIZE="0", RANK="0"),
    "rank_is_missing": dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512"),
    "port_xyz": dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="xyz"),
}


def bad_world(variables: dict[str, str]):
    return lambda lab: lab.refused(lab.train(**variables), "error: .*(WORLD_SIZE|RANK|MASTER_PORT)")


for _name, _variables in BAD_WORLDS.items():
    _shown = " ".join(f"{key}={value}" for key, value in _variables.items() if key[0] in "RWMP")
    fault(f"environment: {_shown}", name=_name)(bad_world(_variables))
