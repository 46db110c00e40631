"""How much a rank's micro-batches compute, whatever the sizes of their samples."""

from dataclasses import replace
from functools import cache

from opendit.models import DiTConfig
from opendit.training.runners import MicroBatch


class TrainingFlops:
    """FLOPs of a model's training passes over latents of any size."""

    def __init__(self, config: DiTConfig):
        self._of_size = cache(lambda size: 3 * replace(config, input_size=size).forward_flops())

    def of(self, micro_batch: MicroBatch) -> float:
        """Forward and backward, of this rank's micro-batch."""
        return len(micro_batch.x0) * self._of_size(tuple(micro_batch.x0.shape[2:]))
