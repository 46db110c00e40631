"""Read this process's rank and the number of processes, and check parallel sizes, without torch.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without RANK there is one process. Invalid
variables raise ValueError.
"""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from opendit.config.names import BLOCKS


@dataclass(frozen=True)
class Place:
    """A process's rank in the run and on the machine, the number of processes, and rank 0's address and port."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


def find_place() -> Place:
    """Read this process's ranks from torchrun's variables. Raises ValueError with the variable and the fix."""
    world = environment_world_size()
    if "RANK" not in os.environ:
        if world > 1:
            raise ValueError(
                f"WORLD_SIZE={world} is set but RANK is not: start {world} processes with torchrun, or unset WORLD_SIZE"
            )
        return Place()
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("RANK is set but WORLD_SIZE is not: start the program with torchrun, or unset RANK")
    rank, local = _number("RANK", 0, world - 1, f"with WORLD_SIZE={world}"), _number("LOCAL_RANK", 0, None, default=0)
    if world == 1:
        return Place(rank, world, local)
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise ValueError(f"MASTER_ADDR is not set: {world} processes need the name of rank 0's machine; use torchrun")
    return Place(rank, world, local, address, _number("MASTER_PORT", 1, 65535))


def environment_world_size() -> int:
    """Return WORLD_SIZE, by default 1. Raises ValueError."""
    return _number("WORLD_SIZE", 1, None, default=1)


def environment_node_size() -> int | None:
    """Return the number of processes that torchrun started on this machine, or None. Raises ValueError."""
    return _number("LOCAL_WORLD_SIZE", 1, None) if "LOCAL_WORLD_SIZE" in os.environ else None


def _number(name: str, low: int, high: int | None, where: str = "", default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    wanted = f"a whole number {f'from {low} to {high}' if high is not None else f'of at least {low}'}"
    hint = "it is set by torchrun or by hand; correct or unset it"
    if text is None:
        raise ValueError(f"{name} is not set: it must be {wanted}; start the program with torchrun")
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text} in the environment must be {wanted}: {hint}") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={text} in the environment must be {wanted}{f' {where}' if where else ''}: {hint}")
    return value


AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")  # axes of the mesh, outer to inner
VIEWS = {  # group name -> mesh axes that the group spans
    "dp": ("dp_replicate", "dp_shard"),  # ranks with different samples
    "fsdp": ("dp_shard", "sp"),  # ranks that divide sharded state
    "loss": ("dp_replicate", "dp_shard", "sp"),  # ranks that average losses and gradients
    "world": AXES,
}


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel groups. In the order of ranks, ``pp`` is outermost and ``tp`` innermost.

    Groups are named as in AXES and VIEWS. There are two more: ``ep``, and ``ep_shard`` for ranks with the same experts.
    Raises ValueError if a size is below 1, or ep does not divide dp_shard x sp x tp.

    Attributes:
        pp: pipeline stages.
        dp_replicate: copies of the sharded model.
        dp_shard: ranks that see different samples and divide one copy's state.
        sp: ranks that share a sequence.
        tp: ranks that divide a layer.
        ep: ranks that divide the experts, consecutive within dp_shard x sp x tp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"parallel size {field.name} {size}: must be a whole number above 0")
        inner = self.dp_shard * self.sp * self.tp
        if inner % self.ep:
            raise ValueError(f"parallel size ep {self.ep} does not divide dp_shard x sp x tp, which is {inner}")

    @classmethod
    def fill(cls, world_size: int, **sizes: int) -> "ParallelDims":
        """Return a mesh with these sizes. All remaining ranks are in dp_shard. Raises ValueError."""
        rest = cls(**{**sizes, "ep": 1})
        if world_size % rest.world_size:
            raise ValueError(f"the parallel sizes {rest} do not divide the {world_size} processes")
        return cls(**sizes, dp_shard=world_size // rest.world_size)

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def check(self, world_size: int) -> None:
        if self.world_size != world_size:
            raise ValueError(f"the parallel sizes {self} need {self.world_size} processes and there are {world_size}")

    def size(self, name: str) -> int:
        sizes, axes = self._grid(name)
        return math.prod(sizes[axis] for axis in axes)

    def groups(self, name: str) -> list[list[int]]:
        """Return the ranks of every group called ``name``, in the order of the mesh."""
        return grid_groups(*self._grid(name))

    def coordinate(self, name: str, rank: int) -> int:
        sizes, axes = self._grid(name)
        place = 0
        for axis in axes:
            place = place * sizes[axis] + rank // math.prod(sizes[axis + 1 :]) % sizes[axis]
        return place

    def _grid(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the grid of ranks, outermost first, and the axes that groups called ``name`` span."""
        if name in ("ep", "ep_shard"):
            inner = self.dp_shard * self.sp * self.tp
            return (self.pp, self.dp_replicate, inner // self.ep, self.ep), (3 if name == "ep" else 2,)
        axes = VIEWS.get(name, (name,))
        if not set(axes) <= set(AXES):
            raise KeyError(f"the mesh has no group {name}: there are {', '.join((*AXES, *VIEWS, 'ep', 'ep_shard'))}")
        return tuple(getattr(self, axis) for axis in AXES), tuple(AXES.index(axis) for axis in axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES) + f" (ep {self.ep})"


def grid_groups(sizes: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """Return groups of ranks that differ only along ``axes``. The last axis varies fastest."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]

    def ranks(along: Sequence[int]) -> list[int]:
        ranges = [range(0, sizes[axis] * strides[axis], strides[axis]) for axis in along]
        return [sum(place) for place in itertools.product(*ranges)]

    others = [axis for axis in range(len(sizes)) if axis not in axes]
    return [[first + step for step in ranks(axes)] for first in ranks(others)]


def divide_grid(frames: int, places: int, ranks: int, by_frames: bool = False) -> tuple[int, int]:
    """Choose whether ranks divide a token grid by frames or by spatial positions. A frame has ``places`` positions.

    Return (axis, tokens per rank with padding). On axis 0, a rank has complete frames. On axis 1, a rank has some
    positions in all frames. Axis 1 is chosen if it needs less padding, unless ``by_frames`` is True.
    """
    rows = [-(-frames // ranks) * places] + [-(-places // ranks) * frames] * (not by_frames)
    return rows.index(min(rows)), min(rows)


def check_sequence_parallel(size: int, world_size: int) -> None:
    _check_shares("--sequence_parallel_size", size, {}, world_size)


def check_tensor_parallel_size(size: int, sequence_parallel: int, world_size: int) -> None:
    """Raise ValueError unless ``size`` * ``sequence_parallel`` divides ``world_size``."""
    _check_shares("--tensor_parallel_size", size, {"--sequence_parallel_size": sequence_parallel}, world_size)


def check_pipeline_parallel_size(size: int, sequence_parallel: int, tensor_parallel: int, world_size: int) -> None:
    """Raise ValueError unless ``size`` * ``sequence_parallel`` * ``tensor_parallel`` divides ``world_size``."""
    inner = {"--tensor_parallel_size": tensor_parallel, "--sequence_parallel_size": sequence_parallel}
    _check_shares("--pipeline_parallel_size", size, inner, world_size)


def _check_shares(flag: str, size: int, others: dict[str, int], world_size: int) -> None:
    """Raise ValueError unless ``size`` times all sizes in ``others`` (flag -> size) divides ``world_size``."""
    if size < 1:
        raise ValueError(f"{flag} {size}: out of range; give 1 or more")
    ranks = size * math.prod(others.values())
    more = " and ".join(f"{other} {number}" for other, number in others.items() if number > 1)
    more = more and f" with {more}"
    if size > 1 and world_size == 1:
        raise ValueError(
            f"{flag} {size}{more}: needs {ranks} processes and there is one; start it with torchrun "
            f"--standalone --nproc_per_node={ranks}, or leave the flag out"
        )
    if world_size % ranks:
        raise ValueError(
            f"{flag} {size}{more}: does not divide the {world_size} processes; change it or torchrun's --nproc_per_node"
        )


def crossing(node: int, world_size: int, tensor_parallel: int, sequence_parallel: int) -> list[str]:
    """Return notes about tensor and sequence parallel groups that span machines. node: processes per machine."""
    notes, sizes = [], {"--tensor_parallel_size": (tensor_parallel, tensor_parallel)}
    sizes["--sequence_parallel_size"] = (sequence_parallel, tensor_parallel * sequence_parallel)
    for flag, (size, ranks) in sizes.items():
        if size > 1 and world_size > node and node % ranks:
            of = f" with --tensor_parallel_size {tensor_parallel}" if ranks > size else ""
            notes.append(
                f"{flag} {size}{of}: groups of {ranks} ranks lie across machines of {node}, and exchange in every "
                f"layer; sizes that divide {node} stay on one"
            )
    return notes


def check_expert_parallel_size(size: int, tensor_parallel: int, copies: int, world_size: int, stages: int = 1) -> None:
    """Raise ValueError unless ``size`` divides the number of processes per model copy and pipeline stage. With tensor
    parallelism, ``size`` must be 1 or ``tensor_parallel``."""
    flag = f"--expert_parallel_size {size}"
    if size < 1:
        raise ValueError(f"{flag}: out of range; give 1 or more")
    if tensor_parallel > 1 and size not in (1, tensor_parallel):
        raise ValueError(
            f"{flag}: the ranks of --tensor_parallel_size {tensor_parallel} divide the experts already; leave it out"
        )
    if size > 1 and world_size == 1:
        raise ValueError(
            f"{flag}: needs {size} processes and there is one; start it with torchrun --standalone "
            f"--nproc_per_node={size}, or leave the flag out"
        )
    if world_size // (copies * stages) % size:
        more = f", of which --data_parallel_replicate makes {copies} copies" if copies > 1 else ""
        more += f", in {stages} stages of --pipeline_parallel_size" if stages > 1 else ""
        raise ValueError(
            f"{flag}: does not divide the {world_size} processes{more}; change it or torchrun's --nproc_per_node"
        )


def parse_offload(text: str, frozen: bool) -> tuple[str, int]:
    """Parse --offload. Return a value of OFFLOAD and the number of offloaded blocks; 10**6 means all. Trained blocks
    are offloaded with optimizer state and averages, ``frozen`` ones (--lora) alone."""
    blocks, _, count = text.partition(":")
    return ("none" if frozen else "state", int(count or 10**6)) if blocks == BLOCKS else (text, 0)


def check_replicate(copies: int, sharing: int, world_size: int) -> None:
    """Raise ValueError unless ``copies`` * ``sharing`` divides ``world_size``. sharing: number of ranks per sample."""
    if world_size % (copies * sharing):
        size = f" in groups of {sharing} that share samples" if sharing > 1 else ""
        raise ValueError(
            f"--data_parallel_replicate {copies}: does not divide the {world_size} processes{size}; change it or "
            "torchrun's --nproc_per_node"
        )


def check_cfg_parallel(sequence_parallel: int, tensor_parallel: int, world_size: int) -> None:
    """Raise ValueError unless the processes divide into pairs of groups. A pair's groups compute the two halves of
    guidance."""
    ranks = 2 * sequence_parallel * tensor_parallel
    if world_size % ranks:
        sizes = {"--sequence_parallel_size": sequence_parallel, "--tensor_parallel_size": tensor_parallel}
        given = " and ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        size = f" with {given}" if given else ""
        raise ValueError(
            f"--cfg_parallel{size}: needs a multiple of {ranks} processes and there "
            f"{'are' if world_size > 1 else 'is'} {world_size}; start it with torchrun "
            f"--standalone --nproc_per_node={ranks}, or leave --cfg_parallel out"
        )
