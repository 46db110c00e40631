"""Groups of processes: the mesh of a run, torch.distributed, and small messages beside training.

Works under ``torchrun`` (which sets RANK, WORLD_SIZE, LOCAL_RANK, ...) and without it (one process).
"""

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

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

# Computation waits for the communication of these groups, which must not queue behind that of gradients: they have
# separate groups even if those contain all ranks, and on a GPU streams of high priority.
PRIORITY = ("sp", "tp", "ep")


@dataclass(frozen=True)
class Mesh:
    """A process and the named groups it talks to (their names: :class:`opendit.config.parallel_sizes.ParallelDims`).

    Ranks that differ only in ``pp``, ``sp`` or ``tp`` share their samples: those of a pipeline (``pp``) have different
    blocks of the model, those of a sequence group (``sp``) different tokens, those of a tensor-parallel group (``tp``)
    different parts of every layer. Data-parallel ranks see different samples.

    A group is made when it is first asked for, by all ranks: on GPUs a communicator takes start-up time and memory, and
    a run uses few of the names.

    Attributes:
        rank: of ``world_size`` processes.
        local_rank: among the processes of this machine.
        device: of this process.
        dims: sizes of the mesh; without them all ranks are data parallel.
        groups: those made so far.
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
        """Number of ranks that share a sequence."""
        return self.dims.sp

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """This rank's sequence group; None for groups of one."""
        return self.group("sp")

    @property
    def dp_rank(self) -> int:
        """Index of this rank's samples: ranks with the same number see the same samples."""
        return self.coordinate("dp")

    @property
    def dp_size(self) -> int:
        """Number of ranks, or groups of ranks, that see different samples."""
        return self.dims.size("dp")

    @property
    def tp_size(self) -> int:
        """Number of ranks that divide every layer."""
        return self.dims.tp

    @property
    def pp_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self.dims.pp

    @property
    def pp_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self.coordinate("pp")

    @property
    def sharing(self) -> int:
        """Number of ranks that see the same samples, including this one."""
        return self.dims.pp * self.dims.sp * self.dims.tp

    @property
    def leads_sharing(self) -> bool:
        """True if this rank is the first of those that see the same samples."""
        return not any(self.coordinate(axis) for axis in ("pp", "sp", "tp"))

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, and writes what is written once."""
        return self.rank == 0

    def coordinate(self, name: str) -> int:
        """Return the index of this rank in its group of this name."""
        return self.dims.coordinate(name, self.rank)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return this rank's group of this name; None for groups of one. The first call makes it: collective over all
        ranks.

        Groups of all ranks are the default group, except those of PRIORITY.
        """
        size = self.dims.size(name)
        if size == 1:
            return None
        if size == self.world_size and name not in PRIORITY:
            return dist.group.WORLD
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device, priority=name in PRIORITY)
        return self.groups[name]

    def own_group(self, name: str) -> dist.ProcessGroup:
        """Return :meth:`group`, or a group of this rank alone instead of None, for libraries that take None to mean all
        ranks."""
        if (group := self.group(name)) is not None:
            return group
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device)
        return self.groups[name]

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Make torch's mesh of all ranks along these groups, outer to inner; without names along the axes above 1. It
        communicates over the groups of :meth:`group`. Collective over all ranks.

        ``("dp_replicate", "fsdp", "tp")``, for example, has what ``fully_shard`` and tensor parallelism slice.

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
        """Wait for all ranks."""
        if self.world_size > 1:
            devices = [self.local_rank] if self.device.type == "cuda" else None
            dist.barrier(group=self.group("world"), device_ids=devices)

    def sum(self, value: Tensor, over: str = "world") -> Tensor:
        """Sum ``value`` over the ranks of a group, in place on all of them."""
        if (group := self.group(over)) is not None:
            dist.all_reduce(value, group=group)
        return value

    def least(self, value: float) -> float:
        """Return the smallest value of all ranks, on every rank."""
        if self.world_size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group("world"))
        return found.item()

    def divided(self, dims: ParallelDims) -> "Mesh":
        """Return a mesh of the same ranks with other groups. Collective."""
        mesh = replace(self, dims=dims, groups={})
        for name in PRIORITY:
            mesh.group(name)  # now, when no rank can be late
        return mesh

    def split_sequence(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Divide this rank's sequence group as a grid. Return the group of ``inner`` neighbouring ranks, and the group
        of ranks that are ``inner`` apart. Collective over all ranks."""
        sizes = [self.dims.size(axis) for axis in AXES]
        place = AXES.index("sp")
        sizes[place : place + 1] = [self.dims.sp // inner, inner]
        grids = (grid_groups(sizes, [axis]) for axis in (place + 1, place))
        near, apart = (_new_group(grid, self.device, priority=True) for grid in grids)
        return near, apart

    def links(self, around: bool) -> dict[tuple[int, bool], dist.ProcessGroup]:
        """Make the groups in which neighbours of a pipeline send to each other. Collective over all ranks.

        Args:
            around: whether the last and the first rank are neighbours, too.

        Returns:
            (index of the first of two neighbours, True from it to the next or False back) -> group; None for pairs
                without
            this rank.
        """
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
        """Return rank 0's ``value`` (any picklable object) on every rank."""
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
    """Start torch.distributed (nccl on GPUs, gloo on CPUs) and return this process's mesh.

    Args:
        timeout_minutes: of collectives.
        sequence_parallel: ranks that share a sequence.
        tensor_parallel: ranks that divide every layer.
        expert_parallel: ranks, of any of these, that have different experts.
        pipeline_parallel: ranks among which the blocks are divided. All further ranks are data parallel.
        replicate: copies of the sharded model.
        dims: sizes of the mesh, instead of these.
        group_of_one: whether a single process has a process group, too. Engines want one; a run that never communicates
            starts sooner without.

    Raises:
        ValueError: more processes on this machine than GPUs, a number of processes that these sizes do not divide or
            that is not that of ``dims``, or environment variables with which the processes can't meet.
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
    """Make these groups, which have every rank once, and return this rank's; collective over all ranks.

    priority: on a GPU its kernels precede others that wait for multiprocessors. Otherwise a matrix product that runs
    already would delay a collective until its own end.
    """
    options = None
    if priority and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(groups, pg_options=options)[0])


def close_mesh() -> None:
    """Shut torch.distributed down, and with it the CUDA graphs of this process; otherwise NCCL warns about leaked
    groups at exit."""
    if dist.is_initialized():
        end_recordings()
        dist.destroy_process_group()
    part()


Result = TypeVar("Result")


class ControlGroup:
    """A gloo group of all ranks for the use of one thread. Its messages neither wait for the GPU nor mix with the
    collectives of training. Build it on every rank, in the same order.

    Args:
        patience_minutes: how long ranks may wait for each other.
    """

    def __init__(self, mesh: Mesh, patience_minutes: float = 60.0):
        self.mesh = mesh
        timeout = datetime.timedelta(minutes=patience_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout) if mesh.world_size > 1 else None
        self._group = cast("dist.ProcessGroup | None", group)  # all ranks are in it

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (any picklable object), in rank order, on every rank."""
        if self._group is None:
            return [value]
        values = [None] * self.mesh.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], Result], *errors: type[Exception]) -> Result:
        """Return this rank's ``work()``. If it raises one of ``errors`` on any rank, raise the error of the first such
        rank on all."""
        result = problem = None
        try:
            result = work()
        except errors as error:
            problem = error
        for found in self.gather(problem):
            if found is not None:
                raise found
        return cast(Result, result)

    def start_largest(self, number: int) -> Callable[[], int]:
        """Start to find the largest ``number`` of all ranks. The function returned waits for it and returns it, on
        every rank."""
        if self._group is None:
            return lambda: number
        box = torch.tensor([number], dtype=torch.int32)
        work: Any = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(box.item())

        return answer
