"""Noise schedules, losses and samplers: functions over tensors, no nn.Module inside. A name's module is imported when
it is first used: ``names`` needs no torch."""

from opendit.common.lazy import import_when_used

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.diffusion.ddpm": "DDPM PREDICTIONS DiffusionLoss linear_betas space_timesteps training_loss",
        "opendit.diffusion.ddpm_trajectory": "DDPMTrajectory eps_model",
        "opendit.diffusion.objectives.edm": "EDMTrajectory",
        "opendit.diffusion.objectives.flow": "FlowTrajectory",
        "opendit.diffusion.guidance": "cfg_model guided_within",
        "opendit.diffusion.names": "ALL_SAMPLERS",
        "opendit.diffusion.objectives": "OBJECTIVES DDPMObjective EDMObjective FlowObjective Objective "
        "objective_from_dict objective_from_flags",
        "opendit.diffusion.prepared": "Prepared",
        "opendit.diffusion.random": "initial_noise keyed_noise",
        "opendit.diffusion.samplers": "SAMPLERS sample",
    },
)
