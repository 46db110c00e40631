"""Weights in and out: our checkpoints <-> diffusers' DiTPipeline folders and Meta's .pt files, as a command and as
functions, which stand in opendit.checkpoint.export."""

from typing import TYPE_CHECKING

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit.checkpoint.export import correct_timesteps as correct_timesteps
    from opendit.checkpoint.export import export_diffusers as export_diffusers
    from opendit.checkpoint.export import export_meta as export_meta
    from opendit.checkpoint.export import import_weights as import_weights
    from opendit.checkpoint.export import load_pipeline as load_pipeline

__getattr__, __all__ = import_when_used(
    __name__,
    {"opendit.checkpoint.export": "correct_timesteps export_diffusers export_meta import_weights load_pipeline"},
)
