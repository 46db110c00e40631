"""Small models with random weights, written as a run of train.py would."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.models import TextConfig, build_model, model_config
from tests.models.test_dit import randomised

BYTES = TextConfig("bytes", 64, 16, False)


def write(path: Path, name: str = "DiT-Ti/2", *, info: dict | None = None, seed: int = 0, **config) -> Path:
    """The weights of a model of 8 x 8 pixels of one channel, of 5 classes unless told otherwise, drawn without VAE."""
    condition = {} if "text" in config else {"num_classes": 5}
    config = model_config(name, **{"input_size": (8, 8), "in_channels": 1, **condition, **config})
    torch.manual_seed(seed)
    model = randomised(build_model(config))
    said = {"model": name, "config": config.to_dict(), "vae": "none", "image_size": config.input_size[-1]}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path, metadata={METADATA_KEY: json.dumps({**said, **(info or {})})})
    return path
