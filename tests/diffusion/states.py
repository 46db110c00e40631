"""The states of a sampler."""

import torch
from torch import Tensor

from opendit.diffusion.samplers import SAMPLERS


@torch.no_grad()
def sample_with_states(
    name: str, model, x: Tensor, trajectory, noise_fn=None, **options
) -> tuple[Tensor, list[Tensor]]:
    """Return the result of ``sample`` and the x at the beginning of every step."""
    sampler = SAMPLERS[name](model, trajectory, x, noise_fn, **options)
    state, states = sampler.init(x), []
    for i in range(sampler.steps):
        # DPM-Solver++'s state is x divided by alpha.
        states.append(trajectory.alphas[i] * state.x if name == "dpmpp" else state.x)
        state = sampler.step(state, i)
    return state.x, states
