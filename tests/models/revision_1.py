"""Record the outputs of configurations without a revision, as they were before revisions existed.

python -m tests.models.revision_1          # writes revision_1.json; only with a program whose revision 1 is right
"""

import json
from pathlib import Path

import torch

from opendit.models.conditioning import TextCondition
from opendit.models.zoo import build_model, config_from_dict

RECORDED = Path(__file__).with_suffix(".json")
PICTURE = {"input_size": [8, 6], "patch_size": 2, "in_channels": 2, "hidden_size": 24, "depth": 3, "num_heads": 4}
CLIP = PICTURE | {"input_size": [4, 4, 6], "patch_size": [2, 2, 3]}
MOVIE = CLIP | {"kind": "moviegen", "bias": False, "positions": "learned", "num_classes": 5, "mlp_ratio": 2.0}
TEXT = {"name": "t5", "width": 10, "max_tokens": 4, "cross_attention": True}
CONFIGS = {  # configurations as in the files of that time
    "DiT": PICTURE | {"kind": "dit", "num_classes": 5},
    "DiT, no kind": PICTURE | {"num_classes": 5, "mlp_ratio": 3.0},
    "DiT, adaln_lora": PICTURE | {"kind": "dit", "num_classes": 5, "adaln_lora": 3, "positions": "learned"},
    "vDiT, adaln_lora, text": CLIP | {"kind": "vdit", "num_classes": None, "text": TEXT, "adaln_lora": 3},
    "ST-DiT, adaln_lora": CLIP | {"kind": "stdit", "num_classes": 5, "adaln_lora": 3, "bias": False},
    "EC-DiT, adaln_lora": PICTURE
    | {"kind": "ecdit", "num_classes": 5, "experts": 3, "expert_hidden": 8, "adaln_lora": 2},
    "MovieGen": MOVIE,
    "MovieGen, kv_heads": MOVIE | {"kv_heads": 2, "adaln_lora": 5},
    "MovieGen, text": MOVIE | {"num_classes": None, "text": TEXT, "kv_heads": None},
    "MovieGen, sincos": MOVIE | {"positions": "sincos"},
}  # fmt: skip


def record(values: dict) -> dict:
    """Return the parameters' names and sizes, and the model's output for weights that depend only on their names."""
    config = config_from_dict(values)
    model = build_model(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, config.in_channels, *config.input_size, generator=generator).double()
    y = torch.tensor([1, 5])
    if config.text:
        tokens = torch.randn(2, 4, 10, generator=generator).double()
        y = TextCondition(tokens, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool(), tokens.mean(1))
    output = model(x, torch.tensor([7, 800]), y)
    return {
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
        "weights": config.parameters(),
        "flops": config.forward_flops(),
        "output": output.flatten()[:: max(1, output.numel() // 40)].tolist(),
    }


if __name__ == "__main__":
    recorded = {name: {"config": values, **record(values)} for name, values in CONFIGS.items()}
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('},"', '},\n"') + "\n")
