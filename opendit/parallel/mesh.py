"""Groups of processes: the mesh of a run, the start of torch.distributed, and a group for small messages.

The module works under ``torchrun`` (which sets RANK, WORLD_SIZE, LOCAL_RANK, ...) and in a single process without it.
"""

import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from opendit.config.parallel_sizes import (
    AXES,
    ParallelDims,
    Place,
    check_cfg_parallel,
    check_sequence_parallel,
    check_tensor_parallel_size,
    find_place,
    grid_groups,
)
from opendit.kernels.recording import end_recordings
from opendit.parallel.collectives import Group

logger = logging.getLogger(__name__)

# Computation waits for messages in these groups. Separate process groups, with high-priority streams on a GPU, keep the
# messages from queueing behind gradients.
PRIORITY = ("sp", "tp", "ep")
TIMEOUT = timedelta(minutes=30)  # limit for a collective, after which the run fails


@dataclass(frozen=True)
class Mesh:
    """A process and its named process groups. :class:`opendit.config.parallel_sizes.ParallelDims` lists the names.

    Ranks of a pipeline (``pp``) have different blocks. Ranks of a sequence group (``sp``) have different tokens. Ranks
    of a tensor-parallel group (``tp``) have different slices of every layer. The ranks of such a group see the same
    samples. Data-parallel ranks see different samples. By default all ranks are data parallel.

    All ranks create a group at its first use, because every group costs start-up time and GPU memory.
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
        return self.dims.sp

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        return self.group("sp")

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel index. Ranks with the same index see the same samples."""
        return self.coordinate("dp")

    @property
    def dp_size(self) -> int:
        return self.dims.size("dp")

    @property
    def tp_size(self) -> int:
        return self.dims.tp

    @property
    def pp_size(self) -> int:
        return self.dims.pp

    @property
    def pp_rank(self) -> int:
        return self.coordinate("pp")

    @property
    def sharing(self) -> int:
        return self.dims.pp * self.dims.sp * self.dims.tp

    @property
    def leads_sharing(self) -> bool:
        return not any(self.coordinate(axis) for axis in ("pp", "sp", "tp"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def coordinate(self, name: str) -> int:
        return self.dims.coordinate(name, self.rank)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return this rank's group ``name``; None for a group of one rank. All ranks must make the first call, because
        it creates the groups."""
        size = self.dims.size(name)
        if size == 1:
            return None
        if size == self.world_size and name not in PRIORITY:
            return dist.group.WORLD
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device, priority=name in PRIORITY)
        return self.groups[name]

    def own_group(self, name: str) -> dist.ProcessGroup:
        """Like :meth:`group`, but return a group of one rank instead of None. Some libraries treat None as all
        ranks."""
        if (group := self.group(name)) is not None:
            return group
        if name not in self.groups:
            self.groups[name] = _new_group(self.dims.groups(name), self.device)
        return self.groups[name]

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Make a ``DeviceMesh`` of all ranks. Its dimensions are the groups ``names``, outer to inner; by default the
        axes with a size above 1. Call on all ranks. Raises ValueError if these groups do not form a grid."""
        names = names or tuple(axis for axis in AXES if self.dims.size(axis) > 1) or ("dp_shard",)
        sizes = [self.dims.size(name) for name in names]
        for axis, name in enumerate(names):
            grid = grid_groups(sizes, [axis]) if math.prod(sizes) == self.world_size else None
            if grid is None or sorted(grid) != sorted(self.dims.groups(name)):
                raise ValueError(f"{' x '.join(names)} is no grid of the {self.world_size} ranks of {self.dims}")
        # init_device_mesh would create every group at once, and without the priority for PRIORITY
        groups = [self.own_group(name) for name in names]
        ranks = torch.arange(self.world_size, dtype=torch.int, device="cpu").view(sizes)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)

    def barrier(self) -> None:
        if self.world_size > 1:
            devices = [self.local_rank] if self.device.type == "cuda" else None
            dist.barrier(group=self.group("world"), device_ids=devices)

    def sum(self, value: Tensor, over: str = "world") -> Tensor:
        """Sum ``value`` over the ranks of a group, in place on all of them."""
        if (group := self.group(over)) is not None:
            dist.all_reduce(value, group=group)
        return value

    def least(self, value: float) -> float:
        if self.world_size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group("world"))
        return found.item()

    def divided(self, dims: ParallelDims) -> "Mesh":
        """Return a mesh of these ranks with the groups of ``dims``. Call on all ranks."""
        mesh = replace(self, dims=dims, groups={})
        for name in PRIORITY:
            mesh.group(name)  # create the groups now, while all ranks are in this call
        return mesh

    def split_sequence(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Arrange every sequence group as a grid with ``inner`` neighbouring ranks in each row. Return this rank's (row
        group, column group). Call on all ranks."""
        sizes = [self.dims.size(axis) for axis in AXES]
        place = AXES.index("sp")
        sizes[place : place + 1] = [self.dims.sp // inner, inner]
        grids = (grid_groups(sizes, [axis]) for axis in (place + 1, place))
        near, apart = (_new_group(grid, self.device, priority=True) for grid in grids)
        return near, apart

    def links(self, around: bool) -> dict[tuple[int, bool], dist.ProcessGroup]:
        """Make groups of neighbouring ranks in a pipeline, with separate groups for both directions. Call on all ranks.
        Return the groups by (index of the first neighbour, True for messages to the next rank or False for messages
        back). around: True if the last rank and the first rank are neighbours, too."""
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
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group("world"), device=self.device)
        return box[0]


def init_mesh(
    *,
    sequence_parallel: int = 1,
    tensor_parallel: int = 1,
    dims: ParallelDims | None = None,
    group_of_one: bool = True,
) -> Mesh:
    """Start torch.distributed (nccl on GPUs, gloo on CPUs) and return this process's mesh.

    Args:
        sequence_parallel: number of ranks that divide a sequence's tokens.
        tensor_parallel: number of ranks that divide every layer.
        dims: replaces both sizes.
        group_of_one: True to make a process group for a single process, too. Engines need a process group.

    Raises ValueError if this machine has more processes than GPUs, the sizes do not fit the number of processes, or
    the processes can't meet.
    """
    place = find_place()
    rank, world, local = place.rank, place.world_size, place.local_rank
    if dims is None:
        check_sequence_parallel(sequence_parallel, world)
        check_tensor_parallel_size(tensor_parallel, sequence_parallel, world)
        dims = ParallelDims.fill(world, sp=sequence_parallel, tp=tensor_parallel)
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
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    return Mesh(rank, world, local, device).divided(dims)


def _new_group(groups: list[list[int]], device: torch.device, priority: bool = False) -> dist.ProcessGroup:
    """Make ``groups`` and return this rank's group. Every rank must be in one group and call this function. priority:
    use high-priority streams on a GPU, so that a running matrix product does not delay a collective."""
    options = None
    if priority and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(groups, pg_options=options)[0])


def close_mesh() -> None:
    """Free CUDA graphs and shut torch.distributed down. Otherwise NCCL warns about leaks at exit."""
    if dist.is_initialized():
        end_recordings()
        dist.destroy_process_group()
    part()


# ------------------------------------------------------------------------------------------ how processes meet

PATIENCE = 300.0  # seconds to wait for all processes to start
UNREACHABLE = 60.0  # seconds to try to reach a machine that does not answer
TELL = 15.0  # seconds before a waiting process logs the missing processes

_met: tuple[Place, dist.Store] | None = None


def meet(place: Place) -> dist.Store:
    """Wait for all processes of the run and return their common store. Later calls with an equal ``place`` return this
    store. A single process gets a new store at every call. Raises ValueError if rank 0 can't be reached, its port is
    taken, or a process does not arrive."""
    global _met
    if place.world_size == 1:
        return dist.HashStore()
    if _met is None or _met[0] != place:  # an earlier run in this process may have ended without part()
        _met = place, _meet_others(place)
    return _met[1]


def part() -> None:
    global _met
    _met = None


def _meet_others(place: Place) -> dist.Store:
    with_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the store is in torchrun's agent process
    if place.rank > 0 or with_agent:
        _reach(place)
    try:
        with _quiet():
            patience = timedelta(seconds=PATIENCE)
            if with_agent:
                store, *_ = next(rendezvous("env://", timeout=patience))
            else:  # rendezvous() would not name the missing processes
                where, serves = (place.address, place.port), place.rank == 0
                store = dist.TCPStore(*where, None, serves, timeout=patience, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        raise ValueError(_why(error, place)) from error
    store = dist.PrefixStore("opendit", store)
    store.set(f"here/{place.rank}", f"{socket.gethostname()} {os.getpid()}")
    keys = [f"here/{rank}" for rank in range(place.world_size)]
    for patience in (TELL, PATIENCE - TELL):
        with contextlib.suppress(RuntimeError):  # waiting timed out
            store.wait(keys, timedelta(seconds=patience))
            return store
        missing = ", ".join(key.removeprefix("here/") for key in keys if not store.check([key]))
        if place.rank == 0 and missing:
            logger.warning(f"note: rank 0 waits for rank {missing} of {place.world_size} processes")
    raise ValueError(
        f"rank {missing} of the {place.world_size} processes did not come within {PATIENCE:.0f} s: start all of them "
        f"(RANK=0 to {place.world_size - 1}), or correct WORLD_SIZE"
    )


def _reach(place: Place) -> None:
    """Wait until rank 0's port accepts connections. Rank 0 may start later. Raises ValueError on timeout."""
    where = f"MASTER_ADDR={place.address}, MASTER_PORT={place.port}"
    begun, reported = time.monotonic(), False
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except socket.gaierror as error:
            reason, patience = f"no machine of that name is known here ({error.strerror})", 5.0
            if error.errno == socket.EAI_AGAIN:  # temporary error of the name server, so try again
                patience = TELL
        except ConnectionRefusedError:
            reason, patience = "nothing listens there; is rank 0 running?", PATIENCE
        except OSError as error:
            reason, patience = f"it can't be reached ({error.strerror or error})", UNREACHABLE
        waited = time.monotonic() - begun
        if waited >= patience:
            raise ValueError(f"rank {place.rank} looked for rank 0 at {where} for {waited:.0f} s: {reason}")
        if not reported and waited >= TELL:
            reported = True
            logger.warning(f"note: rank {place.rank} waits for rank 0 at {where}: {reason}")
        time.sleep(0.2)


def _why(error: Exception, place: Place) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"MASTER_PORT={place.port} is used by another program on this machine (another run?); choose another port "
            "(torchrun --master_port), or let torchrun --standalone do it"
        )
    if "EACCES" in text or "permission denied" in text.lower():
        return f"MASTER_PORT={place.port} may not be used by this user; choose one above 1023"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return (
        f"rank {place.rank} could not meet the others at MASTER_ADDR={place.address}, MASTER_PORT={place.port}: {first}"
    )


@contextlib.contextmanager
def _quiet():
    """Silence stderr, where torch's C++ code prints a stack trace if a port is in use."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


# ------------------------------------------------------------------------------------------ small messages

Result = TypeVar("Result")


class ControlGroup:
    """Gloo group of all ranks for one thread's small messages. Messages do not wait for the GPU. All ranks must create
    their control groups in the same order. Ranks wait for each other for an hour at most."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if mesh.world_size > 1 else None
        self._group = cast("dist.ProcessGroup | None", group)  # not None if there are several ranks

    def gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values = [None] * self.mesh.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], Result], *errors: type[Exception]) -> Result:
        """Return the result of ``work()`` on this rank. If any rank's call raises one of ``errors``, raise the first
        rank's error on all ranks."""
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
        """Start to compute the maximum of ``number`` over all ranks. Return a function that waits for the maximum."""
        if self._group is None:
            return lambda: number
        box = torch.tensor([number], dtype=torch.int32)
        work: Any = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(box.item())

        return answer


# ------------------------------------------------------------------------------------------ replicas in sampling
#
# Each replica draws different samples. With --cfg_parallel, a replica has two groups of neighbouring ranks: the first
# computes the conditional half of guidance, the second the unconditional half. The order of ranks, outer to inner, is:
# data-parallel index, half of guidance, sequence index, tensor-parallel index.


@dataclass(frozen=True)
class Replica:
    """A group of ranks that draw samples together. All ranks get all latents, and each rank decodes some of them."""

    number: int  # index of this replica
    count: int  # number of replicas
    leads: bool  # True on the rank that writes the files
    halves: Group | None  # this rank and its partner in the other half of guidance; None without cfg_parallel
    ranks: Group | None = None  # all ranks of this replica; None if the replica has one rank


def make_replicas(mesh: Mesh, cfg_parallel: bool) -> Replica:
    """Return this rank's replica. Call on all ranks. Raises the errors of :func:`check_cfg_parallel`."""
    ranks, halves = mesh.sharing, None
    same = {mesh.sp_size: "sp", mesh.tp_size: "tp"}.get(ranks)  # name of an existing group with exactly these ranks
    group = Group.of(mesh.group(same)) if same and ranks > 1 else None
    if cfg_parallel:
        check_cfg_parallel(mesh.sp_size, mesh.tp_size, mesh.world_size)
        pairs = [[i, i + ranks] for i in range(mesh.world_size) if i // ranks % 2 == 0]
        # Every rank is in exactly one pair, so new_subgroups_by_enumeration returns this rank's pair.
        halves = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(pairs)[0]))
        group = halves if ranks == 1 else None
        ranks *= 2
    if ranks > 1 and group is None:
        replicas = [list(range(first, first + ranks)) for first in range(0, mesh.world_size, ranks)]
        group = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(replicas)[0]))
    return Replica(mesh.rank // ranks, mesh.world_size // ranks, mesh.rank % ranks == 0, halves, group)
