"""Euler's method for the probability-flow ODE.

[K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
[L] Liu, Gong, Liu, "Flow Straight and Fast", 2023
"""

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from opendit.diffusion.samplers.base import NoiseFn, Observer, Sampler, State, StepWeights
from opendit.diffusion.trajectory import Model, Trajectory


class EulerInputs(NamedTuple):
    """Inputs of an Euler or Heun step besides x."""

    point: Tensor  # (B,)
    time: Tensor  # ()
    length: Tensor  # (): time at the end of the step minus time at its start
    end: Tensor | None = None  # (B,): point at the end of the step, if the slope is evaluated there


class SlopeSampler(Sampler):
    """Base class of methods whose step moves x along one slope, dx/dtime = slope(x, time). Subclasses choose the
    slope."""

    needs = "slope"

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        times = trajectory.times
        self.lengths = [after - time for time, after in zip(times[:-1], times[1:], strict=True)]
        self._times, self._lengths = self.table(times), self.table(self.lengths)

    def inputs(self, i: int) -> EulerInputs:
        return EulerInputs(self.points[i], self._times[i], self._lengths[i])

    def advance(self, model: Model, state: State, inputs: EulerInputs, observe: Observer | None = None) -> State:
        slope = self.trajectory.slope(model, state.x, inputs.point)
        if observe is not None:
            observe(state.x, state.x - inputs.time * slope)
        return State(state.x + inputs.length * self.mean_slope(model, state, inputs, slope))

    @abstractmethod
    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        """Return the slope to follow over the whole step, given the slope at its start; all are (B, C, ...)."""


class EulerSampler(SlopeSampler):
    """Euler's method: [K] eq. 1 and 3 with sigma as the time, [L] eq. 1 for rectified flow.

    First order, one evaluation per step, deterministic. ``denoised`` is x moved along the slope to time 0.
    """

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        return slope

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        slope, length = self.trajectory.slope_weights(i), self.lengths[i]
        if slope is None:
            return None
        return StepWeights(((self.trajectory.input_scale(i),),), ((1 + length * slope.x, length * slope.output),))


SAMPLER = EulerSampler
