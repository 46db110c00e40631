"""DDIM: deterministic, or with a fraction ``eta`` of DDPM's noise.

[S] Song, Meng, Ermon, "Denoising Diffusion Implicit Models", 2021
"""

import math
from typing import NamedTuple

from torch import Tensor

from opendit.diffusion.ddpm import DDPMTrajectory
from opendit.diffusion.samplers.base import NoiseFn, Observer, Sampler, State, StepWeights
from opendit.diffusion.trajectory import Model


class DDIMInputs(NamedTuple):
    """Inputs of a DDIM step besides x."""

    t: Tensor  # (B,) int64, indices of the schedule
    keep: Tensor  # (): weight of the predicted x_0
    renoise: Tensor  # (): weight of the predicted noise
    sigma: Tensor  # (): weight of new noise
    noise: Tensor | None  # (B, C, ...); None where sigma is 0


class DDIMSampler(Sampler):
    """DDIM along a ``DDPMTrajectory``: [S] eq. 12 with the sigma of eq. 16. A learned variance is ignored.

    ``eta`` = 0 is deterministic and never calls ``noise_fn``. ``eta`` = 1 has the variance beta-tilde of DDPM. Raises
    ValueError if ``eta`` is outside [0, 1], or above 0 without ``noise_fn``.
    """

    needs = "predict"
    trajectory: DDPMTrajectory

    def __init__(
        self,
        model: Model,
        trajectory: DDPMTrajectory,
        like: Tensor,
        noise_fn: NoiseFn | None = None,
        *,
        eta: float = 0.0,
    ):
        super().__init__(model, trajectory, like, noise_fn)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, got {eta}")
        if eta > 0 and noise_fn is None:
            raise ValueError("an eta above 0 needs noise_fn")
        self._keep, self._renoise, self._sigmas = [], [], []
        kept = trajectory.alphas_cumprod
        for ac, after in zip(kept[:-1], kept[1:], strict=True):
            sigma = eta * math.sqrt((1 - after) / (1 - ac) * (1 - ac / after))
            self._keep.append(math.sqrt(after))
            # Clamp at 0: where alphas_cumprod is close to 0, rounding could make the radicand negative.
            self._renoise.append(math.sqrt(max(1 - after - sigma**2, 0.0)))
            self._sigmas.append(sigma)
        self._tables = [self.table(values) for values in (self._keep, self._renoise, self._sigmas)]

    def inputs(self, i: int) -> DDIMInputs:
        keep, renoise, sigma = (table[i] for table in self._tables)
        noise = self.noise(i) if self._sigmas[i] > 0 else None
        return DDIMInputs(self.points[i], keep, renoise, sigma, noise)

    def advance(self, model: Model, state: State, inputs: DDIMInputs, observe: Observer | None = None) -> State:
        denoised, eps, _ = self.trajectory.predict(model, state.x, inputs.t)
        if observe is not None:
            observe(state.x, denoised)
        x = inputs.keep * denoised + inputs.renoise * eps
        return State(x if inputs.noise is None else x + inputs.sigma * inputs.noise)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        denoised, keep, renoise = self.trajectory.denoise_weights(i), self._keep[i], self._renoise[i]
        if denoised is None:
            return None
        after = keep * denoised.x, keep * denoised.output + renoise  # the model's output is eps
        noise = self._sigmas[i] > 0
        return StepWeights(((1.0,),), ((*after, self._sigmas[i]) if noise else after,), noise)


SAMPLER = DDIMSampler
