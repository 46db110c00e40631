"""Compute the initial values of a parameter's shard without its full tensor."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from opendit.models.dit import DiT
from opendit.models.initialization import Distribution, distribution_of, draw
from opendit.models.parameter_names import canonical_name
from opendit.parallel.layout import Runs, Shard, copy_overlap, runs_of

GAP = 1 << 15  # two ranges with at most this gap are drawn in one call; drawing the gap takes 0.1 ms
SPAN = 1 << 24  # maximum number of elements that one call draws


class InitialValues:
    """Initial values of the shards of a model's parameters, equal to those of
    ``opendit.models.initialization.initialize``.

    Args:
        model: model that defines names, shapes and distributions. It may be on the meta device.
        seed: seed of the values.

    Raises:
        ValueError: the name of a parameter matches no pattern of the initial distributions, or several.
    """

    def __init__(self, model: DiT, seed: int):
        self.seed = seed
        self._drawn: dict[str, tuple[tuple[int, ...], Distribution]] = {}
        for name, parameter in model.named_parameters():
            name = canonical_name(name)
            self._drawn[name] = tuple(parameter.shape), distribution_of(model, name)

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """Return a shard of the parameter with this canonical name: fp32, of shape ``shard.shape``, in host memory."""
        shape, distribution = self._drawn[name]
        return initial_values(distribution, self.seed, name, shape, shard)

    def whole(self, name: str) -> Tensor:
        """Return the full parameter. Use this method for small parameters only."""
        shape, _ = self._drawn[name]
        return self(name, Shard(shape, ()))


def initial_values(distribution: Distribution, seed: int, name: str, shape: Sequence[int], shard: Shard) -> Tensor:
    """Return a shard of a parameter's initial values: fp32, of shape ``shard.shape``, in host memory. For the other
    arguments, see ``opendit.models.initialization.draw``."""
    values, wanted = torch.empty(shard.shape, dtype=torch.float32, device="cpu"), runs_of(shape, shard.slices)
    for start, stop in _covers(wanted):
        drawn = draw(distribution, seed, name, shape, start, torch.empty(stop - start, device="cpu"))
        copy_overlap(values.view(-1), wanted, drawn, Runs(np.array([start]), np.array([stop - start])))
    return values


def _covers(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield ranges of the canonical tensor, of at most SPAN elements each, that together include all runs."""
    order = np.argsort(runs.start)
    start, stop = runs.start[order], runs.stop[order]
    apart = np.flatnonzero(start[1:] - stop[:-1] > GAP) + 1
    for group in np.split(np.arange(len(start)), apart) if len(start) else ():
        first, last = int(start[group[0]]), int(stop[group[-1]])
        for begin in range(first, last, SPAN):
            yield begin, min(begin + SPAN, last)
