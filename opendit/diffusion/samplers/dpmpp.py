"""DPM-Solver++(2M).

[D] Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2022
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.diffusion.samplers.base import NoiseFn, Observer, Sampler, StepWeights
from opendit.diffusion.trajectory import Model, Trajectory


class DPMSolverState(NamedTuple):
    """State between steps of DPM-Solver++."""

    x: Tensor  # (B, C, ...) x divided by alpha: x_0 + level * noise
    before: Tensor  # (B, C, ...) the x_0 predicted in the previous step; zeros before the first step


class DPMSolverInputs(NamedTuple):
    """Inputs of a step of DPM-Solver++ besides its state."""

    point: Tensor  # (B,)
    alpha: Tensor | None  # (); None if alpha is 1 at all points
    keep: Tensor  # (): weight of x
    move: Tensor  # (): weight of the extrapolated x_0
    # (): weight of the change of the predicted x_0 since the last step, which is added to the predicted x_0
    extrapolate: Tensor


class DPMSolver2M(Sampler):
    """DPM-Solver++(2M), [D] Algorithm 2: deterministic, of second order, with one evaluation per step.

    The state is x divided by alpha, x_0 + level * noise, where level = sigma / alpha. The paper's e^-h is then the
    ratio of the levels at a step's end and start. With few steps, the schedule must be evenly spaced in log(sigma /
    alpha). With 20 steps of a plain ``respaced`` schedule, the result is less accurate than DDIM's.
    """

    needs = "denoise"
    even_in_noise = True

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        sigmas, self._keep, self._extrapolate = trajectory.levels, [], []
        for k, (sigma, after) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
            self._keep.append(after / sigma)
            # Don't extrapolate in the first step, which has no previous prediction, or in a step to noise level 0,
            # where log sigma is -inf.
            ends = k == 0 or after == 0
            self._extrapolate.append(0.0 if ends else math.log(sigma / after) / math.log(sigmas[k - 1] / sigma) / 2)
        self._alphas = None if all(alpha == 1 for alpha in trajectory.alphas) else self.table(trajectory.alphas)
        moves = [1 - keep for keep in self._keep]
        self._tables = [self.table(values) for values in (self._keep, moves, self._extrapolate)]

    def init(self, x: Tensor) -> DPMSolverState:
        return DPMSolverState(x if self._alphas is None else x / self._alphas[0], torch.zeros_like(x))

    def inputs(self, i: int) -> DPMSolverInputs:
        alpha = None if self._alphas is None else self._alphas[i]
        return DPMSolverInputs(self.points[i], alpha, *(table[i] for table in self._tables))

    def advance(
        self, model: Model, state: DPMSolverState, inputs: DPMSolverInputs, observe: Observer | None = None
    ) -> DPMSolverState:
        x = state.x if inputs.alpha is None else inputs.alpha * state.x
        denoised = self.trajectory.denoise(model, x, inputs.point)
        if observe is not None:
            observe(x, denoised)
        target = denoised + inputs.extrapolate * (denoised - state.before)
        return DPMSolverState(inputs.keep * state.x + inputs.move * target, denoised)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        denoised, alpha = self.trajectory.denoise_weights(i), self.trajectory.alphas[i]
        if denoised is None:
            return None
        scale, keep, extrapolate = self.trajectory.input_scale(i), self._keep[i], self._extrapolate[i]
        # weights of the state's x and of the model's output in the predicted x_0
        predicted = denoised.x * alpha, denoised.output
        move = (1 - keep) * (1 + extrapolate)
        x = keep + move * predicted[0], -(1 - keep) * extrapolate, move * predicted[1]
        return StepWeights(((scale * alpha, 0.0),), (x, (predicted[0], 0.0, predicted[1])))


SAMPLER = DPMSolver2M
