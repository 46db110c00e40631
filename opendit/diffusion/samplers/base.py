"""The interface of samplers: pure functions ``init`` and ``step`` of tensors, and tables of what differs between
steps."""

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
    """State of most samplers between two steps. Every state is a NamedTuple of tensors, one of them ``x``."""

    x: Tensor  # (B, C, ...), float32 or float64


class StepWeights(NamedTuple):
    """A step as weighted sums, which kernels can compute in one pass.

    Weights are in this order: the state's fields, the model's outputs in this step's evaluations, noise.

    inputs: for each evaluation, the model's input as a sum of the state's fields and the earlier outputs. after: for
    each field of the next state, the weights of all terms above. The last weight, of noise, is absent if ``noise`` is
    False. variance: (p, q) for models that also predict a variance v in additional output channels: exp(p + q v)
    replaces the weight of the noise in x.
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

    ``step`` is ``advance(model, state, inputs)``. Steps differ only in the model that is called (``model_at``, because
    guidance may be limited to an interval of noise levels) and in the tensors of ``inputs``: rows of tables that are
    computed once, and noise. ``advance`` reads nothing on the host. Therefore it can be
    recorded once as a CUDA graph, and replayed for all steps that call the same model and in which the same inputs are
    None. Before each replay, copy the step's inputs into the recorded tensors. Callers switch off gradients.

    Args:
        model: ``model(x, t)``, as the trajectory calls it.
        trajectory: the path to follow, and the meaning of the model's output.
        like: (B, C, ...), with the batch size, dtype (float32 or float64) and device of the x that ``init`` will get.
        noise_fn: ``noise_fn(k)`` is the noise (B, C, ...) of step k; see ``opendit.diffusion.random.keyed_noise``.
    """

    even_in_noise: ClassVar[bool] = False  # prefer points that are evenly spaced in log(sigma / alpha)
    needs: ClassVar[str]  # the trajectory's method that it calls: slope, denoise, or one that only some classes define
    model: Model
    noise_fn: NoiseFn | None
    trajectory: Trajectory
    steps: int
    points: Tensor

    @classmethod
    def fits(cls, trajectory: type[Trajectory]) -> bool:
        """Return True if the sampler works with trajectories of this class: they define the method that it needs."""
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
        """Return (len(values),) in x's dtype and on its device; ``table[i]`` is a scalar tensor without a copy."""
        return torch.tensor(values, dtype=torch.float64).to(self._device, self._dtype)

    def init(self, x: Tensor) -> NamedTuple:
        """Return the state at the noisiest point, from x (B, C, ...) there."""
        return State(x)

    def model_at(self, i: int) -> Model:
        """Return the model that step i calls, in all its evaluations."""
        return for_step(self.model, self.trajectory.levels[i])

    @abstractmethod
    def inputs(self, i: int) -> NamedTuple:
        """Return the inputs of step i = 0, 1, ... besides the state: tensors, or None for those that the step lacks.

        In ``advance``, scalars may come as (B, 1, ..., 1), one per sample, because samples of a batch may be at
        different steps (opendit.sampling.sampling_engine).
        """

    @abstractmethod
    def advance(self, model: Model, state: Any, inputs: Any, observe: Observer | None = None) -> NamedTuple:
        """Return the next state.

        ``observe(x, denoised)``, if given, is called with x at the start of the step and the x_0 predicted there.
        Raises ValueError if the model's output doesn't fit x.
        """

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        """Return step i as weighted sums, in float64; None if it is not of that form, or the trajectory doesn't state
        it.

        learned_variance: the model predicts a variance, too.
        """
        return None

    def step(self, state: Any, i: int, observe: Observer | None = None) -> NamedTuple:
        """Return the state after step i from the one before it; see ``advance``."""
        return self.advance(self.model_at(i), state, self.inputs(i), observe)
