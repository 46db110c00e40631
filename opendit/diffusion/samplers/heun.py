"""Heun's method for the probability-flow ODE.

[K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
"""

import torch
from torch import Tensor

from opendit.diffusion.samplers.base import State
from opendit.diffusion.samplers.euler import EulerInputs, EulerSampler
from opendit.diffusion.trajectory import Model


class HeunSampler(EulerSampler):
    """[K] Algorithm 1: the mean of the slopes at the step's start and where Euler's step leads to. Second order, two
    evaluations a step; one in EDM's step to 0, where its slope is not defined. Deterministic."""

    def inputs(self, i: int) -> EulerInputs:
        end = self.points[i + 1] if self.trajectory.has_slope(i + 1) else None
        return super().inputs(i)._replace(end=end)

    def mixed_inputs(self, i: int) -> EulerInputs:
        """Where the slope at the end is not defined, that at the start is asked for again, and does not count."""
        inputs = self.inputs(i)
        if all(self.trajectory.has_slope(k) for k in range(1, self.steps + 1)):
            return inputs
        ends = torch.tensor(inputs.end is not None, device=self._device)
        return inputs._replace(end=inputs.point if inputs.end is None else inputs.end, ends=ends)

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        if inputs.end is None:
            return slope
        mean = (slope + self.trajectory.slope(model, state.x + inputs.length * slope, inputs.end)) / 2
        return mean if inputs.ends is None else torch.where(inputs.ends, mean, slope)


SAMPLER = HeunSampler
