"""Packs: samples of unequal size that are concatenated to a single sequence of tokens.

A *segment* is one sample of a pack, with a separate grid, timestep, condition and modulation. Tokens attend only to
tokens of their segment. Padding fills the end of the sequence. No token attends to padding, and the padding's gradient
is exactly zero.

Neighbouring segments of equal length form a *run*. A run's tokens are a view (count, length, ...) of the sequence, so
that a dense kernel can process the run in one call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]  # frames, rows, columns
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)


class SegmentRun(NamedTuple):
    """``count`` neighbouring segments of ``length`` tokens each. segment: number of the first one."""

    segment: int
    count: int
    length: int


@dataclass(frozen=True)
class Segments:
    """The segments of a pack, in order. Raises ValueError for an invalid pack."""

    grids: tuple[Grid, ...]  # each segment's (frames, rows, columns) in tokens
    tokens: int  # the pack's length N, including padding
    repeated: tuple[bool, ...] = ()  # for each segment, True if a single frame is repeated to fill a patch; () for none
    kept: tuple[int, ...] = ()  # for each segment, the number of tokens in a route's blocks; () without a route

    def __post_init__(self) -> None:
        if not self.grids or any(len(grid) != 3 or min(grid) < 1 for grid in self.grids):
            raise ValueError(f"a pack holds segments of (frames, rows, columns) from 1 on, not {self.grids}")
        if self.filled > self.tokens:
            raise ValueError(f"segments of {self.filled:,} tokens don't fit into a pack of {self.tokens:,}")
        if self.repeated and len(self.repeated) != len(self.grids):
            raise ValueError(f"{len(self.grids)} segments, but {len(self.repeated)} marks of repeated frames")

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, ...]], patch: tuple[int, ...], tokens: int) -> "Segments":
        """Return the segments for latents of these sizes, (rows, columns) or (frames, rows, columns). A single frame is
        repeated to fill the patch. Raises ValueError for a size that the patch does not divide."""
        whole = [_fill_patch(size, patch) for size in sizes]
        repeated = tuple(tuple(size) != full for size, full in zip(sizes, whole, strict=True))
        grids = [tuple(side // p for side, p in zip(size, patch, strict=True)) for size in whole]
        whole_grids = ((1, *grid)[-3:] for grid in grids)
        return cls(tuple((f, r, c) for f, r, c in whole_grids), tokens, repeated if any(repeated) else ())

    def of_kept(self, tokens: int) -> "Segments":
        """Return the segments of a pack with only the kept tokens, padded to at least ``tokens`` tokens."""
        return Segments(tuple((1, 1, count) for count in self.kept), max(tokens, sum(self.kept)))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.grids))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of each segment's first token, then the index of the first padding token."""
        return (0, *accumulate(self.lengths))

    @property
    def filled(self) -> int:
        return self.offsets[-1]

    @property
    def fill(self) -> float:
        return self.filled / self.tokens

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        return self.within(0, self.tokens)

    def within(self, first: int, stop: int) -> tuple[SegmentRun, ...]:
        """Return the runs in one rank's range of tokens, [``first``, ``stop``), without padding. Segments are cut at
        the ends of the range. The runs are contiguous and begin at ``first``."""
        ends = zip(range(len(self.grids)), self.offsets, self.offsets[1:], strict=False)
        cut = ((number, min(end, stop) - max(begin, first)) for number, begin, end in ends)
        groups = groupby((part for part in cut if part[1] > 0), key=lambda part: part[1])
        return tuple(SegmentRun(parts[0][0], len(parts), length) for length, parts in ((n, list(g)) for n, g in groups))

    def place(self, device: torch.device) -> "PlacedSegments":
        """Return the pack with tensors on ``device``, for use in layers. The copy does not block the host."""
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
    """A pack, or one rank's range of tokens in the pack."""

    segments: Segments
    sample_of_row: Tensor  # (n,) int32, each token's segment; padding belongs to the last segment
    offsets: Tensor  # (S + 1,) int32, see ``Segments.offsets``
    first: int = 0  # the first token's index in the pack

    def part(self, first: int, rows: int) -> "PlacedSegments":
        return PlacedSegments(self.segments, self.sample_of_row[first : first + rows], self.offsets, first)

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        return self.segments.within(self.first, self.first + len(self.sample_of_row))

    def offsets_of(self, segment: int, count: int) -> Tensor:
        """Return the offsets of ``count`` segments from number ``segment`` on, and the last segment's end: (count + 1,)
        int32. The first offset is 0."""
        made = self.__dict__.setdefault("_offsets", {})  # a cache, because every layer asks for these offsets
        if (segment, count) not in made:
            own = self.offsets[segment : segment + count + 1]
            made[segment, count] = own - own[0]
        return made[segment, count]

    def coordinates(self) -> Tensor:
        """Return (n, 3) int64: frame, row and column of each token in its segment's grid. Padding has the coordinates
        of the last token."""
        device, rows = self.sample_of_row.device, self.sample_of_row
        sides = torch.tensor([(height, width) for _, height, width in self.segments.grids])
        if device.type == "cuda":
            sides = sides.pin_memory().to(device, non_blocking=True)
        height, width = sides[rows].unbind(1)
        place = torch.arange(self.first, self.first + len(rows), device=device)
        # The minimum gives padding the coordinates of the last segment's last token.
        place = torch.minimum(place, self.offsets[rows + 1] - 1) - self.offsets[rows]
        return torch.stack([place // (height * width), place // width % height, place % width], dim=1)


def _fill_patch(size: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return a latent's size, after a single frame is repeated to fill a patch."""
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


def segment_means(x: Tensor, segments: Segments) -> Tensor:
    """Return the mean (S,) of x (tokens,) over each segment's tokens, without padding."""
    parts = x[: segments.filled].split([run.count * run.length for run in segments.runs])
    return torch.cat([part.view(run.count, run.length).mean(1) for part, run in zip(parts, segments.runs, strict=True)])


# ---------------------------------------------------------------------------------------------------------- attention
# A dense kernel processes one run (count, L, H, d) per call, so short runs need many small calls. A varlen kernel
# (opendit/kernels/attention.py), if available, processes several neighbouring short runs in one call.


class Varlen(Protocol):
    """An attention kernel for consecutive segments of unequal length."""

    def takes(self, run: SegmentRun) -> bool:
        """Return True if this kernel is faster for the run than a dense kernel."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Return the attention output (N, H, d) for q, k, v (N, H, d). offsets: (S + 1,) int32, each segment's first
        token and the last segment's end. longest: the longest segment's token count."""
        ...


class AttentionCall(NamedTuple):
    """Consecutive runs that one kernel call processes."""

    runs: tuple[SegmentRun, ...]
    varlen: bool

    @property
    def tokens(self) -> int:
        return sum(run.count * run.length for run in self.runs)


def calls_of(runs: tuple[SegmentRun, ...], varlen: Varlen | None) -> list[AttentionCall]:
    """Return the calls for these runs. Consecutive runs that ``varlen`` takes share one call; each remaining run gets a
    dense call."""
    parts = []
    for together, group in groupby(runs, key=lambda run: varlen is not None and varlen.takes(run)):
        found = tuple(group)
        parts += [AttentionCall(found, True)] if together else [AttentionCall((run,), False) for run in found]
    return parts


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PlacedSegments, attend: Attend, varlen: Varlen | None = None
) -> Tensor:
    """Attend from each token to the tokens of its segment: softmax(q k^T / sqrt(d)) v. The result is zero for padding.
    q, k, v: (1, H, N, d) of the complete pack. The result has the memory layout (1, N, H, d). This layout is also the
    fastest for the inputs."""
    parts = calls_of(packed.segments.runs, varlen)
    padding = q.shape[2] - sum(part.tokens for part in parts)
    # ``split`` concatenates the gradients in one copy. Slices would create a complete tensor of zeros for each
    # gradient.
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
    first, (q, k, v) = part.runs[0], own
    if part.varlen:
        assert varlen is not None, "calls_of asks it"
        offsets = packed.offsets_of(first.segment, sum(run.count for run in part.runs))
        return varlen(q, k, v, offsets, max(run.length for run in part.runs))
    return attend(*(by_segment(x, first) for x in (q, k, v))).transpose(1, 2).flatten(0, 1)


def by_segment(x: Tensor, run: SegmentRun) -> Tensor:
    return x.unflatten(0, (run.count, run.length)).transpose(1, 2)


def segment_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, packed: PlacedSegments, attend: Callable[..., Tensor]
) -> Tensor:
    """Attend from each token to the caption of its segment. Return (1, H, n, d) in the memory layout (1, n, H, d), zero
    for padding.

    Args:
        q: (1, H, n, d), tokens of the pack or of one rank.
        k: (S, H, M, d), captions of all segments.
        v: like ``k``.
        mask: (S, M).
        attend: function with the signature of ``masked_attention``.
    """
    runs = packed.runs
    rest = q.shape[2] - sum(run.count * run.length for run in runs)
    # A rank may have only padding. The result must still depend on k and v, because all ranks need gradients for them.
    if not runs:
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


class _Reordered(torch.autograd.Function):
    """x.index_select(dim, order) for a permutation, with a faster backward pass that permutes instead of adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.dim = dim
        return x.index_select(dim, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return _Reordered.apply(gradient, inverse, order, ctx.dim), None, None, None


@dataclass(frozen=True, eq=False)
class Interleaved:
    """Order of a pack with several streams: tokens are grouped by sample."""

    totals: tuple[int, ...]  # each stream's token count
    order: Tensor  # the pack's token i is token ``order[i]`` of the concatenated streams
    inverse: Tensor  # the inverse permutation
    samples: tuple[Tensor, ...]  # for each stream, its tokens' samples

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], device: torch.device) -> "Interleaved":
        """Return the order for streams of these lengths: sample j has ``lengths[i][j]`` tokens in stream i. The host
        does not wait for the device."""
        counts = np.array(lengths, dtype=np.int64)  # (streams, samples)
        sample = np.concatenate([np.repeat(np.arange(counts.shape[1]), own) for own in counts])
        order = np.argsort(sample, kind="stable")  # a stable sort keeps the order of a sample's streams
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        table = torch.from_numpy(np.stack([order, inverse, sample]))
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        totals = tuple(counts.sum(axis=1).tolist())
        return cls(totals, table[0], table[1], table[2].int().split(totals))

    def join(self, streams: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Join the streams' tensors (..., n, ...) to one tensor (..., N, ...) with tokens grouped by sample."""
        return _Reordered.apply(torch.cat(list(streams), dim=dim), self.order, self.inverse, dim)

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """Invert :meth:`join`: split a tensor into one tensor for each stream."""
        return _Reordered.apply(x, self.inverse, self.order, dim).split(self.totals, dim=dim)
