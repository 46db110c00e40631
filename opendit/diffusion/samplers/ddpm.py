"""Ancestral sampling of DDPM.

[H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
[N] Nichol, Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.diffusion.ddpm import DDPMTrajectory
from opendit.diffusion.samplers.base import NoiseFn, Observer, Sampler, State, StepWeights
from opendit.diffusion.trajectory import Model, Trajectory


class DDPMInputs(NamedTuple):
    """Inputs of a DDPM step besides x."""

    t: Tensor  # (B,) int64, indices of the schedule
    noise: Tensor | None  # (B, C, ...); None in the last step, which adds no noise


class DDPMSampler(Sampler):
    """Ancestral sampling along a ``DDPMTrajectory``: [H] Algorithm 2, with the mean in the form of eq. 7.

    The variance is the model's if the model predicts one ([N] eq. 15), otherwise the posterior's beta-tilde. Raises
    ValueError without ``noise_fn``.
    """

    needs = "predict"
    trajectory: DDPMTrajectory

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        if noise_fn is None:
            raise ValueError("ancestral sampling needs noise_fn")

    def inputs(self, i: int) -> DDPMInputs:
        return DDPMInputs(self.points[i], self.noise(i) if i + 1 < self.steps else None)

    def advance(self, model: Model, state: State, inputs: DDPMInputs, observe: Observer | None = None) -> State:
        schedule = self.trajectory.schedule
        denoised, _, v = self.trajectory.predict(model, state.x, inputs.t)
        if observe is not None:
            observe(state.x, denoised)
        x, log_variance = schedule.posterior(denoised, state.x, inputs.t)
        if v is not None:
            log_variance = schedule.learned_log_variance(v, inputs.t)
        if inputs.noise is not None:
            x = x + torch.exp(0.5 * log_variance) * inputs.noise
        return State(x)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        schedule, denoised, t = self.trajectory.schedule, self.trajectory.denoise_weights(i), self.steps - 1 - i
        if denoised is None:
            return None
        of_x0, of_x = float(schedule.posterior_mean_x0[t]), float(schedule.posterior_mean_xt[t])
        mean = of_x0 * denoised.x + of_x, of_x0 * denoised.output
        if t == 0:
            return StepWeights(((1.0,),), (mean,))
        low, high = float(schedule.posterior_log_variance[t]), float(schedule.betas[t].log())
        # The noise is weighted by exp(log variance / 2), so p and q are half the coefficients of the log variance.
        variance = ((high + low) / 4, (high - low) / 4) if learned_variance else None
        return StepWeights(((1.0,),), ((*mean, math.exp(low / 2)),), True, variance)


SAMPLER = DDPMSampler
