"""Record the memory and work estimates from before they became sums over plans (commit 7e175ea).

python -m tests.training.recorded_estimates     # writes recorded_estimates.json; run it only on correct estimates"""

import json
from pathlib import Path

from opendit.config.architectures import NAMES, VIDEO_NAMES, is_video
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.zoo import model_config
from opendit.training.memory import Setup, estimate

RECORDED = Path(__file__).with_suffix(".json")
LABELS, POOLED = {"num_classes": 10}, {"text": TextConfig("clip", 24, 7)}
TOKENS, INSIDE = {"text": TextConfig("t5", 24, 7, True)}, {"text": TextConfig("bytes", 64, 9, True)}
OPTIONS = {  # options for a small model of every architecture
    "DiT-Ti/2": ({"qk_norm": True}, {"positions": "rope"}, {"bias": False}, {"adaln_lora": 5}, {"mlp_ratio": 3.5}),
    "DiT-B/4": ({"qk_norm": True, "positions": "rope", "adaln_lora": 16}, {"positions": "learned"}),
    "vDiT-Ti/122": ({"qk_norm": True}, {"positions": "rope", "bias": False}, {"adaln_lora": 5, "revision": 1}),
    "ST-DiT-Ti/222": (
        {"full_attention": True},
        {"qk_norm": True},
        {"full_attention": True, "qk_norm": True, "positions": "rope", "adaln_lora": 7},
    ),
    "EC-DiT-Ti/2": ({"expert_capacity": 3.3}, {"qk_norm": True, "positions": "rope"}, {"bias": False}),
    "MovieGen-Ti/122": (
        {"kv_heads": 4},
        {"kv_heads": 1, "qk_norm": True},
        {"positions": "rope"},
        {"positions": "rope", "qk_norm": True, "bias": True},
        {"kv_heads": 4, "positions": "rope", "adaln_lora": 5},
        {"revision": 1},
    ),
}


def configs() -> dict[str, DiTConfig]:
    """Return all named models with labels, and small models of every architecture with every condition and option."""
    found = {name: _config(name, **LABELS) for name in (*NAMES, *VIDEO_NAMES)}
    for name, options in OPTIONS.items():
        for condition in (LABELS, POOLED, TOKENS, INSIDE):
            for more in ({}, *options):
                text = condition.get("text")
                words = f"{text.name} {text.cross_attention}" if text else "labels"
                said = "".join(f" {key}={value}" for key, value in more.items())
                found[f"{name} {words}{said}"] = _config(name, **condition, **more)
    return found


def _config(name: str, **options) -> DiTConfig:
    """Build a configuration for latents of 32 x 32. Videos have 3 frames, or 6 if a patch spans 2 frames."""
    frames = 6 if name.endswith("222") else 3 if is_video(name) else None
    return model_config(name, input_size=(32, 32), in_channels=4, frames=frames, **options)


def setups(config: DiTConfig) -> list[Setup]:
    """Return setups that change the activations, with the plugins zero2, ddp and gemini."""
    found = []
    for plugin, precision in (("zero2", "bf16"), ("ddp", "bf16"), ("ddp", "fp32")):
        for fused in (True, False):
            found.append(Setup(plugin, precision, fused=fused))
            if config.recomputable and config.bias:  # at that commit, recomputation needed biases
                levels = ("norms", "cheap", "half", "mlp")  # the levels at that commit
                found += [Setup(plugin, precision, fused=fused, recompute=level) for level in levels]
    found.append(Setup("gemini", "fp16", world=4, averages=2, accumulate=True))
    found.append(Setup("zero2", "fp16", world=3, grad_checkpoint=True))
    if config.float8 and config.bias:
        found += [Setup(fp8=True), Setup(fp8=True, grad_checkpoint=True)]
    if config.kind not in ("ecdit", "stdit"):  # at that commit, these could not share samples
        found.append(Setup(world=4, sequence_parallel=4))
    return found


def record(config: DiTConfig) -> dict:
    """Return a forward pass's FLOPs, a rank's bytes for 5 samples with zero2, and the activations of every setup."""
    activations = [estimate(config, setup, 5).activations for setup in setups(config)]
    return {
        "flops": config.forward_flops(),
        "total": estimate(config, Setup(), 5).total,
        "activations": activations,
    }


if __name__ == "__main__":
    recorded = {name: record(config) for name, config in configs().items()}
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('},"', '},\n"') + "\n")
