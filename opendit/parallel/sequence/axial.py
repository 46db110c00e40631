"""Attention along the axes of a grid that ranks divide: Dynamic Sequence Parallelism (Zhao et al. 2024, arXiv
2403.10266), for ST-DiT.

A clip's tokens are a grid of T frames x S spatial positions. Attention within frames needs all positions of a frame.
Attention along time needs all frames of a position. P ranks can divide the grid in two layouts:

    by frames      T / P of the frames with all positions    attention within frames needs no other rank
    by positions   all frames with S / P of the positions    attention along time needs no other rank

Tokens are stored in the *home* layout: by frames, or by positions if that needs less padding. Attention along the
divided axis needs the *away* layout. One all-to-all brings its input to the away layout, before the projection to q, k,
v. A second all-to-all brings the output back. In a block's forward pass, a rank receives 2 (P - 1) / P^2 x N D numbers.

If P does not divide the number of frames or positions, padding is appended. Padding never affects other tokens, and its
gradient is zero.

:class:`AllToAll` uses collectives. With :class:`DirectExchange`, ranks access each other's memory (peer_memory.py), as
in Ulysses (ulysses.py), but with positions instead of heads:

    x by frames in the input buffer ─barrier─▶ own positions of all frames read ─▶ q k v, attention along time
      ─▶ the output written to its owners' output buffers ─barrier─▶ own frames, all positions

Positions are sent in parts. A kernel transfers the first incoming part and the last outgoing part. Copy engines
transfer all other parts while arrived parts are processed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.torch_utils import not_compiled
from opendit.config.parallel_sizes import divide_grid
from opendit.kernels import fp8
from opendit.kernels.fp8 import Float8
from opendit.kernels.fp8_linear import Modulated, Quantized, quantized
from opendit.models.attention import AnyProjection, GridAttention, SequenceShards, TokenGrid
from opendit.models.layers import Attend, in_working_dtype
from opendit.parallel.collectives import Exchange, Group, gather_tokens
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory
from opendit.parallel.sequence.ulysses import Collect, Depart, Layer, unread

FRAMES, PLACES = 0, 1  # axes of the grid
PARTS = 2  # number of parts of an exchange; one part's attention overlaps with the next part's exchange
Tokens = Tensor | Modulated | Quantized  # (B, n, D)


@dataclass(frozen=True)
class GridShare:
    """A rank's shard of a grid of tokens, ordered by frame."""

    group: Group
    sizes: tuple[int, int]  # (frames T, positions S)
    # the divided axis in the home layout: FRAMES (a rank has some frames) or PLACES (a rank has some positions)
    home: int

    @property
    def away(self) -> int:
        return 1 - self.home

    def share(self, axis: int) -> int:
        """Return a rank's number of frames (or positions) when they are divided, with padding."""
        return -(-self.sizes[axis] // self.group.size)

    def local(self, axis: int) -> tuple[int, int]:
        """Return a rank's (number of frames, number of positions) when ``axis`` is divided."""
        frames, places = (self.share(axis) if i == axis else size for i, size in enumerate(self.sizes))
        return frames, places

    def own(self, x: Tensor, axis: int) -> Tensor:
        """Select this rank's shard (B, f, s, F) from all tokens (B, T S, F) when ``axis`` is divided, with zeros for
        padding."""
        x, n = x.unflatten(1, self.sizes), self.share(axis)
        start = min(self.group.rank * n, self.sizes[axis])
        return padded(x.narrow(1 + axis, start, min(n, self.sizes[axis] - start)), 1 + axis, n)

    def leave(self, x: Tensor, parts: int) -> list[Exchange]:
        """Start to bring this rank's tokens (B, n, D) to the away layout, in at most ``parts`` exchanges."""
        dim, ranks = 1 + self.away, self.group.size
        x = padded(x.unflatten(1, self.local(self.home)), dim, ranks * self.share(self.away))
        x = x.unflatten(dim, (ranks, -1))
        return [Exchange(self.group).start(part.movedim(dim, 0)) for part in x.split(self.part(parts), dim + 1)]

    def part(self, parts: int) -> int:
        """Return the number of frames (or positions) in one exchange of :meth:`leave`. The last exchange may be
        smaller."""
        return -(-self.share(self.away) // parts)

    def arrive(self, exchange: Exchange) -> Tensor:
        """Wait for one exchange from :meth:`leave`. Return the received tokens (B, f, s, D) in the away layout."""
        dim, received = 1 + self.home, exchange.finish()
        return received.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, self.sizes[self.home])

    def send_back(self, x: Tensor) -> Exchange:
        """Start to send tokens (B, f, s, D) back to the home layout."""
        dim, ranks = 1 + self.home, self.group.size
        x = padded(x, dim, ranks * self.share(self.home)).unflatten(dim, (ranks, -1))
        return Exchange(self.group).start(x.movedim(dim, 0))

    def collect(self, returned: list[Exchange]) -> Tensor:
        dim = 1 + self.away
        x = torch.cat([exchange.finish().movedim(0, dim) for exchange in returned], dim + 1).flatten(dim, dim + 1)
        return x.narrow(dim, 0, self.sizes[self.away]).flatten(1, 2)


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


@dataclass(frozen=True)
class AllToAll:
    """Exchange with collectives, in ``parts`` parts. One part's transfer overlaps with other parts' attention.

    ``attend(grid, x, attend)`` brings tokens (B, n, D) to the away layout and calls ``attend(lines, which)`` for every
    part. The results (B, n, D') return to the home layout. lines: the part's tokens. which: slice of the divided axis.
    """

    parts: int = PARTS

    @not_compiled  # torch's compiler would change the order in which parts are sent and awaited
    def attend(self, grid: GridShare, x: Tokens, attend: Callable[[Tokens, slice], Tensor]) -> Tensor:
        returned, which = [], slice(0, 0)
        for lines in self._arriving(grid, x):
            which = slice(which.stop, which.stop + lines.shape[1] // grid.sizes[grid.home])
            sizes = part_sizes(grid, which)
            returned.append(grid.send_back(attend(lines, which).unflatten(1, sizes)))
        return grid.collect(returned)

    def _arriving(self, grid: GridShare, x: Tokens) -> Iterator[Tokens]:
        if isinstance(x, Modulated | Quantized):
            x = quantized(x)
            yield _moved(x, grid)
            return
        for exchange in grid.leave(in_working_dtype(x)[0], self.parts):
            yield grid.arrive(exchange).flatten(1, 2)


def part_sizes(grid: GridShare, which: slice) -> tuple[int, int]:
    """Return the slice's (number of frames, number of positions) in the away layout."""
    frames, places = (which.stop - which.start if i == grid.away else size for i, size in enumerate(grid.sizes))
    return frames, places


def _moved(x: Quantized, grid: GridShare) -> Quantized:
    """Bring float8 tokens to the away layout. The scale is equal on all ranks, because LayerNorm + modulate computes
    the scale from the samples' modulation."""
    stand_in, data = _MoveQuantized.apply(x.stand_in, x.data.data.view(torch.uint8), grid)
    return Quantized(stand_in, Float8(data.view(fp8.E4M3), x.data.descale))


class _MoveQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stand_in: Tensor, data: Tensor, grid: GridShare):
        ctx.grid = grid
        (exchange,) = grid.leave(data, 1)
        data = grid.arrive(exchange)
        ctx.sizes = data.shape[1:3]
        data = data.flatten(1, 2)
        ctx.mark_non_differentiable(data)
        return stand_in.new_empty_strided(data.shape, (0, 0, 0)), data

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        return ctx.grid.collect([ctx.grid.send_back(grad.unflatten(1, ctx.sizes))]), None, None


@dataclass(frozen=True)
class SharedGrid:
    """Implementation of :class:`opendit.models.attention.SequenceShards` for attention along a grid's axes.

    ``exchange`` moves tokens to the away layout and back. ``full`` divides the tokens for attention to all tokens; None
    without such attention. With ``full``, the home layout must be by frames.
    """

    grid: GridShare
    exchange: "AllToAll | DirectExchange"
    full: SequenceShards | None = None
    _rotations: dict[tuple[int, int | None, int | None], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    axial: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        return math.prod(self.grid.local(self.grid.home))

    def take(self, x: Tensor) -> Tensor:
        return self.grid.own(x, self.grid.home).flatten(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        grid = self.grid
        if grid.home == FRAMES:
            return gather_tokens(x, math.prod(grid.sizes), grid.group)
        by_place = x.unflatten(1, grid.local(PLACES)).transpose(1, 2).flatten(1, 2)
        whole = gather_tokens(by_place, math.prod(grid.sizes), grid.group)
        return whole.unflatten(1, grid.sizes[::-1]).transpose(1, 2).flatten(1, 2)

    def attend_along(
        self,
        axis: int,
        x: Tokens,
        qkv: AnyProjection,
        attend: Callable[..., Tensor],
        rotary: Tensor | None,
    ) -> Tensor:
        grid, divided = self.grid, 1 - axis
        if divided == grid.home:
            return attend(x, qkv, TokenGrid(grid.local(divided), self._rotary(rotary, divided)))

        def attend_part(lines: Tokens, which: slice) -> Tensor:
            return attend(lines, qkv, TokenGrid(part_sizes(grid, which), self._rotary(rotary, divided, which)))

        return self.exchange.attend(grid, x, attend_part)

    def _rotary(self, rotary: Tensor | None, axis: int, which: slice = slice(None)) -> Tensor | None:
        """Return the rotations (n, d / 2, 2) for this rank's tokens when ``axis`` is divided. which: slice of the
        divided axis."""
        if rotary is None:
            return None
        key = axis, which.start, which.stop
        if key not in self._rotations:  # all blocks use these rotations
            own = self.grid.own(rotary.flatten(1).unsqueeze(0), axis)[0]
            part = own[which] if axis == FRAMES else own[:, which]
            self._rotations[key] = part.flatten(0, 1).unflatten(1, (-1, 2))
        return self._rotations[key]

    @property
    def takes_projection(self) -> bool:
        return self.full is not None and self.full.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        assert self.full is not None, "the model has attention to all tokens"
        return self.full.attention(q, k, v, attend)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        assert self.full is not None, "the model has attention to all tokens"
        return self.full.project_and_attend(x, qkv, heads, attend, float8)


def shared_grid(
    group: Group, sizes: tuple[int, ...], exchange: "AllToAll | DirectExchange", full: SequenceShards | None
) -> SharedGrid:
    """Return this rank's shard of a grid of frames, rows and columns. The home layout is by frames. Without ``full``,
    it is by positions if that needs less padding."""
    sizes = sizes[0], math.prod(sizes[1:])
    home, _ = divide_grid(*sizes, group.size, by_frames=full is not None)
    return SharedGrid(GridShare(group, sizes, home), exchange, full)


@dataclass(frozen=True)
class DirectExchange:
    """Exchange with symmetric memory. Float8 inputs, and grids that are divided by positions, use :class:`AllToAll`."""

    memory: PeerMemory
    parts: int = PARTS

    @not_compiled  # a compiler can't see that other ranks read and write the buffers
    def attend(self, grid: GridShare, x: Tokens, attend: Callable[[Tokens, slice], Tensor]) -> Tensor:
        if grid.home != FRAMES or not isinstance(x, Tensor):
            return AllToAll(self.parts).attend(grid, x, attend)
        x = cast(Tensor, in_working_dtype(x)[0])
        if torch.is_grad_enabled() and not x.requires_grad:
            # Compute a frozen x's gradient, too, because all ranks must use the same buffers in the backward pass.
            x = x.detach().requires_grad_()
        frames, own = grid.local(FRAMES)[0], grid.share(grid.away)
        parts = next(n for n in range(self.parts, 0, -1) if own % n == 0)
        places = grid.group.size * own
        x = padded(x.unflatten(1, (frames, -1)), 2, places)
        layer = Layer(self.memory, parts, places, grid.sizes[FRAMES], x.flatten(2).shape)
        departed, out = [], layer
        for part, lines in enumerate(_Enter.apply(x.flatten(2), layer)):
            lines = _ArriveInPlaces.apply(lines, layer, part)  # (B, positions of the part, T, D)
            which = slice(part * own // parts, (part + 1) * own // parts)
            output = attend(lines.transpose(1, 2).flatten(1, 2), which).unflatten(1, (grid.sizes[FRAMES], -1))
            if part == 0:
                out = replace(layer, shape=(*x.shape[:2], places * output.shape[-1]), held=[], arriving={}, doutput={})
            departed.append(Depart.apply(output.transpose(1, 2), out, part))
        y = Collect.apply(out, None, *departed).unflatten(2, (places, -1))
        return y[:, :, : grid.sizes[grid.away]].flatten(1, 2)


class _Enter(torch.autograd.Function):
    """Brings tokens (B, frames, S * D) to the away layout. Returns a tensor (B, positions, T, D) for each part. The
    data may still be arriving."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Layer):
        ctx.layer, ctx.dtype = layer, x.dtype
        layer.rows(Buffer.INPUT, 1, x.dtype).of[layer.memory.group.rank].view(x.shape).copy_(x)
        return tuple(lines for (lines,) in layer.pull(1, x, 0))

    @staticmethod
    def backward(ctx, *unread: Tensor):
        # a view of a buffer; the preceding norm's backward pass reads this view before the next exchange
        return ctx.layer.gradients(ctx.dtype, 1), None


class _ArriveInPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lines: Tensor, layer: Layer, part: int):
        ctx.layer, ctx.part = layer, part
        layer.arrived(part)
        return lines.view_as(lines)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.layer.push_gradients((grad,), ctx.part)
        return unread(grad), None, None
