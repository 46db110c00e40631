"""The networks, their configurations and the zoo of named models. Each module is imported when one of its names is
first used, so importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit.config.architectures import NAMES as NAMES
    from opendit.config.architectures import VIDEO_NAMES as VIDEO_NAMES
    from opendit.config.architectures import canonical_name as canonical_name
    from opendit.config.architectures import is_video as is_video
    from opendit.config.architectures import patch_size as patch_size
    from opendit.models.bytes_text import encode_bytes as encode_bytes
    from opendit.models.conditioning import Condition as Condition
    from opendit.models.conditioning import TextCondition as TextCondition
    from opendit.models.conditioning import TextConfig as TextConfig
    from opendit.models.conditioning import where as where
    from opendit.models.dit import DiT as DiT
    from opendit.models.dit import DiTConfig as DiTConfig
    from opendit.models.ecdit import ECDiT as ECDiT
    from opendit.models.ecdit import ECDiTConfig as ECDiTConfig
    from opendit.models.moviegen import MovieGen as MovieGen
    from opendit.models.moviegen import MovieGenConfig as MovieGenConfig
    from opendit.models.stdit import STDiT as STDiT
    from opendit.models.stdit import STDiTConfig as STDiTConfig
    from opendit.models.vdit import VDiT as VDiT
    from opendit.models.vdit import VDiTConfig as VDiTConfig
    from opendit.models.zoo import build_model as build_model
    from opendit.models.zoo import config_from_dict as config_from_dict
    from opendit.models.zoo import empty_model as empty_model
    from opendit.models.zoo import model_config as model_config
    from opendit.models.zoo import plan_of as plan_of

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.models.bytes_text": "encode_bytes",
        "opendit.models.conditioning": "Condition TextCondition TextConfig where",
        "opendit.models.dit": "DiT DiTConfig",
        "opendit.models.ecdit": "ECDiT ECDiTConfig",
        "opendit.models.moviegen": "MovieGen MovieGenConfig",
        "opendit.config.architectures": "NAMES VIDEO_NAMES canonical_name is_video patch_size",
        "opendit.models.stdit": "STDiT STDiTConfig",
        "opendit.models.vdit": "VDiT VDiTConfig",
        "opendit.models.zoo": "build_model config_from_dict empty_model model_config plan_of",
    },
)
