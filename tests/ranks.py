"""Run a function on several gloo processes and return its results.

A new interpreter needs 5 s to import torch and Colossal-AI. So without a GPU, ranks are forked from a process that has
only imported these. With a GPU, forking is impossible. In Triton's interpreter, ranks are forked from the test process.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp

from opendit.kernels.common import interpreting


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Surroundings:
    """The environment, stdout and stderr of a process, which unpickling restores in another process.

    A forked rank needs this, because its parent was started during another test.
    """

    def __reduce__(self):
        return _surround, (dict(os.environ), DupFd(1), DupFd(2))


def _surround(environment: dict[str, str], output: DupFd, errors: DupFd) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.detach(), 1)
    os.dup2(errors.detach(), 2)


def _child(rank: int, world: int, port: int, folder: str, _, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    np.random.seed()  # otherwise all forks would have the same random state
    torch.set_num_threads(1)
    from opendit.parallel.mesh import init_mesh

    try:
        result = function(init_mesh(), *args)
    except BaseException:
        traceback.print_exc()
        raise
    partial = Path(folder, f"{rank}.partial")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder, str(rank)))
    while not all(Path(folder, str(other)).exists() for other in range(world)):
        time.sleep(0.01)
    # Exit without tearing down gloo and the interpreter, because gloo's threads sometimes abort then ("terminate
    # called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def several_programs() -> None:
    """Let this rank run several programs: they share one process group, and an error that ends a program does not end
    the process."""
    from opendit.parallel import supervisor

    supervisor.close_mesh = lambda: None
    supervisor.end_process = sys.exit


def context(fresh: bool = False) -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context that starts ranks. ``fresh`` starts each rank in a new interpreter."""
    if fresh or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    if interpreting():  # a process of a few files and one thread (tests/kernels/test_interpreter.py)
        return multiprocessing.get_context("fork")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["tests.preload"])
    return chosen


def run_ranks(world: int, function: Callable, *args, fresh: bool = False) -> list:
    """Return ``[function(mesh, *args) on rank 0, on rank 1, ...]``; the function must be importable.

    ``fresh`` starts every rank in a new interpreter, where sets of strings have another order.
    """
    how = context(fresh).get_start_method()
    for attempt in range(5):
        with tempfile.TemporaryDirectory() as folder:
            given = (world, free_port(), folder, _Surroundings(), function, args)
            try:
                mp.start_processes(_child, given, nprocs=world, start_method=how)
            except mp.ProcessRaisedException as error:
                # Another program, such as a parallel test, has taken the port since it was chosen.
                if attempt < 4 and "is used by another program on this machine" in str(error):
                    continue
                raise
            return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]
