"""The order of a pack's tokens where each sample has tokens of several streams, such as its caption's and its media's:
all of a sample's lie next to each other, and blocks with weights for each stream take them stream by stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Reordered(torch.autograd.Function):
    """Reorders the rows of x along a dimension. Each row is read once, so the gradient is a copy, too.
    ``index_select`` would compute it as a sum."""

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
    """The tokens of several streams, sample by sample.

    totals: tokens of each stream. order: (N,) int64, for each place in the order of samples the place of its token in
    the streams, which follow each other; inverse: the same the other way. samples: of each stream (n,) int32, the
    sample that each token belongs to.
    """

    totals: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    samples: tuple[Tensor, ...]

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], device: torch.device) -> "Interleaved":
        """Describe streams with these numbers of tokens of every sample, without waiting for the device."""
        counts = np.array(lengths, dtype=np.int64)  # (streams, samples)
        sample = np.concatenate([np.repeat(np.arange(counts.shape[1]), own) for own in counts])
        order = np.argsort(sample, kind="stable")  # the streams of a sample stay in their order
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        table = torch.from_numpy(np.stack([order, inverse, sample]))
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        totals = tuple(counts.sum(axis=1).tolist())
        return cls(totals, table[0], table[1], table[2].int().split(totals))

    def join(self, streams: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the streams' tokens in the order of samples: tensors (..., n, ...) as one (..., N, ...)."""
        return _Reordered.apply(torch.cat(list(streams), dim=dim), self.order, self.inverse, dim)

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """Return the tokens of every stream: the inverse of :meth:`join`."""
        return _Reordered.apply(x, self.inverse, self.order, dim).split(self.totals, dim=dim)
