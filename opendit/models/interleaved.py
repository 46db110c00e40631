"""Token order of packs whose samples have tokens of several streams, such as a caption and media.

In the pack, all tokens of a sample are consecutive. Blocks with separate weights for each stream need one tensor for
each stream. This module converts between the two orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Reordered(torch.autograd.Function):
    """Permutation of the rows of x along a dimension. The gradient is a copy, the inverse permutation; the gradient of
    ``index_select`` would be a slower sum."""

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
    """Order of the tokens of several streams, grouped by sample.

    Attributes:
        totals: Number of tokens of each stream.
        order: (N,) int64. Token i of the pack is token ``order[i]`` of the concatenated streams.
        inverse: (N,) int64, the inverse permutation of ``order``.
        samples: For each stream, (n,) int32: the sample of each token.
    """

    totals: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    samples: tuple[Tensor, ...]

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], device: torch.device) -> "Interleaved":
        """Return the order for streams with these numbers of tokens. ``lengths[i][j]`` is the number of tokens of
        stream i in sample j. The host does not wait for the device."""
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
        """Join the streams' tensors (..., n, ...) to one tensor (..., N, ...), whose tokens are grouped by sample."""
        return _Reordered.apply(torch.cat(list(streams), dim=dim), self.order, self.inverse, dim)

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """Split a tensor whose tokens are grouped by sample into one tensor for each stream; the inverse of
        :meth:`join`."""
        return _Reordered.apply(x, self.inverse, self.order, dim).split(self.totals, dim=dim)
