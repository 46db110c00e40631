"""The networks and the zoo."""

from opendit.models.bytes_text import encode_bytes
from opendit.models.conditioning import Condition, TextCondition, TextConfig, where
from opendit.models.dit import DiT, DiTConfig
from opendit.models.ecdit import ECDiT, ECDiTConfig
from opendit.models.moviegen import MovieGen, MovieGenConfig
from opendit.models.stdit import STDiT, STDiTConfig
from opendit.models.vdit import VDiT, VDiTConfig
from opendit.models.zoo import (
    NAMES,
    VIDEO_NAMES,
    build_model,
    canonical_name,
    config_from_dict,
    is_video,
    model_config,
    patch_size,
)

__all__ = [
    "NAMES",
    "VIDEO_NAMES",
    "Condition",
    "DiT",
    "DiTConfig",
    "ECDiT",
    "ECDiTConfig",
    "MovieGen",
    "MovieGenConfig",
    "STDiT",
    "STDiTConfig",
    "TextCondition",
    "TextConfig",
    "VDiT",
    "VDiTConfig",
    "build_model",
    "canonical_name",
    "config_from_dict",
    "encode_bytes",
    "is_video",
    "model_config",
    "patch_size",
    "where",
]
