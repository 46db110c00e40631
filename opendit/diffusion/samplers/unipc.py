"""UniPC: a multistep predictor, and a corrector that costs no evaluation.

[U] Zhao, Bai, Rao, Zhou, Lu, "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models",
    2023
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.diffusion.samplers.base import NoiseFn, Observer, Sampler, StepWeights
from opendit.diffusion.trajectory import Model, Trajectory

# Upper bound of noise levels. At t = 1, a flow has no signal, and lambda = -ln(level) would be -inf. diffusers starts
# at t = 1 - 1e-6 instead.
HIGHEST_LEVEL = 1e6


class UniPCState(NamedTuple):
    """State between steps of UniPC."""

    x: Tensor  # (B, C, ...) the predicted x before correction, which is the network's input
    before: Tensor  # (B, C, ...) the x_0 predicted in the previous step; zeros before the first step
    earlier: Tensor  # (B, C, ...) the x_0 predicted two steps ago; zeros before that


class UniPCInputs(NamedTuple):
    """Inputs of a UniPC step besides its state. The last four are weights in the sum that gives the next x."""

    point: Tensor  # (B,)
    time: Tensor  # ()
    keep: Tensor  # (): weight of x
    now: Tensor  # (): weight of the x_0 predicted in this step
    before: Tensor  # (): weight of the state's ``before``
    earlier: Tensor  # (): weight of the state's ``earlier``


class UniPCSampler(Sampler):
    """Deterministic UniPC of order 2 with B(h) = e^h - 1 on predictions of x_0, for x = x_0 + time * slope.

    Step k evaluates the network once, at the predicted x_k, corrects x_k with the result (UniC-2), and predicts x_k+1
    from the corrected x_k (UniP-2). The first step and the last one are of order 1: the first has no predecessor, and
    the last leads to lambda = inf. This is diffusers' ``UniPCMultistepScheduler`` with ``solver_type`` bh2.

    Let m_k be the x_0 predicted in step k. The predicted and the corrected x_k integrate over the interval from k - 1
    to k, approximately with differences of m ([U] Section 3, in its form for predictions of x_0):

        predicted_k = time_k / time_k-1 corrected_k-1 - alpha_k (e^-h - 1) (m_k-1 + 1/2 D_k-2)
        corrected_k = time_k / time_k-1 corrected_k-1 - alpha_k (e^-h - 1) (m_k-1 + rho_0 D_k-2 + rho_1 (m_k - m_k-1))

    where lambda = ln(alpha / sigma), h = lambda_k - lambda_k-1, r = (lambda_k-2 - lambda_k-1) / h and D_k-2 = (m_k-2 -
    m_k-1) / r. So corrected_k is predicted_k plus differences of predictions, and the state needs no second x.
    """

    needs = "slope"

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        self._weights = [self._weights_of(k) for k in range(self.steps)]
        self._times = self.table(trajectory.times)
        self._tables = [self.table(values) for values in zip(*self._weights, strict=True)]

    def _weights_of(self, k: int) -> tuple[float, float, float, float]:
        """Return the weights of x_k, m_k, m_k-1 and m_k-2 in predicted_k+1."""
        times = self.trajectory.times
        keep = times[k + 1] / times[k]
        now, before = self._predictor(k)
        if k == 0:
            return keep, now, before, 0.0
        corrections = self._corrector(k - 1)
        return keep, now + keep * corrections[0], before + keep * corrections[1], keep * corrections[2]

    def _predictor(self, k: int) -> tuple[float, float]:
        """Return the weights of m_k and m_k-1 in predicted_k+1. Its remaining term is corrected_k."""
        scale = self._scale(k)
        if self._order(k) == 1:
            return scale, 0.0
        half = scale / 2 / self._ratio(k)
        return scale - half, half

    def _corrector(self, k: int) -> tuple[float, float, float]:
        """Return the weights of m_k+1, m_k and m_k-1 in corrected_k+1 - predicted_k+1."""
        scale = self._scale(k)
        if self._order(k) == 1:
            return scale / 2, -scale / 2, 0.0  # rho_1 = 1/2
        # rho solves [1 1; r 1] rho = b, where b_m = m! phi_m+1(-h) (-h) / (e^-h - 1).
        h, r = -self._length(k), self._ratio(k)
        growth = math.expm1(h)
        second = growth / h - 1
        third = second / h - 1 / 2
        b = second / growth, 2 * third / growth
        rho_0 = (b[0] - b[1]) / (1 - r)
        rho_1 = b[0] - rho_0
        change = (rho_0 - 1 / 2) / r  # the predictor uses 1/2 as rho_0
        return scale * rho_1, -scale * (rho_1 + change), scale * change

    def _order(self, k: int) -> int:
        return 1 if k in (0, self.steps - 1) else 2

    def _scale(self, k: int) -> float:
        """Return -alpha (e^-h - 1) of the interval from k to k + 1; e^-h is the ratio of its levels."""
        levels = self.trajectory.levels
        return self.trajectory.alphas[k + 1] * (1 - levels[k + 1] / levels[k])

    def _length(self, k: int) -> float:
        """Return h of the interval from k to k + 1."""
        here, there = (min(level, HIGHEST_LEVEL) for level in self.trajectory.levels[k : k + 2])
        return math.log(here / there)

    def _ratio(self, k: int) -> float:
        return -self._length(k - 1) / self._length(k)

    def init(self, x: Tensor) -> UniPCState:
        return UniPCState(x, torch.zeros_like(x), torch.zeros_like(x))

    def inputs(self, i: int) -> UniPCInputs:
        return UniPCInputs(self.points[i], self._times[i], *(table[i] for table in self._tables))

    def advance(
        self, model: Model, state: UniPCState, inputs: UniPCInputs, observe: Observer | None = None
    ) -> UniPCState:
        denoised = state.x - inputs.time * self.trajectory.slope(model, state.x, inputs.point)
        if observe is not None:
            observe(state.x, denoised)
        x = inputs.keep * state.x + inputs.now * denoised
        return UniPCState(x + inputs.before * state.before + inputs.earlier * state.earlier, denoised, state.before)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        slope, time = self.trajectory.slope_weights(i), self.trajectory.times[i]
        if slope is None:
            return None
        keep, now, before, earlier = self._weights[i]
        # weights of x and of the model's output in the x_0 predicted in this step
        of_x, of_output = 1 - time * slope.x, -time * slope.output
        x = keep + now * of_x, before, earlier, now * of_output
        after = x, (of_x, 0.0, 0.0, of_output), (0.0, 1.0, 0.0, 0.0)
        return StepWeights(((self.trajectory.input_scale(i), 0.0, 0.0),), after)


SAMPLER = UniPCSampler
