"""The interface of objectives: the prediction that a model is trained for, and the samplers that suit it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.prepared import Prepared
from opendit.diffusion.random import Stream, initial_noise, keyed_noise, uniform
from opendit.diffusion.samplers import SAMPLERS, sample
from opendit.diffusion.trajectory import LinearForm, Model, Trajectory


@dataclass(frozen=True)
class Objective(ABC):
    """name: of the objective, as its file's. preview_sampler: the one for few steps. learn_sigma: whether the network
    predicts a variance too, in as many channels again."""

    name: ClassVar[str]
    preview_sampler: ClassVar[str]
    learn_sigma: ClassVar[bool]

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """The times (B,) of a training step's samples; ``index``: (B,) positions in the global batch. tokens: of each
        sample, for an objective that asks for them (:meth:`for_tokens`)."""
        return self.times_at(uniform(seed, step, index, Stream.TIMESTEP))

    def for_tokens(self, tokens: int) -> "Objective":
        """The objective for samples of so many tokens: itself, where they make no difference."""
        return self

    @abstractmethod
    def times_at(self, u: Tensor) -> Tensor:
        """The times (B,) at u (B,) float64 in (0, 1), uniform in training: equal steps of u are equal shares of it.
        They rise or fall with u, so that neighbours in u have about the same noise."""

    @abstractmethod
    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """Compute the network's input from data x0 (B, C, ...), standard normal noise of its shape and times t (B,) of
        ``times``, with all that ``loss`` will need. Raises ValueError for shapes that don't fit each other."""

    @abstractmethod
    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """The loss of each sample, (B,) in float32 at least, from what the network made of ``prepared.x_t`` and
        ``prepared.timestep``. Raises ValueError for an output of another shape than the objective's."""

    @abstractmethod
    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        """Return the trajectory of sampling in ``steps`` steps. even_in_noise: space its points evenly in
        log(sigma / alpha), if the objective has a choice."""

    def network(self, model: Model) -> Model:
        """Return ``model(x, t)`` as the trajectory reads it."""
        return model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """Write the result of ``network(model)`` at point k of a trajectory as a weighted sum of the model's input and
        output."""
        return LinearForm(0.0, 1.0)

    @abstractmethod
    def noise_level(self, timestep: Tensor) -> Tensor:
        """Sigma, the standard deviation of the noise over the scale of the signal, for what the network gets as t.
        Both (B,); the one unit in which noise is comparable across objectives, steps and samplers."""

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
        """Samples (B, *shape) of ``model(x, t)``; all noise is keyed by ``seed`` and ``index`` (B,). sampler: one of
        ``samplers``, None for the first. progress: as of ``opendit.diffusion.samplers.sample``."""
        name = self.choose(sampler)
        trajectory = self.trajectory(steps, SAMPLERS[name].even_in_noise)
        x = trajectory.start(initial_noise(seed, index, shape))
        noise_fn = keyed_noise(seed, index, shape)
        return sample(name, self.network(model), x, trajectory, noise_fn=noise_fn, progress=progress)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Those that can go along its trajectory, the default one first."""
        default, trajectory = DESCRIPTIONS[self.name].sampler, type(self.for_tokens(1).trajectory(2))
        fitting = [name for name, sampler in SAMPLERS.items() if sampler.fits(trajectory)]
        return tuple(sorted(fitting, key=lambda name: name != default))

    def choose(self, sampler: str | None) -> str:
        """The sampler to use. Raises ValueError for one that can't draw from models of this objective."""
        if sampler is not None and sampler not in self.samplers:
            raise ValueError(
                f"--sampler {sampler}: not for a model of --objective {self.name}; give {' or '.join(self.samplers)}"
            )
        return sampler or self.samplers[0]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @property
    def predicts(self) -> dict[str, Any]:
        """Return the settings that decide what the network's output means. Others only weigh and choose samples."""
        return {"objective": self.name}


def one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError for a value of a flag that is none of those known."""
    if value not in known:
        raise ValueError(f"{flag} {value}: not known to this version; give one of {', '.join(known)}")


def above_0(flag: str, value: float) -> None:
    """Raises ValueError for a value of a flag that is no number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {value}: out of range; give a number above 0")
