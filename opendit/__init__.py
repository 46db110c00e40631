# pyright: standard
"""OpenDiT: fast, memory-lean training and sampling of Diffusion Transformers on Colossal-AI.

    import opendit

    pipe = opendit.load("outputs/000-vDiT-XL-222")     # a run, a checkpoint, Meta's .pt, a folder of diffusers
    clips = pipe(["a seven moving left"], steps=50, guidance=3, seed=0)
    clips[0].save("seven.mp4")

docs/python.md describes the whole interface. A name is imported at its first use, so ``import opendit`` alone does not
import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit import fused as fused
    from opendit.cli.command import train as train
    from opendit.config.evaluate import EvaluateConfig as EvaluateConfig
    from opendit.config.train import TrainConfig as TrainConfig
    from opendit.evaluation.program import evaluate as evaluate
    from opendit.models.dit import DiT as DiT
    from opendit.models.zoo import build_model as build_model
    from opendit.models.zoo import model_config as model_config
    from opendit.sampling.output_files import VideoClip as VideoClip
    from opendit.sampling.pipeline import Pipeline as Pipeline
    from opendit.sampling.pipeline import load as load

__version__ = "0.2.0"
__all__ = [
    "DiT",
    "EvaluateConfig",
    "Pipeline",
    "TrainConfig",
    "VideoClip",
    "build_model",
    "evaluate",
    "fused",
    "load",
    "model_config",
    "train",
]

_get, _ = import_when_used(
    __name__,
    {
        "opendit.config.evaluate": "EvaluateConfig",
        "opendit.cli.command": "train",
        "opendit.config.train": "TrainConfig",
        "opendit.evaluation.program": "evaluate",
        "opendit.sampling.output_files": "VideoClip",
        "opendit.sampling.pipeline": "Pipeline load",
        "opendit.models.dit": "DiT",
        "opendit.models.zoo": "build_model model_config",
    },
)


def __getattr__(name: str) -> Any:
    return importlib.import_module("opendit.fused") if name == "fused" else _get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
