"""Large frames decoded in overlapping tiles of one size, whose seams are blended: independent pieces of work, which a
batch holds several of and ranks can share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """The cuts of latents (B, C, ..., h, w) into tiles that overlap.

    sides: (h, w) of the latents. size: of a tile, at most as large. overlap: of neighbours, in latent numbers, less
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
        """Tiles of one sample."""
        rows, columns = self.starts
        return len(rows) * len(columns)

    def cut(self, latents: Tensor, scale: int = 1) -> Tensor:
        """The tiles (B * count, C, ..., *size) of latents (B, C, ..., h, w), a sample's next to each other, by rows; or
        those of pixels, of which ``scale`` a side belong to a latent number."""
        rows, columns = ([scale * start for start in starts] for starts in self.starts)
        height, width = (scale * side for side in self.size)
        tiles = [latents[..., y : y + height, x : x + width] for y in rows for x in columns]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def join(self, tiles: Tensor, downscale: int = 1) -> Tensor:
        """Pixels (B, ..., h * downscale, w * downscale) fp32 of the decoded tiles of :meth:`cut`.

        Every pixel is the mean of the tiles that it lies in, each weighted by its distance to the tile's borders inside
        the frame, up to the overlap."""
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
    """A tile's weights (length,) along one side: they go up to 1 over ``overlap`` from a border inside the frame."""
    places = torch.arange(length, device=device) + 0.5
    up = (places / overlap).clamp(max=1) if start > 0 else torch.ones_like(places)
    down = ((length - places) / overlap).clamp(max=1) if start + length < side else torch.ones_like(places)
    return torch.minimum(up, down)


def tiles_of(sides: tuple[int, int], size: tuple[int, int], overlap: tuple[int, int]) -> Tiles | None:
    """The tiles of at most this size; None if one holds all."""
    (height, width), (rows, columns) = sides, map(min, sides, size)
    if (rows, columns) == (height, width):
        return None
    return Tiles((height, width), (rows, columns), (min(overlap[0], rows - 1), min(overlap[1], columns - 1)))
