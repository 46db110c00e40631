"""Solvers of the probability-flow ODE that objectives share; each objective says what its time and slope are.

[K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
[D] Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2022
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

Slope = Callable[[Tensor, float], Tensor]


def for_step(model: Callable, level: float) -> Callable:
    """``model`` for all evaluations of a step that starts at noise level sigma ``level``; one that has ``at_level``
    (see ``opendit.diffusion.samplers.GuidedWithin``) chooses by it, and any other is the same at all levels."""
    choose = getattr(model, "at_level", None)
    return model if choose is None else choose(level)


def integrate(
    slope_from: Callable[[float], Slope],
    x: Tensor,
    times: Sequence[float],
    *,
    corrected: Callable[[float], bool],
    progress=None,
    callback=None,
) -> Tensor:
    """Euler's method for dx/dt = slope(x, t) along ``times``, with Heun's correction where it is asked for.

    slope_from(t): the function slope(x, t) for all evaluations of the step that starts at t.
    x: (B, C, ...) at times[0]. corrected: whether the step that ends at a given time takes the mean of the slopes at
    its two ends, the second one where Euler's step leads to ([K] Algorithm 1): second order, two evaluations.
    progress and callback: as of opendit.diffusion.samplers, with ``timestep`` the time; ``denoised`` is where the
    slope at x leads to at time 0. Returns x at times[-1], of x's dtype.
    """
    steps = range(len(times) - 1)
    for k in steps if progress is None else progress(steps):
        t, after = times[k], times[k + 1]
        slope = slope_from(t)
        direction = slope(x, t)
        if callback is not None:
            callback({"step": k, "timestep": t, "x": x, "denoised": x - t * direction})
        if corrected(after):
            direction = (direction + slope(x + (after - t) * direction, after)) / 2
        x = x + (after - t) * direction
    return x


def multistep(denoise: Callable[[Tensor, int], Tensor], x: Tensor, sigmas: Sequence[float], *, progress=None) -> Tensor:
    """DPM-Solver++(2M), [D] Algorithm 2, for x = x_0 + sigma noise: second order with one evaluation a step.

    Any schedule x_t = alpha x_0 + sigma_t noise takes this form when divided by alpha; e^-h of the paper is then the
    ratio of a step's two sigmas. x: (B, C, ...) at sigmas[0]. sigmas: (n + 1,), falling, the last one may be 0.
    denoise(x, k): the x_0 predicted at sigmas[k]. Returns x at sigmas[-1], of x's dtype.
    """
    steps, before = range(len(sigmas) - 1), None
    for k in steps if progress is None else progress(steps):
        sigma, after = sigmas[k], sigmas[k + 1]
        denoised = target = denoise(x, k)
        # The first step has nothing to extrapolate from; a step to 0 is infinitely long in log sigma.
        if before is not None and after > 0:
            ratio = math.log(sigma / after) / math.log(sigmas[k - 1] / sigma)
            target = denoised + ratio / 2 * (denoised - before)
        x = after / sigma * x + (1 - after / sigma) * target
        before = denoised
    return x
