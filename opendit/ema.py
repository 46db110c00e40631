"""Exponential moving average of the fp32 master weights, sharded as the plugin shards them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from opendit.parallel.engine import Engine


class EMA:
    """Every rank averages its own pieces of the masters: no communication in a step, and 4 bytes x parameters
    / ranks of memory.

    Args:
        engine: holds the masters; the average starts at their present values.
        decay: share of the old average kept by one update.
    """

    def __init__(self, engine: Engine, decay: float):
        self.engine, self.decay = engine, decay
        self.pieces = {name: piece.detach().clone() for name, piece in engine.masters().items()}

    @torch.no_grad()
    def update(self) -> None:
        """average += (1 - decay) * (master - average); call after every step that was not skipped."""
        torch._foreach_lerp_(list(self.pieces.values()), list(self.engine.masters().values()), 1.0 - self.decay)

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full fp32 tensor) of every parameter in turn; collective, the same on every rank."""
        for name, piece in self.pieces.items():
            yield name, self.engine.gather(name, piece)

    @torch.no_grad()
    def load(self, name: str, full: Tensor) -> None:
        """Sets the average of one parameter from its full tensor."""
        self.pieces[name].copy_(full.reshape(-1)[slice(*self.engine.span(name))])
