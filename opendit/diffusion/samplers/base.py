"""The interface of samplers: ``init`` and ``step``, pure functions of tensors, and tables of all that differs between
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
    """The state of most samplers between two steps. Every state is a NamedTuple of tensors, one of them ``x``."""

    x: Tensor  # (B, C, ...), float32 or float64


class StepWeights(NamedTuple):
    """A step as weighted sums, for kernels that take it in one piece.

    Weights stand in this order: the state's parts, the model's outputs in this step's evaluations, noise.

    inputs: what the model gets in each evaluation, of the state's parts and the outputs before. after: the parts of the
    next state, of everything; without noise where ``noise`` is False. variance: (p, q) if the weight of the noise in x
    is exp(p + q v) instead, where v are the model's further channels.
    """

    inputs: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]
    noise: bool = False
    variance: tuple[float, float] | None = None


class Sampler(ABC):
    """One sampler over one trajectory, for batches like one.

        state = sampler.init(x)
        for i in range(sampler.steps):
            state = sampler.step(state, i)
        return state.x

    ``step`` is ``advance(model, state, inputs)``: all that differs from step to step is which model is called (guidance
    in an interval of noise levels chooses it, by ``model_at``) and the tensors of ``inputs``, which are rows of tables
    made once, and noise. ``advance`` reads nothing on the host, so one recording of it as a CUDA graph serves all steps
    that call the same model and have the same inputs (None or not), with the inputs copied to where it was recorded.
    Gradients are the caller's to switch off.

    Args:
        model: ``model(x, t)``, as the trajectory calls it.
        trajectory: where to go; it says what the model's output means.
        like: (B, C, ...), the batch size, dtype (float32 or float64) and device of the x that ``init`` will get.
        noise_fn: ``noise_fn(k)`` is the noise (B, C, ...) of step k; see ``opendit.diffusion.random.keyed_noise``.
    """

    even_in_noise: ClassVar[bool] = False  # whether it wants its points even in log(sigma / alpha)
    needs: ClassVar[str]  # the method of a trajectory that it calls: slope, denoise, or one that not every kind has
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
        """The noise of step i, (B, C, ...), of a sampler that was given ``noise_fn``."""
        assert self.noise_fn is not None
        return self.noise_fn(i)

    def table(self, values: Sequence[float]) -> Tensor:
        """(len(values),) of x's dtype and on its device; ``table[i]`` is a scalar tensor, and takes no copy."""
        return torch.tensor(values, dtype=torch.float64).to(self._device, self._dtype)

    def init(self, x: Tensor) -> NamedTuple:
        """The state at the noisiest point, from x (B, C, ...) there."""
        return State(x)

    def model_at(self, i: int) -> Model:
        """The model that step i calls, in all its evaluations."""
        return for_step(self.model, self.trajectory.levels[i])

    @abstractmethod
    def inputs(self, i: int) -> NamedTuple:
        """Return the inputs of step i = 0, 1, ... besides the state: tensors, or None for those that the step lacks.

        ``advance`` may get a number of these as (B, 1, ..., 1), one a sample: samples of a batch may be at other steps
        (opendit.sampling.sampling_engine)."""

    @abstractmethod
    def advance(self, model: Model, state: Any, inputs: Any, observe: Observer | None = None) -> NamedTuple:
        """The next state. ``observe(x, denoised)``, if given, is called with x at the point where the step starts and
        the x_0 predicted there. Raises ValueError if the model's output doesn't fit x."""

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        """Step i as weighted sums, in float64; None if it is not that, or not stated. learned_variance: the model
        predicts a variance too."""
        return None

    def step(self, state: Any, i: int, observe: Observer | None = None) -> NamedTuple:
        """The state after step i from the one before it; see ``advance``."""
        return self.advance(self.model_at(i), state, self.inputs(i), observe)
