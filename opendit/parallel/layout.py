"""Map every parameter's canonical full tensor to this rank's shard, and back.

A canonical tensor has the parameter's shape in the undivided model, as in a checkpoint. A sequence of cuts, outer to
inner, defines a rank's shard. For example, a cut by ``tp`` selects the rows of the rank's heads, and a cut by ``fsdp``
selects some of these rows. A parameter without a cut by a group is replicated over this group.

:class:`Runs` describes a shard as contiguous ranges of the flattened canonical tensor. With runs, elements can be
copied between shards of different layouts.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opendit.models.dit import DiT
from opendit.models.initialization import Distribution, canonical_name, distribution_of, draw
from opendit.parallel.mesh import Mesh

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """Division of a tensor among the ranks of a mesh group. Every index belongs to exactly one rank."""

    group: str
    dim: int | None  # the divided dimension; None if the flattened tensor is divided
    ranges: tuple[tuple[Range, ...], ...]  # each rank's ranges [start, stop), in the shard's order

    def lengths(self) -> list[int]:
        return [sum(stop - start for start, stop in ranges) for ranges in self.ranges]

    def check(self, shape: tuple[int, ...], ranks: int) -> None:
        """Raise ValueError unless this cut divides a tensor of ``shape`` among ``ranks`` ranks. Every index must belong
        to exactly one rank."""
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
        """Return the shape of a rank's shard, for a tensor of ``shape``."""
        length = self.lengths()[rank]
        return (length,) if self.dim is None else (*shape[: self.dim], length, *shape[self.dim + 1 :])


def flat_cut(group: str, numel: int, ranks: int) -> Cut:
    """Cut the flattened tensor into ranges of equal width. The last ranges are shorter or empty if ``ranks`` does not
    divide ``numel``."""
    return Cut(group, None, _even(numel, ranks))


def dim_cut(group: str, dim: int, size: int, ranks: int) -> Cut:
    """Cut a dimension into ranges of equal width, as ``torch.chunk`` and ``fully_shard`` do. The last ranges may be
    shorter or empty."""
    return Cut(group, dim, _even(size, ranks))


def _even(size: int, ranks: int) -> tuple[tuple[Range, ...], ...]:
    width = -(-size // ranks)
    return tuple(((min(i * width, size), min((i + 1) * width, size)),) for i in range(ranks))


@dataclass(frozen=True)
class Shard:
    """A rank's shard of a canonical tensor. Each cut concatenates ranges along a dimension ``dim``. If ``dim`` is None,
    the tensor is flattened first."""

    shape: tuple[int, ...]
    slices: tuple[tuple[int | None, tuple[Range, ...]], ...]  # (dim, ranges) of every cut, outer to inner

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def take(self, full: Tensor) -> Tensor:
        """Return the shard of a full tensor, as a view or a copy."""
        shard = full
        for dim, ranges in self.slices:
            shard = shard.reshape(-1) if dim is None else shard
            parts = [shard.narrow(dim or 0, start, stop - start) for start, stop in ranges or ((0, 0),)]
            shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)
        return shard

    def flat_part(self, part: int, parts: int) -> "Shard":
        """Divide the flattened shard evenly into ``parts`` shards, and return number ``part``. If ``parts`` is 1,
        return this shard without flattening."""
        if parts == 1:
            return self
        ranges = _even(self.numel, parts)[part]
        return Shard((ranges[0][1] - ranges[0][0],), (*self.slices, (None, ranges)))


class Layout:
    """This rank's shards of a set of parameters.

    The constructor creates process groups, so all ranks must build their layouts in the same order. Raises ValueError
    if a cut does not assign every index exactly once, or does not fit its group.

    Args:
        cuts: every parameter's cuts, outer to inner. Each cut divides the result of the previous cut.
        on_every_stage: names of the parameters on all ranks of a pipeline. All other parameters are on one rank.
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
        self._before: dict[str, list[tuple[int, ...]]] = {}  # shape of this rank's slice before each cut
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
        return self._local[name]

    def take(self, name: str, full: Tensor) -> Tensor:
        return self._local[name].take(full)

    def replicas(self, name: str) -> list[int]:
        """Return the sorted ranks that have this rank's shard of a parameter."""
        dims, groups = self.mesh.dims, {cut.group for cut in self.cuts[name]}
        groups |= set() if name in self._on_every_stage else {"pp"}
        mine = [dims.coordinate(group, self.mesh.rank) for group in groups]
        return [r for r in range(self.mesh.world_size) if [dims.coordinate(group, r) for group in groups] == mine]

    @torch.no_grad()
    def gather(self, name: str, shard: Tensor) -> Tensor:
        """Join the shards of all ranks to a new, full tensor. Call on all ranks that divide the parameter, in the same
        order for all parameters. The result is on the mesh's device, or without communication on the shard's
        device."""
        alone = all(self.mesh.dims.size(cut.group) == 1 for cut in self.cuts[name])
        full = shard if alone else shard.to(self.mesh.device)
        for cut, shape in zip(reversed(self.cuts[name]), reversed(self._before[name]), strict=True):
            full = self._join(cut, shape, full)
        return full.clone() if alone else full

    def _join(self, cut: Cut, shape: tuple[int, ...], shard: Tensor) -> Tensor:
        """Undo ``cut``: gather the shards of its group, and return the tensor of ``shape``."""
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
        if _in_order(cut):  # the concatenated shards are the tensor, followed by padding
            return received[: math.prod(shape)].view(shape)
        full = received.new_empty(math.prod(shape) if cut.dim is None else shape)
        for rank, (ranges, row) in enumerate(zip(cut.ranges, received.view(len(sizes), width), strict=True)):
            part, dim, offset = row[: sizes[rank]].view(cut.shape(shape, rank)), cut.dim or 0, 0
            for start, stop in ranges:
                full.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
                offset += stop - start
        return full.view(shape)


def _in_order(cut: Cut) -> bool:
    """Return True if the concatenated shards form the tensor. All shards have the longest shard's length."""
    width = max(cut.lengths())
    return cut.dim in (None, 0) and all(
        start == rank * width for rank, ranges in enumerate(cut.ranges) for start, stop in ranges if start != stop
    )


# the type of Shard.slices, but with any kind of sequence
Slices = Sequence[tuple[int | None, Sequence[tuple[int, int]]]]


@dataclass(frozen=True)
class Runs:
    """A flattened shard as consecutive runs. A run is a contiguous range of the flattened canonical tensor."""

    start: np.ndarray  # (n,) int64, first indices
    length: np.ndarray  # (n,) int64

    @property
    def offset(self) -> np.ndarray:  # each run's first index in the shard
        return np.cumsum(self.length) - self.length

    @property
    def stop(self) -> np.ndarray:
        return self.start + self.length

    def select(self, start: np.ndarray, length: np.ndarray) -> "Runs":
        """Return the runs of some ranges in the shard. start, length: the ranges' first indices and lengths."""
        edges = np.append(self.offset, self.length.sum())
        first = np.searchsorted(edges, start, "right") - 1
        number = np.searchsorted(edges, start + length, "left") - first
        which = _expand(first, number)
        begin = np.maximum(np.repeat(start, number), edges[which])
        end = np.minimum(np.repeat(start + length, number), edges[which + 1])
        return Runs(self.start[which] + begin - edges[which], end - begin)


def runs_of(shape: Sequence[int], slices: Slices) -> Runs:
    """Return the runs of a shard. Adjacent runs are joined, and no run is empty. shape: canonical shape. slices: see
    :class:`Shard`."""
    runs, shape = Runs(*np.array([[0], [math.prod(shape)]], dtype=np.int64)), tuple(shape)
    for dim, ranges in slices:
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        edges = edges[edges[:, 0] < edges[:, 1]]
        if not len(edges):  # an empty range makes the shard empty
            return Runs(*np.zeros((2, 0), dtype=np.int64))
        if dim is None:
            start, length, shape = edges[:, 0], edges[:, 1] - edges[:, 0], (int((edges[:, 1] - edges[:, 0]).sum()),)
        else:
            outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
            rows = np.arange(outer, dtype=np.int64)[:, None] * (shape[dim] * inner)
            start = (rows + edges[:, 0] * inner).reshape(-1)
            length = np.tile((edges[:, 1] - edges[:, 0]) * inner, outer)
            shape = (*shape[:dim], int((edges[:, 1] - edges[:, 0]).sum()), *shape[dim + 1 :])
        runs = _joined(runs.select(*_joined_ranges(start, length)))
    return _joined(runs)


def overlap(target: Runs, source: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the common runs of two shards. Return their (offsets in ``target``, offsets in ``source``, lengths).
    ``source`` must not contain an element twice."""
    order = np.argsort(source.start, kind="stable")
    start, stop, offset = source.start[order], source.stop[order], source.offset[order]
    first = np.searchsorted(stop, target.start, "right")
    number = np.maximum(0, np.searchsorted(start, target.stop, "left") - first)
    which, mine = _expand(first, number), np.repeat(np.arange(len(number)), number)
    begin = np.maximum(target.start[mine], start[which])
    end = np.minimum(target.stop[mine], stop[which])
    return target.offset[mine] + begin - target.start[mine], offset[which] + begin - start[which], end - begin


def copy_overlap(target: Tensor, target_runs: Runs, source: Tensor, source_runs: Runs) -> int:
    """Copy the common elements of two shards from the flattened ``source`` to the flattened ``target``, and return
    their number."""
    into, out_of, length = overlap(target_runs, source_runs)
    steps = np.diff(into[1:-1]), np.diff(out_of[1:-1])
    if len(length) > 3 and all(map(_constant, (length[1:-1], *steps))) and min(step[0] for step in steps) > 0:
        # Each row of a matrix has one run, in the same columns. Copy all rows at once, because single copies would be
        # slower than reading the file.
        size = (len(length) - 2, int(length[1]))
        views = [
            flat.as_strided(size, (int(at[2] - at[1]), 1), flat.storage_offset() + int(at[1]))
            for flat, at in ((target, into), (source, out_of))
        ]
        views[0].copy_(views[1])
        ends = [0, len(length) - 1]
    else:
        ends = range(len(length))
    for i in ends:
        begin, where, count = int(into[i]), int(out_of[i]), int(length[i])
        target[begin : begin + count].copy_(source[where : where + count])
    return int(length.sum())


def hold_each_once(numel: int, shards: Iterable[Runs]) -> bool:
    """Return True if every element of a tensor of ``numel`` elements is in exactly one shard."""
    shards = list(shards)
    start = np.concatenate([runs.start for runs in shards] or [np.zeros(0, np.int64)])
    stop = np.concatenate([runs.stop for runs in shards] or [np.zeros(0, np.int64)])
    order = np.argsort(start, kind="stable")
    edges = np.concatenate([[0], stop[order]]), np.concatenate([start[order], [numel]])
    return bool((edges[0] == edges[1]).all())


def _joined(runs: Runs) -> Runs:
    return Runs(*_joined_ranges(runs.start, runs.length))


def _joined_ranges(start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drop empty ranges, and join ranges that begin where the previous range ends."""
    start, length = start[length > 0], length[length > 0]
    if len(start) < 2:
        return start, length
    first = np.append(True, start[1:] != start[:-1] + length[:-1])
    return start[first], np.add.reduceat(length, np.flatnonzero(first))


def _expand(first: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Concatenate, for all i, the ``number[i]`` consecutive integers from ``first[i]``."""
    return np.repeat(first - (np.cumsum(number) - number), number) + np.arange(number.sum())


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


GAP = 1 << 15  # ranges closer than this are drawn in one call; drawing the gap takes 0.1 ms
SPAN = 1 << 24  # maximum number of elements that one call draws


class InitialValues:
    """Draws the initial values of a model's shards, as ``opendit.models.initialization.initialize`` does. The model may
    be on the meta device. Raises ValueError unless every parameter has exactly one initial distribution."""

    def __init__(self, model: DiT, seed: int):
        self.seed = seed
        self._drawn: dict[str, tuple[tuple[int, ...], Distribution]] = {}
        for name, parameter in model.named_parameters():
            name = canonical_name(name)
            self._drawn[name] = tuple(parameter.shape), distribution_of(model, name)

    def __call__(self, name: str, shard: Shard) -> Tensor:
        shape, distribution = self._drawn[name]
        return initial_values(distribution, self.seed, name, shape, shard)

    def whole(self, name: str) -> Tensor:
        """Return the full parameter. Use only for small parameters."""
        shape, _ = self._drawn[name]
        return self(name, Shard(shape, ()))


def initial_values(distribution: Distribution, seed: int, name: str, shape: Sequence[int], shard: Shard) -> Tensor:
    """Return a shard of a parameter's initial values: fp32, of shape ``shard.shape``, in host memory.
    ``opendit.models.initialization.draw`` describes distribution, seed, name and shape."""
    values, wanted = torch.empty(shard.shape, dtype=torch.float32, device="cpu"), runs_of(shape, shard.slices)
    for start, stop in _covers(wanted):
        drawn = draw(distribution, seed, name, shape, start, torch.empty(stop - start, device="cpu"))
        copy_overlap(values.view(-1), wanted, drawn, Runs(np.array([start]), np.array([stop - start])))
    return values


def _covers(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield ranges of the canonical tensor that include all runs. A range has at most SPAN elements."""
    order = np.argsort(runs.start)
    start, stop = runs.start[order], runs.stop[order]
    apart = np.flatnonzero(start[1:] - stop[:-1] > GAP) + 1
    for group in np.split(np.arange(len(start)), apart) if len(start) else ():
        first, last = int(start[group[0]]), int(stop[group[-1]])
        for begin in range(first, last, SPAN):
            yield begin, min(begin + SPAN, last)
