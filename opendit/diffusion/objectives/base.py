"""The interface of objectives: how a training sample is prepared, its loss, and the trajectory that samplers follow."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.guidance import GuidedWithin, cfg_model
from opendit.diffusion.random import Stream, initial_noise, keyed_noise, uniform
from opendit.diffusion.samplers import SAMPLERS, LinearForm, Model, Trajectory, sample


class Prepared(NamedTuple):
    """A micro-batch prepared for the network. Every tensor's first dimension is the batch.

    x_t: (B, C, ...), the network's input, float32 at least. timestep: the network's time, (B,), or (B, 2) for MeanFlow.
    context: further inputs of the loss, an objective's NamedTuple of tensors (B, ...)."""

    x_t: Tensor
    timestep: Tensor
    context: NamedTuple


@dataclass(frozen=True)
class Objective(ABC):
    """A training objective: what a network predicts, the loss, and the trajectory that samplers follow.

    name: name of the objective's file. preview_sampler: sampler for previews with few steps. learn_sigma: True if the
    network also predicts a variance, in C additional channels."""

    name: ClassVar[str]
    preview_sampler: ClassVar[str]
    learn_sigma: ClassVar[bool]

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """Draw the times (B,) of a training step's samples. index: (B,), the samples' indices in the global batch.
        tokens: each sample's token count, for objectives that depend on it."""
        return self.times_at(uniform(seed, step, index, Stream.TIMESTEP))

    def for_tokens(self, tokens: int) -> "Objective":
        """Return the objective for samples of ``tokens`` tokens. Most objectives return self."""
        return self

    @abstractmethod
    def times_at(self, u: Tensor) -> Tensor:
        """Map u (B,), float64 in (0, 1), monotonically to times (B,). Close values of u have similar noise levels."""

    @abstractmethod
    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Return the inputs of network and loss. x0: data (B, C, ...). t: times (B,). noise: standard normal, in x0's
        shape. Raises ValueError if the shapes don't match."""

    asks_network: ClassVar[bool] = False  # True if ``complete`` calls the network

    def complete(self, prepared: Prepared, network: Any) -> Prepared:
        """Return ``prepared`` with the final target. If ``asks_network``, the network computes the target, without
        gradients. network: see ``opendit.diffusion.objectives.meanflow.Network``."""
        return prepared

    @abstractmethod
    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """Return each sample's loss, (B,), float32 at least. Raises ValueError if ``output`` has a wrong shape."""

    @abstractmethod
    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        """Return the trajectory for ``steps`` sampling steps. even_in_noise: space the points evenly in log(sigma /
        alpha), if the objective supports this."""

    def network(self, model: Model) -> Model:
        """Return a model that converts ``model(x, t)`` to the prediction that the trajectory expects."""
        return model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """Return the output of ``network(model)`` at point k as a weighted sum of the model's input and output."""
        return LinearForm(0.0, 1.0)

    @abstractmethod
    def noise_level(self, timestep: Tensor) -> Tensor:
        """Convert the network's time (B,) to the noise level sigma (B,), the ratio of noise to signal."""

    def sample(
        self,
        model: Model,
        index: Tensor,
        shape: tuple[int, ...],
        *,
        seed: int,
        steps: int,
        sampler: str | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    ) -> Tensor:
        """Draw samples (B, *shape) of ``model(x, t)``. sampler: None for the first of ``samplers``. All noise is keyed
        by ``seed`` and ``index`` (B,)."""
        name = self.choose(sampler)
        trajectory = self.trajectory(steps, SAMPLERS[name].even_in_noise)
        x = trajectory.start(initial_noise(seed, index, shape))
        noise_fn = keyed_noise(seed, index, shape)
        return sample(name, self.network(model), x, trajectory, noise_fn=noise_fn, progress=progress)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the samplers that work with the trajectory, the default first."""
        default, trajectory = DESCRIPTIONS[self.name].sampler, type(self.for_tokens(1).trajectory(2))
        fitting = [name for name, sampler in SAMPLERS.items() if sampler.fits(trajectory)]
        return tuple(sorted(fitting, key=lambda name: name != default))

    def choose(self, sampler: str | None) -> str:
        if sampler is not None and sampler not in self.samplers:
            raise ValueError(
                f"--sampler {sampler}: not for a model of --objective {self.name}; give {' or '.join(self.samplers)}"
            )
        return sampler or self.samplers[0]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @property
    def predicts(self) -> dict[str, Any]:
        """Settings that define the meaning of the network's input and output."""
        return {"objective": self.name}


def one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{flag} {value}: not known to this version; give one of {', '.join(known)}")


def above_0(flag: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {value}: out of range; give a number above 0")


if TYPE_CHECKING:
    from opendit.models.conditioning import Condition
    from opendit.models.dit import DiT


@torch.inference_mode()
def sample_latents(
    model: "DiT",
    y: "Condition",
    null: "Condition",
    index: Tensor,
    *,
    objective: Objective,
    seed: int,
    steps: int,
    sampler: str | None = None,
    cfg_scale: float = 4.0,
    cfg_channels: int | None = None,
    cfg_interval: tuple[float, float] | None = None,
    size: tuple[int, ...] | None = None,
    forward: Callable[[Tensor, Tensor, "Condition"], Tensor] | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
) -> Tensor:
    """Draw fp32 latents: (B, C, h, w), or (B, C, t, h, w) for a clip model.

    Args:
        y: the conditions of the B samples, on the model's device. null: the null condition, a batch of one.
        index: (B,) int64, the samples' indices in the job. A sample's noise depends only on ``seed`` and its index.
        cfg_interval: range of noise levels (``Objective.noise_level``) with guidance; None: everywhere.
        size: (h, w) or (t, h, w) of the latents; by default the model's input size.
        forward: called as ``forward(x, t, y)`` instead of ``model``; for example the model's parallel wrapper.
    """
    shape = (model.config.in_channels, *(size or model.config.input_size))
    guided = cfg_model(forward or model, y, null, cfg_scale, cfg_channels, model.config.rescaled_guidance)
    if cfg_interval is not None:
        conditional = cfg_model(forward or model, y, null, 1.0)
        guided = GuidedWithin(cfg_interval, objective.noise_level, guided, conditional)
    return objective.sample(guided, index, shape, seed=seed, steps=steps, sampler=sampler, progress=progress)


def sample_in_batches(
    model: "DiT", y: "Condition", null: "Condition", index: Tensor, batch_size: int, **settings: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (index, latents) of up to ``batch_size`` samples, as :func:`sample_latents`. ``index`` may be on a CPU."""
    for first in range(0, len(index), batch_size):
        rows = slice(first, first + batch_size)
        yield index[rows], sample_latents(model, y[rows], null, index[rows].to(model.device), **settings)
