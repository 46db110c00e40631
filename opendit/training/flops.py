"""Count the FLOPs of a rank's micro-batches, for samples of any size."""

from dataclasses import replace
from functools import cache

from opendit.models import DiTConfig
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch


class TrainingFlops:
    """FLOPs of a model's training passes over latents of any size."""

    def __init__(self, config: DiTConfig):
        self._patch = config.patch
        self._of_size = cache(lambda size: 3 * replace(config, input_size=size).forward_flops())

    def of(self, micro_batch: MicroBatch | PackedMicroBatch) -> float:
        """Forward and backward, of this rank's micro-batch; a pack's padding is not counted."""
        if isinstance(micro_batch, PackedMicroBatch):
            grids = (grid[-len(self._patch) :] for grid in micro_batch.segments.grids)
            return sum(self._of_size(tuple(n * p for n, p in zip(grid, self._patch, strict=True))) for grid in grids)
        return len(micro_batch.x0) * self._of_size(tuple(micro_batch.x0.shape[2:]))
