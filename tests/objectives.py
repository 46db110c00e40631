"""An objective with a model between its halves, as the runners put them together, and one to measure anything by."""

from typing import NamedTuple

from torch import Tensor

from opendit.diffusion import Prepared


def losses_of(objective, model, x0: Tensor, t: Tensor, noise: Tensor, **conditions) -> Tensor:
    """The loss of each sample, (B,)."""
    prepared = objective.prepare(x0, t, noise)
    output = model(prepared.x_t, prepared.timestep, **conditions)
    return objective.loss(output, prepared)


class Target(NamedTuple):
    target: Tensor


class SquaredError:
    """The model is given x and t as they are; of its first channels those of ``noise`` are what it is to return."""

    asks_network = False

    def prepare(self, x: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        return Prepared(x, t, Target(noise))

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        (target,) = prepared.context
        return (output.float()[:, : target.shape[1]] - target).square().flatten(1).mean(1)
