"""Sequences of two streams, captions and media, each of which is shared out by itself.

A rank has its part of the one and its part of the other, so that both have the same share of work on every rank, and a
layer of one stream meets the tokens of that stream alone. In attention tokens come in the order of the ranks; they are
put in the order of the sequence there, where filled-up places drop out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.models.layers import Attend


@dataclass(frozen=True)
class SharedStreams:
    """A sequence of several streams.

    Attributes:
        parts: the shares of every stream.
        lengths: numbers of tokens of the streams.
        ranks: number of ranks that share them.
        exchange: attention of q, k, v (B, H, rows, d) of this rank's tokens over those of all ranks, by a strategy that
            is given ``attend`` and the number of tokens of all ranks; None where projections give the tokens of all.
    """

    parts: tuple[Any, ...]
    lengths: tuple[int, ...]
    ranks: int
    exchange: Callable[[Tensor, Tensor, Tensor, Attend, int], Tensor] | None

    takes_projection = False
    axial = False

    @property
    def rows_of_streams(self) -> tuple[int, ...]:
        """Numbers of tokens of every stream that a rank has."""
        return tuple(part.rows for part in self.parts)

    @property
    def rows(self) -> int:
        """Number of tokens of a rank, padding included."""
        return sum(self.rows_of_streams)

    def take_stream(self, number: int, x: Tensor) -> Tensor:
        """Return this rank's tokens of all tokens (B, n, F) of a stream."""
        return self.parts[number].take(x)

    def gather_stream(self, number: int, x: Tensor) -> Tensor:
        """Return all tokens of a stream, on every rank, from this rank's."""
        return self.parts[number].gather(x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Return the attention output of q, k, v (B, H, n, d), n tokens of this rank or, where projections gather them,
        of all ranks."""
        order = self._order(q.device)

        def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = attend(*(part.index_select(2, order) for part in (q, k, v)))
            return output.new_zeros(*q.shape[:2], self.ranks * self.rows, q.shape[3]).index_copy(2, order, output)

        if self.exchange is None:
            return in_order(q, k, v).transpose(1, 2).flatten(2)
        return self.exchange(q, k, v, in_order, self.ranks * self.rows)

    def attention_of_streams(self, projected: Sequence[tuple[Tensor, ...]], attend: Attend) -> Sequence[Tensor]:
        """Return the attention output of every stream (B, n, H d), of its q, k, v (B, n, H, d)."""
        if self.exchange is not None:
            q, k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*projected, strict=True))
            return self.attention(q, k, v, attend).split(self.rows_of_streams, dim=1)
        cut = [[x[:, :length] for x in parts] for parts, length in zip(projected, self.lengths, strict=True)]
        q, k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*cut, strict=True))
        outputs = attend(q, k, v).transpose(1, 2).flatten(2).split(self.lengths, dim=1)
        return [
            F.pad(output, (0, 0, 0, parts[0].shape[1] - output.shape[1]))
            for output, parts in zip(outputs, projected, strict=True)
        ]

    def _order(self, device: torch.device) -> Tensor:
        """Return where the tokens of the sequence are among those of all ranks, rank after rank."""
        found, start = [], 0
        for length, rows in zip(self.lengths, self.rows_of_streams, strict=True):
            at = torch.arange(length, device=device)
            found.append(at // rows * self.rows + start + at % rows)
            start += rows
        return torch.cat(found)
