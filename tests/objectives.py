"""Compute an objective's losses as a training run does, and a squared-error objective for tests."""

from typing import NamedTuple

from torch import Tensor

from opendit.diffusion.objectives.base import Prepared


def losses_of(objective, model, x0: Tensor, t: Tensor, noise: Tensor, **conditions) -> Tensor:
    """Return the loss of each sample, (B,)."""
    prepared = objective.prepare(x0, t, noise)
    output = model(prepared.x_t, prepared.timestep, **conditions)
    return objective.loss(output, prepared)


class Target(NamedTuple):
    target: Tensor


class SquaredError:
    """An objective that passes x and t unchanged to the model. The output's first channels should equal ``noise``."""

    asks_network = False

    def prepare(self, x: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        return Prepared(x, t, Target(noise))

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        (target,) = prepared.context
        return (output.float()[:, : target.shape[1]] - target).square().flatten(1).mean(1)
