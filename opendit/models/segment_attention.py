"""Attention in packs: tokens attend to those of their own segment alone.

A run of equal lengths is a view (count, L, H, d) of the pack, which dense kernels take at full speed. Where runs are
short, many small calls would follow each other: a varlen kernel, where there is one, takes such neighbours in one call
(opendit/kernels/varlen.py chooses it); else there is one call a run.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opendit.models.segments import PlacedSegments, SegmentRun

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)


class Varlen(Protocol):
    """A kernel for neighbours of unequal length."""

    def takes(self, run: SegmentRun) -> bool:
        """Return True if it is faster for such a run than a dense call."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """The attention output (N, H, d) of q, k, v (N, H, d); offsets: (S + 1,) int32, where each of S segments begins
        and the last one ends; longest: tokens of the longest."""
        ...


class AttentionCall(NamedTuple):
    """Neighbouring runs that are attended to in one call."""

    runs: tuple[SegmentRun, ...]
    varlen: bool

    @property
    def tokens(self) -> int:
        return sum(run.count * run.length for run in self.runs)


def calls_of(runs: tuple[SegmentRun, ...], varlen: Varlen | None) -> list[AttentionCall]:
    """The calls for these runs: dense for each, or one for neighbours that ``varlen`` takes."""
    parts = []
    for together, group in groupby(runs, key=lambda run: varlen is not None and varlen.takes(run)):
        found = tuple(group)
        parts += [AttentionCall(found, True)] if together else [AttentionCall((run,), False) for run in found]
    return parts


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PlacedSegments, attend: Attend, varlen: Varlen | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the tokens of each token's segment; zeros for padding.

    q, k, v: (1, H, N, d) of the whole pack, at their best as views of (1, N, ..., H, d), as projections leave them; so
    the result lies in memory, too.
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
    """(n, H, d) of a part's ``own`` q, k, v (n, H, d)."""
    first, (q, k, v) = part.runs[0], own
    if part.varlen:
        assert varlen is not None, "calls_of asks it"
        offsets = packed.offsets_of(first.segment, sum(run.count for run in part.runs))
        return varlen(q, k, v, offsets, max(run.length for run in part.runs))
    return attend(*(by_segment(x, first) for x in (q, k, v))).transpose(1, 2).flatten(0, 1)


def by_segment(x: Tensor, run: SegmentRun) -> Tensor:
    """A run's tokens (count * L, H, d) as (count, H, L, d)."""
    return x.unflatten(0, (run.count, run.length)).transpose(1, 2)


def segment_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, packed: PlacedSegments, attend: Callable[..., Tensor]
) -> Tensor:
    """Attention of every token to its segment's caption; zeros for padding.

    q: (1, H, n, d) of the pack's tokens, or one rank's; k, v: (S, H, M, d) and mask: (S, M) bool of the captions of
    all segments. attend: ``masked_attention``. Returns (1, H, n, d), in memory (1, n, H, d).
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
