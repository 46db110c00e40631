"""Objectives, noise schedules and samplers: functions over tensors, without any nn.Module.

Importing this package loads no submodule. Each submodule is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit.config.names import ALL_SAMPLERS as ALL_SAMPLERS
    from opendit.diffusion.ddpm import DDPM as DDPM
    from opendit.diffusion.ddpm import DDPMTrajectory as DDPMTrajectory
    from opendit.diffusion.ddpm import eps_model as eps_model
    from opendit.diffusion.ddpm import linear_betas as linear_betas
    from opendit.diffusion.ddpm import space_timesteps as space_timesteps
    from opendit.diffusion.guidance import cfg_model as cfg_model
    from opendit.diffusion.guidance import guided_within as guided_within
    from opendit.diffusion.objectives import OBJECTIVES as OBJECTIVES
    from opendit.diffusion.objectives import DDPMObjective as DDPMObjective
    from opendit.diffusion.objectives import EDMObjective as EDMObjective
    from opendit.diffusion.objectives import FlowObjective as FlowObjective
    from opendit.diffusion.objectives import Objective as Objective
    from opendit.diffusion.objectives import objective_from_dict as objective_from_dict
    from opendit.diffusion.objectives import objective_from_flags as objective_from_flags
    from opendit.diffusion.objectives.base import Prepared as Prepared
    from opendit.diffusion.objectives.ddpm import PREDICTIONS as PREDICTIONS
    from opendit.diffusion.objectives.ddpm import DiffusionLoss as DiffusionLoss
    from opendit.diffusion.objectives.ddpm import training_loss as training_loss
    from opendit.diffusion.objectives.edm import EDMTrajectory as EDMTrajectory
    from opendit.diffusion.objectives.flow import FlowTrajectory as FlowTrajectory
    from opendit.diffusion.random import initial_noise as initial_noise
    from opendit.diffusion.random import keyed_noise as keyed_noise
    from opendit.diffusion.samplers import SAMPLERS as SAMPLERS
    from opendit.diffusion.samplers import sample as sample

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.diffusion.ddpm": "DDPM DDPMTrajectory eps_model linear_betas space_timesteps",
        "opendit.diffusion.objectives.ddpm": "PREDICTIONS DiffusionLoss training_loss",
        "opendit.diffusion.objectives.edm": "EDMTrajectory",
        "opendit.diffusion.objectives.flow": "FlowTrajectory",
        "opendit.diffusion.guidance": "cfg_model guided_within",
        "opendit.config.names": "ALL_SAMPLERS",
        "opendit.diffusion.objectives": "OBJECTIVES DDPMObjective EDMObjective FlowObjective Objective "
        "objective_from_dict objective_from_flags",
        "opendit.diffusion.objectives.base": "Prepared",
        "opendit.diffusion.random": "initial_noise keyed_noise",
        "opendit.diffusion.samplers": "SAMPLERS sample",
    },
)
