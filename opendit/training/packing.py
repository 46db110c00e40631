"""From a loader's batch of samples of unequal size to packs (``--pack_tokens``)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, cast

import torch
from torch import Tensor

from opendit.data import Batch
from opendit.data.enlarging import enlarge
from opendit.diffusion import Objective
from opendit.models import Condition
from opendit.models.segments import Segments, to_patches
from opendit.training.micro_batch import PackedMicroBatch


class SampleInputs(Protocol):
    """Makes the inputs of samples of one shape; ``Inputs`` of train.py does, whose methods say more."""

    objective: Objective
    device: torch.device
    seed: int

    def clean(self, x: Tensor, step: int, index: Tensor) -> Tensor: ...
    def noise(self, x0: Tensor, step: int, index: Tensor) -> Tensor: ...
    def condition(self, batch: Batch, index: Tensor) -> Condition: ...
    def given(self, x0: Tensor, step: int, index: Tensor) -> Tensor | None: ...


@dataclass(frozen=True)
class Packing:
    """The settings of a run's packs.

    patch: of the model. tokens: of a micro-batch, which is one sequence. micro_batches: of a step, over all ranks that
    have different samples.
    """

    patch: tuple[int, ...]
    tokens: int
    micro_batches: int

    def micro_batch(self, inputs: SampleInputs, batch: Batch, index: Tensor) -> PackedMicroBatch:
        """Return the samples of a batch, a tuple of tensors each of its own shape, as packs on the device.

        index: (S,) the samples' positions in the global batch, on the device.
        """
        samples, x0, noise, given = cast(tuple[Tensor, ...], batch.x), [], [], []
        for part in same_size(samples):
            x = torch.stack([sample.to(inputs.device, non_blocking=True) for sample in samples[part]])
            x0.append(inputs.clean(enlarge(x, batch.small and batch.small[part]), batch.step, index[part]))
            noise.append(inputs.noise(x0[-1], batch.step, index[part]))
            given.append(inputs.given(x0[-1], batch.step, index[part]))
        segments = self.segments(tuple(group.shape[2:]) for group in x0 for _ in group)
        shares = self.shares(batch.weights, len(index), batch.segments_in_step)
        return PackedMicroBatch(
            self.patches(x0),
            inputs.objective.times(inputs.seed, batch.step, index, segments.lengths),
            self.patches(noise),
            inputs.condition(batch, index),
            segments,
            shares.to(inputs.device, non_blocking=True),
            None if given[0] is None else self.patches(given),
        )

    def segments(self, sizes: Iterable[tuple[int, ...]]) -> Segments:
        """Return the segments of a pack of latents of these sizes."""
        return Segments.of(list(sizes), self.patch, self.tokens)

    def patches(self, latents: Sequence[Tensor]) -> Tensor:
        """Latents (k, C, ...) of neighbours of one size, one group after the other, as (tokens, C, *patch) with zeros
        at the end."""
        found = [to_patches(group, self.patch).flatten(0, 1) for group in latents]
        left = self.tokens - sum(map(len, found))
        return torch.cat([*found, found[0].new_zeros(left, *found[0].shape[1:])])

    def shares(self, weights: Tensor | None, samples: int, segments_in_step: int) -> Tensor:
        """The share of each of ``samples`` segments in the micro-batch's loss, (S,) float32 on weights' device.

        weights: (S,) of the samples' losses, None for 1. The mean over ranks and micro-batches is then the mean over
        all samples of the step, however many of them a micro-batch has.
        """
        weights = torch.ones(samples) if weights is None else weights.float()
        return weights * (self.micro_batches / segments_in_step)


def same_size(samples: Sequence[Tensor]) -> list[slice]:
    """Neighbours of one shape, as they are handled together."""
    found, first = [], 0
    for _, group in groupby(samples, key=lambda x: x.shape):
        count = sum(1 for _ in group)
        found.append(slice(first, first + count))
        first += count
    return found
