"""Rectified flow: straight paths from data to noise, and a network that predicts the velocity along them.

    [H] Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023
    [L] Liu, Gong, Liu, "Flow Straight and Fast", 2023
    [E] Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (SD3), 2024
    [K] Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), 2022
    [C] Stoica et al., "Contrastive Flow Matching", 2025
    [J] Li, He, "Back to Basics: Let Denoising Generative Models Denoise" (JiT), 2025

x_t = (1 - t) x_0 + t noise for t from 0 (data) to 1 (noise). The network predicts the velocity dx_t/dt = noise - x_0
([E] eq. 13). The network's time is 1000 t, the range of timestep embeddings.

The squared error of the implied x_0 has the weight 1/t^2. With eps-prediction, the weight is the signal-to-noise ratio,
which is close to 0 at high noise. So flow learns coarse features, such as a clip's subject, much sooner.

With ``prediction`` "x", the network predicts x_0. The network may then be narrower than the number of values in a patch
([J] sec. 3). The loss is the squared error of the velocity (x_t - x_0) / t, with t clamped to at least LEAST_TIME ([J]
sec. 4).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective, Prepared, above_0, one_of
from opendit.diffusion.objectives.edm import karras_sigmas
from opendit.diffusion.random import Stream, uniform
from opendit.diffusion.samplers import LinearForm, Model, Trajectory, as_rows, at_least_float32, for_each_sample

SETTINGS = DESCRIPTIONS["flow"].settings

PREDICTED = SETTINGS["prediction"].bounds["choices"]
TIME_SCALE = 1000.0  # the network's time at t = 1
LEAST_TIME = 0.05  # lower bound of t in the velocity (x_t - x_0) / t
EMPIRICAL_STEPS = 50  # default number of steps in FLUX.2's pipelines
MOST_GROWTH = 50.0  # limit of |ln(shift)| from ``shift_growth``


def uniform_times(u: Tensor) -> Tensor:
    return u


def logit_normal_times(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Map uniform u to times t with normal logit(t) ([E] eq. 19). The middle is more likely than the ends."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def mode_times(u: Tensor, scale: float = 1.29) -> Tensor:
    """Map uniform u to times by mode sampling ([E] eq. 20). The density peaks in the middle."""
    return 1 - u - scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


TIME_SAMPLING = {"uniform": uniform_times, "logit_normal": logit_normal_times, "mode": mode_times}


def shift_times(t: Tensor, shift: float | Tensor) -> Tensor:
    """Shift times towards the noise, [E] eq. 23. For m pixels instead of n, [E] uses the shift sqrt(m / n)."""
    return shift * t / (1 + (shift - 1) * t)


def share_below(times: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Invert the monotonic function ``times`` by bisection. Return u in [0, 1] with times(u) = t, in t's dtype."""
    low, high = torch.zeros_like(t), torch.ones_like(t)
    rises = times(torch.full_like(t, 0.75)) > times(torch.full_like(t, 0.25))
    for _ in range(60):
        middle = (low + high) / 2
        above = (times(middle) < t) == rises
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def empirical_shift(tokens: int, steps: int) -> float:
    """Return the shift of FLUX.2's pipelines (``compute_empirical_mu``).

    ln(shift) is linear in the number of steps. Its values at 10 and at 200 steps are linear in the number of tokens.
    Above 4300 tokens, ln(shift) is the value at 200 steps for any number of steps."""
    most = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return math.exp(most)
    slope = (most - (8.73809524e-05 * tokens + 1.89833333)) / 190
    return math.exp(slope * steps + most - 200 * slope)


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return x_t = (1 - t) x_0 + t noise, (B, ...), in float32 at least; t: (B,) in [0, 1]."""
    x0, noise = at_least_float32(x0), at_least_float32(noise)
    t = t.to(x0.dtype).view(-1, *(1,) * (x0.dim() - 1))
    return (1 - t) * x0 + t * noise


class FlowContext(NamedTuple):
    """Inputs of the loss besides x_t and the network's time. target: (B, C, ...), the output's target, float32 at
    least. weight: (B,), each sample's weight for the squared error."""

    target: Tensor
    weight: Tensor


class ContrastContext(NamedTuple):
    """``FlowContext`` with one more field. other: (B, C, ...), the velocity of another sample, which the contrastive
    loss pushes the prediction away from (paper [C])."""

    target: Tensor
    weight: Tensor
    other: Tensor


def of_neighbours(x: Tensor) -> Tensor:
    """Swap samples 0 and 1, 2 and 3, and so on, of x (B, ...); an unpaired last sample stays. If micro-batches have
    even sizes and consecutive samples, the pairs do not depend on the number of ranks."""
    return x[(torch.arange(len(x), device=x.device) ^ 1).clamp(max=len(x) - 1)]


def network_times(t: Tensor) -> Tensor:
    """Return the network's time 1000 t: float32 in [0, 1000]."""
    return (t * TIME_SCALE).to(torch.float32)


def sampling_times(steps: int, shift: float = 1.0, terminal: float | None = None, shifted_end: bool = False) -> Tensor:
    """Return ``steps`` + 1 times for sampling, evenly spaced from 1 to 0 and then shifted, float64.

    terminal: with two or more steps, stretch the times so that the last nonzero time is ``terminal`` (Qwen-Image, LTX).
    shifted_end: before the shift, space the nonzero times evenly from 1 to shift_times(1/1000) (Stable Diffusion 3)."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    if shifted_end:
        last = shift / (TIME_SCALE + shift - 1)
        t[:-1] = torch.linspace(1, last, steps, dtype=torch.float64)
    t = shift_times(t, shift)
    t[0] = 1  # exact, without the shift's rounding
    if terminal is not None and steps > 1:
        t[:-1] = 1 - (1 - t[:-1]) * ((1 - terminal) / (1 - t[-2]))
    return t


def discrete_times(steps: int, shift: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the times of diffusers' UniPC for flows, and the network's times, each (``steps`` + 1,) float64.

    Times are spaced evenly from 1 to 1/1000 and shifted. Then the first is set to 1 - 1e-6, so that lambda = ln((1 - t)
    / t) is finite, and the last to 0. All are rounded to float32. The network's times are 1000 t, rounded down to
    integers."""
    # the order of operations in numpy.linspace, for equal rounding
    t = torch.arange(steps, dtype=torch.float64) * ((1 / TIME_SCALE - 1) / steps) + 1
    t = shift_times(t, shift)
    t[0] = 1 - 1e-6
    t = torch.cat((t, t.new_zeros(1)))
    return t.float().double(), (t * TIME_SCALE).floor()


def noise_level(t: float) -> float:
    """Return the noise level sigma, the ratio of noise to signal in x_t; infinite at t = 1."""
    return t / (1 - t) if t < 1 else math.inf


class FlowTrajectory(Trajectory):
    """The trajectory of rectified flow over ``times``, (n + 1,), descending. At time 1, x is ``noise_scale`` times
    noise. A ``point`` is the network's time, (B,) float32: 1000 t, or from ``network_times`` (n + 1,). The model
    returns the velocity dx/dt, (B, C, ...), or x_0 with ``predicts_x``."""

    def __init__(
        self,
        times: Tensor,
        network_times: Tensor | None = None,
        predicts_x: bool = False,
        noise_scale: float = 1.0,
    ):
        assert network_times is None or not predicts_x, "a slope is computed with the times themselves"
        self.times = times.tolist()
        self._points = [t * TIME_SCALE for t in self.times] if network_times is None else network_times.tolist()
        self.levels = [noise_scale * noise_level(t) for t in self.times]
        self.alphas = [1 - t for t in self.times]
        self.predicts_x, self.noise_scale = predicts_x, noise_scale

    def start(self, noise: Tensor) -> Tensor:
        return noise if self.noise_scale == 1 else noise * self.noise_scale

    def points(self, x: Tensor) -> Tensor:
        return for_each_sample(self._points, x, torch.float32)

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        output = model(x, point).to(x.dtype)
        return (x - output) / as_rows(point / TIME_SCALE, x) if self.predicts_x else output

    def has_slope(self, k: int) -> bool:
        return not self.predicts_x or self.times[k] > 0

    def slope_weights(self, k: int) -> LinearForm:
        return LinearForm(1 / self.times[k], -1 / self.times[k]) if self.predicts_x else LinearForm(0.0, 1.0)


class SigmaTrajectory(FlowTrajectory):
    """A trajectory with x = x_0 + sigma noise and sigma as time, [K] eq. 1, for a flow network. sigmas: (n + 1,),
    descending, above 0. x equals (1 + sigma) times the flow's x_t at t = sigma / (1 + sigma)."""

    def __init__(self, sigmas: Tensor):
        super().__init__(sigmas / (1 + sigmas))
        self.times = self.levels = sigmas.tolist()
        self.alphas = [1.0] * len(self.levels)

    def start(self, noise: Tensor) -> Tensor:
        return noise * self.levels[0]

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        x_t = x * as_rows(1 - point / TIME_SCALE, x)
        return x_t + as_rows(1 - point / TIME_SCALE, x) * model(x_t, point).to(x.dtype)

    def input_scale(self, k: int) -> float:
        return 1 / (1 + self.levels[k])

    def slope_weights(self, k: int) -> LinearForm:
        return LinearForm(self.input_scale(k), self.input_scale(k))


@dataclass(frozen=True)
class FlowObjective(Objective):
    """Rectified flow.

    Attributes:
        shift: see ``shift_times``; used in training and sampling.
        times_are: distribution of training times; ``mean`` and ``std`` are parameters of logit_normal.
        prediction: the network's output: "v" for the velocity, "x" for x_0.
        noise_scale: s in x_t = (1 - t) x_0 + t s noise.
        min_snr: gamma of [H]. Squared errors of x_0 get the weight min(SNR, gamma) instead of 1 / t^2.
        contrast: weight of the term in [C] eq. 6, which increases the distance to another sample's velocity.
        shift_tokens: samples of m tokens get shift * sqrt(m / shift_tokens) ([E] eq. 23), so clips get more noise than
            pictures. None: one shift for all samples.

    The other fields have no flags. They describe public models.

        shift_growth: samples of m tokens get shift * exp(shift_growth * (m - shift_tokens)) instead, as in FLUX.
        shift_terminal, shifted_end: arguments of ``sampling_times``.
        discrete_times: True to sample at the times of the function ``discrete_times``.
        least, most: bounds of the training times, for a network that is used only between them; None: 0 and 1.
        karras: True to sample at [K]'s noise levels from 80 to 0.002, without a step to 0; see ``SigmaTrajectory``.
        empirical_tokens: number of tokens for ``empirical_shift``, set by ``for_tokens`` and at first 0. None: use
            ``shift`` instead.
    """

    name: ClassVar[str] = "flow"
    preview_sampler: ClassVar[str] = "euler"
    learn_sigma: ClassVar[bool] = False

    shift: float = SETTINGS["shift"].default
    times_are: str = SETTINGS["times_are"].default
    shift_tokens: int | None = SETTINGS["shift_tokens"].default
    mean: float = SETTINGS["mean"].default
    std: float = SETTINGS["std"].default
    prediction: str = SETTINGS["prediction"].default
    noise_scale: float = SETTINGS["noise_scale"].default
    min_snr: float | None = SETTINGS["min_snr"].default
    contrast: float = SETTINGS["contrast"].default
    shift_growth: float | None = None
    shift_terminal: float | None = None
    shifted_end: bool = False
    discrete_times: bool = False
    least: float | None = None
    most: float | None = None
    empirical_tokens: int | None = None
    karras: bool = False

    def __post_init__(self) -> None:
        one_of("--flow_times", self.times_are, tuple(TIME_SAMPLING))
        one_of("--flow_prediction", self.prediction, PREDICTED)
        above_0("--flow_std", self.std)
        above_0("--flow_noise_scale", self.noise_scale)
        if self.min_snr is not None:
            above_0("--flow_min_snr", self.min_snr)
        if not 0 <= self.contrast < 1:
            raise ValueError(f"--flow_contrast {self.contrast}: out of range; give a number from 0 to below 1")
        if (self.mean, self.std) != (0, 1) and self.times_are != "logit_normal":
            raise ValueError(
                f"--flow_mean, --flow_std: of times that are not {self.times_are}; give --flow_times logit_normal"
            )
        if self.discrete_times and self.prediction != "v":
            raise ValueError("discrete_times: of networks that predict velocities; leave one of them out")
        above_0("--flow_shift", self.shift)
        if self.shift_tokens is not None:
            above_0("--flow_shift_tokens", self.shift_tokens)
        elif self.shift_growth is not None:
            raise ValueError("shift_growth: counts from shift_tokens, which is not given")
        if self.shift_terminal is not None and not 0 < self.shift_terminal < 1:
            raise ValueError(f"shift_terminal {self.shift_terminal}: out of range; give a number between 0 and 1")
        if self.shift_terminal is not None and self.discrete_times:
            raise ValueError("shift_terminal: discrete_times end at 1/1000; leave one of them out")

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        if self.shift_tokens is None and self.empirical_tokens is None:
            return super().times(seed, step, index)
        if tokens is None:
            raise ValueError("--flow_shift_tokens: the samples' numbers of tokens are not known; give them")
        u = uniform(seed, step, index, Stream.TIMESTEP)
        shifts = torch.tensor([self._shift_of(m) for m in tokens], dtype=torch.float64)
        return self._times(u, shifts.to(u.device))

    def for_tokens(self, tokens: int) -> "Objective":
        if self.empirical_tokens is not None:
            return replace(self, empirical_tokens=tokens)
        if self.shift_tokens is None:
            return self
        return replace(self, shift=self._shift_of(tokens), shift_tokens=None, shift_growth=None)

    def _shift_of(self, tokens: int) -> float:
        if self.empirical_tokens is not None:
            return empirical_shift(tokens, EMPIRICAL_STEPS)
        assert self.shift_tokens is not None  # every caller checks this
        if self.shift_growth is None:
            return self.shift * math.sqrt(tokens / self.shift_tokens)
        exponent = self.shift_growth * (tokens - self.shift_tokens)
        if abs(exponent) > MOST_GROWTH:
            raise ValueError(
                f"shift_growth {self.shift_growth:g}: {tokens} tokens would be shifted by e^{exponent:.3g}"
            )
        return self.shift * math.exp(exponent)

    def times_at(self, u: Tensor) -> Tensor:
        return self._times(u, self._shift_for(EMPIRICAL_STEPS))

    def _shift_for(self, steps: int) -> float:
        self._check_resolved()
        return empirical_shift(self.empirical_tokens, steps) if self.empirical_tokens else self.shift

    def _times(self, u: Tensor, shift: float | Tensor) -> Tensor:
        """Map u in (0, 1) to shifted times between ``least`` and ``most``."""
        made = TIME_SAMPLING[self.times_are]
        if self.times_are == "logit_normal":
            made = partial(logit_normal_times, mean=self.mean, std=self.std)
        if self.least is None and self.most is None:
            return shift_times(made(u), shift)
        shift = torch.as_tensor(shift, dtype=torch.float64, device=u.device)
        low, high = (
            share_below(lambda u: shift_times(made(u), shift), torch.full_like(u, end, dtype=torch.float64) * shift**0)
            for end in (self.least or 0.0, 1.0 if self.most is None else self.most)
        )
        return shift_times(made(low + u * (high - low)), shift)

    @property
    def share(self) -> float:
        """Fraction of the unbounded training times that lie between ``least`` and ``most``."""
        whole, ends = replace(self, least=None, most=None), (self.least or 0.0, 1.0 if self.most is None else self.most)
        low, high = share_below(whole.times_at, torch.tensor(ends, dtype=torch.float64)).tolist()
        return abs(high - low)

    def _check_resolved(self) -> None:
        if self.shift_tokens is not None or self.empirical_tokens == 0:
            raise ValueError("--flow_shift_tokens: the number of tokens is not known; ask for_tokens first")

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Return x_t, the network's time 1000 t in float32, and the loss's target (velocity or x_0) and weight."""
        if x0.shape != noise.shape or t.shape != x0.shape[:1]:
            raise ValueError(f"x0 {tuple(x0.shape)}, noise {tuple(noise.shape)} and t {tuple(t.shape)} don't fit")
        x0, noise = at_least_float32(x0), at_least_float32(noise)
        noise = noise if self.noise_scale == 1 else noise * self.noise_scale
        x_t, velocity, weight = interpolate(x0, noise, t), noise - x0, self._weights(t.to(x0.dtype))
        context = FlowContext(velocity if self.prediction == "v" else x0, weight)
        if self.contrast:
            other = of_neighbours(velocity)
            context = ContrastContext(*context, other if self.prediction == "v" else x_t - as_rows(t, x_t) * other)
        return Prepared(x_t, network_times(t), context)

    def _weights(self, t: Tensor) -> Tensor:
        if self.min_snr is None:
            return t.clamp_min(LEAST_TIME) ** -2 if self.prediction == "x" else torch.ones_like(t)
        snr = ((1 - t) / (self.noise_scale * t)) ** 2
        of_x = snr.clamp(max=self.min_snr)
        # ``of_x`` is for x_0's squared error, which is t^2 times the velocity's.
        return of_x if self.prediction == "x" else t**2 * of_x

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """Return each sample's weighted mean squared error of ``output`` (B, C, ...). With ``contrast``, the mean
        squared error against ``other``, times ``contrast``, is first subtracted."""
        target, weight, *others = prepared.context
        if output.shape != target.shape:
            shapes = f"{tuple(target.shape)}, the model returned {tuple(output.shape)}"
            raise ValueError(f"a velocity has the shape of x0 {shapes}")
        output = at_least_float32(output)
        error = (output - target).square().flatten(1).mean(1)
        for other in others:
            error = error - self.contrast * (output - other).square().flatten(1).mean(1)
        return error if self.prediction == "v" and self.min_snr is None else weight * error

    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        shift = self._shift_for(steps)
        if self.karras:
            return SigmaTrajectory(karras_sigmas(steps + 1)[:-1])
        if self.discrete_times:
            return FlowTrajectory(*discrete_times(steps, shift))
        times = sampling_times(steps, shift, self.shift_terminal, self.shifted_end)
        return FlowTrajectory(times, None, self.prediction == "x", self.noise_scale)

    def noise_level(self, timestep: Tensor) -> Tensor:
        t = timestep / TIME_SCALE
        return self.noise_scale * t / (1 - t)  # infinite at 1, where no signal is left

    @property
    def predicts(self) -> dict[str, Any]:
        own = {"flow_prediction": self.prediction} if self.prediction != "v" else {}
        return super().predicts | own | ({"flow_noise_scale": self.noise_scale} if self.noise_scale != 1 else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the settings that have an effect."""
        defaults = {"mean": 0.0, "std": 1.0, "prediction": "v", "noise_scale": 1.0, "contrast": 0.0}
        kept = {name: value for name, value in super().to_dict().items() if value is not None and value is not False}
        return {name: value for name, value in kept.items() if value != defaults.get(name)}


OBJECTIVE = FlowObjective


class PublishedSchedule(NamedTuple):
    """The objective and the sampler of a public model's pipeline. If the shift depends on the number of tokens, call
    ``objective.for_tokens``."""

    objective: FlowObjective
    sampler: str


# Settings with only one supported value: the default in diffusers 0.42.1.
ALWAYS = {"num_train_timesteps": 1000}
CURVES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
EULER_ONLY = {**ALWAYS, **CURVES, "invert_sigmas": False, "stochastic_sampling": False}
UNIPC_ONLY: dict[str, Any] = {
    **ALWAYS,
    **CURVES,
    "solver_order": 2,
    "solver_type": "bh2",
    "solver_p": None,
    "predict_x0": True,
    "thresholding": False,
    "lower_order_final": True,
    "disable_corrector": [],
    "final_sigmas_type": "zero",
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}
EULER_READ = set(
    (
        "shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len shift_terminal "
        "time_shift_type"
    ).split()
)
UNIPC_READ = set("prediction_type use_flow_sigmas flow_shift".split())
# settings without effect for flows
UNIPC_UNUSED = set(
    (
        "beta_start beta_end beta_schedule trained_betas rescale_betas_zero_snr timestep_spacing steps_offset "
        "sigma_min sigma_max dynamic_thresholding_ratio sample_max_value time_shift_type"
    ).split()
)

# Settings without effect in pipelines that set Karras' noise levels themselves.
KARRAS_UNUSED = set("use_karras_sigmas sigma_min sigma_max sigma_data final_sigmas_type".split())


def published_schedule(config: Mapping[str, Any], shifted_end: bool = False, karras: bool = False) -> PublishedSchedule:
    """Convert diffusers' ``scheduler_config.json`` of a public model. shifted_end, karras: see ``Family``.

    FlowMatchEulerDiscreteScheduler (FLUX, Qwen-Image, Z-Image) gets its times from the pipeline, evenly spaced from 1
    to 1 / steps. UniPCMultistepScheduler (Wan) must have ``use_flow_sigmas`` on. Raises ValueError for a setting that
    is not supported. Unknown settings of newer versions are accepted if they are off."""
    name = config.get("_class_name")
    if name not in READERS:
        raise ValueError(f"_class_name {name!r}: not supported; give {' or '.join(READERS)}")
    if karras:
        if config.get("use_karras_sigmas") is not True:
            raise ValueError(f"use_karras_sigmas {config.get('use_karras_sigmas')!r}: not supported; give true")
        config = {key: value for key, value in config.items() if key not in KARRAS_UNUSED}
    found = READERS[name](config)
    objective = found.objective
    if karras:
        if objective != FlowObjective():
            raise ValueError(f"_class_name {name!r}: for this pipeline only a shift of 1 is supported")
        return found._replace(objective=replace(objective, karras=True))
    if not shifted_end:
        return found
    if objective.discrete_times or objective.shift_tokens is not None or objective.shift_terminal is not None:
        raise ValueError(f"_class_name {name!r}: for this pipeline only a fixed shift is supported")
    return found._replace(objective=replace(objective, shifted_end=True))


def _euler(config: Mapping[str, Any]) -> PublishedSchedule:
    _check(config, EULER_ONLY, EULER_READ)
    terminal = _number(config, "shift_terminal", 0.0) if config.get("shift_terminal") is not None else 0.0
    if not 0 <= terminal < 1:
        raise ValueError(f"shift_terminal {terminal:g}: out of range; give a number from 0 to 1")
    common: dict[str, Any] = {"shift_terminal": terminal or None}
    if not config.get("use_dynamic_shifting", False):
        return PublishedSchedule(FlowObjective(_shift(config, "shift"), **common), "euler")
    if (law := config.get("time_shift_type", "exponential")) != "exponential":
        raise ValueError(f"time_shift_type {law!r}: not supported; give 'exponential'")
    # As in the pipelines' calculate_shift, the shift is e^mu, and mu is linear in the number of tokens.
    least, most = (_number(config, key, mu) for key, mu in (("base_shift", 0.5), ("max_shift", 1.15)))
    for key, mu in (("base_shift", least), ("max_shift", most)):
        if abs(mu) > 10:
            raise ValueError(f"{key} {mu:g}: out of range; give a number from -10 to 10")
    few, many = (_number(config, key, n) for key, n in (("base_image_seq_len", 256), ("max_image_seq_len", 4096)))
    if not 1 <= few < many or few != int(few):
        raise ValueError(f"base_image_seq_len {few:g}: out of range; give a whole number below max_image_seq_len")
    growth = (most - least) / (many - few)
    dynamic = FlowObjective(math.exp(least), shift_tokens=int(few), shift_growth=growth, **common)
    return PublishedSchedule(dynamic, "euler")


def _unipc(config: Mapping[str, Any]) -> PublishedSchedule:
    _check(config, UNIPC_ONLY, UNIPC_READ | UNIPC_UNUSED)
    for key, value, default in (("prediction_type", "flow_prediction", "epsilon"), ("use_flow_sigmas", True, False)):
        if (found := config.get(key, default)) != value:
            raise ValueError(f"{key} {found!r}: not supported; give {value!r}")
    return PublishedSchedule(FlowObjective(_shift(config, "flow_shift"), discrete_times=True), "unipc")


READERS: dict[str, Callable[[Mapping[str, Any]], PublishedSchedule]] = {
    "FlowMatchEulerDiscreteScheduler": _euler,
    "UniPCMultistepScheduler": _unipc,
}


def _check(config: Mapping[str, Any], only: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise ValueError if a setting differs from its value in ``only``, or if an unknown setting is on."""
    for key, value in config.items():
        if key in only:
            if value != only[key] and (value or only[key]):  # null, false and empty all mean off
                raise ValueError(f"{key} {value!r}: not supported; give {only[key]!r}")
        elif key not in read and not key.startswith("_") and value:
            raise ValueError(f"{key} {value!r}: not known to this version")


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} {value!r}: not a number")
    return float(value)


def _shift(config: Mapping[str, Any], key: str) -> float:
    value = _number(config, key, 1.0)
    if value <= 0:
        raise ValueError(f"{key} {value:g}: out of range; give a number above 0")
    return value
