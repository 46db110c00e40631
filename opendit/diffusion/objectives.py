"""What a model is trained to predict, with the samplers that go with it: one object for training and sampling.

It is made from flags for training, and from what a checkpoint says of itself (``to_dict``) for sampling.
"""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from torch import Tensor

from opendit.diffusion import ddpm, edm, flow
from opendit.diffusion.ddpm import DDPM
from opendit.diffusion.ddpm_trajectory import DDPMTrajectory, eps_model
from opendit.diffusion.flow import TIME_SAMPLING, TIME_SCALE, FlowTrajectory, sampling_times, shift_times
from opendit.diffusion.names import FLOW_TIMES, PREDICTIONS, SAMPLERS_OF
from opendit.diffusion.prepared import Prepared
from opendit.diffusion.random import Stream, initial_noise, integers, keyed_noise, uniform
from opendit.diffusion.samplers import SAMPLERS, sample
from opendit.diffusion.trajectory import Model, Trajectory


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
    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        """What the network gets of data x0 (B, C, ...) with standard normal noise of its shape at times t (B,) from
        ``times``, and what ``loss`` will need. Raises ValueError for shapes that don't fit each other."""

    @abstractmethod
    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        """The loss of each sample, (B,) in float32 at least, from what the network made of ``prepared.x_t`` and
        ``prepared.timestep``. Raises ValueError for an output of another shape than the objective's."""

    @abstractmethod
    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        """Where sampling in so many steps goes. even_in_noise: with points even in log(sigma / alpha), where the
        objective has a choice."""

    def network(self, model: Model) -> Model:
        """``model(x, t)`` as the trajectory reads it."""
        return model

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
        progress=None,
    ) -> Tensor:
        """Samples (B, *shape) of ``model(x, t)``; all noise is keyed by ``seed`` and ``index`` (B,). sampler: one of
        ``samplers``, None for the first. progress: as of ``opendit.diffusion.samplers.sample``."""
        name = self.choose(sampler)
        trajectory = self.trajectory(steps, SAMPLERS[name].even_in_noise)
        x = trajectory.start(initial_noise(seed, index, shape))
        noise_fn = keyed_noise(seed, index, shape)
        return sample(name, self.network(model), x, trajectory, noise_fn=noise_fn, progress=progress)

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

    @property
    def predicts(self) -> dict:
        """What decides the meaning of the network's output. Other settings only weigh and choose training samples."""
        return {"objective": self.name}


@functools.cache
def _shifted(shift: float) -> DDPM:
    """One for all who ask, with its tables on their devices."""
    return DDPM.linear(shift=shift)


@dataclass(frozen=True)
class DDPMObjective(Objective):
    """Noise prediction with learned variance over 1,000 steps: the DiT paper's. prediction: "v" puts the velocity in
    the noise's place. min_snr: the gamma of min-SNR weights, None for weights of 1. shift: of the noise at every
    timestep, in training and sampling alike."""

    name: ClassVar[str] = "ddpm"
    samplers: ClassVar[tuple[str, ...]] = SAMPLERS_OF["ddpm"]
    preview_sampler: ClassVar[str] = "ddim"
    learn_sigma: ClassVar[bool] = True

    prediction: str = "eps"
    min_snr: float | None = None
    shift: float = 1.0

    def __post_init__(self):
        _one_of("--prediction", self.prediction, PREDICTIONS)
        if self.min_snr is not None:
            _above_0("--min_snr", self.min_snr)
        _above_0("--ddpm_shift", self.shift)

    @property
    def schedule(self) -> DDPM:
        return _shifted(self.shift)

    def times(self, seed, step, index):
        return integers(seed, step, index, Stream.TIMESTEP, self.schedule.num_steps)

    def prepare(self, x0, t, noise):
        return ddpm.prepare(self.schedule, x0, t, noise)

    def loss(self, output, prepared):
        x0, t, noise = prepared.context
        how = {"prediction": self.prediction, "min_snr": self.min_snr}
        return ddpm.training_loss(self.schedule, output, x0, prepared.x_t, t, noise, **how).loss

    def trajectory(self, steps, even_in_noise=False):
        full = self.schedule
        return DDPMTrajectory(full.respaced_by_noise(steps) if even_in_noise else full.respaced(steps))

    def network(self, model):
        return eps_model(model, self.schedule) if self.prediction == "v" else model

    def noise_level(self, timestep):
        return self.schedule.noise_level(timestep)

    @property
    def predicts(self):
        shifted = {} if self.shift == 1 else {"ddpm_shift": self.shift}  # the network is told the timestep only
        return {**super().predicts, "prediction": self.prediction, **shifted}

    def to_dict(self):
        """Without what is at its default: as checkpoints from before these settings say it, which so resume unnoted."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **{k: v for k, v in chosen.items() if v != getattr(DDPMObjective, k)}}


@dataclass(frozen=True)
class FlowObjective(Objective):
    """Rectified flow. times_are: uniform, logit_normal or mode. shift: of training and sampling times alike."""

    name: ClassVar[str] = "flow"
    samplers: ClassVar[tuple[str, ...]] = SAMPLERS_OF["flow"]
    preview_sampler: ClassVar[str] = "euler"
    learn_sigma: ClassVar[bool] = False

    shift: float = 1.0
    times_are: str = "uniform"

    def __post_init__(self):
        _one_of("--flow_times", self.times_are, FLOW_TIMES)
        _above_0("--flow_shift", self.shift)

    def times(self, seed, step, index):
        u = uniform(seed, step, index, Stream.TIMESTEP)
        return shift_times(TIME_SAMPLING[self.times_are](u), self.shift)

    def prepare(self, x0, t, noise):
        return flow.prepare(x0, t, noise)

    def loss(self, output, prepared):
        return flow.loss(output, prepared)

    def trajectory(self, steps, even_in_noise=False):
        return FlowTrajectory(sampling_times(steps, self.shift))

    def noise_level(self, timestep):
        t = timestep / TIME_SCALE
        return t / (1 - t)  # infinite at 1, where no signal is left


@dataclass(frozen=True)
class EDMObjective(Objective):
    """EDM. mean, std: of ln(sigma) in training. sigma_data: the standard deviation of the data."""

    name: ClassVar[str] = "edm"
    samplers: ClassVar[tuple[str, ...]] = SAMPLERS_OF["edm"]
    preview_sampler: ClassVar[str] = "heun"
    learn_sigma: ClassVar[bool] = False

    mean: float = -1.2
    std: float = 1.2
    sigma_data: float = 0.5

    def __post_init__(self):
        _above_0("--edm_std", self.std)
        _above_0("--edm_sigma_data", self.sigma_data)

    def times(self, seed, step, index):
        return edm.log_normal_sigmas(uniform(seed, step, index, Stream.TIMESTEP), self.mean, self.std)

    def prepare(self, x0, t, noise):
        return edm.prepare(x0, t, noise, sigma_data=self.sigma_data)

    def loss(self, output, prepared):
        return edm.loss(output, prepared)

    def trajectory(self, steps, even_in_noise=False):
        return edm.EDMTrajectory(edm.karras_sigmas(steps), self.sigma_data)

    def noise_level(self, timestep):
        return edm.sigmas_of(timestep)

    @property
    def predicts(self):
        return {**super().predicts, "edm_sigma_data": self.sigma_data}


OBJECTIVES = {kind.name: kind for kind in (DDPMObjective, FlowObjective, EDMObjective)}


def objective_from_dict(values: dict | None) -> Objective:
    """The objective that ``to_dict`` wrote; None, of weights that don't say, is the DiT paper's.

    Raises ValueError for one, or a setting of one, that this version does not know.
    """
    values = dict(values or {"name": DDPMObjective.name})
    name = values.pop("name")
    if name not in OBJECTIVES:
        raise ValueError(f"trained by objective {name!r}: this version knows {', '.join(OBJECTIVES)}")
    known = [field.name for field in fields(OBJECTIVES[name])]
    if unknown := set(values) - set(known):
        raise ValueError(f"objective {name} has no {', '.join(sorted(unknown))}: this version knows {', '.join(known)}")
    return OBJECTIVES[name](**values)


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{flag} {value}: this version knows {', '.join(known)}")


def _above_0(flag: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {value}: must be a number above 0")
