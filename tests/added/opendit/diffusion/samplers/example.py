"""An example of a sampler: the midpoint method, which uses the slope after half an Euler step."""

from opendit.diffusion.samplers.base import State
from opendit.diffusion.samplers.euler import SlopeSampler


class MidpointSampler(SlopeSampler):
    def mean_slope(self, model, state: State, inputs, slope):
        half = inputs.length / 2
        # inputs.length is (B, 1, ...) and inputs.point is (B,), because samples of a batch may be at different steps.
        return self.trajectory.slope(model, state.x + half * slope, inputs.point + half.flatten())


SAMPLER = MidpointSampler
