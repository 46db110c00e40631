"""Samplers' ``init`` and ``step`` are pure, repeat to the complete loop, and can be recorded once for all steps."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from opendit.diffusion.guidance import GuidedWithin, cfg_model
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.random import initial_noise, keyed_noise
from opendit.diffusion.samplers import SAMPLERS, sample

OBJECTIVES = {
    "ddpm": DDPMObjective(),
    "v": DDPMObjective("v", shift=3.0),
    "flow": FlowObjective(3.0),
    "edm": EDMObjective(sigma_data=0.7),
}
EVERY = [(which, name, {}) for which, objective in OBJECTIVES.items() for name in objective.samplers]
EVERY += [("ddpm", "ddim", {"eta": 0.6}), ("v", "ddim", {"eta": 1.0})]
SHAPE, INDEX = (2, 3, 5), torch.tensor([4, 0, 11])
OF_EVERY = pytest.mark.parametrize(("which", "name", "options"), EVERY)


def network(learned: bool):
    def model(x, t, y):
        time, label = t.view(-1, 1, 1, 1) / 1000, y.view(-1, 1, 1, 1)
        output = torch.sin(2 * x + time + label) + 0.3 * x
        return torch.cat((output, torch.cos(3 * x + time)), 1) if learned else output

    return model


def problem(which: str, name: str, steps: int = 7, interval=(0.3, 3.0), dtype=torch.float32):
    """Return a model guided in an interval of noise levels, its trajectory, the first x and noise_fn."""
    objective = OBJECTIVES[which]
    y, model = torch.tensor([1, 2, 3]), network(objective.learn_sigma)
    guided, plain = (cfg_model(model, y, torch.tensor(0), scale) for scale in (3.0, 1.0))
    model = objective.network(GuidedWithin(interval, objective.noise_level, guided, plain))
    trajectory = objective.trajectory(steps, SAMPLERS[name].even_in_noise)
    noise_fn = keyed_noise(3, INDEX, SHAPE)
    x = trajectory.start(initial_noise(3, INDEX, SHAPE)).to(dtype)
    return model, trajectory, x, lambda k: noise_fn(k).to(dtype)


def made(which: str, name: str, options: dict, **how):
    model, trajectory, x, noise_fn = problem(which, name, **how)
    return SAMPLERS[name](model, trajectory, x, noise_fn, **options), x


@OF_EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps_taken_one_by_one_are_the_loop(which, name, options, dtype, steps):
    model, trajectory, x, noise_fn = problem(which, name, steps, dtype=dtype)
    expected = sample(name, model, x, trajectory, noise_fn=noise_fn, **options)
    sampler = SAMPLERS[name](model, trajectory, x, noise_fn, **options)
    state = sampler.init(x)
    for i in range(sampler.steps):
        state = sampler.step(state, i)
    assert sampler.steps == steps and state.x.dtype == dtype and torch.equal(state.x, expected)


@OF_EVERY
def test_objectives_draw_by_their_trajectory(which, name, options):
    if options:
        return  # an objective's ``sample`` takes no options
    model, trajectory, x, noise_fn = problem(which, name)
    expected = sample(name, model, x, trajectory, noise_fn=noise_fn)
    y, objective = torch.tensor([1, 2, 3]), OBJECTIVES[which]
    guided, plain = (cfg_model(network(objective.learn_sigma), y, torch.tensor(0), scale) for scale in (3.0, 1.0))
    within = GuidedWithin((0.3, 3.0), objective.noise_level, guided, plain)
    assert torch.equal(objective.sample(within, INDEX, SHAPE, seed=3, steps=7, sampler=name), expected)


@OF_EVERY
def test_a_step_is_a_pure_function(which, name, options):
    """Steps change no arguments, keep no state, and can be taken in any order and by another sampler."""
    sampler, x = made(which, name, options)
    other, _ = made(which, name, options)
    start, states = x.clone(), [sampler.init(x)]
    assert all(part.shape == x.shape and part.dtype == x.dtype for part in states[0])
    for i in range(sampler.steps):
        states.append(sampler.step(states[-1], i))
    before = [[part.clone() for part in state] for state in states]
    for i in (5, 0, 6, 3):
        for again in (sampler.step(states[i], i), other.step(states[i], i)):
            assert type(again) is type(states[i + 1])
            assert all(map(torch.equal, again, states[i + 1]))
    assert torch.equal(x, start)
    assert all(map(torch.equal, itertools.chain(*before), itertools.chain(*states)))


def recorded(sampler, state, i: int):
    """Record step i's operations on ``state`` as a function of states and inputs of the same kind."""
    inputs, model = sampler.inputs(i), sampler.model_at(i)

    def advance(state, present):
        rest = iter(present)
        values = [None if value is None else next(rest) for value in inputs]
        return tuple(sampler.advance(model, state, type(inputs)(*values)))

    return make_fx(advance)(state, [value for value in inputs if value is not None])


@OF_EVERY
def test_one_recording_serves_all_steps_of_a_kind(which, name, options):
    """Replaying one step's recording with another step's tensors gives that step, so only the inputs may differ
    between steps and nothing may be read on the host."""
    sampler, x = made(which, name, options, steps=12)
    state, recordings = sampler.init(x), {}
    for i in range(sampler.steps):
        inputs = sampler.inputs(i)
        present = [value for value in inputs if value is not None]
        assert all(value.shape in ((), x.shape[:1], x.shape) and value.device == x.device for value in present)
        kind = (sampler.model_at(i), *(value is None for value in inputs))
        if kind not in recordings:
            recordings[kind] = recorded(sampler, state, i)
        after = sampler.step(state, i)
        assert all(map(torch.equal, recordings[kind](state, present), after)), i
        state = after
    # Guided or not; some samplers' last step adds no noise or has only one slope.
    assert 2 <= len(recordings) <= 3


class OnTheHost(TorchDispatchMode):
    """Records operations that make the host wait for a GPU or copy to it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name in ("_local_scalar_dense", "lift_fresh", "is_nonzero", "equal", "nonzero"):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


@OF_EVERY
def test_a_step_neither_reads_nor_copies_on_the_host(which, name, options):
    model, trajectory, x, _ = problem(which, name)
    noises = [torch.ones_like(x) for _ in range(trajectory.steps)]
    sampler = SAMPLERS[name](model, trajectory, x, noises.__getitem__, **options)
    state = sampler.step(sampler.init(x), 0)  # the first step makes the schedule's tables
    with OnTheHost() as host:
        for i in range(1, sampler.steps):
            state = sampler.step(state, i)
    assert host.calls == []
    with OnTheHost() as host:
        float(state.x.sum()), torch.tensor([1.0])
    assert host.calls == ["_local_scalar_dense", "lift_fresh"]
