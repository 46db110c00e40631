"""Tiles of equal size cover the latents, and joining them is a weighted mean with weights from a formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendit.encoders.vae import Tiles, tiles_of

SIDE = st.integers(1, 23)


@given(SIDE, SIDE, st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_what_is_cut_and_joined_is_what_it_was(height, width, size, other, overlap):
    tiles = tiles_of((height, width), (size, other), (overlap, overlap))
    if tiles is None:
        assert height <= size and width <= other
        return
    x = torch.randn(2, 3, 2, height, width)
    cut = tiles.cut(x)
    assert cut.shape == (2 * tiles.count, 3, 2, min(size, height), min(other, width))
    torch.testing.assert_close(tiles.join(cut, 1), x)
    up = lambda t: t.repeat_interleave(3, -2).repeat_interleave(3, -1)  # noqa: E731
    torch.testing.assert_close(tiles.join(up(cut), 3), up(x))


def expected(tiles: Tiles, decoded: np.ndarray, scale: int) -> np.ndarray:
    """Join the tiles of one sample, pixel by pixel in float64."""
    (rows, columns), (height, width) = tiles.starts, (side * scale for side in tiles.sides)
    places = [(y * scale, x * scale) for y in rows for x in columns]

    def weight(place: int, start: int, length: int, side: int, overlap: int) -> float:
        if not start <= place < start + length:
            return 0.0
        up = 1.0 if start == 0 else min(1.0, (place - start + 0.5) / overlap)
        down = 1.0 if start + length == side else min(1.0, (start + length - place - 0.5) / overlap)
        return min(up, down)

    out = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            total = 0.0
            for tile, (top, left) in zip(decoded, places, strict=True):
                w = weight(y, top, tile.shape[0], height, tiles.overlap[0] * scale)
                w *= weight(x, left, tile.shape[1], width, tiles.overlap[1] * scale)
                if w:
                    out[y, x] += w * tile[y - top, x - left]
                    total += w
            out[y, x] /= total
    return out


@pytest.mark.parametrize(("sides", "size", "overlap"), [((7, 10), (4, 4), (1, 1)), ((9, 6), (5, 6), (2, 2))])
def test_seams_are_blended_by_the_distance_to_a_border(sides, size, overlap):
    tiles = tiles_of(sides, size, overlap)
    decoded = torch.randn(tiles.count, size[0] * 2, size[1] * 2, generator=torch.Generator().manual_seed(0))
    joined = tiles.join(decoded.unsqueeze(1), 2)
    np.testing.assert_allclose(joined[0, 0].numpy(), expected(tiles, decoded.numpy(), 2), atol=1e-5)
