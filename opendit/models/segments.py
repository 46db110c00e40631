"""Packs: samples of unequal size, one after the other in a single sequence of tokens.

A *segment* is one sample of a pack. It has its own grid of tokens, timestep, condition and modulation. Tokens attend
only to tokens of their segment. Padding fills the end of the sequence. Its values go through the layers, but no token
attends to them, and their gradient is exactly zero.

Segments may come in any order. Neighbouring segments of equal length form a *run*. The tokens of a run are a view
(count, length, ...) of the sequence, so that dense kernels can process the run in one call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # frames, rows, columns
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)


class SegmentRun(NamedTuple):
    """``count`` neighbouring segments of ``length`` tokens each, starting with number ``segment``."""

    segment: int
    count: int
    length: int


@dataclass(frozen=True)
class Segments:
    """The samples that lie one after the other in a pack of tokens.

    grids: (frames, rows, columns) of each segment, in tokens and in the order of the pack. A picture has 1 frame.
    tokens: length N of the pack. Tokens after the last segment are padding.
    repeated: True for each segment whose single frame is repeated to fill a patch of several frames. Empty if none is.

    Raises ValueError if there are no segments, if a grid is invalid, or if the segments have more tokens than the pack.
    """

    grids: tuple[Grid, ...]
    tokens: int
    repeated: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.grids or any(len(grid) != 3 or min(grid) < 1 for grid in self.grids):
            raise ValueError(f"a pack holds segments of (frames, rows, columns) from 1 on, not {self.grids}")
        if self.filled > self.tokens:
            raise ValueError(f"segments of {self.filled:,} tokens don't fit into a pack of {self.tokens:,}")
        if self.repeated and len(self.repeated) != len(self.grids):
            raise ValueError(f"{len(self.grids)} segments, but {len(self.repeated)} marks of repeated frames")

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, ...]], patch: tuple[int, ...], tokens: int) -> "Segments":
        """Make the segments of latents of these sizes, (rows, columns) or (frames, rows, columns), for a patch size.

        Raises ValueError for a size that the patch does not divide; a single frame is repeated to fill it.
        """
        whole = [_fill_patch(size, patch) for size in sizes]
        repeated = tuple(tuple(size) != full for size, full in zip(sizes, whole, strict=True))
        grids = [tuple(side // p for side, p in zip(size, patch, strict=True)) for size in whole]
        whole_grids = ((1, *grid)[-3:] for grid in grids)
        return cls(tuple((f, r, c) for f, r, c in whole_grids), tokens, repeated if any(repeated) else ())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(map(math.prod, self.grids))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first token of each segment, and where the padding begins."""
        return (0, *accumulate(self.lengths))

    @property
    def filled(self) -> int:
        """Tokens that are not padding."""
        return self.offsets[-1]

    @property
    def fill(self) -> float:
        """Their share."""
        return self.filled / self.tokens

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        return self.within(0, self.tokens)

    def within(self, first: int, stop: int) -> tuple[SegmentRun, ...]:
        """Return the runs of one rank's tokens, from ``first`` to before ``stop``. Segments that cross an end are cut.
        No run contains padding. The runs are contiguous from ``first`` (or the padding before it) on."""
        ends = zip(range(len(self.grids)), self.offsets, self.offsets[1:], strict=False)
        cut = ((number, min(end, stop) - max(begin, first)) for number, begin, end in ends)
        groups = groupby((part for part in cut if part[1] > 0), key=lambda part: part[1])
        return tuple(SegmentRun(parts[0][0], len(parts), length) for length, parts in ((n, list(g)) for n, g in groups))

    def place(self, device: torch.device) -> "PlacedSegments":
        """Copy the layers' description of the pack to ``device``, without waiting for it."""
        table = torch.tensor([*self.lengths, self.tokens - self.filled, *self.offsets])
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        count = len(self.grids)
        lengths, offsets = table.split([count + 1, count + 1])
        number = torch.arange(count + 1, device=device, dtype=torch.int32).clamp_(max=count - 1)
        sample_of_row = torch.repeat_interleave(number, lengths, output_size=self.tokens)
        return PlacedSegments(self, sample_of_row, offsets.to(torch.int32))


@dataclass(frozen=True, eq=False)
class PlacedSegments:
    """A pack as layers see it: all of it, or one rank's part.

    sample_of_row: (n,) int32, non-decreasing, the segment of each token. Padding belongs to the last segment.
    offsets: (S + 1,) int32, as of :class:`Segments`. first: position in the pack of the first token.
    """

    segments: Segments
    sample_of_row: Tensor
    offsets: Tensor
    first: int = 0

    def part(self, first: int, rows: int) -> "PlacedSegments":
        """Return one rank's part of a pack: ``rows`` tokens from the token ``first`` on."""
        return PlacedSegments(self.segments, self.sample_of_row[first : first + rows], self.offsets, first)

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        """Return the runs of these n tokens."""
        return self.segments.within(self.first, self.first + len(self.sample_of_row))

    def offsets_of(self, segment: int, count: int) -> Tensor:
        """Return the first token of ``count`` segments, starting with number ``segment``, and the end of the last one.

        Returns (count + 1,) int32, relative to the start of these segments."""
        made = self.__dict__.setdefault("_offsets", {})  # every layer asks for the same offsets
        if (segment, count) not in made:
            own = self.offsets[segment : segment + count + 1]
            made[segment, count] = own - own[0]
        return made[segment, count]

    def coordinates(self) -> Tensor:
        """Return (n, 3) int64: frame, row and column of each token in its segment's grid. Padding repeats the last."""
        device, rows = self.sample_of_row.device, self.sample_of_row
        sides = torch.tensor([(height, width) for _, height, width in self.segments.grids])
        if device.type == "cuda":
            sides = sides.pin_memory().to(device, non_blocking=True)
        height, width = sides[rows].unbind(1)
        place = torch.arange(self.first, self.first + len(rows), device=device)
        place = torch.minimum(place, self.offsets[rows + 1] - 1) - self.offsets[rows]  # padding: the last token's
        return torch.stack([place // (height * width), place // width % height, place % width], dim=1)


def _fill_patch(size: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return a latent's size after its single frame is repeated to fill a patch."""
    full = (patch[0], *size[1:]) if len(patch) == 3 and size[0] == 1 else tuple(size)
    if len(full) != len(patch) or any(side < 1 or side % p for side, p in zip(full, patch, strict=False)):
        raise ValueError(
            f"latents of {' x '.join(map(str, size))} do not divide by patch {' x '.join(map(str, patch))}"
        )
    return full


# ------------------------------------------------------------------------------------------------------------ patches


def to_patches(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Cut latents (B, C, ...) into patches (B, n, C, *patch), in token order. A single frame is repeated."""
    sizes = _fill_patch(tuple(x.shape[2:]), patch)
    x = x.expand(*x.shape[:2], *sizes)
    x = x.reshape(*x.shape[:2], *(part for side, p in zip(sizes, patch, strict=True) for part in (side // p, p)))
    axes = range(len(patch))
    order = (0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes))
    return x.permute(order).flatten(1, len(patch))


def from_patches(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Invert :func:`to_patches`: (B, n, C, *patch) to (B, C, ...). grid: tokens along each axis."""
    patch = x.shape[3:]
    axes, x = len(patch), x.unflatten(1, tuple(grid))
    order = (0, 1 + axes, *(place for axis in range(axes) for place in (1 + axis, 2 + axes + axis)))
    sides = (side * p for side, p in zip(grid, patch, strict=True))
    return x.permute(order).reshape(x.shape[0], x.shape[1 + axes], *sides)


def pack_patches(latents: Sequence[Tensor], patch: tuple[int, ...], tokens: int) -> Tensor:
    """Concatenate the patches of latents (C, ...) and pad them with zeros: (tokens, C, *patch).

    Raises ValueError if the patch does not divide a latent, or if the latents have more than ``tokens`` tokens.
    """
    parts = [to_patches(x.unsqueeze(0), patch).squeeze(0) for x in latents]
    filled = sum(map(len, parts))
    if filled > tokens:
        raise ValueError(f"segments of {filled:,} tokens don't fit into a pack of {tokens:,}")
    return torch.cat([*parts, parts[0].new_zeros(tokens - filled, *parts[0].shape[1:])])


def unpack_patches(x: Tensor, segments: Segments) -> list[Tensor]:
    """Turn patches (tokens, C, *patch) into each segment's latents (C, ...). Keep one copy of a repeated frame."""
    axes, found = x.dim() - 2, []
    repeated = segments.repeated or (False,) * len(segments.grids)
    for part, grid, single in zip(x[: segments.filled].split(segments.lengths), segments.grids, repeated, strict=True):
        whole = from_patches(part.unsqueeze(0), grid[3 - axes :]).squeeze(0)
        found.append(whole[:, :1] if single else whole)
    return found


def segment_means(x: Tensor, segments: Segments) -> Tensor:
    """Return the mean of x (tokens,) over each segment's tokens, (S,). Padding is left out."""
    parts = x[: segments.filled].split([run.count * run.length for run in segments.runs])
    return torch.cat([part.view(run.count, run.length).mean(1) for part, run in zip(parts, segments.runs, strict=True)])


# ---------------------------------------------------------------------------------------------------------- attention
# A run of equal lengths is a view (count, L, H, d) of the pack, which dense kernels take at full speed. Where runs are
# short, many small calls would follow each other: a varlen kernel, if there is one (opendit/kernels/varlen.py chooses
# it), takes such neighbours in one call; otherwise there is one call a run.


class Varlen(Protocol):
    """A kernel for neighbours of unequal length."""

    def takes(self, run: SegmentRun) -> bool:
        """Return True if it is faster for such a run than a dense call."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Return the attention output (N, H, d) of q, k, v (N, H, d).

        offsets: (S + 1,) int32, the first token of each segment and the end of the last. longest: most tokens of a
        segment."""
        ...


class AttentionCall(NamedTuple):
    """Neighbouring runs that are attended to in one call."""

    runs: tuple[SegmentRun, ...]
    varlen: bool

    @property
    def tokens(self) -> int:
        return sum(run.count * run.length for run in self.runs)


def calls_of(runs: tuple[SegmentRun, ...], varlen: Varlen | None) -> list[AttentionCall]:
    """Return the calls for these runs: a dense call for each, or one call for neighbours that ``varlen`` takes."""
    parts = []
    for together, group in groupby(runs, key=lambda run: varlen is not None and varlen.takes(run)):
        found = tuple(group)
        parts += [AttentionCall(found, True)] if together else [AttentionCall((run,), False) for run in found]
    return parts


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PlacedSegments, attend: Attend, varlen: Varlen | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the tokens of each token's segment, and zeros for padding.

    q, k, v: (1, H, N, d) of the whole pack. Views of (1, N, ..., H, d), the layout of projections, are fastest. The
    result is in this memory layout, too.
    """
    parts = calls_of(packed.segments.runs, varlen)
    padding = q.shape[2] - sum(part.tokens for part in parts)
    # split, not slices: their backward pass joins the parts' gradients in one copy, that of a slice makes a whole
    # tensor of zeros for each.
    sizes = [*(part.tokens for part in parts), *([padding] if padding else [])]
    whole = (x[0].transpose(0, 1) for x in (q, k, v))
    rows = zip(*(x.split(sizes) if len(sizes) > 1 else (x,) for x in whole), strict=True)
    found = [_attend_to(part, own, packed, attend, varlen) for part, own in zip(parts, rows, strict=False)]
    if padding:
        found.append(q.new_zeros(padding, q.shape[1], v.shape[-1]).to(found[0].dtype))
    output = found[0] if len(found) == 1 else torch.cat(found)
    return output.unsqueeze(0).transpose(1, 2)


def _attend_to(
    part: AttentionCall, own: tuple[Tensor, ...], packed: PlacedSegments, attend: Attend, varlen: Varlen | None
) -> Tensor:
    """Return the attention output (n, H, d) of a part's ``own`` q, k, v (n, H, d)."""
    first, (q, k, v) = part.runs[0], own
    if part.varlen:
        assert varlen is not None, "calls_of asks it"
        offsets = packed.offsets_of(first.segment, sum(run.count for run in part.runs))
        return varlen(q, k, v, offsets, max(run.length for run in part.runs))
    return attend(*(by_segment(x, first) for x in (q, k, v))).transpose(1, 2).flatten(0, 1)


def by_segment(x: Tensor, run: SegmentRun) -> Tensor:
    """View a run's tokens (count * L, H, d) as (count, H, L, d)."""
    return x.unflatten(0, (run.count, run.length)).transpose(1, 2)


def segment_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, packed: PlacedSegments, attend: Callable[..., Tensor]
) -> Tensor:
    """Attend from every token to its segment's caption. The result is zero for padding.

    q: (1, H, n, d) of the pack's tokens, or one rank's; k, v: (S, H, M, d) and mask: (S, M) bool of the captions of
    all segments. attend: ``masked_attention``. Returns (1, H, n, d), laid out in memory as (1, n, H, d).
    """
    runs = packed.runs
    rest = q.shape[2] - sum(run.count * run.length for run in runs)
    if not runs:  # a rank of padding alone; still a function of k and v, for ranks' gradients to be of the same tensors
        return q * 0 + 0 * (k.sum() + v.sum())
    before, after = runs[0].segment, len(k) - runs[-1].segment - runs[-1].count
    sizes = [before, *(run.count for run in runs), after]
    tokens = q[0].transpose(0, 1).split([*(run.count * run.length for run in runs), rest])
    captions = list(zip(*(x.split(sizes) for x in (k, v, mask)), strict=True))[1:-1]
    found = [
        attend(by_segment(own, run), *caption).transpose(1, 2).flatten(0, 1)
        for own, run, caption in zip(tokens, runs, captions, strict=False)
    ]
    if rest:
        found.append(q.new_zeros(rest, q.shape[1], v.shape[-1]).to(found[0].dtype))
    return torch.cat(found).unsqueeze(0).transpose(1, 2)
