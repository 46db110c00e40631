"""Position encodings from a token's coordinates (t, h, w) or (h, w): sine-cosine tables, learned tables and rotations.

All encodings are functions of coordinates (N, axes), so they work for any grid and for packs of several grids.
``Attention.prepare`` applies the rotations (RoPE); opendit/kernels/rotate_heads.py is the kernel of that operation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 10000.0  # base of the geometric series of wavelengths


def grid_coordinates(*sizes: int, device: torch.device | None = None) -> Tensor:
    """Return the coordinates of a grid's tokens, (prod(sizes), axes) int64, with the last axis fastest."""
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")
    return torch.stack(axes, dim=-1).flatten(0, -2)


def sincos_positions(coordinates: Tensor, dim: int) -> Tensor:
    """Return the sine-cosine positions (N, dim) float32 of coordinates (N, axes), computed in float64.

    This is Meta's layout: the channels are split evenly over the axes, the last axis (the column) first. Each axis has
    sines, then cosines, with frequencies 10000^(-i / n), i < n = dim / (2 * axes).

    Raises ValueError unless ``dim`` is divisible by 2 * axes.
    """
    axes = coordinates.shape[1]
    check_sincos(dim, axes)
    omega = _frequencies(dim // (2 * axes), coordinates.device)
    parts = []
    for position in reversed(coordinates.double().unbind(1)):
        angles = position[:, None] * omega
        parts += [torch.sin(angles), torch.cos(angles)]
    return torch.cat(parts, dim=1).float()


def check_sincos(dim: int, axes: int) -> None:
    """Raise ValueError unless ``dim`` is divisible by 2 * axes."""
    if dim % (2 * axes):
        raise ValueError(f"a {axes}D sine-cosine table needs a width divisible by {2 * axes}, not {dim}")


def sincos_position_table(dim: int, *sizes: int, device: torch.device | None = None) -> Tensor:
    """Return :func:`sincos_positions` of a line (length,) or a grid (height, width), as (prod(sizes), dim), row by row.
    On the meta device, return an empty tensor: computing there would make torch import its compiler."""
    if device is not None and torch.device(device).type == "meta":
        check_sincos(dim, len(sizes))
        return torch.empty(math.prod(sizes), dim, dtype=torch.float32, device=device)
    return sincos_positions(grid_coordinates(*sizes, device=device), dim)


def _frequencies(count: int, device: torch.device) -> Tensor:
    return BASE ** -(torch.arange(count, dtype=torch.float64, device=device) / count)


def rotary_shares(head_dim: int, axes: int) -> list[int]:
    """Return how many of a head's channel pairs each axis rotates: equal numbers, plus the remainder for the first axis
    (time in clips). Raises ValueError if ``head_dim`` is odd or has fewer pairs than axes."""
    pairs = head_dim // 2
    if head_dim % 2 or pairs < axes:
        raise ValueError(
            f"--positions rope: a head size of {head_dim} can't be divided among {axes} axes; take an even one "
            f"from {2 * axes} on"
        )
    return [pairs - pairs // axes * (axes - 1)] + [pairs // axes] * (axes - 1)


def rotary_table(coordinates: Tensor, head_dim: int) -> Tensor:
    """Return the table for :func:`rotate`: cosines and sines (N, head_dim / 2, 2) float32 for tokens at coordinates (N,
    axes). This extends Su et al., "RoFormer" (2021), to several axes. Raises ValueError if ``head_dim`` is odd or too
    small."""
    shares = rotary_shares(head_dim, coordinates.shape[1])
    parts = zip(coordinates.double().unbind(1), shares, strict=True)
    angles = torch.cat([position[:, None] * _frequencies(share, position.device) for position, share in parts], dim=1)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


def axes_table(coordinates: Tensor, channels: Sequence[int], bases: Sequence[float]) -> Tensor:
    """Return the cosines and sines (..., d / 2, 2) float32 of tokens at coordinates (..., axes), computed in float64.
    channels: a head's number of channels for each axis. An axis with c channels has the frequencies base^(-2 i / c)."""
    angles = []
    for position, count, base in zip(coordinates.double().unbind(-1), channels, bases, strict=True):
        pairs = torch.arange(count // 2, dtype=torch.float64, device=position.device)
        angles.append(position.unsqueeze(-1) * base ** -(2 * pairs / count))
    joined = torch.cat(angles, dim=-1)
    return torch.stack([joined.cos(), joined.sin()], dim=-1).float()


def interwoven_table(
    coordinates: Tensor, width: int, base: float, steps: Sequence[float], sides: Sequence[float]
) -> Tensor:
    """Return the cosines and sines (..., D / 2, 2) float32 of tokens at coordinates (..., axes). D is ``width``.

    A position is p = coordinate * step / side. The frequencies are pi / 2 * base^u, with u from 0 to 1. For each
    frequency, the angles (2 p - 1) * frequency of all axes are consecutive. Channels without an angle come first and
    are not rotated.

    The computation is in float32 and in LTX-Video's order of operations, because rounding matters: angles reach 15,000.
    """
    count = width // (2 * len(steps))
    grid = coordinates.to(torch.float32)
    shares = [part * step / side for part, step, side in zip(grid.unbind(-1), steps, sides, strict=True)]
    powers = torch.linspace(0.0, 1.0, count, device=grid.device, dtype=torch.float32)
    frequencies = base**powers * math.pi / 2.0
    angles = (frequencies * (torch.stack(shares, dim=-1).unsqueeze(-1) * 2 - 1)).transpose(-1, -2).flatten(-2)
    angles = F.pad(angles, (width // 2 - angles.shape[-1], 0))
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of channels (2 i, 2 i + 1) of x (B, N, H, d) by the token's angle. The rotation is computed in
    fp32 or wider, and the result has x's dtype.

    table: cosines and sines (N, d / 2, 2) from :func:`rotary_table`, or (B, N, d / 2, 2) with a table for each sample.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    (even, odd), (cos, sin) = pairs.unbind(-1), table.unsqueeze(-3).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class LearnedPositions(nn.Module):
    """Learned positions, with one table for each axis. A token's position is the sum of its rows in all tables
    (MovieGen, Polyak et al. 2024)."""

    def __init__(self, sizes: tuple[int, ...], dim: int):
        super().__init__()
        self.sizes = sizes
        self.axes: nn.ModuleList = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)

    def forward(self, coordinates: Tensor) -> Tensor:
        """Return the positions (N, D) in the weights' dtype. coordinates: (N, axes) int64, each below its size."""
        return cast(Tensor, sum(table(at) for table, at in zip(self.axes, coordinates.unbind(1), strict=True)))


class _AddTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:
        return torch.add(x, table, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _):
        return tangent.clone()


def add_table(x: Tensor, table: Tensor) -> Tensor:
    """Return x (B, N, D) plus a constant fp32 table (1, N, D) or (N, D). The sum is computed in fp32 and rounded to x's
    dtype once, without allocating an fp32 tensor."""
    return _AddTable.apply(x, table)


def normalise_rotate(
    q: Tensor,
    k: Tensor,
    q_norm: Callable[[Tensor], Tensor] | None,
    k_norm: Callable[[Tensor], Tensor] | None,
    table: Tensor | None,
    across: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise q (B, N, H, d) and k (B, N, K, d), then rotate both by the table (see :func:`rotate`). ``across``: the
    norms are over all channels of a token (H d,), as in Wan and LTX-Video. Norms and table may be None."""
    if q_norm is not None and k_norm is not None:
        q, k = _normalise_heads(q_norm, q, across), _normalise_heads(k_norm, k, across)
    return (q, k) if table is None else (rotate(q, table), rotate(k, table))


def _normalise_heads(norm: Callable[[Tensor], Tensor], x: Tensor, across: bool) -> Tensor:
    return norm(x.flatten(2)).unflatten(2, (x.shape[2], -1)) if across else norm(x)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions. A token's coordinates are (frame, row, column) of its patch.

    Attributes:
        channels: Number of a head's channels for each axis; () with ``steps`` or without rotations.
        base: Base of the frequencies.
        bases: Base for each axis; () for ``base`` on every axis.
        text: Coordinates of a caption's tokens. "zero": 0 on all axes. "count": ``first``, ``first`` + 1, ... along the
            first axis; the media's tokens get the next number on this axis. "last": 0, 1, ... along an additional last
            axis. "diagonal": one coordinate for all axes, counted from half the media's longer side; the media's rows
            and columns are then counted from the middle.
        first: First coordinate for ``text`` "count".
        steps: Size of a coordinate's step along each axis; () if all heads share the rotations. With steps, a position
            is coordinate * step / side. The axes' channels are interleaved over all heads, so heads have different
            angles.
        sides: Side of each axis for ``steps``.
    """

    channels: tuple[int, ...]
    base: float = 10000.0
    text: Literal["zero", "count", "last", "diagonal"] = "zero"
    first: int = 1
    steps: tuple[float, ...] = ()
    sides: tuple[float, ...] = ()
    bases: tuple[float, ...] = ()

    def table(self, coordinates: Tensor, width: int) -> Tensor | None:
        """Return the cosines and sines of tokens at coordinates (..., axes); None without rotations. They are (..., d /
        2, 2) for one head's channels. With ``steps`` they are (..., D / 2, 2) for all D = ``width`` channels."""
        if not self.steps and not self.channels:
            return None
        if not self.steps:
            return axes_table(coordinates, self.channels, self.bases or (self.base,) * len(self.channels))
        return interwoven_table(coordinates, width, self.base, self.steps, self.sides)


def media_places(rotary: Rotary, places: Tensor, sides: Tensor) -> Tensor:
    """Return the rotary coordinates (n, axes) float64 of media tokens. For ``rotary.text`` "count", the caller must add
    the offset for the caption's length.

    Args:
        places: (n, 2 or 3), the tokens' coordinates in the grid.
        sides: (2,) or (n, 2), the grid's rows and columns.
    """
    axes, places = len(rotary.channels) - (rotary.text == "last"), places.double()
    if rotary.text == "diagonal":
        places[:, -2:] -= sides - sides // 2
    # With three coordinates and two axes, the padding is negative and removes the frame.
    places = F.pad(places, (axes - places.shape[1], 0))
    return F.pad(places, (0, len(rotary.channels) - axes))


def text_places(rotary: Rotary, length: int, sides: Tensor) -> Tensor:
    """Return the rotary coordinates (length, axes) or (S, length, axes) float64 of captions' tokens. sides: (2,) or
    (S, 2), number of rows and columns of the media."""
    index = torch.arange(length, device=sides.device, dtype=torch.float64)
    at = index.new_zeros(length, len(rotary.channels))
    if rotary.text == "count":
        at[:, 0] = index + rotary.first
    elif rotary.text == "last":
        at[:, -1] = index
    elif rotary.text == "diagonal":
        at = at + (index + (sides // 2).amax(-1, keepdim=True)).unsqueeze(-1)
    return at
