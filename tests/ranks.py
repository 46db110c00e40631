"""Runs a function on several gloo processes and brings its results back."""

import os
import pickle
import socket
import tempfile
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
    from opendit.parallel.mesh import close_mesh, init_mesh

    try:
        result = function(init_mesh(), *args)
    except BaseException:
        traceback.print_exc()
        raise
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    close_mesh()


def run_ranks(world: int, function: Callable, *args) -> list:
    """``[function(mesh, *args) on rank 0, on rank 1, ...]``; the function must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_child, (world, _free_port(), folder, function, args), nprocs=world)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]
