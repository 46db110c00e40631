"""Who this process is: the device it drives and its place among the others.

Works under ``torchrun`` (which sets RANK, WORLD_SIZE, LOCAL_RANK, ...) and without it (one process).
"""

import datetime
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Mesh:
    """A process and the groups it talks to.

    Data-parallel ranks see different samples; the ranks of one sequence-parallel group share theirs.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place; every rank gets the result."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def broadcast_object(self, value):
        """Rank 0's ``value`` on every rank (any picklable object)."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def environment_world_size() -> int:
    """Number of processes, before anything is initialised."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init_mesh(timeout_minutes: float = 30.0) -> Mesh:
    """Starts torch.distributed (nccl on GPUs, gloo on CPUs) and returns this process's mesh.

    Raises:
        ValueError: more processes on this machine than GPUs.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    rank, world, local = (int(os.environ.get(k, "0")) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                "lower torchrun's --nproc_per_node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
    return Mesh(rank, world, local, device)


def close_mesh() -> None:
    """Ends torch.distributed; without it NCCL warns about leaked groups at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
