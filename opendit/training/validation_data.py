"""Choose the samples of the held-out loss, their number and their times."""

import numpy as np
import torch

from opendit.data import MediaDataset
from opendit.data.base import SampleKey
from opendit.data.held_out import SEED
from opendit.data.order.sequences import permuted
from opendit.training.specification import RunSpecification

LEVELS = 10  # noise levels, each an equal share of what training draws
MOST_SAMPLES = 1000
SHARE_OF_SAMPLES = 0.015  # of those trained on in between: forward passes alone, which are 0.5 % of the run's work


def steps_between(spec: RunSpecification) -> int:
    """Steps from one validation to the next; those of the run if only its end is validated."""
    flags = spec.flags
    return (flags.ckpt_every if flags.validate_every is None else flags.validate_every) or spec.last_step


def number_of_losses(spec: RunSpecification) -> int:
    """Return the number of losses to average: --validate_samples, or as many as cost little beside the steps between.
    All ranks of a pipeline but one idle meanwhile."""
    if spec.flags.validate_samples is not None:
        return spec.flags.validate_samples
    trained_on = steps_between(spec) * spec.schedule.global_batch
    return max(LEVELS, min(MOST_SAMPLES, int(SHARE_OF_SAMPLES * trained_on / spec.mesh.pp_size)))


class FixedSamples:
    """The row, the time and the micro-batch of each of ``count`` losses.

    The row of loss i is drawn once and for all, each row as often as any other. Its noise is keyed by
    (``SEED``, i); its time is the quantile (k + 1/2) / count of training's times, each k once: a stratified sample.

    Attributes:
        quantiles: (count,) float64 in (0, 1), by the loss's number.
        micro_batches: the numbers of the losses of each: ``size`` of one shape.
        new: of each micro-batch how many of them, its first ones, are in no earlier one. The last one of a shape
            is filled up with losses that are there already, so that all are of one size.
    """

    def __init__(self, dataset: MediaDataset, count: int, size: int):
        numbers = np.arange(count)
        self.rows = permuted(numbers % len(dataset), len(dataset), SEED, 1, 0)
        self.quantiles = torch.from_numpy((permuted(numbers, count, SEED, 2, 0) + 0.5) / count)
        keys = np.array([dataset.shape_key(int(row)) for row in self.rows])
        self.micro_batches: list[list[int]] = []
        self.new: list[int] = []
        for key in np.unique(keys):
            numbers = np.flatnonzero(keys == key)
            filled = np.resize(numbers, -(-len(numbers) // size) * size)
            self.micro_batches += filled.reshape(-1, size).tolist()
            self.new += [min(size, len(numbers) - first) for first in range(0, len(numbers), size)]

    def keys(self, number: int) -> list[SampleKey]:
        """Return the keys of the samples that a micro-batch reads."""
        return [SampleKey(int(self.rows[i]), 0, i) for i in self.micro_batches[number]]
