"""Weights in and out: our checkpoints <-> diffusers' DiTPipeline folders and Meta's .pt files, as a command and as
functions, which stand in opendit.state.export."""

from opendit.common.lazy import import_when_used

__getattr__, __all__ = import_when_used(
    __name__,
    {"opendit.state.export": "correct_timesteps export_diffusers export_meta import_weights load_pipeline"},
)
