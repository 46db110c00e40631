"""Sequence parallelism for sequences of two streams, caption tokens and media tokens.

Each stream is divided evenly among the ranks, so every rank has the same number of tokens of a stream. A stream's
layers process only tokens of this stream. For attention, the tokens of all ranks are arranged in the order of the
sequence, without padding.
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
    """This rank's shards of a sequence of several streams.

    Attributes:
        parts: this rank's shard of every stream.
        lengths: number of tokens of every stream.
        ranks: number of ranks that share the sequence.
        exchange: method of a strategy that computes attention. Its arguments are q, k, v (B, H, rows, d) of this rank's
            tokens, ``attend``, and the number of tokens of all ranks, including padding. None if projections return the
            tokens of all ranks.
    """

    parts: tuple[Any, ...]
    lengths: tuple[int, ...]
    ranks: int
    exchange: Callable[[Tensor, Tensor, Tensor, Attend, int], Tensor] | None

    takes_projection = False
    axial = False

    @property
    def rows_of_streams(self) -> tuple[int, ...]:
        """Number of tokens per rank of every stream, including padding."""
        return tuple(part.rows for part in self.parts)

    @property
    def rows(self) -> int:
        """Number of tokens per rank, including padding."""
        return sum(self.rows_of_streams)

    def take_stream(self, number: int, x: Tensor) -> Tensor:
        """Return this rank's shard of a stream, given all its tokens (B, n, F)."""
        return self.parts[number].take(x)

    def gather_stream(self, number: int, x: Tensor) -> Tensor:
        """Gather a stream from this rank's tokens x. Return all tokens of the stream, on every rank."""
        return self.parts[number].gather(x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Return the attention output of q, k, v (B, H, n, d). These hold the n tokens of this rank, or the tokens of
        all ranks if the projections gather tokens."""
        order = self._order(q.device)

        def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = attend(*(part.index_select(2, order) for part in (q, k, v)))
            return output.new_zeros(*q.shape[:2], self.ranks * self.rows, q.shape[3]).index_copy(2, order, output)

        if self.exchange is None:
            return in_order(q, k, v).transpose(1, 2).flatten(2)
        return self.exchange(q, k, v, in_order, self.ranks * self.rows)

    def attention_of_streams(self, projected: Sequence[tuple[Tensor, ...]], attend: Attend) -> Sequence[Tensor]:
        """Return the attention output (B, n, H d) of every stream from the q, k, v (B, n, H, d) of every stream."""
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
        """Return, for every token of the sequence, its index in the concatenation of all ranks' tokens."""
        found, start = [], 0
        for length, rows in zip(self.lengths, self.rows_of_streams, strict=True):
            at = torch.arange(length, device=device)
            found.append(at // rows * self.rows + start + at % rows)
            start += rows
        return torch.cat(found)
