"""Samplers: from noise to data along an objective's trajectory. Each has its own file, and all share one signature.

To add a sampler, write ``NAME.py`` here with a subclass of ``Sampler`` that is assigned to ``SAMPLER``, and add the
name to ``ALL_SAMPLERS`` in opendit/config/names.py. It works with all objectives whose trajectories define the method
that it ``needs``.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from opendit.config.names import ALL_SAMPLERS
from opendit.diffusion.samplers.base import NoiseFn, Sampler, State
from opendit.diffusion.trajectory import Model, Trajectory, at_least_float32

SAMPLERS: dict[str, type[Sampler]] = {name: import_module(f"{__name__}.{name}").SAMPLER for name in ALL_SAMPLERS}
__all__ = ["SAMPLERS", "Sampler", "State", "sample"]


@torch.no_grad()
def sample(
    name: str,
    model: Model,
    x: Tensor,
    trajectory: Trajectory,
    *,
    noise_fn: NoiseFn | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Tensor:
    """Sample data from x with sampler ``name``: call its ``init``, then ``step`` for every step of the trajectory.

    Args:
        model: ``model(x, t)`` gets x (B, C, ...), float32 at least, and the network's time (B,). It returns what the
            objective trains it to predict, in any dtype.
        x: (B, C, ...), the state at the noisiest point, see ``Trajectory.start``. The result has the same shape, in
            float32, or in float64 if x is float64.
        noise_fn: ``noise_fn(k)`` returns the noise of step k = 0, 1, ..., (B, C, ...).
        progress: wraps the sequence of steps, as ``tqdm.tqdm`` does.
        callback: called in each step with a dict of values at the step's start: ``step`` k, ``timestep`` (the
            trajectory's time), the state ``x``, and ``denoised``, the x_0 predicted from x.
        options: options of the sampler, such as DDIM's ``eta``.

    Raises:
        ValueError: the model's output doesn't fit x, or the sampler rejects an option.
    """
    x = at_least_float32(x)
    sampler = SAMPLERS[name](model, trajectory, x, noise_fn, **options)
    state: Any = sampler.init(x)  # a NamedTuple with a field x
    steps = range(sampler.steps)
    for i in steps if progress is None else progress(steps):
        state = sampler.step(state, i, callback and _reporting(callback, i, trajectory.times[i]))
    return state.x


def _reporting(
    callback: Callable[[dict[str, Any]], None], step: int, timestep: float
) -> Callable[[Tensor, Tensor], None]:
    return lambda x, denoised: callback({"step": step, "timestep": timestep, "x": x, "denoised": denoised})
