"""The networks and the zoo."""

from opendit.models.dit import DiT, DiTConfig
from opendit.models.zoo import NAMES, model_config

__all__ = ["NAMES", "DiT", "DiTConfig", "model_config"]
