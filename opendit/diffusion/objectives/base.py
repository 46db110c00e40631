"""The interface of objectives: how a training sample is prepared, its loss, and the trajectory that samplers follow."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.random import Stream, initial_noise, keyed_noise, uniform
from opendit.diffusion.samplers import SAMPLERS, sample
from opendit.diffusion.trajectory import LinearForm, Model, Trajectory


class Prepared(NamedTuple):
    """A micro-batch prepared for the network.

    It holds only tensors whose first dimension is the sample, so that it can be split into smaller micro-batches, sent
    to another pipeline stage, and recorded in a CUDA graph.

    x_t: (B, C, ...), the network's input, float32 at least. timestep: (B,), the network's time. context: what the loss
    needs besides, the objective's own NamedTuple of tensors (B, ...).
    """

    x_t: Tensor
    timestep: Tensor
    context: NamedTuple

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [self.x_t, self.timestep, *self.context]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Prepared":
        """Apply ``function`` to every tensor; ``lambda tensor: tensor[rows]`` selects samples."""
        return Prepared(function(self.x_t), function(self.timestep), self.context._make(map(function, self.context)))


@dataclass(frozen=True)
class Objective(ABC):
    """A training objective: the prediction that a model learns, its loss, and the trajectory that samplers follow.

    Attributes:
        name: equal to its file's.
        preview_sampler: the sampler for few steps.
        learn_sigma: the network also predicts a variance, in C additional channels.
    """

    name: ClassVar[str]
    preview_sampler: ClassVar[str]
    learn_sigma: ClassVar[bool]

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """Return the times (B,) of a training step's samples.

        ``index``: (B,) positions in the global batch. tokens: of each sample, for objectives that need them
        (:meth:`for_tokens`).
        """
        return self.times_at(uniform(seed, step, index, Stream.TIMESTEP))

    def for_tokens(self, tokens: int) -> "Objective":
        """Return the objective for samples of this many tokens: itself, unless the number matters."""
        return self

    @abstractmethod
    def times_at(self, u: Tensor) -> Tensor:
        """Return the times (B,) at u (B,) float64 in (0, 1), which is uniform in training: equal intervals of u are
        equally likely.

        They are monotonic in u, so that neighbours in u have similar noise.
        """

    @abstractmethod
    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Compute the network's input, and everything ``loss`` will need.

        x0: data (B, C, ...). t: times (B,) of ``times``. noise: standard normal, of x0's shape. Raises ValueError for
        shapes that don't fit each other.
        """

    asks_network: ClassVar[bool] = False  # whether ``complete`` has something to do

    def complete(self, prepared: Prepared, network: Any) -> Prepared:
        """Return ``prepared`` with the part of the loss's target that the network itself makes, without gradients.

        network: see ``opendit.diffusion.objectives.meanflow.Network``."""
        return prepared

    @abstractmethod
    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """Return the loss of each sample, (B,) in float32 at least, from the network's output at ``prepared.x_t`` and
        ``prepared.timestep``. Raises ValueError for an output of the wrong shape."""

    @abstractmethod
    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        """Return the trajectory of sampling in ``steps`` steps. even_in_noise: space its points evenly in log(sigma /
        alpha), if the objective has a choice."""

    def network(self, model: Model) -> Model:
        """Return ``model(x, t)`` in the form that the trajectory expects."""
        return model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """Write the result of ``network(model)`` at point k of a trajectory as a weighted sum of the model's input and
        output."""
        return LinearForm(0.0, 1.0)

    @abstractmethod
    def noise_level(self, timestep: Tensor) -> Tensor:
        """Return sigma, the standard deviation of the noise over the scale of the signal, for the network's time. Both
        are (B,).

        Only in this unit is noise comparable across objectives, steps and samplers.
        """

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
        """Draw samples (B, *shape) of ``model(x, t)``, with all noise keyed by ``seed`` and ``index`` (B,).

        sampler: one of ``samplers``, None for the first. progress: see ``opendit.diffusion.samplers.sample``.
        """
        name = self.choose(sampler)
        trajectory = self.trajectory(steps, SAMPLERS[name].even_in_noise)
        x = trajectory.start(initial_noise(seed, index, shape))
        noise_fn = keyed_noise(seed, index, shape)
        return sample(name, self.network(model), x, trajectory, noise_fn=noise_fn, progress=progress)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the samplers that fit the trajectory, the default one first."""
        default, trajectory = DESCRIPTIONS[self.name].sampler, type(self.for_tokens(1).trajectory(2))
        fitting = [name for name, sampler in SAMPLERS.items() if sampler.fits(trajectory)]
        return tuple(sorted(fitting, key=lambda name: name != default))

    def choose(self, sampler: str | None) -> str:
        """Return the sampler to use. Raises ValueError for one that can't draw from models of this objective."""
        if sampler is not None and sampler not in self.samplers:
            raise ValueError(
                f"--sampler {sampler}: not for a model of --objective {self.name}; give {' or '.join(self.samplers)}"
            )
        return sampler or self.samplers[0]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @property
    def predicts(self) -> dict[str, Any]:
        """Settings that decide what the network's output means. All others only weight and choose samples."""
        return {"objective": self.name}


def one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError for a value of a flag that is not among the known ones."""
    if value not in known:
        raise ValueError(f"{flag} {value}: not known to this version; give one of {', '.join(known)}")


def above_0(flag: str, value: float) -> None:
    """Raise ValueError for a value of a flag that is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {value}: out of range; give a number above 0")
