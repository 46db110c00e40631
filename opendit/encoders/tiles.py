"""Decode large frames in overlapping tiles of one size and blend the seams.

Tiles are independent of each other: a batch holds several, and ranks can share them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """The cuts of latents (B, C, ..., h, w) into overlapping tiles.

    sides: (h, w) of the latents. size: of a tile, at most ``sides``. overlap: of neighbours, in latent values, less
    than ``size``; the last tile of a row or column ends where the latents do, and may overlap more.
    """

    sides: tuple[int, int]
    size: tuple[int, int]
    overlap: tuple[int, int]

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """Return where tiles start along height and along width."""
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
        """Cut latents (B, C, ..., h, w) into tiles (B * count, C, ..., *size), those of a sample next to each other,
        row by row.

        scale: pixels per latent value along a side, if pixels are cut instead of latents.
        """
        rows, columns = ([scale * start for start in starts] for starts in self.starts)
        height, width = (scale * side for side in self.size)
        tiles = [latents[..., y : y + height, x : x + width] for y in rows for x in columns]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def join(self, tiles: Tensor, downscale: int = 1) -> Tensor:
        """Blend the decoded tiles of :meth:`cut` into pixels (B, ..., h * downscale, w * downscale) fp32.

        Every pixel is the mean of the tiles that contain it, each weighted by the distance to its borders inside the
        frame, up to the overlap.
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
    """Return a tile's weights (length,) along one side, which rise to 1 over ``overlap`` from a border inside the
    frame."""
    places = torch.arange(length, device=device) + 0.5
    up = (places / overlap).clamp(max=1) if start > 0 else torch.ones_like(places)
    down = ((length - places) / overlap).clamp(max=1) if start + length < side else torch.ones_like(places)
    return torch.minimum(up, down)


def tiles_of(sides: tuple[int, int], size: tuple[int, int], overlap: tuple[int, int]) -> Tiles | None:
    """Return tiles of at most this size, or None if one holds everything."""
    (height, width), (rows, columns) = sides, map(min, sides, size)
    if (rows, columns) == (height, width):
        return None
    return Tiles((height, width), (rows, columns), (min(overlap[0], rows - 1), min(overlap[1], columns - 1)))
