"""The flags of train.py that steer a run as a whole: what it draws of itself, saves and goes on from."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.cli.command_line import Flags, flag
from opendit.cli.values import COUNT, FROM_0, GUIDANCE, SAMPLING_STEPS, SEED
from opendit.state.names import BEST, CHECKPOINT_FORMATS
from opendit.training.run_loggers import LOGGERS


@dataclass(frozen=True)
class GridFlags(Flags):
    """The pictures that a run draws of itself."""

    group: ClassVar[str] = "Sample grids: what a run draws of itself"

    sample_every: int | None = flag(
        None, "steps between sample grids (default: as --ckpt_every); 0: none", unit="steps", **FROM_0
    )
    sample_steps: int = flag(50, "sampling steps of those grids", **SAMPLING_STEPS)
    sample_cfg_scale: float = flag(4.0, "guidance of those grids", **GUIDANCE)


@dataclass(frozen=True)
class SaveFlags(Flags):
    """What a run saves and goes on from."""

    group: ClassVar[str] = "Checkpoints: what a run saves and goes on from"

    outputs: str = flag("./outputs", "folder of the run folders", common=True, unit="folder")
    load: str | None = flag(
        None,
        "resume: latest, a run folder or a checkpoint folder",
        common="resume: latest, a run or a checkpoint",
        unit="folder",
    )
    save: bool = flag(True, "write checkpoints; --no_save: none, to time steps")
    ckpt_every: int = flag(
        1000, "steps between checkpoints; 0: only the one at the end", common=True, unit="steps", **FROM_0
    )
    ckpt_keep: int = flag(0, "checkpoints to keep, older ones are deleted; 0: all", unit="checkpoints", **FROM_0)
    ckpt_best: str | None = flag(
        None, "also keep the checkpoint that is best by this, as checkpoints/best", choices=tuple(BEST)
    )
    checkpoint_format: str = flag(
        "auto",
        "whole: whole tensors; sharded: each rank writes its shards, for models larger than a host",
        choices=CHECKPOINT_FORMATS,
    )


@dataclass(frozen=True)
class RunFlags(Flags):
    """The run as a whole."""

    group: ClassVar[str] = "Run: recipes, seeds, logs"

    recipe: str | None = flag(
        None,
        "a named set of flags, which this command line overrides; list: shows them",
        alias="factory",
        common="a named set of flags; list: shows them",
        unit="name",
    )
    dry_run: int | None = flag(
        None,
        "say what the run needs, on so many GPUs, and stop; nothing is built",
        alone=0,
        at_least=0,
        at_most=2**20,
        common="say what it needs on so many GPUs",
        unit="gpus",
    )
    global_seed: int = flag(42, "seed of everything random", **SEED)
    log_every: int = flag(10, "steps between log lines", unit="steps", **COUNT)
    log_to: str | list[str] | None = flag(
        None,
        "beside TensorBoard; what is sent to a server, if anything, their environment variables say",
        several=True,
        choices=tuple(LOGGERS),
    )
    deterministic: bool = flag(False, "the same bits in every run on the same GPUs; slower")
    profile: bool = flag(False, "record a few early steps: a trace and a table of where the time goes")

    @property
    def loggers(self) -> list[str]:
        """The names of ``log_to``."""
        return [self.log_to] if isinstance(self.log_to, str) else list(dict.fromkeys(self.log_to or ()))
