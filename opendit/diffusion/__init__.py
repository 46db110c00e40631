"""Noise schedules, losses and samplers: functions over tensors, no nn.Module inside."""

from opendit.diffusion.ddpm import DDPM, DiffusionLoss, ddpm_loss, linear_betas, space_timesteps, training_loss
from opendit.diffusion.objectives import (
    ALL_SAMPLERS,
    OBJECTIVES,
    DDPMObjective,
    FlowObjective,
    Objective,
    objective_from_dict,
)
from opendit.diffusion.samplers import SAMPLERS, cfg_model, initial_noise, keyed_noise, sample_ddim, sample_ddpm

__all__ = [
    "ALL_SAMPLERS",
    "DDPM",
    "OBJECTIVES",
    "SAMPLERS",
    "DDPMObjective",
    "DiffusionLoss",
    "FlowObjective",
    "Objective",
    "cfg_model",
    "ddpm_loss",
    "initial_noise",
    "keyed_noise",
    "linear_betas",
    "objective_from_dict",
    "sample_ddim",
    "sample_ddpm",
    "space_timesteps",
    "training_loss",
]
