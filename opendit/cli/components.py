"""The flags of a run, by component."""

from opendit.config import components as component
from opendit.config.components import (
    EvaluationFlags,
    GridFlags,
    ParallelFlags,
    RunFlags,
    SaveFlags,
    SpeedFlags,
    ValidationFlags,
)
from opendit.config.train import TrainConfig


class Components:
    """The settled flags of a run by component. What prepares or builds a component of the run gets that component's own
    flags, and no others: its signature says on which flags it can depend."""

    def __init__(self, flags: TrainConfig):
        self.model = flags.part(component.ModelFlags)
        self.captions = flags.part(component.CaptionFlags)
        self.data = flags.part(component.DataFlags)
        self.loader = flags.part(component.LoaderFlags)
        self.start = flags.part(component.StartFlags)
        self.objective = flags.part(component.ObjectiveFlags)
        self.batch = flags.part(component.BatchFlags)
        self.optimizer = flags.part(component.OptimizerFlags)
        self.speed = flags.part(SpeedFlags)
        self.train_speed = flags.part(component.TrainSpeedFlags)
        self.memory = flags.part(component.MemoryFlags)
        self.plugin = flags.part(component.PluginFlags)
        self.parallel = flags.part(ParallelFlags)
        self.run = flags.part(RunFlags)
        self.save = flags.part(SaveFlags)
        self.grids = flags.part(GridFlags)
        self.validation = flags.part(ValidationFlags)
        self.evaluation = flags.part(EvaluationFlags)
