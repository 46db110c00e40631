"""The result of ``Objective.prepare``: the network's input, and the inputs that ``Objective.loss`` needs."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Prepared(NamedTuple):
    """A micro-batch made ready for the network. It holds tensors only, all with the samples first, so that it can be
    split into smaller micro-batches, sent to another stage of a pipeline, and recorded in a CUDA graph.

    x_t: (B, C, ...) what the network gets, float32 at least. timestep: (B,) what it gets as time. context: what the
    loss needs besides, a NamedTuple of tensors (B, ...) of the objective's own.
    """

    x_t: Tensor
    timestep: Tensor
    context: NamedTuple

    def tensors(self) -> list[Tensor]:
        """All of them, always in the same order."""
        return [self.x_t, self.timestep, *self.context]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Prepared":
        """The same with ``function`` of every tensor in its place; ``lambda tensor: tensor[rows]`` takes samples."""
        return Prepared(function(self.x_t), function(self.timestep), self.context._make(map(function, self.context)))
