"""Heun's method for the probability-flow ODE.

[K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
"""

from torch import Tensor

from opendit.diffusion.samplers.base import State, StepWeights
from opendit.diffusion.samplers.euler import EulerInputs, SlopeSampler
from opendit.diffusion.trajectory import Model


class HeunSampler(SlopeSampler):
    """Heun's method, [K] Algorithm 1: follow the mean of the slopes at the step's start and at the end of Euler's step.

    Second order, deterministic, with two evaluations per step. A step whose end has no slope, such as EDM's sigma = 0,
    evaluates the model only once.
    """

    def inputs(self, i: int) -> EulerInputs:
        end = self.points[i + 1] if self.trajectory.has_slope(i + 1) else None
        return super().inputs(i)._replace(end=end)

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        if inputs.end is None:
            return slope
        return (slope + self.trajectory.slope(model, state.x + inputs.length * slope, inputs.end)) / 2

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        begin, scale, length = self.trajectory.slope_weights(i), self.trajectory.input_scale(i), self.lengths[i]
        if begin is None:
            return None
        euler = 1 + length * begin.x, length * begin.output  # weights of x and the first output after Euler's step
        if not self.trajectory.has_slope(i + 1):
            return StepWeights(((scale,),), (euler,))
        end, rescale = self.trajectory.slope_weights(i + 1), self.trajectory.input_scale(i + 1)
        assert end is not None  # a trajectory returns weights for the slopes of all points, or of none
        after = (
            1 + length / 2 * (begin.x + end.x * euler[0]),
            length / 2 * (begin.output + end.x * euler[1]),
            length / 2 * end.output,
        )
        return StepWeights(((scale,), (rescale * euler[0], rescale * euler[1])), (after,))


SAMPLER = HeunSampler
