"""Checksums of a checkpoint are computed beside its loading, and what was loaded of a damaged one is dropped."""

import json
import threading

import torch

from opendit.checkpoint import files, pretrained
from opendit.checkpoint.files import write_manifest
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.common.tensor_files import write_tensors
from opendit.models import model_config
from opendit.models.zoo import build_model


def test_weights_are_loaded_while_they_are_verified(tmp_path, monkeypatch):
    """The checksum is not known before the model is loaded; of damaged weights, what was loaded is dropped."""
    run, loaded = tmp_path / "run", threading.Event()
    for step, value in ((1, 0.0), (2, 1.0)):
        folder = run / "checkpoints" / f"step_{step:07d}"
        folder.mkdir(parents=True)
        config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=3)
        model = build_model(config, seed=0)
        torch.nn.init.constant_(model.final_layer.linear.bias, value)
        info = {"model": "DiT-Ti/2", "config": config.to_dict(), "image_size": 8}
        entry = write_tensors(folder / "ema.safetensors", model.state_dict(), {METADATA_KEY: json.dumps(info)})
        write_manifest(folder, 1, {"ema.safetensors": entry})
    seen, hashed, load = [], files.sha256_of, pretrained.load_state

    def waits(path):
        assert loaded.wait(60), "verified before it was loaded"
        loaded.clear()
        return hashed(path)

    def loads(model, *rest):
        load(model, *rest)
        seen.append(model.final_layer.linear.bias[0].item())
        loaded.set()

    monkeypatch.setattr(files, "sha256_of", waits)
    monkeypatch.setattr(pretrained, "load_state", loads)
    model, weights = pretrained.load_pretrained(run, notes=[])
    assert seen == [1.0] and weights.path.parent.name == "step_0000002"
    with open(weights.path, "r+b") as file:  # one bit of a bias, which stays a number
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    notes: list[str] = []
    model, weights = pretrained.load_pretrained(run, notes=notes)
    assert seen == [1.0, 1.0, 0.0] and weights.path.parent.name == "step_0000001"
    assert model.final_layer.linear.bias[0].item() == 0 and "step_0000002" in notes[0] and "checksum" in notes[0]
    (run / "checkpoints" / "step_0000002" / "ema.safetensors").write_bytes(b"{")  # which can't be loaded at all
    loaded.set()
    assert pretrained.load_pretrained(run, notes=notes)[1].path.parent.name == "step_0000001"
