"""Samplers: from noise to data along an objective's trajectory. One file each, all with one signature.

To add one, write ``NAME.py`` here with a subclass of ``Sampler`` named by ``SAMPLER``, and add the name to
``ALL_SAMPLERS`` in opendit/config/names.py. It samples from the models of all objectives whose trajectories define the
method that it ``needs``.
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
    """Sample data from x with sampler ``name``: its ``init``, then its ``step`` for every step of the trajectory.

    Args:
        model: ``model(x, t)`` gets x (B, C, ...), float32 at least, and the objective's network time (B,); it returns
            what the objective trains it to predict, in any dtype.
        x: (B, C, ...), x at the noisiest point, see ``Trajectory.start``. The result has its shape, in float32 (float64
            if x is).
        noise_fn: ``noise_fn(k)`` returns the noise of step k = 0, 1, ... (0 is the first step), (B, C, ...).
        progress: wraps the sequence of steps, as ``tqdm.tqdm`` does.
        callback: called at each step with a dict: ``step`` k, ``timestep`` (the trajectory's time there), the state
            ``x`` there, and ``denoised``, the x_0 predicted from it.
        options: of the sampler, such as DDIM's ``eta``.

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
