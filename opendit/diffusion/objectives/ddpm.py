"""The objective of the DiT paper over the schedule and the loss of opendit/diffusion/ddpm.py, where the papers are."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion import ddpm
from opendit.diffusion.ddpm import DDPM, PREDICTIONS
from opendit.diffusion.ddpm_trajectory import DDPMTrajectory, eps_model
from opendit.diffusion.objectives.base import Objective, above_0, one_of
from opendit.diffusion.prepared import Prepared
from opendit.diffusion.random import Stream, integers
from opendit.diffusion.trajectory import LinearForm, Model, Trajectory

SETTINGS = DESCRIPTIONS["ddpm"].settings


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
    preview_sampler: ClassVar[str] = "ddim"
    learn_sigma: ClassVar[bool] = True

    prediction: str = SETTINGS["prediction"].default
    min_snr: float | None = SETTINGS["min_snr"].default
    shift: float = SETTINGS["shift"].default

    def __post_init__(self) -> None:
        one_of("--prediction", self.prediction, PREDICTIONS)
        if self.min_snr is not None:
            above_0("--min_snr", self.min_snr)
        above_0("--ddpm_shift", self.shift)

    @property
    def schedule(self) -> DDPM:
        return _shifted(self.shift)

    def times(self, seed: int, step: int, index: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        return integers(seed, step, index, Stream.TIMESTEP, self.schedule.num_steps)

    def times_at(self, u: Tensor) -> Tensor:
        return (u * self.schedule.num_steps).long()

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        return ddpm.prepare(self.schedule, x0, t, noise)

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        x0, t, noise = prepared.context
        how = {"prediction": self.prediction, "min_snr": self.min_snr}
        return ddpm.training_loss(self.schedule, output, x0, prepared.x_t, t, noise, **how).loss

    def trajectory(self, steps: int, even_in_noise: bool = False) -> Trajectory:
        full = self.schedule
        return DDPMTrajectory(full.respaced_by_noise(steps) if even_in_noise else full.respaced(steps))

    def network(self, model: Model) -> Model:
        return eps_model(model, self.schedule) if self.prediction == "v" else model

    def network_weights(self, trajectory: Trajectory, k: int) -> LinearForm:
        """eps = sigma x + alpha v of a model that predicts velocity."""
        if self.prediction != "v":
            return LinearForm(0.0, 1.0)
        alpha = trajectory.alphas[k]
        return LinearForm(math.sqrt(1 - alpha**2), alpha)

    def noise_level(self, timestep: Tensor) -> Tensor:
        return self.schedule.noise_level(timestep)

    @property
    def predicts(self) -> dict[str, Any]:
        shifted = {} if self.shift == 1 else {"ddpm_shift": self.shift}  # the network is told the timestep only
        return {**super().predicts, "prediction": self.prediction, **shifted}

    def to_dict(self) -> dict[str, Any]:
        """Without what is at its default: as checkpoints from before these settings say it, which so resume unnoted."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **{k: v for k, v in chosen.items() if v != getattr(DDPMObjective, k)}}


OBJECTIVE = DDPMObjective
