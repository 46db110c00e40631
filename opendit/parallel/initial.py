"""Shards without their canonical tensors: initial values, and whatever else can be read range by range."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opendit.models import DiT
from opendit.models.initialization import distribution_of, draw
from opendit.parallel.layout import Range, Shard

ROWS = 1 << 24  # elements read at a time where only a part of every row is needed


def initial_values(model: DiT, seed: int, name: str, shard: Shard) -> Tensor:
    """The initial values of a shard of a parameter, as ``opendit.models.initialization.initialize`` gives them to the
    whole: (shard.shape) fp32 in host memory.

    model: knows the shapes and the distributions, and may be on the meta device. name: canonical, as of ``shard``.
    Raises ValueError unless exactly one pattern of the model's initial distributions fits the name.
    """
    shape, distribution = model.get_parameter(name).shape, distribution_of(model, name)
    return read_shard(shape, shard, lambda start, out: draw(distribution, seed, name, shape, start, out))


def read_shard(shape: Sequence[int], shard: Shard, read: Callable[[int, Tensor], object]) -> Tensor:
    """The shard of a canonical tensor of ``shape`` of which ranges can be read: (shard.shape) fp32 in host memory.

    read(start, out) fills ``out`` (n,) with elements [start, start + n) of the flattened tensor. Only what is held is
    read, but for cuts of a dimension after the first: then it is whole rows, at most ROWS elements at a time.
    """
    shape = tuple(shape) or (1,)
    held, flat = [((0, side),) for side in shape], None
    for dim, ranges in shard.slices:
        if dim is not None and flat is None:
            held[dim] = _of(held[dim], ranges)
        else:
            flat = ranges if flat is None else _of(flat, ranges)
    lengths = [sum(stop - start for start, stop in ranges) for ranges in held]
    flat = ((0, math.prod(lengths)),) if flat is None else flat
    result = torch.empty(shard.shape, dtype=torch.float32, device="cpu")
    out, width = result.view(-1), math.prod(shape[1:])
    if all(ranges == ((0, side),) for ranges, side in zip(held[1:], shape[1:], strict=True)):
        rows = tuple((start * width, stop * width) for start, stop in held[0])
        for start, stop in _of(rows, flat):
            read(start, out[: stop - start])
            out = out[stop - start :]
        return result
    local = math.prod(lengths[1:])  # what is left of a row
    step = max(1, ROWS // width)
    for start, stop in flat if local else ():
        for first in range(start // local, -(-stop // local), step):
            last = min(first + step, -(-stop // local))
            block = torch.cat([_rows(shape, ranges, read) for ranges in _of(held[0], ((first, last),))])
            for dim, ranges in enumerate(held[1:], start=1):
                block = torch.cat([block.narrow(dim, low, high - low) for low, high in ranges], dim)
            wanted = block.view(-1)[max(start - first * local, 0) : stop - first * local]
            out[: len(wanted)] = wanted
            out = out[len(wanted) :]
    return result


def _rows(shape: Sequence[int], rows: Range, read: Callable[[int, Tensor], object]) -> Tensor:
    block = torch.empty(rows[1] - rows[0], *shape[1:], dtype=torch.float32, device="cpu")
    read(rows[0] * math.prod(shape[1:]), block.view(-1))
    return block


def _of(ranges: Sequence[Range], inner: Sequence[Range]) -> tuple[Range, ...]:
    """Of the indices that ``ranges`` hold, one after the other, those at the places of ``inner``; in as few ranges as
    possible, none of them empty."""
    found = []
    for low, high in inner:
        offset = 0
        for start, stop in ranges:
            first, last = max(low - offset, 0), min(high - offset, stop - start)
            if first < last and found and found[-1][1] == start + first:
                found[-1] = found[-1][0], start + last
            elif first < last:
                found.append((start + first, start + last))
            offset += stop - start
    return tuple(found)
