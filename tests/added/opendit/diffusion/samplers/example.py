"""An example of a sampler: the midpoint method, whose slope is that half a step of Euler's further on."""

from opendit.diffusion.samplers.base import State
from opendit.diffusion.samplers.euler import SlopeSampler


class MidpointSampler(SlopeSampler):
    def mean_slope(self, model, state: State, inputs, slope):
        half = inputs.length / 2
        # The engine has a length for each sample, (B, 1, ...), beside points (B,): its samples may be at other steps.
        return self.trajectory.slope(model, state.x + half * slope, inputs.point + half.flatten())


SAMPLER = MidpointSampler
