"""Write small models with random weights in the format of train.py's runs."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import A, B, Lora, targets
from opendit.models.zoo import build_model, empty_model, model_config
from tests.models.test_dit import randomised

BYTES = TextConfig("bytes", 64, 16, False)


def write(path: Path, name: str = "DiT-Ti/2", *, info: dict | None = None, seed: int = 0, **config) -> Path:
    """Write a model without VAE, by default for 8 x 8 pixels with one channel and 5 classes; return the path."""
    condition = {} if "text" in config else {"num_classes": 5}
    config = model_config(name, **{"input_size": (8, 8), "in_channels": 1, **condition, **config})
    torch.manual_seed(seed)
    model = randomised(build_model(config))
    said = {"model": name, "config": config.to_dict(), "vae": "none", "image_size": config.input_size[-1]}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path, metadata={METADATA_KEY: json.dumps({**said, **(info or {})})})
    return path


def write_lora(path: Path, lora: Lora, config: DiTConfig, name: str, seed: int = 0, full=()) -> Path:
    """Write a random file like that of a run with --lora; ``full`` names fully trained parameters."""
    model, generator = empty_model(config, parameters=False), torch.Generator().manual_seed(seed)
    state = {key: torch.randn(dict(model.named_parameters())[key].shape, generator=generator) for key in full}
    for layer, (rank, columns, rows) in targets(model, lora).items():
        state[layer + A] = torch.randn(rank, columns, generator=generator) / 4
        state[layer + B] = torch.randn(rows, rank, generator=generator) / 4
    info = {"model": name, "config": config.to_dict(), "vae": "none", "lora": lora.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={METADATA_KEY: json.dumps(info)})
    return path
