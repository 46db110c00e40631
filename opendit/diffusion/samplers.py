"""Samplers for DDPM schedules: from noise to data, each one pure function.

    [H] Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020
    [S] Song, Meng, Ermon, "Denoising Diffusion Implicit Models", 2021
    [G] Ho, Salimans, "Classifier-Free Diffusion Guidance", 2022
    [I] Kynkaanniemi et al., "Applying Guidance in a Limited Interval Improves Sample and Distribution Quality", 2024

What they share:

- ``model(x, t)`` gets x (B, C, ...) float32 and t (B,) int64, the timesteps the network was trained on, and returns
  (B, C, ...) eps, or (B, 2C, ...) eps and v, in any dtype. ``eps_model`` makes one of a model that predicts velocity.
- ``x``: (B, C, ...) standard normal, see ``initial_noise``. The result has its shape, in float32 (float64 if x is).
- ``noise_fn(k)`` gives the noise of step k = 0, 1, ... (0 is the first one taken), (B, C, ...), see ``keyed_noise``.
- ``clip_denoised`` clips each prediction of x_0 to [-1, 1]: for pixels, not for latents.
- ``progress`` wraps the sequence of steps, as ``tqdm.tqdm`` does.
- ``callback`` gets, at each step, a dict: ``step`` k, ``timestep`` t of the network, the state ``x`` there, and
  ``denoised``, the x_0 predicted from it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.diffusion.ddpm import DDPM, at_least_float32, split_output
from opendit.diffusion.random import Stream, normal
from opendit.diffusion.solvers import for_step, multistep

Model = Callable[[Tensor, Tensor], Tensor]
NoiseFn = Callable[[int], Tensor]


@torch.no_grad()
def sample_ddpm(
    model: Model,
    x: Tensor,
    schedule: DDPM,
    *,
    noise_fn: NoiseFn,
    clip_denoised: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    callback: Callable[[dict], None] | None = None,
) -> Tensor:
    """Ancestral sampling: [H] Algorithm 2, its mean in the form of eq. 7, over all steps of ``schedule``.

    The variance is the model's if it has one (Nichol & Dhariwal 2021, eq. 15), else that of the posterior, beta-tilde.
    See the top of the file for the arguments. Raises ValueError if the model's output doesn't fit x.
    """
    x, levels = at_least_float32(x), schedule.noise_levels
    for k, i in _steps(schedule, progress):
        t = torch.full((len(x),), i, device=x.device)
        denoised, _, v = _denoise(for_step(model, levels[i]), x, schedule, t, clip_denoised)
        _report(callback, schedule, k, i, x, denoised)
        x, log_variance = schedule.posterior(denoised, x, t)
        if v is not None:
            log_variance = schedule.learned_log_variance(v, t)
        if i > 0:
            x = x + torch.exp(0.5 * log_variance) * noise_fn(k)
    return x


@torch.no_grad()
def sample_ddim(
    model: Model,
    x: Tensor,
    schedule: DDPM,
    *,
    eta: float = 0.0,
    noise_fn: NoiseFn | None = None,
    clip_denoised: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    callback: Callable[[dict], None] | None = None,
) -> Tensor:
    """DDIM: [S] eq. 12 with the sigma of eq. 16, over all steps of ``schedule``. A model's own variance is not used.

    ``eta`` = 0 is deterministic and never calls ``noise_fn``; 1 has the variance beta-tilde of DDPM.
    See the top of the file for the arguments. Raises ValueError for an ``eta`` outside [0, 1], for one above 0
    without ``noise_fn``, and if the model's output doesn't fit x.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must be between 0 and 1, got {eta}")
    if eta > 0 and noise_fn is None:
        raise ValueError("an eta above 0 needs noise_fn")
    x, levels = at_least_float32(x), schedule.noise_levels
    alphas_cumprod = schedule.alphas_cumprod.tolist()
    for k, i in _steps(schedule, progress):
        t = torch.full((len(x),), i, device=x.device)
        denoised, eps, _ = _denoise(for_step(model, levels[i]), x, schedule, t, clip_denoised)
        _report(callback, schedule, k, i, x, denoised)
        ac, previous = alphas_cumprod[i], alphas_cumprod[i - 1] if i > 0 else 1.0
        sigma = eta * math.sqrt((1 - previous) / (1 - ac) * (1 - ac / previous))
        # max: where alphas_cumprod is next to 0, rounding could leave a negative number under the root.
        x = math.sqrt(previous) * denoised + math.sqrt(max(1 - previous - sigma**2, 0.0)) * eps
        if sigma > 0:
            x = x + sigma * noise_fn(k)
    return x


@torch.no_grad()
def sample_dpmpp(
    model: Model,
    x: Tensor,
    schedule: DDPM,
    *,
    noise_fn: NoiseFn | None = None,
    clip_denoised: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    callback: Callable[[dict], None] | None = None,
) -> Tensor:
    """DPM-Solver++(2M) over all steps of ``schedule``, then to zero noise; see ``opendit.diffusion.solvers.multistep``.

    Deterministic: ``noise_fn`` is never called. A model's own variance is not used. Few steps want a schedule that is
    ``respaced_by_noise``: on a plain ``respaced`` one of 20 they end up further off than DDIM's.
    See the top of the file for the arguments. Raises ValueError if the model's output doesn't fit x.
    """
    alphas = schedule.alphas_cumprod.sqrt().flip(0).tolist()
    sigmas = [*reversed(schedule.noise_levels), 0.0]

    def denoised_at(scaled: Tensor, k: int) -> Tensor:
        i = schedule.num_steps - 1 - k
        x = alphas[k] * scaled  # the solver's x is x_t / alpha
        t = torch.full((len(x),), i, device=x.device)
        denoised, _, _ = _denoise(for_step(model, sigmas[k]), x, schedule, t, clip_denoised)
        _report(callback, schedule, k, i, x, denoised)
        return denoised

    return multistep(denoised_at, at_least_float32(x) / alphas[0], sigmas, progress=progress)


SAMPLERS = {"ddpm": sample_ddpm, "ddim": sample_ddim, "dpmpp": sample_dpmpp}


def initial_noise(seed: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What sampling starts from: (B, *shape) float32 standard normal on ``index``'s device.

    ``index``: (B,) int64, which samples of the whole job these are. A sample's noise depends on ``seed`` and its own
    index only, so a batch can be split in any way.
    """
    return normal(seed, 0, index, Stream.SAMPLE_INIT, shape)


def keyed_noise(seed: int, index: Tensor, shape: tuple[int, ...]) -> NoiseFn:
    """A ``noise_fn`` with the same properties: step k's noise of a sample depends on ``seed``, k and its index only."""
    return lambda k: normal(seed, k, index, Stream.SAMPLE_STEP, shape)


def cfg_model(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    y: Tensor,
    null_y: Tensor,
    scale: float,
    guided_channels: int | None = None,
) -> Model:
    """Classifier-free guidance, [G] eq. 6 in the form uncond + scale * (cond - uncond), as a model of (x, t).

    ``model(x, t, y)`` is called once a step, on the conditional batch and then the unconditional one in one batch of
    2B; with ``scale`` 1.0, which is the conditional model itself, on B alone.
    ``y``: (B, ...) any condition, a tensor or an object with ``cat``, ``expand_as``, ``len`` and ``shape``;
    ``null_y``: what stands for "no condition", of y's shape or expandable to it.
    ``guided_channels``: the first so many channels of eps are guided, default all. Meta's DiT samples with 3 of its
    4. Other channels, and v, are the conditional ones. The result is float32 at least.
    Raises ValueError if null_y doesn't expand to y, or, once called, if y and x differ in batch size, if the output
    doesn't fit x or if guided_channels is not between 1 and C.
    """
    if scale == 1.0:
        return lambda x, t: at_least_float32(model(x, t, y))
    try:
        y_both = getattr(y, "cat", torch.cat)((y, null_y.expand_as(y)))
    except RuntimeError as e:
        raise ValueError(f"null_y {tuple(null_y.shape)} does not expand to y {tuple(y.shape)}") from e

    def guided(x: Tensor, t: Tensor) -> Tensor:
        channels = x.shape[1] if guided_channels is None else guided_channels
        if not 1 <= channels <= x.shape[1]:
            raise ValueError(f"guided_channels must be between 1 and {x.shape[1]}, got {channels}")
        if len(y) != len(x):
            raise ValueError(f"{len(y)} conditions for {len(x)} samples")
        cond, uncond = at_least_float32(model(torch.cat((x, x)), torch.cat((t, t)), y_both)).chunk(2)
        split_output(cond, x)  # a wrong shape is reported as for any model
        uncond = uncond[:, :channels]
        return torch.cat((uncond + scale * (cond[:, :channels] - uncond), cond[:, channels:]), dim=1)

    return guided


# People write levels with three digits: 157 for the 157.4 that the noisiest timestep of DDPM has. Levels that differ by
# less than this are one; of 1,000 timesteps or steps, neighbours differ by 0.5 % at least.
SAME_LEVEL = 0.003


@dataclass(frozen=True)
class GuidedWithin:
    """Guidance in a limited interval of noise levels, see :func:`guided_within`."""

    low: float
    high: float
    noise_level: Callable[[Tensor], Tensor]
    guided: Model
    conditional: Model

    def at_level(self, level: float) -> Model:
        """The model for a step that starts at noise level sigma ``level``, all of its evaluations."""
        inside = self.low * (1 - SAME_LEVEL) <= level <= self.high * (1 + SAME_LEVEL)
        return self.guided if inside else self.conditional

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at_level(float(self.noise_level(t[:1])))(x, t)


def guided_within(
    interval: tuple[float, float], noise_level: Callable[[Tensor], Tensor], guided: Model, conditional: Model
) -> GuidedWithin:
    """Guidance in a limited interval of noise levels, [I], as a model of (x, t).

    ``guided`` is called where low <= sigma <= high for ``interval`` = (low, high), and ``conditional`` elsewhere, which
    saves the second half of the batch there. ([I] leaves low itself out; here 0 means all levels below high, the end of
    the trajectory included. A level that agrees with a bound to 0.3 % is the bound.)

    Samplers decide once a step, by the level that it starts from, as [I]'s code does: Heun's second evaluation, at the
    lower level where the step ends, is guided if the first one is. Called by itself, it decides by ``noise_level``: the
    standard deviation of the noise over the scale of the signal, (B,), for the t that the network gets;
    opendit.diffusion.objectives has each objective's. A batch has one noise level, as in every sampler.
    Raises ValueError unless 0 <= low < high.
    """
    low, high = interval
    if not 0 <= low < high:
        raise ValueError(f"a guidance interval is 0 <= LOW < HIGH, got {low:g} {high:g}")
    return GuidedWithin(low, high, noise_level, guided, conditional)


@dataclass(frozen=True)
class EpsModel:
    """See :func:`eps_model`."""

    model: Model
    schedule: DDPM

    def at_level(self, level: float) -> "EpsModel":
        return EpsModel(for_step(self.model, level), self.schedule)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        velocity, v = split_output(at_least_float32(self.model(x, t)), x)
        eps = self.schedule.eps_of_velocity(x, t, velocity)
        return eps if v is None else torch.cat((eps, v), dim=1)


def eps_model(model: Model, schedule: DDPM) -> EpsModel:
    """A model that predicts velocity (and v) as one that predicts eps (and v), float32 at least.

    ``schedule``: the unshortened one, whose indices the network's timesteps are.
    """
    return EpsModel(model, schedule)


def _steps(schedule: DDPM, progress) -> Iterable[tuple[int, int]]:
    """(0, n - 1), (1, n - 2), ..., (n - 1, 0): the number of a step and its index in the schedule."""
    steps = range(schedule.num_steps)
    for k in steps if progress is None else progress(steps):
        yield k, schedule.num_steps - 1 - k


def _denoise(
    model: Model, x: Tensor, schedule: DDPM, t: Tensor, clip_denoised: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The model's x_0, eps and v at (x, t); after clipping, the eps that agrees with the clipped x_0."""
    eps, v = split_output(model(x, schedule.model_timesteps(t)).to(x.dtype), x)
    denoised = schedule.predict_x0(x, t, eps)
    if clip_denoised:
        denoised = denoised.clamp(-1, 1)
        eps = schedule.predict_eps(x, t, denoised)
    return denoised, eps, v


def _report(callback, schedule: DDPM, k: int, i: int, x: Tensor, denoised: Tensor) -> None:
    if callback is not None:
        callback({"step": k, "timestep": int(schedule.timestep_map[i]), "x": x, "denoised": denoised})
