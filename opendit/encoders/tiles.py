"""Decode large frames in overlapping tiles of one size, and blend the seams. Tiles don't depend on each other, so a
batch can hold several tiles and ranks can share them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """A division of latents (B, C, ..., h, w) into overlapping tiles.

    The last tile of a row or column ends at the border of the latents, so it may overlap more with its neighbour.

    Attributes:
        sides: (h, w) of the latents.
        size: height and width of a tile, at most ``sides``.
        overlap: overlap of neighbouring tiles in latent values, along height and width; less than ``size``.
    """

    sides: tuple[int, int]
    size: tuple[int, int]
    overlap: tuple[int, int]

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """Start positions of the tiles along height and along width."""
        rows, columns = (
            [*range(0, side - size, size - overlap), side - size]
            for side, size, overlap in zip(self.sides, self.size, self.overlap, strict=True)
        )
        return rows, columns

    @property
    def count(self) -> int:
        """Number of tiles of one sample."""
        rows, columns = self.starts
        return len(rows) * len(columns)

    def cut(self, latents: Tensor, scale: int = 1) -> Tensor:
        """Cut latents (B, C, ..., h, w) into tiles (B * count, C, ..., *size).

        The tiles of one sample follow each other, row by row. scale: number of pixels per latent value along a side, to
        cut pixels instead of latents.
        """
        rows, columns = ([scale * start for start in starts] for starts in self.starts)
        height, width = (scale * side for side in self.size)
        tiles = [latents[..., y : y + height, x : x + width] for y in rows for x in columns]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def join(self, tiles: Tensor, downscale: int = 1) -> Tensor:
        """Blend the decoded tiles of :meth:`cut` into pixels (B, ..., h * downscale, w * downscale) fp32.

        Every pixel is the weighted mean of the tiles that contain it. A tile's weight rises with the pixel's distance
        from the tile's borders, up to the overlap. Borders that the tile shares with the frame do not lower its weight.
        """
        (rows, columns), sides = self.starts, [side * downscale for side in self.sides]
        tiles = tiles.unflatten(0, (-1, self.count))
        joined = torch.zeros(*tiles.shape[:1], *tiles.shape[2:-2], *sides, device=tiles.device)
        weights = torch.zeros(sides, device=tiles.device)
        places = [(y * downscale, x * downscale) for y in rows for x in columns]
        height, width = tiles.shape[-2:]
        for number, (y, x) in enumerate(places):
            ramps = [
                _ramp(start, length, side, overlap * downscale, tiles.device)
                for start, length, side, overlap in zip((y, x), (height, width), sides, self.overlap, strict=True)
            ]
            weight = ramps[0].unsqueeze(1) * ramps[1]
            joined[..., y : y + height, x : x + width] += tiles[:, number].float() * weight
            weights[y : y + height, x : x + width] += weight
        return joined.div_(weights)


def _ramp(start: int, length: int, side: int, overlap: int, device: torch.device) -> Tensor:
    """Return a tile's weights (length,) along one side.

    At an inner border, the weights rise to 1 over ``overlap`` values. At the frame's border, the weights are 1.
    """
    places = torch.arange(length, device=device) + 0.5
    up = (places / overlap).clamp(max=1) if start > 0 else torch.ones_like(places)
    down = ((length - places) / overlap).clamp(max=1) if start + length < side else torch.ones_like(places)
    return torch.minimum(up, down)


def tiles_of(sides: tuple[int, int], size: tuple[int, int], overlap: tuple[int, int]) -> Tiles | None:
    """Return tiles of at most this size; None if one tile covers the whole latents."""
    (height, width), (rows, columns) = sides, map(min, sides, size)
    if (rows, columns) == (height, width):
        return None
    return Tiles((height, width), (rows, columns), (min(overlap[0], rows - 1), min(overlap[1], columns - 1)))
