"""The networks and the zoo. A name's module is imported when it is first used: ``names`` needs no torch."""

from opendit.common.lazy import import_when_used

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.models.bytes_text": "encode_bytes",
        "opendit.models.conditioning": "Condition TextCondition TextConfig where",
        "opendit.models.dit": "DiT DiTConfig",
        "opendit.models.ecdit": "ECDiT ECDiTConfig",
        "opendit.models.moviegen": "MovieGen MovieGenConfig",
        "opendit.models.names": "NAMES VIDEO_NAMES canonical_name is_video patch_size",
        "opendit.models.stdit": "STDiT STDiTConfig",
        "opendit.models.vdit": "VDiT VDiTConfig",
        "opendit.models.zoo": "build_model config_from_dict empty_model model_config plan_of",
    },
)
