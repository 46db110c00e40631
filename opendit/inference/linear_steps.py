"""What a sampler's steps are as sums with weights, where they are that; found by asking the sampler.

Most updates are linear in what they are made of: the state, the network's predictions, noise. Which weights that gives
stands in the sampler's own equations, across trajectories and objectives, and nowhere a second time: the sampler draws
one batch in float64 whose samples are the unit vectors, one for each thing that a step is made of, and what comes out
are the weights. One more sample, of numbers, tells whether the step is linear.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opendit.diffusion import Objective
from opendit.diffusion.samplers import SAMPLERS

MOST_EVALUATIONS = 2
SAME = 1e-9  # relative difference up to which a step is what its weights say


@dataclass(frozen=True)
class LinearStep:
    """One step. Weights are in the order: the state's parts, the predictions of the step's evaluations, noise.

    inputs: what the network gets in each evaluation, of the state's parts and the predictions before. after: the parts
    of the next state, of everything; without noise where ``noise`` is False. variance: (p, q), where the weight of the
    noise in the first part is exp(p + q v), v being the network's other channels, and not the number that stands there.
    """

    inputs: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]
    noise: bool
    variance: tuple[float, float] | None = None

    @property
    def evaluations(self) -> int:
        return len(self.inputs)


class _NotLinearError(Exception):
    pass


class _Probe:
    """A sampler whose batch is the unit vectors."""

    def __init__(self, objective: Objective, name: str, steps: int, variance: bool):
        kind = SAMPLERS[name]
        trajectory = objective.trajectory(steps, kind.even_in_noise)
        like = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        self.parts = len(kind(lambda x, t: x, trajectory, like, lambda k: like).init(like))
        self.things = self.parts + MOST_EVALUATIONS + 1
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(1, self.things, dtype=torch.float64, generator=generator)
        # (A row, a thing): unit vectors, then numbers; and large ones, which tell of clipping.
        self.rows = torch.cat([torch.eye(self.things, dtype=torch.float64), numbers, 100 * numbers])
        self.variance = variance
        like = torch.zeros(len(self.rows), 1, 1, 1, dtype=torch.float64)
        self.sampler = kind(objective.network(self._network), trajectory, like, self._noise)
        state = self.sampler.init(like)
        self.state_type: Any = type(state)
        self.shapes = {part.shape for part in state}

    def _column(self, thing: int) -> Tensor:
        return self.rows[:, thing].view(-1, 1, 1, 1).clone()

    def _network(self, x: Tensor, t: Tensor) -> Tensor:
        if len(self.inputs) == MOST_EVALUATIONS:
            raise _NotLinearError
        prediction = self._column(self.parts + len(self.inputs))
        self.inputs.append(x)
        return torch.cat((prediction, torch.full_like(prediction, self.v)), 1) if self.variance else prediction

    def _noise(self, k: int) -> Tensor:
        self.noisy = True
        return self._column(self.things - 1)

    def _weights(self, x: Tensor) -> Tensor:
        """(things,) of what a step made of the batch. Raises _NotLinearError if it is not a sum with these weights."""
        found = x.flatten()
        weights, sums = found[: self.things], found[self.things :]
        size = self.rows[self.things :].abs() @ weights.abs()
        if not found.isfinite().all() or ((self.rows[self.things :] @ weights - sums).abs() > SAME * size).any():
            raise _NotLinearError
        return weights

    def step(self, i: int, v: float) -> tuple[list[Tensor], list[Tensor], bool]:
        """Weights (things,) of every evaluation's input and of every part after step i; whether there is noise."""
        self.inputs, self.noisy, self.v = [], False, v
        state = self.state_type(*(self._column(part) for part in range(self.parts)))
        after = self.sampler.step(state, i)
        return [self._weights(x) for x in self.inputs], [self._weights(part) for part in after], self.noisy


def _learned(probe: _Probe, i: int, after: list[Tensor]) -> tuple[float, float] | None:
    """p and q of a step whose noise has a learned variance; None if nothing depends on v."""
    found = {v: torch.stack(probe.step(i, v)[1]) for v in (-1.0, 0.5, 1.0)}
    if all(torch.equal(weights, torch.stack(after)) for weights in found.values()):
        return None
    low, middle, high = (float(weights[0, -1]) for weights in found.values())
    for weights in found.values():  # of no other weight
        weights[0, -1] = 0
    if not all(torch.equal(weights, found[1.0]) for weights in found.values()) or min(low, middle, high) <= 0:
        raise _NotLinearError
    p, q = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
    if abs(math.log(middle) - (p + 0.5 * q)) > SAME * max(1.0, abs(p)):
        raise _NotLinearError
    return p, q


def linear_steps(objective: Objective, name: str, steps: int, variance: bool) -> list[LinearStep] | None:
    """The steps of sampler ``name``, one of the objective's; None where one of them is no such sum, or where the
    network is first given something else than a multiple of x.

    variance: whether the network predicts a variance, too.
    """
    try:
        probe = _Probe(objective, name, steps, variance)
        if len(probe.shapes) != 1 or probe.state_type._fields[0] != "x":
            return None
        return [_linear(probe, i) for i in range(probe.sampler.steps)]
    except _NotLinearError:
        return None


def _linear(probe: _Probe, i: int) -> LinearStep:
    inputs, after, noise = probe.step(i, 0.0)
    made = probe.parts + len(inputs)  # the state's parts and the step's predictions
    counts = [1, *range(probe.parts + 1, made)]  # what each evaluation's input may be made of
    if any(weights[count:].any() for weights, count in zip(inputs, counts, strict=True)):
        raise _NotLinearError
    if any(weights[made:-1].any() for weights in after):
        raise _NotLinearError
    return LinearStep(
        inputs=tuple(tuple(weights[: probe.parts + number].tolist()) for number, weights in enumerate(inputs)),
        after=tuple((*weights[:made].tolist(), *([float(weights[-1])] if noise else [])) for weights in after),
        noise=noise,
        variance=_learned(probe, i, after) if probe.variance else None,
    )
