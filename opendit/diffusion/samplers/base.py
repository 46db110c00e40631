"""The interface of samplers: pure functions ``init`` and ``step``, and tables with each step's coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.diffusion.guidance import for_step
from opendit.diffusion.trajectory import Model, Trajectory

NoiseFn = Callable[[int], Tensor]
Observer = Callable[[Tensor, Tensor], None]


class State(NamedTuple):
    """State of most samplers between two steps. Every state is a NamedTuple of tensors with a field ``x``."""

    x: Tensor  # (B, C, ...), float32 or float64


class StepWeights(NamedTuple):
    """A step as weighted sums, which kernels can compute in one pass.

    Every list of weights has this order: the state's fields, the model's outputs in this step's evaluations, the noise.

    inputs: for each evaluation, the weights that sum the state's fields and the earlier outputs to the model's input.
    after: for each field of the next state, the weights of all terms. If ``noise`` is False, the noise's weight is
    omitted. variance: (p, q) for models that also predict a variance v in additional output channels. With such a
    model, the weight of the noise in x is exp(p + q v).
    """

    inputs: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]
    noise: bool = False
    variance: tuple[float, float] | None = None


class Sampler(ABC):
    """One sampler over one trajectory, for batches with the shape, dtype and device of ``like``.

        state = sampler.init(x)
        for i in range(sampler.steps):
            state = sampler.step(state, i)
        return state.x

    ``step`` is ``advance(model, state, inputs)``. Only two things change from step to step. First, ``model_at`` selects
    the model, because guidance may be limited to an interval of noise levels. Second, ``inputs`` returns noise and rows
    of precomputed tables. ``advance`` never reads a tensor on the host, so it can be recorded as a CUDA graph. The
    graph can be replayed for all steps that call the same model and have the same inputs set to None. Before each
    replay, copy the step's inputs into the recorded tensors. The caller must disable gradients.

    Args:
        model: ``model(x, t)``, as the trajectory calls it.
        trajectory: the path to follow; it also defines the meaning of the model's output.
        like: (B, C, ...), with the batch size, dtype (float32 or float64) and device of the x passed to ``init``.
        noise_fn: ``noise_fn(k)`` returns the noise (B, C, ...) of step k; see ``opendit.diffusion.random.keyed_noise``.
    """

    even_in_noise: ClassVar[bool] = False  # True if points should be evenly spaced in log(sigma / alpha)
    # trajectory method that the sampler calls: slope, denoise, or a method that only some trajectories have
    needs: ClassVar[str]
    model: Model
    noise_fn: NoiseFn | None
    trajectory: Trajectory
    steps: int
    points: Tensor

    @classmethod
    def fits(cls, trajectory: type[Trajectory]) -> bool:
        """Return True if trajectories of this class define the method that the sampler needs."""
        defined = getattr(trajectory, cls.needs, None)
        return defined is not None and defined is not getattr(Trajectory, cls.needs, None)

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        self.model, self.trajectory, self.noise_fn = model, trajectory, noise_fn
        self.steps = trajectory.steps
        self.points = trajectory.points(like)
        self._like, self._dtype, self._device = like, like.dtype, like.device

    def noise(self, i: int) -> Tensor:
        """Return the noise of step i, (B, C, ...). The sampler must have a ``noise_fn``."""
        assert self.noise_fn is not None
        return self.noise_fn(i)

    def table(self, values: Sequence[float]) -> Tensor:
        """Return ``values`` as a tensor in x's dtype and on its device. ``table[i]`` then gives a scalar tensor without
        a copy to the device."""
        return torch.tensor(values, dtype=torch.float64).to(self._device, self._dtype)

    def init(self, x: Tensor) -> NamedTuple:
        """Return the state at the noisiest point, where x is (B, C, ...)."""
        return State(x)

    def model_at(self, i: int) -> Model:
        """Return the model to call in all evaluations of step i."""
        return for_step(self.model, self.trajectory.levels[i])

    @abstractmethod
    def inputs(self, i: int) -> NamedTuple:
        """Return the inputs of step i = 0, 1, ... besides the state: tensors, or None for inputs that the step lacks.

        ``advance`` also accepts scalars as (B, 1, ..., 1), one per sample, because samples of a batch may be at
        different steps (opendit.sampling.sampling_engine).
        """

    @abstractmethod
    def advance(self, model: Model, state: Any, inputs: Any, observe: Observer | None = None) -> NamedTuple:
        """Return the state after the step.

        If ``observe`` is given, call ``observe(x, denoised)`` with x at the start of the step and the x_0 predicted
        there. Raise ValueError if the model's output doesn't fit x.
        """

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        """Return step i as weighted sums, in float64; None if the step can't be written as weighted sums.

        learned_variance: True if the model also predicts a variance.
        """
        return None

    def step(self, state: Any, i: int, observe: Observer | None = None) -> NamedTuple:
        """Advance ``state`` by step i and return the new state; see ``advance``."""
        return self.advance(self.model_at(i), state, self.inputs(i), observe)
