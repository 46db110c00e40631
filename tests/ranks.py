"""Runs a function on several gloo processes and brings its results back."""

import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _child(rank: int, world: int, port: int, folder: str, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
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
    # Without the tear-down of gloo and of the interpreter: gloo's threads now and then abort in it ("terminate
    # called without an active exception"), after all the work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(world: int, function: Callable, *args) -> list:
    """``[function(mesh, *args) on rank 0, on rank 1, ...]``; the function must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_child, (world, _free_port(), folder, function, args), nprocs=world)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]
