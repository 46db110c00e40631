"""Describe a shard by the elements of the canonical tensor that it holds: flat runs, in the shard's order.

Any nest of cuts becomes a list of runs, so that shards of different layouts can be compared and copied into each other:
a part that one rank has written in rows is found in what another needs as a flat range.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

Slices = Sequence[tuple[int | None, Sequence[tuple[int, int]]]]  # as opendit.parallel.layout.Shard has them


@dataclass(frozen=True)
class Runs:
    """Runs of the flattened canonical tensor, which make a flattened shard when put one after the other.

    start, length: (n,) int64, of the canonical tensor. offset: (n,) int64, where each begins in the shard.
    """

    start: np.ndarray
    length: np.ndarray

    @property
    def offset(self) -> np.ndarray:
        return np.cumsum(self.length) - self.length

    @property
    def stop(self) -> np.ndarray:
        return self.start + self.length

    def select(self, start: np.ndarray, length: np.ndarray) -> "Runs":
        """The runs of a part of the shard: of these ranges of it, one after the other."""
        edges = np.append(self.offset, self.length.sum())
        first = np.searchsorted(edges, start, "right") - 1
        number = np.searchsorted(edges, start + length, "left") - first
        which = _expand(first, number)
        begin = np.maximum(np.repeat(start, number), edges[which])
        end = np.minimum(np.repeat(start + length, number), edges[which + 1])
        return Runs(self.start[which] + begin - edges[which], end - begin)


def runs_of(shape: Sequence[int], slices: Slices) -> Runs:
    """The runs of a shard: what is left of a tensor of ``shape`` after these cuts, outer to inner. Neighbours are
    joined, and none is empty."""
    runs, shape = Runs(*np.array([[0], [math.prod(shape)]], dtype=np.int64)), tuple(shape)
    for dim, ranges in slices:
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        edges = edges[edges[:, 0] < edges[:, 1]]
        if not len(edges):  # whatever the other dimensions are, which need not be counted through
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
    """The elements that two shards share: (offset in ``target``, offset in ``source``, length) of every run of them.
    ``source`` holds no element twice."""
    order = np.argsort(source.start, kind="stable")
    start, stop, offset = source.start[order], source.stop[order], source.offset[order]
    first = np.searchsorted(stop, target.start, "right")
    number = np.maximum(0, np.searchsorted(start, target.stop, "left") - first)
    which, mine = _expand(first, number), np.repeat(np.arange(len(number)), number)
    begin = np.maximum(target.start[mine], start[which])
    end = np.minimum(target.stop[mine], stop[which])
    return target.offset[mine] + begin - target.start[mine], offset[which] + begin - start[which], end - begin


def copy_overlap(target: Tensor, target_runs: Runs, source: Tensor, source_runs: Runs) -> int:
    """Copies what two shards share from the flattened ``source`` into the flattened ``target``; returns how many
    elements that are. Nothing else of ``source`` is read."""
    into, out_of, length = overlap(target_runs, source_runs)
    steps = np.diff(into[1:-1]), np.diff(out_of[1:-1])
    if len(length) > 3 and all(map(_constant, (length[1:-1], *steps))) and min(step[0] for step in steps) > 0:
        # Columns, say: one run a row. As many copies as rows would take longer than the disk.
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
    """Return True if the shards together hold every element of a tensor of ``numel`` elements exactly once."""
    shards = list(shards)
    start = np.concatenate([runs.start for runs in shards] or [np.zeros(0, np.int64)])
    stop = np.concatenate([runs.stop for runs in shards] or [np.zeros(0, np.int64)])
    order = np.argsort(start, kind="stable")
    edges = np.concatenate([[0], stop[order]]), np.concatenate([start[order], [numel]])
    return bool((edges[0] == edges[1]).all())


def _joined(runs: Runs) -> Runs:
    return Runs(*_joined_ranges(runs.start, runs.length))


def _joined_ranges(start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges without the empty ones, and those that begin where the one before ends as one with it."""
    start, length = start[length > 0], length[length > 0]
    if len(start) < 2:
        return start, length
    first = np.append(True, start[1:] != start[:-1] + length[:-1])
    return start[first], np.add.reduceat(length, np.flatnonzero(first))


def _expand(first: np.ndarray, number: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ..., number[0] of them, then first[1], ..."""
    return np.repeat(first - (np.cumsum(number) - number), number) + np.arange(number.sum())


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())
