"""Encode positions: sine-cosine tables, learned tables and rotations, of a token's coordinates (t, h, w) or (h, w).

All are functions of coordinates (N, axes), so that they serve any grid, and packed sequences of several.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 10000.0  # of the geometric series of wavelengths


def grid_coordinates(*sizes: int, device: torch.device | None = None) -> Tensor:
    """The tokens of a grid, (prod(sizes), axes) int64, the last axis fastest."""
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")
    return torch.stack(axes, dim=-1).flatten(0, -2)


def sincos_positions(coordinates: Tensor, dim: int) -> Tensor:
    """Sine-cosine positions (N, dim) float32 of coordinates (N, axes).

    Meta's layout: the channels are split evenly over the axes, the last axis (the column) first; each part is
    sines, then cosines, of frequencies 10000^(-i / n), i < n = dim / (2 * axes). Positions are computed in float64.
    Raises ValueError unless dim divides by 2 * axes.
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
    """Raise ValueError if the sines and cosines of ``axes`` axes can't divide the width evenly."""
    if dim % (2 * axes):
        raise ValueError(f"a {axes}D sine-cosine table needs a width divisible by {2 * axes}, not {dim}")


def sincos_position_table(dim: int, *sizes: int, device: torch.device | None = None) -> Tensor:
    """:func:`sincos_positions` of a line (length,) or a grid (height, width), (prod(sizes), dim), rows first.

    On the meta device it has no values, and is made without computing any: torch would import its compiler for that."""
    if device is not None and torch.device(device).type == "meta":
        check_sincos(dim, len(sizes))
        return torch.empty(math.prod(sizes), dim, dtype=torch.float32, device=device)
    return sincos_positions(grid_coordinates(*sizes, device=device), dim)


def _frequencies(count: int, device: torch.device) -> Tensor:
    return BASE ** -(torch.arange(count, dtype=torch.float64, device=device) / count)


def rotary_shares(head_dim: int, axes: int) -> list[int]:
    """Pairs of a head's channels that each axis rotates: equal shares, and to the first axis (time, of a clip) what is
    left over. Raises ValueError if head_dim is odd or has no pair for every axis."""
    pairs = head_dim // 2
    if head_dim % 2 or pairs < axes:
        raise ValueError(
            f"--positions rope: a head size of {head_dim} can't be divided among {axes} axes; take an even one "
            f"from {2 * axes} on"
        )
    return [pairs - pairs // axes * (axes - 1)] + [pairs // axes] * (axes - 1)


def rotary_table(coordinates: Tensor, head_dim: int) -> Tensor:
    """Cosines and sines (N, head_dim / 2, 2) float32 by which :func:`rotate` turns the heads of tokens at coordinates
    (N, axes): Su et al., "RoFormer" (2021), for several axes, with a sine-cosine table's frequencies along each.

    Raises ValueError for heads that are odd or too small.
    """
    shares = rotary_shares(head_dim, coordinates.shape[1])
    parts = zip(coordinates.double().unbind(1), shares, strict=True)
    angles = torch.cat([position[:, None] * _frequencies(share, position.device) for position, share in parts], dim=1)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


def axes_table(coordinates: Tensor, channels: Sequence[int], bases: Sequence[float]) -> Tensor:
    """Cosines and sines (..., d / 2, 2) float32 of tokens at coordinates (..., axes), which divide the channels of a
    head as ``channels`` says: base^(-2 i / c) are the frequencies of an axis of c channels. Computed in float64."""
    angles = []
    for position, count, base in zip(coordinates.double().unbind(-1), channels, bases, strict=True):
        pairs = torch.arange(count // 2, dtype=torch.float64, device=position.device)
        angles.append(position.unsqueeze(-1) * base ** -(2 * pairs / count))
    joined = torch.cat(angles, dim=-1)
    return torch.stack([joined.cos(), joined.sin()], dim=-1).float()


def interwoven_table(
    coordinates: Tensor, width: int, base: float, steps: Sequence[float], sides: Sequence[float]
) -> Tensor:
    """Cosines and sines (..., D / 2, 2) float32 of tokens at coordinates (..., axes), for all D channels of a token.

    A position is p = coordinate * step / side. Of each frequency pi / 2 * base^u, u from 0 to 1, the axes' angles (2 p
    - 1) * frequency follow each other; the channels that are left over come first and stay as they are. In float32 and
    in LTX-Video's order of operations: angles reach 15,000, and rounding is a part of them.
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
    """Turns each pair of channels (2 i, 2 i + 1) of x (B, N, H, d) by a token's angle; table (N, d / 2, 2) of
    :func:`rotary_table`, or one for each sample (B, N, d / 2, 2). In fp32 or wider; the result has x's dtype."""
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    (even, odd), (cos, sin) = pairs.unbind(-1), table.unsqueeze(-3).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class LearnedPositions(nn.Module):
    """A learned table for each axis; a token's position is the sum of its rows (MovieGen, Polyak et al. 2024)."""

    def __init__(self, sizes: tuple[int, ...], dim: int):
        super().__init__()
        self.sizes = sizes
        self.axes: nn.ModuleList = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)

    def forward(self, coordinates: Tensor) -> Tensor:
        """(N, D) in the weights' dtype, of coordinates (N, axes) int64 below ``sizes``."""
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
    """x (B, N, D) plus a constant table (1, N, D) or (N, D) fp32, added in fp32 and rounded to x's dtype once.

    ``(x + table).to(x.dtype)`` without the tensor of x's size in fp32, forward and backward.
    """
    return _AddTable.apply(x, table)
