"""Heun's method for the probability-flow ODE.

[K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
"""

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

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        if inputs.end is None:
            return slope
        return (slope + self.trajectory.slope(model, state.x + inputs.length * slope, inputs.end)) / 2


SAMPLER = HeunSampler
