"""Samplers' stated step weights are compared with the steps themselves in float64."""

import pytest
import torch

from opendit.diffusion.objectives import OBJECTIVES
from opendit.diffusion.samplers import SAMPLERS
from opendit.sampling.fused_steps import weights_of_network

SETTINGS = {
    "ddpm": ("ddpm", {}),
    "velocity": ("ddpm", {"prediction": "v"}),
    "shifted": ("ddpm", {"shift": 3.0}),
    "edm": ("edm", {"sigma_data": 0.7}),
    "flow": ("flow", {"shift": 2.5}),
}
EVERY = [(which, name) for which, (of, more) in SETTINGS.items() for name in OBJECTIVES[of](**more).samplers]
SHAPE = (3, 2, 4, 5)


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Network:
    """Returns one given output per evaluation, and keeps its inputs."""

    def __init__(self, outputs, variance):
        self.outputs, self.variance, self.inputs = outputs, variance, []

    def __call__(self, x, t):
        self.inputs.append(x)
        output = self.outputs[len(self.inputs) - 1]
        return output if self.variance is None else torch.cat((output, self.variance), 1)


def made(which: str, name: str, steps: int, network, eta=None):
    of, more = SETTINGS[which]
    objective, kind = OBJECTIVES[of](**more), SAMPLERS[name]
    options = {} if eta is None else {"eta": eta}
    trajectory = objective.trajectory(steps, kind.even_in_noise)
    noise = numbers(100)
    return objective, kind(objective.network(network), trajectory, noise, lambda k: noise, **options), noise


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize(("which", "name"), EVERY)
def test_steps_are_their_weighted_sums(which, name, steps):
    outputs = [numbers(1), numbers(2)]
    for learned in (False, True) if which in ("ddpm", "velocity", "shifted") else (False,):
        for eta in (None, 0.6) if name == "ddim" else (None,):
            variance = numbers(3) if learned else None
            network = Network(outputs, variance)
            objective, sampler, noise = made(which, name, steps, network, eta)
            begin = sampler.init(noise)
            state = type(begin)(*(numbers(10 + part) for part in range(len(begin))))
            for i in range(steps):
                network.inputs.clear()
                want = sampler.step(state, i)
                found = weights_of_network(sampler.weights(i, learned), objective, sampler, i)
                assert len(found.inputs) == len(network.inputs)
                terms = [*state]
                for weights, got, output in zip(found.inputs, network.inputs, outputs, strict=False):
                    check(weights, terms, got)
                    terms.append(output)
                for part, weights in zip(want, found.after, strict=True):
                    sums = [*terms, noise] if found.noise else terms
                    if found.variance is not None and part is want.x:
                        p, q = found.variance
                        *weights, _ = weights
                        sums, part = terms, part - torch.exp(p + q * variance) * noise
                    check(weights, sums, part)


def check(weights, terms, want):
    got = sum(weight * term for weight, term in zip(weights, terms, strict=True))
    size = sum(abs(weight) * term.abs() for weight, term in zip(weights, terms, strict=True))
    assert ((got - want).abs() <= 2e-5 * (size + 1)).all()  # tables are float32; x_0 is 157 times a difference
