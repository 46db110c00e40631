"""Shapes that media of any size are cropped to: aspect ratios and durations whose tokens fit a budget."""

from dataclasses import dataclass

import numpy as np

LONGEST = 4  # a shape is at most so many times as long as it is wide
STEP = 1.1  # from one aspect ratio to the next, of buckets
LEVELS = 7  # areas: that of a square of --image_size, half of it, and so on to a 64th
_ROWS = 65536  # media assigned at once


@dataclass(frozen=True)
class TokenSize:
    """The pixels that a token stands for.

    frames: of latents, in a token of a clip; a picture is one token long. temporal: frames of a clip for each latent
    frame after the first. side: (height, width) in pixels.
    """

    frames: int
    temporal: int
    side: tuple[int, int]

    def length(self, frames: int) -> int:
        """Tokens along time of a clip of ``frames`` frames, which it can have."""
        return 1 if frames == 1 else ((frames - 1) // self.temporal + 1) // self.frames

    def clip_frames(self, tokens: int) -> int:
        return (tokens * self.frames - 1) * self.temporal + 1


@dataclass(frozen=True)
class ShapeTable:
    """shapes: (n, 3) int32, each frames, height and width, in frames and pixels. tokens: (n,) int64 of each. level:
    (n,) int8, 0 for the largest area."""

    shapes: np.ndarray
    tokens: np.ndarray
    level: np.ndarray


def shape_table(image_size: int, num_frames: int, token: TokenSize, most: int, fine: bool = False) -> ShapeTable:
    """All shapes of at most ``most`` tokens: of each area those of every aspect ratio up to ``LONGEST``, as pictures
    and as clips of ``num_frames`` frames, half of them, a quarter, and so on. num_frames: 1 for pictures alone. fine:
    every aspect ratio that whole tokens make, rather than steps of a tenth.

    Raises ValueError if the square of ``image_size`` has more tokens.
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
    """(rows, columns) in tokens of the shapes of this square's area, or as little less as whole tokens allow."""
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
    """Return, for each medium, the number of its shape in ``table``, int16; -1 if it is smaller than all of them.

    Of the shapes that it need not be enlarged for by more than ``upscale``, and has frames for, those of the largest
    area; of these the longest ones; of these the one that least of it is cropped for.

    sizes: (n, 3) frames, height and width. interval: of the frames read.
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
        # By area, then length, then what is kept: no sum of the later ones outweighs a step of an earlier one.
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
