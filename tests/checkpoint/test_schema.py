"""Schemas accept all metadata from this and earlier versions, and refuse impossible values."""

import copy
import dataclasses
import json

import pytest

from opendit.checkpoint.schema import ModelConfig, checked_config, checked_metadata
from opendit.common.json_models import FileKind, checked
from opendit.config.architectures import NAMES, VIDEO_NAMES
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import CLASSES, model_config

SIZES = dict(input_size=(32, 32), in_channels=4)
MODEL = FileKind(ModelConfig, 1)


def metadata(name="DiT-XL/2", **more) -> dict:
    config = model_config(name, **SIZES, num_classes=10, frames=4 if name in VIDEO_NAMES else None)
    return {"model": name, "config": config.to_dict(), **more}


@pytest.mark.parametrize("name", [*NAMES, *VIDEO_NAMES])
def test_every_model_of_the_zoo_passes(name):
    for condition in ({"num_classes": 1000}, {"text": TextConfig("bytes", 128, 64, True)}):
        frames = 4 if name in VIDEO_NAMES else None
        config = model_config(name, **SIZES, frames=frames, **condition)
        stored = json.loads(json.dumps(config.to_dict()))
        assert checked_config(stored, "f") == config
        checked(stored, MODEL, "f")


def test_metadata_of_this_and_earlier_versions_passes():
    whole = metadata(
        objective=DDPMObjective().to_dict(), class_names=["a", "b\n", "\udcff"], captions=["x" * 10_000], vae="ema",
        text_encoder=None, image_size=256, frame_interval=1, step=400_000, version=2,
        lora={"rank": 4, "alpha": 4, "base": "/some/where/ema.safetensors"},
    )  # fmt: skip
    assert checked_metadata(json.dumps(whole), "f") == json.loads(json.dumps(whole))
    checked_metadata("{}", "f")
    old = metadata(class_names=[], vae="none", image_size=8)  # before kinds, objectives and the options of blocks
    for key in ("kind", "qk_norm", "adaln_lora", "bias", "positions", "text"):
        del old["config"][key]
    checked_metadata(json.dumps(old), "f")
    for objective in (DDPMObjective("v", 5.0, 2.0), FlowObjective(3.0, "mode"), EDMObjective(-0.4, 1.0, 1.0)):
        checked_metadata(json.dumps(metadata(objective=objective.to_dict())), "f")


def changed(path: str, value) -> dict:
    found = inner = copy.deepcopy(metadata(objective={"name": "flow", "shift": 1.0}))
    *steps, last = path.split(".")
    for step in steps:
        inner = inner[step]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.hidden_size", 10**9), ("config.hidden_size", 0), ("config.hidden_size", -1152),
        ("config.hidden_size", 1152.0), ("config.hidden_size", "1152"), ("config.hidden_size", True),
        ("config.hidden_size", None), ("config.hidden_size", [1152]), ("config.hidden_size", KeyError),
        ("config.depth", 10**7), ("config.depth", 0), ("config.num_heads", 7), ("config.num_heads", 0),
        ("config.in_channels", 10**6), ("config.num_classes", 10**12), ("config.num_classes", None),
        ("config.mlp_ratio", 1e-9), ("config.mlp_ratio", 1e9), ("config.mlp_ratio", "4"),
        ("config.input_size", [10**9, 10**9]), ("config.input_size", [32, 33]), ("config.input_size", [32]),
        ("config.input_size", []), ("config.input_size", 32), ("config.input_size", [65536, 65536]),
        ("config.input_size", {"0": 32}), ("config.patch_size", 0), ("config.patch_size", [2, 2]),
        ("config.patch_size", 2.0), ("config.learn_sigma", 1), ("config.positions", "nowhere"),
        ("config.positions", 3), ("config.kind", "vit"), ("config.kind", None), ("config.kind", []),
        ("config.text", {"name": "t5"}), ("config.text", "t5"), ("config.adaln_lora", 10**5), ("config.more", 1),
        ("config", None), ("config", []), ("config", "DiT-XL/2"), ("model", KeyError), ("model", 3), ("model", "a b"),
        ("objective", "flow"), ("objective.name", "magic"), ("objective.name", KeyError), ("objective.shift", 0),
        ("objective.shift", -1.0), ("objective.shift", "1"), ("objective.mean", 1.0), ("objective.times_are", "x"),
        ("class_names", "abc"), ("class_names", [1]), ("class_names", {"a": 0}), ("captions", [None]),
        ("vae", None), ("vae", ["ema"]), ("text_encoder", 5), ("image_size", 0), ("image_size", 10**9),
        ("frame_interval", 0), ("step", -1), ("step", 10**40), ("lora", {"rank": 4}), ("lora", {}), ("more", 1),
        ("lora", {"rank": 0, "alpha": 1, "base": "x"}), ("lora", {"rank": 4, "alpha": 0, "base": "x"}),
        ("lora", {"rank": 4, "alpha": 1, "base": None}),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_in_one_line_that_names_the_field(path, value):
    with pytest.raises(ValueError) as refusal:
        checked_metadata(json.dumps(changed(path, value)), "/w/ema.safetensors")
    message = str(refusal.value)
    assert message.startswith("/w/ema.safetensors: ") and "\n" not in message and len(message) < 400
    field = path.split(".")[-1]
    # Some are reported by the check that needs them, in the words of a flag.
    others = ("does not divide", "conditioned on", "--flow_times")
    assert field in message or any(words in message for words in others), message


def test_every_field_of_a_dataclass_is_checked():
    for prefix, kind in CLASSES.items():
        stored = metadata(next(name for name in [*NAMES, *VIDEO_NAMES] if name.startswith(f"{prefix}-")))["config"]
        stored = json.loads(json.dumps(stored))
        for field in dataclasses.fields(kind.config):
            checked(stored, MODEL, "f")
            with pytest.raises(ValueError, match=field.name):
                checked({**stored, field.name: object()}, MODEL, "f")
