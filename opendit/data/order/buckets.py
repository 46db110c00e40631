"""Shapes that media of any size are cropped to, and the tokens of a sample of each shape.

A shape table holds aspect ratios and durations whose tokens fit a budget; every medium is assigned one of its shapes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LONGEST = 4  # the largest ratio of a shape's sides
STEP = 1.1  # from one aspect ratio of buckets to the next
LEVELS = 7  # areas: that of a square of --image_size, half of it, and so on to a 64th
_ROWS = 65536  # media assigned at once
_CHUNK = 2**20  # rows summarised at once


@dataclass(frozen=True)
class TokenSize:
    """The size of a token.

    frames: latent frames in a token of a clip; a picture is one token long. temporal: frames of a clip for each latent
    frame after the first. side: (height, width) in pixels.
    """

    frames: int
    temporal: int
    side: tuple[int, int]

    def length(self, frames: int) -> int:
        """Return the tokens along time of a clip of ``frames`` frames, which must be a possible length."""
        return 1 if frames == 1 else ((frames - 1) // self.temporal + 1) // self.frames

    def clip_frames(self, tokens: int) -> int:
        return (tokens * self.frames - 1) * self.temporal + 1


def token_size(patch: tuple[int, ...], downscale: int = 1, temporal: int = 1) -> TokenSize:
    """Return the size of a token of a model with this patch, ([frames,] rows, columns), of latents each of which stands
    for ``downscale`` pixels along a side and ``temporal`` frames."""
    *frames, height, width = patch
    return TokenSize(frames[0] if frames else 1, temporal, (height * downscale, width * downscale))


@dataclass(frozen=True)
class ShapeTable:
    """shapes: (n, 3) int32, the frames, height and width of each, in frames and pixels. tokens: (n,) int64. level: (n,)
    int8, 0 for the largest area."""

    shapes: np.ndarray
    tokens: np.ndarray
    level: np.ndarray


def shape_table(image_size: int, num_frames: int, token: TokenSize, most: int, fine: bool = False) -> ShapeTable:
    """Return all shapes of at most ``most`` tokens.

    These have, for each area, every aspect ratio up to ``LONGEST``, as pictures and as clips of ``num_frames`` frames,
    half of them, a quarter, and so on.

    Args:
        num_frames: 1 for pictures alone.
        fine: include every aspect ratio that whole tokens can make, rather than steps of a tenth.

    Raises:
        ValueError: the square of ``image_size`` has more tokens.
    """
    if (least := image_size**2 // (token.side[0] * token.side[1])) > most:
        raise ValueError(
            f"{most}: a picture of --image_size {image_size} has {least:,} tokens; raise it to that at least"
        )
    lengths, length = {1: 1}, token.length(num_frames)
    while length >= 1 and num_frames > 1:
        if (frames := token.clip_frames(length)) > 1:
            lengths[frames] = length
        length //= 2
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for level in range(LEVELS):
        for rows, columns in _grids(int(image_size / 2 ** (level / 2)), token.side, fine):
            for frames, along in lengths.items():
                if (tokens := rows * columns * along) <= most:
                    shape = frames, rows * token.side[0], columns * token.side[1]
                    found.setdefault(shape, (tokens, level))
    order = sorted(found, key=lambda shape: (found[shape][1], shape))
    return ShapeTable(
        np.array(order, dtype=np.int32),
        np.array([found[shape][0] for shape in order], dtype=np.int64),
        np.array([found[shape][1] for shape in order], dtype=np.int8),
    )


def _grids(side: int, token: tuple[int, int], fine: bool) -> list[tuple[int, int]]:
    """Return (rows, columns) in tokens of the shapes with this square's area, or just less."""
    height, width = token
    all_rows = range(1, LONGEST * side // height + 1)
    found = [(rows, side * side // (rows * height * width)) for rows in all_rows]
    kept = []
    for tall in (True, False):  # each from the square outwards
        ratios = {
            (rows, columns): rows * height / (columns * width) if tall else columns * width / (rows * height)
            for rows, columns in found
            if columns > 0 and (rows * height >= columns * width) == tall
        }
        last = 1.0 if kept and kept[0][0] * height == kept[0][1] * width else 0.0
        for grid, ratio in sorted(ratios.items(), key=lambda item: item[1]):
            if ratio <= LONGEST and (ratio > last if fine else ratio >= last * STEP):
                kept.append(grid)
                last = ratio
    return kept


def assign(sizes: np.ndarray, interval: int, table: ShapeTable, upscale: float) -> np.ndarray:
    """Return the number of each medium's shape in ``table``, (n,) int16; -1 for one that is smaller than all of them.

    A shape is possible if the medium has enough frames and need not be enlarged by more than ``upscale``. Of the
    possible shapes those of the largest area are taken, then the longest, then the one that crops the least.

    sizes: (n, 3) frames, height and width. interval: between the frames that are read.
    """
    out = np.full(len(sizes), -1, dtype=np.int16)
    frames, height, width = (column[None].astype(np.float64) for column in table.shapes.T)
    for first in range(0, len(sizes), _ROWS):
        part = sizes[first : first + _ROWS].astype(np.float64)
        unique, inverse = np.unique(part, axis=0, return_inverse=True)
        long, high, wide = (column[:, None] for column in unique.T)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.maximum(height / high, width / wide)
            kept = height * width / (scale**2 * high * wide)
        possible = (np.minimum(high, wide) > 0) & (scale <= upscale * (1 + 1e-9))
        possible &= (frames == 1) | (1 + (frames - 1) * interval <= long)
        # By area, then length, then the share kept: no sum of later terms outweighs a step of an earlier one.
        order = -1e9 * table.level[None] + frames * 1e3 + kept * 10
        best = np.where(possible, order, -np.inf).argmax(axis=1)
        best[~possible.any(axis=1)] = -1
        out[first : first + _ROWS] = best[inverse.reshape(-1)]
    return out


def kept_shares(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the share of each medium's pixels that its shape shows, (n,): 1 if nothing is cropped. shapes: (n, 3)."""
    sizes, shapes = sizes.astype(np.float64), shapes.astype(np.float64)
    scale = np.maximum(shapes[:, 1] / sizes[:, 1], shapes[:, 2] / sizes[:, 2])
    return shapes[:, 1] * shapes[:, 2] / (scale**2 * sizes[:, 1] * sizes[:, 2])


# ------------------------------------------------------------------------------------------ tokens of every row


class Lengths:
    """The tokens of every row's sample, indexed as an array of them would be, looked up by shape instead of stored.

    keys: (rows,) the number of each row's shape; may be mapped from a file. tokens: (shapes,) of a sample of each.
    """

    def __init__(self, keys: np.ndarray, tokens: np.ndarray):
        self.keys, self.tokens = keys, tokens

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Any) -> Any:
        return self.tokens[self.keys[rows]]


class Summary(NamedTuple):
    """rows: their number. least, most, total: of their tokens."""

    rows: int
    least: int
    most: int
    total: int

    @property
    def mean(self) -> float:
        return self.total / self.rows


def summary_of(lengths: np.ndarray | Lengths, start: int, stop: int) -> Summary:
    """Summarise rows [start, stop), at least one, in memory that does not grow with them."""
    parts = (lengths[first : min(stop, first + _CHUNK)] for first in range(start, stop, _CHUNK))
    found = [(int(part.min()), int(part.max()), int(part.sum(dtype=np.int64))) for part in parts]
    least, most, total = zip(*found, strict=True)
    return Summary(stop - start, min(least), max(most), sum(total))
