"""Who this process is: the device it drives and its place among the others.

Works under ``torchrun`` (which sets RANK, WORLD_SIZE, LOCAL_RANK, ...) and without it (one process).
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.rendezvous import meet, part
from opendit.parallel.sizes import check_sequence_parallel, find_place


@dataclass(frozen=True)
class Mesh:
    """A process and the groups it talks to.

    Data parallel x sequence parallel: the ``sp_size`` ranks next to each other are a sequence group and share their
    samples; data-parallel ranks, one for each group, see different samples.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    sp_size: int = 1
    sp_group: dist.ProcessGroup | None = None  # of this rank's sequence group; None for groups of one

    @property
    def sp_rank(self) -> int:
        """This rank's place in its sequence group."""
        return self.rank % self.sp_size

    @property
    def dp_rank(self) -> int:
        """The number of this rank's sequence group: ranks of one number see the same samples."""
        return self.rank // self.sp_size

    @property
    def dp_size(self) -> int:
        """How many sequence groups there are."""
        return self.world_size // self.sp_size

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes what is written once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place; every rank gets the result."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def split_sequence(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """This rank's sequence group as a grid: the ``inner`` ranks next to it, and those ``inner`` apart. Collective
        over all ranks."""
        first = range(0, self.world_size, self.sp_size)
        rows = [[*range(i, i + inner)] for i in range(0, self.world_size, inner)]
        columns = [[*range(start + i, start + self.sp_size, inner)] for start in first for i in range(inner)]
        options = _eager_streams(self.device)
        return tuple(dist.new_subgroups_by_enumeration(grid, pg_options=options)[0] for grid in (rows, columns))

    def broadcast_object(self, value):
        """Rank 0's ``value`` on every rank (any picklable object)."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def init_mesh(timeout_minutes: float = 30.0, *, sequence_parallel: int = 1) -> Mesh:
    """Starts torch.distributed (nccl on GPUs, gloo on CPUs) and returns this process's mesh.

    sequence_parallel: ranks that share a sequence. They get a process group of their own even where they are all there
    are: its communication must not queue behind that of the gradients.

    Raises:
        ValueError: more processes on this machine than GPUs, a number that sequence_parallel does not divide, or
            variables of the environment with which the processes can't meet.
    """
    place = find_place()
    rank, world, local = place.rank, place.world_size, place.local_rank
    check_sequence_parallel(sequence_parallel, world)
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
            store=dist.PrefixStore("default", meet(place)),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
    sp_group = None
    if sequence_parallel > 1:
        groups = [[*range(i, i + sequence_parallel)] for i in range(0, world, sequence_parallel)]
        sp_group, _ = dist.new_subgroups_by_enumeration(groups, pg_options=_eager_streams(device))
    return Mesh(rank, world, local, device, sequence_parallel, sp_group)


def _eager_streams(device: torch.device) -> object | None:
    """Options of a group whose communication lies in the way of computation: on a GPU its kernels go before others that
    wait for multiprocessors, for a matrix product under way would let it begin only when it ends itself."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def close_mesh() -> None:
    """Ends torch.distributed; without it NCCL warns about leaked groups at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    part()
