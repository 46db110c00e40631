"""MeanFlow: a network predicts the mean velocity over a time interval, for sampling in one or two steps.

    [M] Geng et al., "Mean Flows for One-step Generative Modeling", arXiv 2505.13447
    [I] Geng et al., "Improved Mean Flows", arXiv 2512.02012

x_t = (1 - t) x_0 + t noise as in ``flow``, and the velocity is v = noise - x_0. The network predicts u(x_t, r, t), the
mean velocity from r to t on the path through x_t: x_r = x_t - (t - r) u. The mean velocity satisfies ([M] eq. 6)

    u = v - (t - r) du/dt, with du/dt along the path = v . grad_x u + the partial derivative by t.

The right side, without a gradient, is the training target of u. In du/dt, v is replaced by the network's u(x_t, t, t),
because noise - x_0 is a noisy estimate of the velocity at x_t ([I] sec. 4.1). At r = t, the loss equals ``flow``'s.

Guidance is built into the target ([M] eq. 19): v is replaced by w v + (1 - w) u(x_t, t, t), with an unconditional u. So
sampling with guidance evaluates the network once per step instead of twice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective, Prepared, above_0
from opendit.diffusion.objectives.flow import FlowTrajectory, interpolate, logit_normal_times, sampling_times
from opendit.diffusion.random import Stream, uniform
from opendit.diffusion.samplers import LinearForm, Model, Trajectory, at_least_float32

SETTINGS = DESCRIPTIONS["meanflow"].settings
SMALLEST = 1e-3  # added to the squared error before it divides a sample's gradient ([M] sec. 4.3)


class Network(Protocol):
    """The network for ``MeanFlowObjective.complete``, without gradients. x: some of the micro-batch's samples. rows:
    these samples' indices in the micro-batch."""

    dropped: Tensor  # (B,) bool: True for samples with the null condition

    def __call__(self, x: Tensor, time: Tensor, rows: Tensor) -> Tensor: ...

    def unconditional(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the output with the null condition for all samples."""
        ...

    def derivative(self, x: Tensor, time: Tensor, dx: Tensor, dtime: Tensor, rows: Tensor) -> Tensor:
        """Return the directional derivative of the output along (dx, dtime)."""
        ...


class MeanFlowContext(NamedTuple):
    """Inputs of the loss besides x_t and the network's time. interval: (B,), t - r. target: (B, C, ...), noise - x_0
    until :meth:`MeanFlowObjective.complete` replaces it."""

    target: Tensor
    interval: Tensor


def network_times(t: Tensor, interval: Tensor) -> Tensor:
    """Return the network's time inputs (t, -1 - (t - r)), (B, 2) float32. The model adds the embeddings of both.

    Only t is positive, so the model can distinguish the two. Times are not scaled by 1000 as in ``flow``, because that
    would also scale the derivatives in du/dt."""
    return torch.stack((t, -1 - interval), 1).to(torch.float32)


class MeanFlowTrajectory(FlowTrajectory):
    """The trajectory of MeanFlow. A ``point`` is t, (B,). The model gets t and the step's length, (B, 2), and returns
    the mean velocity over the step. So Euler's method is exact."""

    def __init__(self, times: Tensor):
        super().__init__(times, times)
        self._starts, self._lengths = times[:-1], times[:-1] - times[1:]

    def slope(self, model: Model, x: Tensor, point: Tensor) -> Tensor:
        starts, lengths = (table.to(point.device, point.dtype) for table in (self._starts, self._lengths))
        # samples of a batch may be at different steps
        step = (point[:, None] - starts).abs().argmin(1)
        return model(x, network_times(point, lengths[step])).to(x.dtype)

    def slope_weights(self, k: int) -> LinearForm | None:
        return None  # the fused sampling kernels support only one time per sample


@dataclass(frozen=True)
class MeanFlowObjective(Objective):
    """Improved MeanFlow. mean, std: parameters of the logits of t and r. share: fraction of samples with r < t; others
    have r = t.

    guidance: w in the module's docstring; 1 means no guidance. power: a sample's gradient is divided by its squared
    error to this power."""

    name: ClassVar[str] = "meanflow"
    preview_sampler: ClassVar[str] = "euler"
    learn_sigma: ClassVar[bool] = False
    asks_network: ClassVar[bool] = True

    mean: float = SETTINGS["mean"].default
    std: float = SETTINGS["std"].default
    share: float = SETTINGS["share"].default
    guidance: float = SETTINGS["guidance"].default
    power: float = SETTINGS["power"].default

    def __post_init__(self) -> None:
        above_0("--meanflow_std", self.std)
        above_0("--meanflow_share", self.share)
        if not math.isfinite(self.mean + self.guidance + self.power):
            raise ValueError("--meanflow_mean, --meanflow_guidance, --meanflow_power: not finite; give numbers")

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """Draw (t, r) of each sample, (B, 2), with r <= t."""
        first, second = (uniform(seed, step, index, stream) for stream in (Stream.TIMESTEP, Stream.INTERVAL))
        one, other = self._time(first), self._time((second / self.share).clamp(max=1 - 1e-7))
        other = torch.where(second < self.share, other, one)
        return torch.stack((torch.maximum(one, other), torch.minimum(one, other)), 1)

    def times_at(self, u: Tensor) -> Tensor:
        return self._time(u)[:, None].repeat(1, 2)

    def _time(self, u: Tensor) -> Tensor:
        return logit_normal_times(u, self.mean, self.std)

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Return x_t, the network's time inputs, and the velocity as target. t: (t, r) of each sample, (B, 2)."""
        if x0.shape != noise.shape or t.shape != (len(x0), 2):
            raise ValueError(f"x0 {tuple(x0.shape)}, noise {tuple(noise.shape)} and t {tuple(t.shape)} don't fit")
        velocity, (now, before) = at_least_float32(noise) - at_least_float32(x0), t.unbind(1)
        context = MeanFlowContext(velocity, (now - before).to(velocity.dtype))
        return Prepared(interpolate(x0, noise, now), network_times(now, now - before), context)

    @torch.no_grad()
    def complete(self, prepared: Prepared, network: Network) -> Prepared:
        x, times, (velocity, interval) = prepared
        now = network_times(times[:, 0], torch.zeros_like(times[:, 0]))
        target = velocity
        if self.guidance != 1:
            guided = self.guidance * velocity + (1 - self.guidance) * network.unconditional(x, now)
            target = torch.where(_like(network.dropped, x), velocity, guided)
        rows = interval.nonzero()[:, 0]
        if len(rows):
            own = x[rows], times[rows]
            dtime = own[1].new_tensor([1.0, -1.0]).expand_as(own[1])
            change = network.derivative(*own, network(own[0], now[rows], rows), dtime, rows)
            target = target.index_add(0, rows, -_like(interval[rows], change) * change)
        return prepared._replace(context=MeanFlowContext(target, interval))

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """Return each sample's squared error of ``output`` (B, C, ...), with the gradient divided by error **
        ``power``."""
        target, _ = prepared.context
        if output.shape != target.shape:
            shapes = f"{tuple(target.shape)}, the model returned {tuple(output.shape)}"
            raise ValueError(f"a mean velocity has the shape of x0 {shapes}")
        error = (at_least_float32(output) - target).square().flatten(1).mean(1)
        weighted = error / (error.detach() + SMALLEST) ** self.power
        # the value is ``error``, and the gradient is ``weighted``'s
        return error.detach() + weighted - weighted.detach()

    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        return MeanFlowTrajectory(sampling_times(steps))

    @property
    def samplers(self) -> tuple[str, ...]:
        return ("euler",)  # other samplers would combine mean velocities over different intervals

    def noise_level(self, timestep: Tensor) -> Tensor:
        t = timestep[:, 0]
        return t / (1 - t)


def _like(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.dim() - 1))


OBJECTIVE = MeanFlowObjective
