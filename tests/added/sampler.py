"""An example sampler for opendit/diffusion/samplers.py: the midpoint method."""

from opendit.diffusion.samplers import SAMPLERS, SlopeSampler, State


class MidpointSampler(SlopeSampler):
    def mean_slope(self, model, state: State, inputs, slope):
        half = inputs.length / 2
        # inputs.length is 0-dim or (1, 1, ...), and inputs.point is (B,)
        return self.trajectory.slope(model, state.x + half * slope, inputs.point + half.flatten())


SAMPLERS["example"] = MidpointSampler
