"""Map every parameter's canonical full tensor to this rank's shard, and back.

The canonical tensor of a parameter is the one that a checkpoint holds: full, in the model's own shape. From it a chain
of cuts leads to the shard of a rank, outer to inner: say the rows of its heads (``tp``), and of these its part of
``fsdp``. What no cut divides is replicated. Whoever keeps state by parameter (masters, moments, averages) keeps shards,
and comes and goes between them and canonical tensors by :class:`Layout` alone.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.mesh import Mesh

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """One division of a tensor among the ranks of a group.

    group: its name in the mesh. dim: the dimension divided, None for the flattened tensor. ranges: for every rank of
    the group, in order, the shard ranges [start, stop) that it holds of it, one after the other; the ranks together
    hold every index once.
    """

    group: str
    dim: int | None
    ranges: tuple[tuple[Range, ...], ...]

    def lengths(self) -> list[int]:
        """Indices that every rank holds."""
        return [sum(stop - start for start, stop in ranges) for ranges in self.ranges]

    def check(self, shape: tuple[int, ...], ranks: int) -> None:
        """Raises ValueError unless it divides a tensor of this shape among so many ranks, every index once."""
        if self.dim is not None and not 0 <= self.dim < len(shape):
            raise ValueError(f"{self.group}: a tensor of {len(shape)} dimensions can't be divided along {self.dim}")
        if len(self.ranges) != ranks:
            raise ValueError(f"{self.group}: shard ranges of {len(self.ranges)} ranks for a group of {ranks}")
        size = math.prod(shape) if self.dim is None else shape[self.dim]
        held = sorted(r for ranges in self.ranges for r in ranges if r[0] != r[1])
        edges = [0, *itertools.chain.from_iterable(held), size]
        if edges[::2] != edges[1::2] or any(start > stop for start, stop in held):
            raise ValueError(f"{self.group}: the shard ranges {self.ranges} do not hold each of {size} indices once")

    def shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of ``shape``."""
        length = self.lengths()[rank]
        return (length,) if self.dim is None else (*shape[: self.dim], length, *shape[self.dim + 1 :])


def flat_cut(group: str, numel: int, ranks: int) -> Cut:
    """The flattened tensor in ranges of equal width, the last ones shorter or empty where that does not divide."""
    return Cut(group, None, _even(numel, ranks))


def dim_cut(group: str, dim: int, size: int, ranks: int) -> Cut:
    """A dimension in ranges of equal width, the last ones shorter or empty, as ``torch.chunk`` and ``fully_shard``."""
    return Cut(group, dim, _even(size, ranks))


def block_cut(group: str, dim: int, blocks: Sequence[int], ranks: int, unit: int = 1) -> Cut:
    """A dimension made of ``blocks``, of each of which every rank holds an equal share: the rows of q, of k and of v,
    say, by heads. ``unit``: rows that stay together, the size of a head. Raises ValueError if ranks can't share a block
    evenly."""
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    start = 0
    for block in blocks:
        if block % (unit * ranks):
            raise ValueError(f"{group}: {ranks} ranks can't share {block} rows evenly in units of {unit}")
        share = block // ranks
        for rank in range(ranks):
            ranges[rank].append((start + rank * share, start + (rank + 1) * share))
        start += block
    return Cut(group, dim, tuple(map(tuple, ranges)))


def _even(size: int, ranks: int) -> tuple[tuple[Range, ...], ...]:
    width = -(-size // ranks)
    return tuple(((min(i * width, size), min((i + 1) * width, size)),) for i in range(ranks))


@dataclass(frozen=True)
class Shard:
    """The part of a canonical tensor that a rank holds.

    shape: of the shard. slices: (dim, ranges) of every cut, outer to inner: of what the cuts before have left, these
    ranges along dim (None: of the flattened tensor), one after the other.
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int | None, tuple[Range, ...]], ...]

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return math.prod(self.shape)

    def take(self, full: Tensor) -> Tensor:
        """The shard of a full tensor: a view of it if every cut leaves one range, otherwise a copy."""
        shard = full
        for dim, ranges in self.slices:
            shard = shard.reshape(-1) if dim is None else shard
            parts = [shard.narrow(dim or 0, start, stop - start) for start, stop in ranges or ((0, 0),)]
            shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)
        return shard

    def flat_part(self, part: int, parts: int) -> "Shard":
        """One of ``parts`` even flat parts of the shard; the whole for one."""
        if parts == 1:
            return self
        ranges = _even(self.numel, parts)[part]
        return Shard((ranges[0][1] - ranges[0][0],), (*self.slices, (None, ranges)))


class Layout:
    """The shards of a set of parameters on this rank of a mesh.

    Args:
        mesh: names the groups. Those of the cuts are made here: build layouts on all ranks alike.
        shapes: the canonical shape of every parameter.
        cuts: the cuts of every parameter, outer to inner; a cut divides what those before it have left on this rank.
        on_every_stage: those that all ranks of a pipeline have; of the others ``shapes`` has those of this rank's
            stages.

    Raises:
        ValueError: a cut that does not hold every index once, or not on the ranks of its group.
    """

    def __init__(
        self,
        mesh: Mesh,
        shapes: Mapping[str, Sequence[int]],
        cuts: Mapping[str, Sequence[Cut]],
        on_every_stage: Collection[str] = (),
    ):
        self.mesh, self._on_every_stage = mesh, frozenset(on_every_stage)
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.cuts = {name: tuple(cuts[name]) for name in self.shapes}
        self._local: dict[str, Shard] = {}
        self._before: dict[str, list[tuple[int, ...]]] = {}  # shapes that the cuts are made of
        for name, shape in self.shapes.items():
            before, slices = [], []
            for cut in self.cuts[name]:
                try:
                    cut.check(shape, mesh.dims.size(cut.group))
                except ValueError as error:
                    raise ValueError(f"layout of {name}: {error}") from None
                mesh.group(cut.group)
                place = mesh.coordinate(cut.group)
                before.append(shape)
                slices.append((cut.dim, cut.ranges[place]))
                shape = cut.shape(shape, place)
            self._before[name], self._local[name] = before, Shard(shape, tuple(slices))

    def local(self, name: str) -> Shard:
        """Return this rank's shard of a parameter."""
        return self._local[name]

    def take(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor, as :meth:`Shard.take`."""
        return self._local[name].take(full)

    def replicas(self, name: str) -> list[int]:
        """The ranks that hold what this one holds of a parameter, this one among them, in order: those that differ
        from it in no group of its cuts, nor in their stages if it is not on every one."""
        dims, groups = self.mesh.dims, {cut.group for cut in self.cuts[name]}
        groups |= set() if name in self._on_every_stage else {"pp"}
        mine = [dims.coordinate(group, self.mesh.rank) for group in groups]
        return [r for r in range(self.mesh.world_size) if [dims.coordinate(group, r) for group in groups] == mine]

    @torch.no_grad()
    def gather(self, name: str, shard: Tensor) -> Tensor:
        """The full tensor, new memory, from the shards of all ranks; collective over the groups of the cuts, the same
        on each of their ranks. It lies on the device, if the shard does or other ranks' are needed."""
        alone = all(self.mesh.dims.size(cut.group) == 1 for cut in self.cuts[name])
        full = shard if alone else shard.to(self.mesh.device)
        for cut, shape in zip(reversed(self.cuts[name]), reversed(self._before[name]), strict=True):
            full = self._join(cut, shape, full)
        return full.clone() if alone else full

    def _join(self, cut: Cut, shape: tuple[int, ...], shard: Tensor) -> Tensor:
        """The tensor of ``shape`` that ``cut`` has divided, from this rank's shard of it and the others'."""
        group, flat = self.mesh.group(cut.group), shard.reshape(-1)
        across = math.prod(shape) // shape[cut.dim] if cut.dim is not None and shape[cut.dim] else 1
        sizes = [length * across for length in cut.lengths()]
        width = max(sizes)
        if group is None:
            received = flat
        else:
            if flat.numel() < width:
                padded = flat.new_zeros(width)
                padded[: flat.numel()] = flat
                flat = padded
            received = flat.new_empty(width * len(sizes))
            dist.all_gather_into_tensor(received, flat.contiguous(), group=group)
        if _in_order(cut):  # what was received is the tensor itself, with padding at the end
            return received[: math.prod(shape)].view(shape)
        full = received.new_empty(math.prod(shape) if cut.dim is None else shape)
        for rank, (ranges, row) in enumerate(zip(cut.ranges, received.view(len(sizes), width), strict=True)):
            part, dim, offset = row[: sizes[rank]].view(cut.shape(shape, rank)), cut.dim or 0, 0
            for start, stop in ranges:
                full.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
                offset += stop - start
        return full.view(shape)


def _in_order(cut: Cut) -> bool:
    """Return True if the ranks' shards, each padded to the longest, form the tensor when they are concatenated."""
    width = max(cut.lengths())
    return cut.dim in (None, 0) and all(
        start == rank * width for rank, ranges in enumerate(cut.ranges) for start, stop in ranges if start != stop
    )
