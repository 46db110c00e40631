"""What a model is trained to predict, with the samplers that go with it: one object for training and sampling.

It is made from flags for training, and from what a checkpoint says of itself (``to_dict``) for sampling.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import Tensor

from opendit.diffusion.ddpm import DDPM, ddpm_loss
from opendit.diffusion.flow import FLOW_SAMPLERS, TIME_SAMPLING, flow_loss, sampling_times, shift_times
from opendit.diffusion.samplers import SAMPLERS, initial_noise, keyed_noise
from opendit.random import Stream, integers, uniform


class Objective(ABC):
    """name: of the objective. samplers: names of those that can draw from its models, the default one first.
    preview_sampler: the one for few steps. learn_sigma: whether the network predicts a variance too, in as many
    channels again."""

    name: ClassVar[str]
    samplers: ClassVar[tuple[str, ...]]
    preview_sampler: ClassVar[str]
    learn_sigma: ClassVar[bool]

    @abstractmethod
    def times(self, seed: int, step: int, index: Tensor) -> Tensor:
        """The times (B,) of a training step's samples; ``index``: (B,) positions in the global batch."""

    @abstractmethod
    def loss(self, model: Callable[..., Tensor], x0: Tensor, t: Tensor, noise: Tensor, **model_kwargs) -> Tensor:
        """The loss of each sample, (B,); t from ``times``."""

    @abstractmethod
    def sample(
        self, model, index: Tensor, shape: tuple[int, ...], *, seed: int, steps: int, sampler: str | None, progress
    ) -> Tensor:
        """Samples (B, *shape) of ``model(x, t)``; all noise is keyed by ``seed`` and ``index`` (B,). sampler: one of
        ``samplers``, None for the first."""

    def choose(self, sampler: str | None) -> str:
        """The sampler to use. Raises ValueError for one that can't draw from models of this objective."""
        if sampler is not None and sampler not in self.samplers:
            raise ValueError(
                f"--sampler {sampler}: this model was trained by --objective {self.name}, which is sampled by "
                f"{' or '.join(self.samplers)}"
            )
        return sampler or self.samplers[0]

    def to_dict(self) -> dict:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class DDPMObjective(Objective):
    """Noise prediction with learned variance over 1,000 steps: the DiT paper's."""

    name: ClassVar[str] = "ddpm"
    samplers: ClassVar[tuple[str, ...]] = tuple(SAMPLERS)
    preview_sampler: ClassVar[str] = "ddim"
    learn_sigma: ClassVar[bool] = True
    schedule: ClassVar[DDPM] = DDPM.linear()

    def times(self, seed, step, index):
        return integers(seed, step, index, Stream.TIMESTEP, self.schedule.num_steps)

    def loss(self, model, x0, t, noise, **model_kwargs):
        return ddpm_loss(self.schedule, model, x0, t, noise, **model_kwargs).loss

    def sample(self, model, index, shape, *, seed, steps, sampler=None, progress=None):
        draw = SAMPLERS[self.choose(sampler)]
        noise_fn = keyed_noise(seed, index, shape)
        noise = initial_noise(seed, index, shape)
        return draw(model, noise, self.schedule.respaced(steps), noise_fn=noise_fn, progress=progress)


@dataclass(frozen=True)
class FlowObjective(Objective):
    """Rectified flow. times_are: uniform, logit_normal or mode. shift: of training and sampling times alike."""

    name: ClassVar[str] = "flow"
    samplers: ClassVar[tuple[str, ...]] = tuple(FLOW_SAMPLERS)
    preview_sampler: ClassVar[str] = "euler"
    learn_sigma: ClassVar[bool] = False

    shift: float = 1.0
    times_are: str = "uniform"

    def times(self, seed, step, index):
        u = uniform(seed, step, index, Stream.TIMESTEP)
        return shift_times(TIME_SAMPLING[self.times_are](u), self.shift)

    def loss(self, model, x0, t, noise, **model_kwargs):
        return flow_loss(model, x0, t, noise, **model_kwargs)

    def sample(self, model, index, shape, *, seed, steps, sampler=None, progress=None):
        draw = FLOW_SAMPLERS[self.choose(sampler)]
        return draw(model, initial_noise(seed, index, shape), sampling_times(steps, self.shift), progress=progress)


OBJECTIVES = {kind.name: kind for kind in (DDPMObjective, FlowObjective)}
ALL_SAMPLERS = tuple(sampler for kind in OBJECTIVES.values() for sampler in kind.samplers)


def objective_from_dict(values: dict | None) -> Objective:
    """The objective that ``to_dict`` wrote; None, of weights that don't say, is the DiT paper's.

    Raises ValueError for one that this version does not know.
    """
    values = dict(values or {"name": DDPMObjective.name})
    name = values.pop("name")
    if name not in OBJECTIVES:
        raise ValueError(f"trained by objective {name!r}: this version knows {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](**values)
