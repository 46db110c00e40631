"""Samplers, and the trajectories from noise to data that they follow.

An objective's trajectory, such as ``DDPMTrajectory``, defines the meaning of the network's output. A sampler works with
any trajectory that has the method ``Sampler.needs``, such as ``denoise`` or ``slope``.

To add a sampler, write a subclass of :class:`Sampler` here, and give it a name in :data:`SAMPLERS`. Add the name to
``ALL_SAMPLERS`` in opendit/config/names.py.

    [D] Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2022
    [H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
    [K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
    [L] Liu, Gong, Liu, "Flow Straight and Fast", 2023
    [N] Nichol, Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021
    [S] Song, Meng, Ermon, "Denoising Diffusion Implicit Models", 2021
    [U] Zhao, Bai, Rao, Zhou, Lu, "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion
        Models", 2023
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


class LinearForm(NamedTuple):
    """A weighted sum: ``x`` is the weight of the state x, ``output`` the weight of the model's output."""

    x: float
    output: float


class Trajectory(ABC):
    """A path from noise to data, with points 0 (noise) to ``steps`` (data). Step k leads from point k to point k + 1.

    At point k, x is alpha (x_0 + levels[k] noise), with alpha = alphas[k]. A model is called as ``model(x, t)``, with x
    (B, C, ...) and the network's time t (B,)."""

    # (steps + 1,), or (steps,) if the last point is never evaluated; the unit depends on the class
    times: Sequence[float]
    levels: Sequence[float]  # (steps + 1,) sigma / alpha, descending; guidance intervals use this unit
    alphas: Sequence[float]  # (steps + 1,)

    @property
    def steps(self) -> int:
        return len(self.levels) - 1

    def start(self, noise: Tensor) -> Tensor:
        """Return x at point 0, computed from standard normal ``noise`` (B, C, ...), in noise's shape."""
        return noise

    @abstractmethod
    def points(self, x: Tensor) -> Tensor:
        """Return a tensor (steps or steps + 1, B). Row k is the argument ``point`` of other methods at point k:
        timestep indices, noise levels or network times, depending on the class."""

    def denoise(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """Return the x_0 that the model predicts from x (B, C, ...), in x's shape and dtype. ``point``: (B,), a row of
        :meth:`points`. Raises ValueError if the model's output doesn't fit x."""
        raise NotImplementedError

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        """Return dx/dtime of the probability-flow ODE, in the unit of ``times``. Arguments: see :meth:`denoise`."""
        raise NotImplementedError

    def has_slope(self, k: int) -> bool:
        return True

    def input_scale(self, k: int) -> float:
        """Return the factor that turns x into the model's input at point k."""
        return 1.0

    def denoise_weights(self, k: int) -> LinearForm | None:
        """Return ``denoise`` at point k as a weighted sum; None if this is impossible."""
        return None

    def slope_weights(self, k: int) -> LinearForm | None:
        """Return ``slope`` at point k as a weighted sum; None if this is impossible."""
        return None


def for_each_sample(values: Sequence[float], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (len(values), B) on x's device. Row i, contiguous, repeats values[i] for all samples of x (B, ...)."""
    return torch.tensor(values, dtype=torch.float64).to(x.device, dtype)[:, None].repeat(1, len(x))


def as_rows(coefficients: Tensor, x: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ..., 1), to match the rank and dtype of x."""
    return coefficients.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bf16 and fp16 to float32, and leave float32 and float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_output(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a model's output for ``x`` (B, C, ...) into (prediction in x's shape, variance output v or None). Raises
    ValueError for an output of another shape."""
    channels = x.shape[1]
    if output.shape == x.shape:
        return output, None
    if output.shape == (x.shape[0], 2 * channels, *x.shape[2:]):
        return output[:, :channels], output[:, channels:]
    raise ValueError(
        f"for x {tuple(x.shape)} a model must return {channels} or {2 * channels} channels of its size, "
        f"got {tuple(output.shape)}"
    )


def for_step(model: Model, level: float) -> Model:
    """Return the model for a step at noise level ``level`` (sigma): ``model.at_level(level)`` if possible."""
    choose = getattr(model, "at_level", None)
    return model if choose is None else choose(level)


NoiseFn = Callable[[int], Tensor]


class State(NamedTuple):
    """State of most samplers between two steps. Every sampler's state is a NamedTuple of tensors with a field ``x``."""

    x: Tensor  # (B, C, ...), float32 or float64


class StepWeights(NamedTuple):
    """A step as weighted sums. Kernels compute it in one pass.

    The weights' order is: the state's fields, the model's outputs in this step, the noise.

    inputs: for each evaluation, the weights of the state and of earlier outputs. after: for each field of the next
    state, all weights. noise: False if the step adds no noise. variance: (p, q) for a model with variance output v; the
    noise's weight in x is exp(p + q v)."""

    inputs: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]
    noise: bool = False
    variance: tuple[float, float] | None = None


class Sampler(ABC):
    """One sampler over one trajectory, for batches with the shape, dtype and device of ``like``.

        state = sampler.init(x)
        for i in range(sampler.steps):
            state = sampler.step(state, i)
        samples = state.x

    ``step`` calls ``advance(model, state, inputs)``. ``inputs`` are noise and rows of precomputed tables. With a
    guidance interval, steps may have different models (``model_at``). ``advance`` never reads a tensor on the host, so
    a CUDA graph can record it. One graph serves all steps that have the same model and lack the same inputs. The caller
    must disable gradients.

    ``noise_fn(k)`` returns the noise (B, C, ...) of step k; see ``opendit.diffusion.random.keyed_noise``."""

    even_in_noise: ClassVar[bool] = False  # True for points evenly spaced in log(sigma / alpha)
    # the trajectory's method that the sampler calls, such as slope or denoise
    needs: ClassVar[str]
    trajectory: Any

    @classmethod
    def fits(cls, trajectory: type[Trajectory]) -> bool:
        """Return True if trajectories of this class have the method that the sampler needs."""
        defined = getattr(trajectory, cls.needs, None)
        return defined is not None and defined is not getattr(Trajectory, cls.needs, None)

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        self.model, self.trajectory, self.noise_fn = model, trajectory, noise_fn
        self.steps: int = trajectory.steps
        self.points: Tensor = trajectory.points(like)
        self._dtype, self._device = like.dtype, like.device

    def noise(self, i: int) -> Tensor:
        """Return the noise of step i, (B, C, ...). The sampler must have a ``noise_fn``."""
        assert self.noise_fn is not None
        return self.noise_fn(i)

    def table(self, values: Sequence[float]) -> Tensor:
        """Return ``values`` in x's dtype and on its device, so that ``table[i]`` needs no copy from the host."""
        return torch.tensor(values, dtype=torch.float64).to(self._device, self._dtype)

    def init(self, x: Tensor) -> NamedTuple:
        """Return the state at the noisiest point, where x is (B, C, ...)."""
        return State(x)

    def model_at(self, i: int) -> Model:
        return for_step(self.model, self.trajectory.levels[i])

    @abstractmethod
    def inputs(self, i: int) -> NamedTuple:
        """Return the inputs of step i = 0, 1, ... besides the state: tensors, or None for inputs that the step lacks.
        If samples are at different steps, ``advance`` also accepts (B, 1, ..., 1) instead of 0-dim tensors."""

    @abstractmethod
    def advance(self, model: Model, state: Any, inputs: Any) -> NamedTuple:
        """Return the state after the step. Raise ValueError if the model's output doesn't fit x."""

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        """Return step i as weighted sums, in float64; None if this is impossible. learned_variance: True if the model
        also predicts a variance."""
        return None

    def step(self, state: Any, i: int) -> NamedTuple:
        return self.advance(self.model_at(i), state, self.inputs(i))


# ------------------------------------------------------------------------------------------ Euler and Heun


class EulerInputs(NamedTuple):
    """Inputs of an Euler or Heun step besides x."""

    point: Tensor  # (B,)
    length: Tensor  # (): time at the step's end minus time at its start
    end: Tensor | None = None  # (B,): point at the step's end, if its slope is evaluated


class SlopeSampler(Sampler):
    """Base class of samplers for dx/dtime = slope(x, time). Subclasses choose the slope along which a step moves x."""

    needs = "slope"

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        times = trajectory.times
        self.lengths = [after - time for time, after in zip(times[:-1], times[1:], strict=True)]
        self._lengths = self.table(self.lengths)

    def inputs(self, i: int) -> EulerInputs:
        return EulerInputs(self.points[i], self._lengths[i])

    def advance(self, model: Model, state: State, inputs: EulerInputs) -> State:
        slope = self.trajectory.slope(model, state.x, inputs.point)
        return State(state.x + inputs.length * self.mean_slope(model, state, inputs, slope))

    @abstractmethod
    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        """Return the slope along which the step moves x, (B, C, ...). ``slope``: the slope at the step's start."""


class EulerSampler(SlopeSampler):
    """Euler's method for the probability-flow ODE: [K] eq. 1 and 3 with sigma as time, [L] eq. 1 for rectified flow. It
    is deterministic and of first order, with one evaluation per step."""

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        return slope

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        slope, length = self.trajectory.slope_weights(i), self.lengths[i]
        if slope is None:
            return None
        return StepWeights(((self.trajectory.input_scale(i),),), ((1 + length * slope.x, length * slope.output),))


class HeunSampler(SlopeSampler):
    """Heun's method, [K] Algorithm 1: move x along the mean of the slopes at the step's start and at Euler's end point.

    It is deterministic and of second order, with two evaluations per step. If the end point has no slope (EDM's sigma =
    0), the step is Euler's."""

    def inputs(self, i: int) -> EulerInputs:
        end = self.points[i + 1] if self.trajectory.has_slope(i + 1) else None
        return super().inputs(i)._replace(end=end)

    def mean_slope(self, model: Model, state: State, inputs: EulerInputs, slope: Tensor) -> Tensor:
        if inputs.end is None:
            return slope
        return (slope + self.trajectory.slope(model, state.x + inputs.length * slope, inputs.end)) / 2

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        begin, scale, length = self.trajectory.slope_weights(i), self.trajectory.input_scale(i), self.lengths[i]
        if begin is None:
            return None
        euler = 1 + length * begin.x, length * begin.output  # weights of x and the first output after Euler's step
        if not self.trajectory.has_slope(i + 1):
            return StepWeights(((scale,),), (euler,))
        end, rescale = self.trajectory.slope_weights(i + 1), self.trajectory.input_scale(i + 1)
        after = (
            1 + length / 2 * (begin.x + end.x * euler[0]),
            length / 2 * (begin.output + end.x * euler[1]),
            length / 2 * end.output,
        )
        return StepWeights(((scale,), (rescale * euler[0], rescale * euler[1])), (after,))


# ------------------------------------------------------------------------------------------ DDIM and DDPM


class DDIMInputs(NamedTuple):
    """Inputs of a DDIM step besides x."""

    t: Tensor  # (B,) int64, indices of the schedule
    keep: Tensor  # (): weight of the predicted x_0
    renoise: Tensor  # (): weight of the predicted noise
    sigma: Tensor  # (): weight of new noise
    noise: Tensor | None  # (B, C, ...); None where sigma is 0


class DDIMSampler(Sampler):
    """DDIM along a ``DDPMTrajectory``: [S] eq. 12 with the sigma of eq. 16. A learned variance is ignored.

    ``eta`` = 0 is deterministic and never calls ``noise_fn``. ``eta`` = 1 has DDPM's variance beta-tilde. Raises
    ValueError if ``eta`` is outside [0, 1], or above 0 without ``noise_fn``."""

    needs = "predict"

    def __init__(
        self, model: Model, trajectory: Any, like: Tensor, noise_fn: NoiseFn | None = None, *, eta: float = 0.0
    ):
        super().__init__(model, trajectory, like, noise_fn)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, got {eta}")
        if eta > 0 and noise_fn is None:
            raise ValueError("an eta above 0 needs noise_fn")
        self._keep, self._renoise, self._sigmas = [], [], []
        kept = trajectory.alphas_cumprod
        for ac, after in zip(kept[:-1], kept[1:], strict=True):
            sigma = eta * math.sqrt((1 - after) / (1 - ac) * (1 - ac / after))
            self._keep.append(math.sqrt(after))
            # rounding could make this negative near alphas_cumprod = 0
            self._renoise.append(math.sqrt(max(1 - after - sigma**2, 0.0)))
            self._sigmas.append(sigma)
        self._tables = [self.table(values) for values in (self._keep, self._renoise, self._sigmas)]

    def inputs(self, i: int) -> DDIMInputs:
        keep, renoise, sigma = (table[i] for table in self._tables)
        noise = self.noise(i) if self._sigmas[i] > 0 else None
        return DDIMInputs(self.points[i], keep, renoise, sigma, noise)

    def advance(self, model: Model, state: State, inputs: DDIMInputs) -> State:
        denoised, eps, _ = self.trajectory.predict(model, state.x, inputs.t)
        x = inputs.keep * denoised + inputs.renoise * eps
        return State(x if inputs.noise is None else x + inputs.sigma * inputs.noise)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        denoised, keep, renoise = self.trajectory.denoise_weights(i), self._keep[i], self._renoise[i]
        after = keep * denoised.x, keep * denoised.output + renoise  # the model's output is eps
        noise = self._sigmas[i] > 0
        return StepWeights(((1.0,),), ((*after, self._sigmas[i]) if noise else after,), noise)


class DDPMInputs(NamedTuple):
    """Inputs of a DDPM step besides x."""

    t: Tensor  # (B,) int64, indices of the schedule
    noise: Tensor | None  # (B, C, ...); None in the last step


class DDPMSampler(Sampler):
    """Ancestral sampling along a ``DDPMTrajectory``: [H] Algorithm 2, with the mean from eq. 7. It needs ``noise_fn``.
    The variance is learned ([N] eq. 15), or else the posterior's beta-tilde."""

    needs = "predict"

    def __init__(self, model: Model, trajectory: Any, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        if noise_fn is None:
            raise ValueError("ancestral sampling needs noise_fn")

    def inputs(self, i: int) -> DDPMInputs:
        return DDPMInputs(self.points[i], self.noise(i) if i + 1 < self.steps else None)

    def advance(self, model: Model, state: State, inputs: DDPMInputs) -> State:
        schedule = self.trajectory.schedule
        denoised, _, v = self.trajectory.predict(model, state.x, inputs.t)
        x, log_variance = schedule.posterior(denoised, state.x, inputs.t)
        if v is not None:
            log_variance = schedule.learned_log_variance(v, inputs.t)
        if inputs.noise is not None:
            x = x + torch.exp(0.5 * log_variance) * inputs.noise
        return State(x)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        schedule, denoised, t = self.trajectory.schedule, self.trajectory.denoise_weights(i), self.steps - 1 - i
        of_x0, of_x = float(schedule.posterior_mean_x0[t]), float(schedule.posterior_mean_xt[t])
        mean = of_x0 * denoised.x + of_x, of_x0 * denoised.output
        if t == 0:
            return StepWeights(((1.0,),), (mean,))
        low, high = float(schedule.posterior_log_variance[t]), float(schedule.betas[t].log())
        # The noise's weight is exp(log variance / 2), so p and q are half the log variance's coefficients.
        variance = ((high + low) / 4, (high - low) / 4) if learned_variance else None
        return StepWeights(((1.0,),), ((*mean, math.exp(low / 2)),), True, variance)


# ------------------------------------------------------------------------------------------ DPM-Solver++


class DPMSolverState(NamedTuple):
    """State of DPM-Solver++ between two steps."""

    x: Tensor  # (B, C, ...) x / alpha = x_0 + level * noise
    before: Tensor  # (B, C, ...) the x_0 predicted in the previous step; zeros at first


class DPMSolverInputs(NamedTuple):
    """Inputs of a step of DPM-Solver++ besides its state."""

    point: Tensor  # (B,)
    alpha: Tensor | None  # (); None if alpha is 1 at all points
    keep: Tensor  # (): weight of x
    move: Tensor  # (): weight of the extrapolated x_0
    # (): weight of the predicted x_0's change since the previous step
    extrapolate: Tensor


class DPMSolver2M(Sampler):
    """DPM-Solver++(2M), [D] Algorithm 2: deterministic, of second order, with one evaluation per step.

    The state is x / alpha = x_0 + level * noise, with level = sigma / alpha. So the paper's e^-h is level_k+1 /
    level_k. With few steps, the schedule must be evenly spaced in log(sigma / alpha)."""

    needs = "denoise"
    even_in_noise = True

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        sigmas, self._keep, self._extrapolate = trajectory.levels, [], []
        for k, (sigma, after) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
            self._keep.append(after / sigma)
            # the first step has no previous prediction; a step to noise level 0 can't extrapolate to log sigma = -inf
            ends = k == 0 or after == 0
            self._extrapolate.append(0.0 if ends else math.log(sigma / after) / math.log(sigmas[k - 1] / sigma) / 2)
        self._alphas = None if all(alpha == 1 for alpha in trajectory.alphas) else self.table(trajectory.alphas)
        moves = [1 - keep for keep in self._keep]
        self._tables = [self.table(values) for values in (self._keep, moves, self._extrapolate)]

    def init(self, x: Tensor) -> DPMSolverState:
        return DPMSolverState(x if self._alphas is None else x / self._alphas[0], torch.zeros_like(x))

    def inputs(self, i: int) -> DPMSolverInputs:
        alpha = None if self._alphas is None else self._alphas[i]
        return DPMSolverInputs(self.points[i], alpha, *(table[i] for table in self._tables))

    def advance(self, model: Model, state: DPMSolverState, inputs: DPMSolverInputs) -> DPMSolverState:
        x = state.x if inputs.alpha is None else inputs.alpha * state.x
        denoised = self.trajectory.denoise(model, x, inputs.point)
        target = denoised + inputs.extrapolate * (denoised - state.before)
        return DPMSolverState(inputs.keep * state.x + inputs.move * target, denoised)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        denoised, alpha = self.trajectory.denoise_weights(i), self.trajectory.alphas[i]
        if denoised is None:
            return None
        scale, keep, extrapolate = self.trajectory.input_scale(i), self._keep[i], self._extrapolate[i]
        # weights of the state's x and the model's output in the predicted x_0
        predicted = denoised.x * alpha, denoised.output
        move = (1 - keep) * (1 + extrapolate)
        x = keep + move * predicted[0], -(1 - keep) * extrapolate, move * predicted[1]
        return StepWeights(((scale * alpha, 0.0),), (x, (predicted[0], 0.0, predicted[1])))


# ------------------------------------------------------------------------------------------ UniPC

# UniPC's highest noise level, because a flow has no signal at t = 1, and lambda = -ln(level) would be -inf
HIGHEST_LEVEL = 1e6


class UniPCState(NamedTuple):
    """State of UniPC between two steps."""

    x: Tensor  # (B, C, ...) the predicted x before correction (the network's input)
    before: Tensor  # (B, C, ...) the x_0 predicted in the previous step; zeros at first
    earlier: Tensor  # (B, C, ...) the x_0 predicted two steps ago; zeros at first


class UniPCInputs(NamedTuple):
    """Inputs of a UniPC step besides its state. The last four are weights in the sum for the next x."""

    point: Tensor  # (B,)
    time: Tensor  # (): time at the start of the step
    keep: Tensor  # (): weight of x
    now: Tensor  # (): weight of the x_0 predicted in this step
    before: Tensor  # (): weight of the state's ``before``
    earlier: Tensor  # (): weight of the state's ``earlier``


class UniPCSampler(Sampler):
    """Deterministic UniPC of order 2 with B(h) = e^h - 1 and predictions of x_0, where x = x_0 + time * slope.

    Step k evaluates the network once, at the predicted x_k. The result corrects x_k (UniC-2), and the corrected x_k
    predicts x_k+1 (UniP-2). The first step (no predecessor) and the last step (to lambda = inf) are of order 1. This is
    diffusers' ``UniPCMultistepScheduler`` with ``solver_type`` bh2.

    Let m_k be the x_0 predicted in step k. Then ([U] Section 3, in the form for predictions of x_0):

        predicted_k = time_k / time_k-1 corrected_k-1 - alpha_k (e^-h - 1) (m_k-1 + 1/2 D_k-2)
        corrected_k = time_k / time_k-1 corrected_k-1 - alpha_k (e^-h - 1) (m_k-1 + rho_0 D_k-2 + rho_1 (m_k - m_k-1))

    Here lambda = ln(alpha / sigma), h = lambda_k - lambda_k-1, r = (lambda_k-2 - lambda_k-1) / h, and D_k-2 = (m_k-2 -
    m_k-1) / r. So corrected_k is predicted_k plus differences of predictions, and the state needs no second x."""

    needs = "slope"

    def __init__(self, model: Model, trajectory: Trajectory, like: Tensor, noise_fn: NoiseFn | None = None):
        super().__init__(model, trajectory, like, noise_fn)
        self._weights = [self._weights_of(k) for k in range(self.steps)]
        self._times = self.table(trajectory.times)
        self._tables = [self.table(values) for values in zip(*self._weights, strict=True)]

    def _weights_of(self, k: int) -> tuple[float, float, float, float]:
        """Return the weights of x_k, m_k, m_k-1 and m_k-2 in predicted_k+1."""
        times = self.trajectory.times
        keep = times[k + 1] / times[k]
        now, before = self._predictor(k)
        if k == 0:
            return keep, now, before, 0.0
        corrections = self._corrector(k - 1)
        return keep, now + keep * corrections[0], before + keep * corrections[1], keep * corrections[2]

    def _predictor(self, k: int) -> tuple[float, float]:
        """Return the weights of m_k and m_k-1 in predicted_k+1. The remaining term is a multiple of corrected_k."""
        scale = self._scale(k)
        if self._order(k) == 1:
            return scale, 0.0
        half = scale / 2 / self._ratio(k)
        return scale - half, half

    def _corrector(self, k: int) -> tuple[float, float, float]:
        """Return the weights of m_k+1, m_k and m_k-1 in corrected_k+1 - predicted_k+1."""
        scale = self._scale(k)
        if self._order(k) == 1:
            return scale / 2, -scale / 2, 0.0  # rho_1 = 1/2
        # rho solves [1 1; r 1] rho = b, where b_m = m! phi_m+1(-h) (-h) / (e^-h - 1), with [U]'s phi.
        h, r = -self._length(k), self._ratio(k)
        growth = math.expm1(h)
        second = growth / h - 1
        third = second / h - 1 / 2
        b = second / growth, 2 * third / growth
        rho_0 = (b[0] - b[1]) / (1 - r)
        rho_1 = b[0] - rho_0
        change = (rho_0 - 1 / 2) / r  # the predictor uses 1/2 as rho_0
        return scale * rho_1, -scale * (rho_1 + change), scale * change

    def _order(self, k: int) -> int:
        return 1 if k in (0, self.steps - 1) else 2

    def _scale(self, k: int) -> float:
        """Return -alpha (e^-h - 1) for the step from k to k + 1, where e^-h is the ratio of the levels."""
        levels = self.trajectory.levels
        return self.trajectory.alphas[k + 1] * (1 - levels[k + 1] / levels[k])

    def _length(self, k: int) -> float:
        """Return h for the step from k to k + 1."""
        here, there = (min(level, HIGHEST_LEVEL) for level in self.trajectory.levels[k : k + 2])
        return math.log(here / there)

    def _ratio(self, k: int) -> float:
        return -self._length(k - 1) / self._length(k)

    def init(self, x: Tensor) -> UniPCState:
        return UniPCState(x, torch.zeros_like(x), torch.zeros_like(x))

    def inputs(self, i: int) -> UniPCInputs:
        return UniPCInputs(self.points[i], self._times[i], *(table[i] for table in self._tables))

    def advance(self, model: Model, state: UniPCState, inputs: UniPCInputs) -> UniPCState:
        denoised = state.x - inputs.time * self.trajectory.slope(model, state.x, inputs.point)
        x = inputs.keep * state.x + inputs.now * denoised
        return UniPCState(x + inputs.before * state.before + inputs.earlier * state.earlier, denoised, state.before)

    def weights(self, i: int, learned_variance: bool) -> StepWeights | None:
        slope, time = self.trajectory.slope_weights(i), self.trajectory.times[i]
        if slope is None:
            return None
        keep, now, before, earlier = self._weights[i]
        # the x_0 predicted in this step is of_x x + of_output output
        of_x, of_output = 1 - time * slope.x, -time * slope.output
        x = keep + now * of_x, before, earlier, now * of_output
        after = x, (of_x, 0.0, 0.0, of_output), (0.0, 1.0, 0.0, 0.0)
        return StepWeights(((self.trajectory.input_scale(i), 0.0, 0.0),), after)


# ------------------------------------------------------------------------------------------ sampling

SAMPLERS: dict[str, type[Sampler]] = {
    "ddim": DDIMSampler,
    "ddpm": DDPMSampler,
    "dpmpp": DPMSolver2M,
    "euler": EulerSampler,
    "heun": HeunSampler,
    "unipc": UniPCSampler,
}


@torch.no_grad()
def sample(
    name: str,
    model: Model,
    x: Tensor,
    trajectory: Trajectory,
    *,
    noise_fn: NoiseFn | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    **options: Any,
) -> Tensor:
    """Sample data with sampler ``name``, starting from x at point 0 of the trajectory, and return the final x.

    Args:
        model: ``model(x, t)`` gets x (B, C, ...), float32 at least, and the network's time (B,). It returns the
            objective's prediction, in any dtype.
        x: (B, C, ...), the result of ``Trajectory.start``. The final x has this shape, in float32 or x's float64.
        noise_fn: ``noise_fn(k)`` returns the noise of step k = 0, 1, ..., (B, C, ...).
        progress: wraps the sequence of steps, as ``tqdm.tqdm`` does.
        options: options of the sampler, such as DDIM's ``eta``.

    Raises ValueError if the model's output doesn't fit x, or the sampler rejects an option.
    """
    x = at_least_float32(x)
    sampler = SAMPLERS[name](model, trajectory, x, noise_fn, **options)
    state: Any = sampler.init(x)  # a NamedTuple with a field x
    steps = range(sampler.steps)
    for i in steps if progress is None else progress(steps):
        state = sampler.step(state, i)
    return state.x
