"""Describe this process: the device it drives and its place among the others.

Works under ``torchrun`` (which sets RANK, WORLD_SIZE, LOCAL_RANK, ...) and without it (one process).
"""

import datetime
import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opendit.config.parallel_sizes import (
    AXES,
    ParallelDims,
    check_expert_parallel_size,
    check_pipeline_parallel_size,
    check_replicate,
    check_sequence_parallel,
    check_tensor_parallel_size,
    find_place,
    grid_groups,
)
from opendit.kernels.recording import end_recordings
from opendit.parallel.rendezvous import meet, part

# Their communication lies in the way of computation, and must not queue behind that of the gradients: they have groups
# of their own even where those are all ranks, and on a GPU streams of high priority.
PRIORITY = ("sp", "tp", "ep")


@dataclass(frozen=True)
class Mesh:
    """A process and the named groups it talks to (their names: :class:`opendit.config.parallel_sizes.ParallelDims`).

    Ranks that differ in ``pp``, ``sp`` or ``tp`` alone share their samples: those of a pipeline (``pp``) have different
    blocks of the model, those of a sequence group (``sp``) different tokens, those of a tensor-parallel group (``tp``)
    different parts of every layer. Data-parallel ranks see different samples.

    A group is made when it is first asked for, by all ranks alike: on GPUs a communicator takes start-up time and
    memory, and a run uses few of the names.

    dims: sizes of the mesh; without them all ranks are data parallel. groups: those made so far.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dims: ParallelDims = field(default=None)  # pyright: ignore[reportArgumentType, reportAssignmentType] made below
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dims is None:
            object.__setattr__(self, "dims", ParallelDims(dp_shard=self.world_size))
        self.dims.check(self.world_size)

    @property
    def sp_size(self) -> int:
        """Ranks that share a sequence."""
        return self.dims.sp

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """This rank's sequence group; None for groups of one."""
        return self.group("sp")

    @property
    def dp_rank(self) -> int:
        """Ranks of one number see the same samples."""
        return self.coordinate("dp")

    @property
    def dp_size(self) -> int:
        """The number of ranks, or groups of ranks, that see different samples."""
        return self.dims.size("dp")

    @property
    def tp_size(self) -> int:
        """Ranks that divide every layer."""
        return self.dims.tp

    @property
    def pp_size(self) -> int:
        """Ranks of a pipeline."""
        return self.dims.pp

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.coordinate("pp")

    @property
    def sharing(self) -> int:
        """Ranks that see the same samples, this one among them."""
        return self.dims.pp * self.dims.sp * self.dims.tp

    @property
    def leads_sharing(self) -> bool:
        """True if this rank is the first of those that see the same samples."""
        return not any(self.coordinate(axis) for axis in ("pp", "sp", "tp"))

    @property
    def is_main(self) -> bool:
        """True if this rank prints, and writes what is written once."""
        return self.rank == 0

    def coordinate(self, name: str) -> int:
        """This rank's place in its group of this name."""
        return self.dims.coordinate(name, self.rank)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """This rank's group of this name; None for groups of one. The first call makes it: collective over all ranks.

        Groups of all ranks are the default group, but those of PRIORITY."""
        size = self.dims.size(name)
        if size == 1:
            return None
        if size == self.world_size and name not in PRIORITY:
            return dist.group.WORLD
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device, priority=name in PRIORITY)
        return self.groups[name]

    def own_group(self, name: str) -> dist.ProcessGroup:
        """:meth:`group`, and where that has no other rank in it a group of this one, for libraries that take none to
        mean all ranks."""
        if (group := self.group(name)) is not None:
            return group
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device)
        return self.groups[name]

    def device_mesh(self, *names: str) -> DeviceMesh:
        """torch's mesh of all ranks along these groups, outer to inner; without names along the axes above 1. What it
        communicates goes over the groups of :meth:`group`. Collective over all ranks.

        ``("dp_replicate", "fsdp", "tp")``, say, has what ``fully_shard`` and tensor parallelism slice.

        Raises:
            ValueError: the groups are not a grid of all ranks in this order.
        """
        names = names or tuple(axis for axis in AXES if self.dims.size(axis) > 1) or ("dp_shard",)
        sizes = [self.dims.size(name) for name in names]
        for axis, name in enumerate(names):
            grid = grid_groups(sizes, [axis]) if math.prod(sizes) == self.world_size else None
            if grid is None or sorted(grid) != sorted(self.dims.groups(name)):
                raise ValueError(f"{' x '.join(names)} is no grid of the {self.world_size} ranks of {self.dims}")
        # Not init_device_mesh: it makes every group at once, and without the options of PRIORITY.
        groups = [self.own_group(name) for name in names]
        ranks = torch.arange(self.world_size, dtype=torch.int, device="cpu").view(sizes)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            devices = [self.local_rank] if self.device.type == "cuda" else None
            dist.barrier(group=self.group("world"), device_ids=devices)

    def sum(self, value: Tensor, over: str = "world") -> Tensor:
        """Sum over the ranks of a group, in place; every one of them gets the result."""
        if (group := self.group(over)) is not None:
            dist.all_reduce(value, group=group)
        return value

    def least(self, value: float) -> float:
        """The smallest of all ranks' values; every one of them gets it."""
        if self.world_size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group("world"))
        return found.item()

    def divided(self, dims: ParallelDims) -> "Mesh":
        """The same ranks with other groups. Collective."""
        mesh = replace(self, dims=dims, groups={})
        for name in PRIORITY:
            mesh.group(name)  # now, when no rank can be late
        return mesh

    def split_sequence(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """This rank's sequence group as a grid: the ``inner`` ranks next to each other, and those ``inner`` apart.
        Collective over all ranks."""
        sizes = [self.dims.size(axis) for axis in AXES]
        place = AXES.index("sp")
        sizes[place : place + 1] = [self.dims.sp // inner, inner]
        grids = (grid_groups(sizes, [axis]) for axis in (place + 1, place))
        near, apart = (_new_group(grid, self.device, priority=True) for grid in grids)
        return near, apart

    def links(self, around: bool) -> dict[tuple[int, bool], dist.ProcessGroup]:
        """The groups in which neighbours of a pipeline send to each other, by the place of the first of the two and by
        direction: (place, True) from it to the next, (place, False) back. ``around``: between the last and the first
        rank, too. (Of links that this rank has no part in there is None.) Collective over all ranks."""
        pipelines, found = self.dims.groups("pp"), {}
        for place in range(self.pp_size if around else self.pp_size - 1):
            pairs = [[ranks[place], ranks[(place + 1) % self.pp_size]] for ranks in pipelines]
            for forward in (True, False):
                name = f"pp {place} {'forward' if forward else 'back'}"
                if name not in self.groups:
                    self.groups[name] = _new_group(pairs, self.device)
                found[place, forward] = self.groups[name]
        return found

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank (any picklable object)."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group("world"), device=self.device)
        return box[0]


def init_mesh(
    timeout_minutes: float = 30.0,
    *,
    sequence_parallel: int = 1,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    pipeline_parallel: int = 1,
    replicate: int = 1,
    dims: ParallelDims | None = None,
    group_of_one: bool = True,
) -> Mesh:
    """Starts torch.distributed (nccl on GPUs, gloo on CPUs) and returns this process's mesh.

    Args:
        sequence_parallel: ranks that share a sequence. tensor_parallel: ranks that divide every layer.
            pipeline_parallel: ranks among which the blocks are divided. The others are data parallel.
        expert_parallel: ranks, of any of these, that have different experts.
        replicate: copies of the sharded model.
        dims: sizes of the mesh, instead of these.
        group_of_one: whether a process that is alone has a process group, too. Engines want one; a run that never
            communicates starts sooner without.

    Raises:
        ValueError: more processes on this machine than GPUs, a number of them that these sizes do not divide or that is
            not that of dims, or variables of the environment with which the processes can't meet.
    """
    place = find_place()
    rank, world, local = place.rank, place.world_size, place.local_rank
    check_sequence_parallel(sequence_parallel, world)
    check_tensor_parallel_size(tensor_parallel, sequence_parallel, world)
    check_pipeline_parallel_size(pipeline_parallel, sequence_parallel, tensor_parallel, world)
    check_replicate(replicate, sequence_parallel * tensor_parallel * pipeline_parallel, world)
    inner = sequence_parallel, tensor_parallel
    check_expert_parallel_size(expert_parallel, *inner, replicate, world, pipeline_parallel)
    sizes = dict(pp=pipeline_parallel, sp=sequence_parallel, tp=tensor_parallel, dp_replicate=replicate)
    # Ranks that divide every layer divide its experts, too.
    sizes["ep"] = expert_parallel if tensor_parallel == 1 else 1
    dims = dims or ParallelDims.fill(world, **sizes)
    dims.check(world)
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU, there are {torch.cuda.device_count()}; "
                "lower torchrun's --nproc_per_node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized() and (group_of_one or world > 1):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("default", meet(place)),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
    return Mesh(rank, world, local, device).divided(dims)


def _new_group(groups: list[list[int]], device: torch.device, priority: bool = False) -> dist.ProcessGroup:
    """Makes these groups, which have every rank once, and returns this rank's; collective over all ranks. ``priority``:
    on a GPU its kernels go before others that wait for multiprocessors, for a matrix product under way would let it
    begin only when it ends itself."""
    options = None
    if priority and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(groups, pg_options=options)[0])


def close_mesh() -> None:
    """Ends torch.distributed, and with it the CUDA graphs of this process; without it NCCL warns about leaked groups at
    exit."""
    if dist.is_initialized():
        end_recordings()
        dist.destroy_process_group()
    part()
