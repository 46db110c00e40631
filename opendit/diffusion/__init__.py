"""Noise schedules, losses and samplers: functions over tensors, no nn.Module inside."""

from opendit.diffusion.ddpm import (
    DDPM,
    PREDICTIONS,
    DiffusionLoss,
    ddpm_loss,
    linear_betas,
    space_timesteps,
    training_loss,
)
from opendit.diffusion.objectives import (
    ALL_SAMPLERS,
    OBJECTIVES,
    DDPMObjective,
    EDMObjective,
    FlowObjective,
    Objective,
    objective_from_dict,
)
from opendit.diffusion.samplers import (
    SAMPLERS,
    cfg_model,
    guided_within,
    initial_noise,
    keyed_noise,
    sample_ddim,
    sample_ddpm,
    sample_dpmpp,
)

__all__ = [
    "ALL_SAMPLERS",
    "DDPM",
    "OBJECTIVES",
    "PREDICTIONS",
    "SAMPLERS",
    "DDPMObjective",
    "DiffusionLoss",
    "EDMObjective",
    "FlowObjective",
    "Objective",
    "cfg_model",
    "ddpm_loss",
    "guided_within",
    "initial_noise",
    "keyed_noise",
    "linear_betas",
    "objective_from_dict",
    "sample_ddim",
    "sample_ddpm",
    "sample_dpmpp",
    "space_timesteps",
    "training_loss",
]
