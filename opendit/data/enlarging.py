"""Enlarge clips on the GPU instead of the CPU.

If clips are smaller than a run requests, resizing them takes a CPU half as long as decoding them. The result is
bit-identical to torch's resizing on a CPU, so a sample does not depend on the device that resizes it.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

AT_ONCE = 2**25  # maximum values resized at once; temporary memory is eight bytes per value
_SHARPNESS = -0.5  # parameter a of Keys' cubic convolution, as in PIL and torch's antialiased resizing
_MOST_BITS = 22  # maximum fractional bits of a weight


class Small(NamedTuple):
    """Marks a sample that is smaller than requested and still has to be enlarged.

    The sample fills the upper left ``height`` x ``width`` pixels of its slot in a batch. mirrored: mirror the sample
    left to right after enlarging it."""

    height: int
    width: int
    mirrored: bool


def enlarge(x: Tensor, small: Sequence[Small | None] | None, at_once: int = AT_ONCE) -> Tensor:
    """Enlarge every :class:`Small` sample of a batch to full size, on ``x``'s device. The host waits for the device
    only when a pair of sizes occurs for the first time.

    The result is bit-identical to ``torch.nn.functional.interpolate(..., mode="bicubic", antialias=True)`` for uint8 on
    a CPU.

    Args:
        x: (B, C, [T,] H, W) uint8, in any memory order.
        small: B entries, None for a sample at full size; or None if all samples are.
        at_once: values of ``x`` that are resized together, at least one sample.
    """
    if small is None:
        return x
    x = x.clone()
    frames = x.movedim(1, -1)  # (B, [T,] H, W, C), the memory order of decoders
    each = max(1, at_once // max(1, x[0].numel()))
    for first, last, (height, width) in _runs(small, each):
        corner = frames[first:last, ..., :height, :width, :]
        frames[first:last] = resize(corner, (x.shape[-2], x.shape[-1]))
    for number, sample in enumerate(small):
        if sample is not None and sample.mirrored:
            x[number] = x[number].flip(-1)
    return x


def _runs(small: Sequence[Small | None], most: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield (first, last + 1, (height, width)) for each run of at most ``most`` consecutive samples of one size."""
    first = 0
    for size, same in groupby(small, lambda sample: None if sample is None else sample[:2]):
        end = first + len(list(same))
        if size is not None:
            for start in range(first, end, most):
                yield start, min(start + most, end), size
        first = end


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize frames (..., H, W, C) uint8 to size = (height, width), bicubic with antialiasing, on their device.

    Like PIL, and like torch for uint8 on a CPU, it adds integers, and rounds to bytes after each axis, the width first.
    """
    for axis, length in ((-2, size[1]), (-3, size[0])):
        if frames.shape[axis] != length:
            frames = _along(frames, axis, length)
    return frames


def _along(frames: Tensor, axis: int, length: int) -> Tensor:
    places, weights, bits = _taps(frames.shape[axis], length, frames.device)
    shape = [1] * frames.ndim
    shape[axis] = length
    total = frames.new_full((), 1 << (bits - 1), dtype=torch.int32)  # 0.5, so that the shift below rounds
    for place, weight in zip(places, weights, strict=True):
        part = frames.index_select(frames.ndim + axis, place) * weight.view(shape)
        total = part.add_(total)
    return (total >> bits).clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=256)
def _taps(source: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the taps that resize an axis from ``source`` to ``length`` pixels.

    They are the positions of the old pixels, int32 (taps, length); the fixed-point weights, int32 (taps, length); and
    the number of fractional bits of a weight."""
    places, weights = _exact_taps(source, length)
    largest, bits = max(map(max, weights)), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:  # until 16 bits are full
        bits += 1
    whole = [[int(math.copysign(0.5, weight) + weight * (1 << bits)) for weight in row] for row in weights]
    return (
        torch.tensor(places, dtype=torch.int32).T.contiguous().to(device),
        torch.tensor(whole, dtype=torch.int32).T.contiguous().to(device),
        bits,
    )


def _exact_taps(source: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the positions of the old pixels and their weights for each new pixel. Weights sum to 1.

    The computation uses double precision and torch's order of operations, because the result must be bit-identical."""
    scale = source / length
    reach, shrink = 2.0 * max(scale, 1.0), 1.0 / max(scale, 1.0)
    most = math.ceil(reach) * 2 + 1
    places, weights = [], []
    for number in range(length):
        center = scale * (number + 0.5)
        first = max(int(center - reach + 0.5), 0)
        count = min(max(min(int(center + reach + 0.5), source) - first, 0), most)
        row = [_cubic((tap + first - center + 0.5) * shrink) for tap in range(count)]
        total = 0.0
        for weight in row:
            total += weight
        left = most - count
        weights.append([weight / total for weight in row] + [0.0] * left)
        places.append([first + tap for tap in range(count)] + [first] * left)
    return places, weights


def _cubic(x: float) -> float:
    """Return the weight at distance ``x``: equation 15 of Keys, "Cubic convolution interpolation for digital image
    processing", 1981."""
    a, x = _SHARPNESS, abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    if x < 2:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return 0.0
