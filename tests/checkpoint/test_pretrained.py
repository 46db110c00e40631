"""Meta's files from every kind of training, and checksums computed during loading."""

import argparse
import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sample
from opendit.checkpoint import pretrained
from opendit.checkpoint import tensor_set as files
from opendit.checkpoint.foreign import assumption, infer_config
from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.checkpoint.tensor_set import write_manifest
from opendit.common.tensor_files import write_tensors
from opendit.models.dit import DiT, DiTConfig
from opendit.models.zoo import Weights, build_model, model_config
from tests.first_weights import taken_over
from tests.models.test_dit import randomised


def meta_state(rows: int, out_channels: int, channels: int = 1, side: int = 8) -> dict[str, torch.Tensor]:
    """Return a DiT-Ti/2's weights as in Meta's code, with the given sizes of label table and last layer."""
    config = model_config("DiT-Ti/2", input_size=(side, side), in_channels=channels, num_classes=3)
    model = randomised(DiT(config))
    model.y_embedder.embedding_table = nn.Embedding(rows, 128)
    model.final_layer.linear = nn.Linear(128, 4 * out_channels)
    return model.state_dict()


def stored(folder, state, num_classes: int | None = None):
    """Save weights like Meta's release, or like a training checkpoint whose arguments contain the number of classes."""
    path = folder / "meta.pt"
    if num_classes is None:
        torch.save(state, path)
    else:
        args = argparse.Namespace(model="DiT-Ti/2", num_classes=num_classes)
        torch.save({"model": {}, "ema": state, "opt": {}, "args": args}, path)
    return path


@pytest.mark.parametrize(
    ("rows", "said", "asked", "classes", "null_class", "noted"),
    [
        (1001, None, None, 1000, True, False),  # the released models
        (1000, None, None, 1000, False, True),  # ImageNet without class dropout
        (1000, None, 999, 999, True, False),
        (8, None, None, 7, True, True),
        (8, None, 8, 8, False, False),
        (8, None, 7, 7, True, False),
        (8, 8, None, 8, False, False),  # a training checkpoint says so
        (1001, 1001, None, 1001, False, False),
        (1, None, 1, 1, False, False),
    ],
)
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_a_table_and_a_last_layer_load_as_what_they_are(
    rows, said, asked, classes, null_class, noted, learn_sigma, tmp_path
):
    state = meta_state(rows, 2 if learn_sigma else 1)
    model, weights = load_pretrained(stored(tmp_path, state, said), "DiT-Ti/2", num_classes=asked)
    config = model.config
    assert (config.num_classes, config.null_class, config.learn_sigma) == (classes, null_class, learn_sigma)
    assert config.parameters() == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert bool(assumption(weights, config)) == noted
    if noted:
        other = rows - 1 if classes == rows else rows  # the number of classes if the assumption is wrong
        assert assumption(weights, config)[0].endswith(f"sample.py needs --num_classes {other}")
    last = torch.tensor([rows - 1])  # every row can be drawn
    out = model(torch.randn(1, 1, 8, 8), torch.tensor([3]), last)
    assert out.shape == (1, 2 if learn_sigma else 1, 8, 8)


@pytest.mark.parametrize(
    ("state", "said", "message"),
    [
        (meta_state(8, 2), 5, "a label table of 8 rows, which is none of 5 classes"),
        (meta_state(8, 2), 9, "a label table of 8 rows, which is none of 9 classes"),
        (meta_state(1, 2), None, "a label table of 1 rows, which is none of 0 classes"),
        (meta_state(8, 3), None, "predicts 12 numbers a patch: neither the noise of its 2 x 2 x 1 ones alone nor"),
        (meta_state(8, 1, channels=2), None, "predicts 4 numbers a patch"),
    ],
)
def test_what_is_neither_is_refused(state, said, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        infer_config(state, "DiT-Ti/2", tmp_path / "w.pt", said)


def test_sampling_without_a_null_class(tmp_path, no_ranks, capsys):
    """Guidance is refused because there is no null class; without guidance every class can be drawn."""
    path = stored(tmp_path, meta_state(4, 1))
    given = ["--ckpt", str(path), "--model", "DiT-Ti/2", "--vae", "none", "--num_sampling_steps", "2"]
    given += ["--output", str(tmp_path / "s"), "--npz", str(tmp_path / "s.npz"), "--mixed_precision", "fp32"]
    for flags in ([], ["--cfg_scale", "2"], ["--cfg_scale", "0"]):
        with pytest.raises(SystemExit):
            sample.main([*given, "--num_classes", "4", *flags])
        assert "no null class to guide away from; use --cfg_scale 1" in capsys.readouterr().err
    sample.main([*given, "--num_classes", "4", "--cfg_scale", "1", "--class_labels", "3", "0"])
    assert "does not say how many classes" not in capsys.readouterr().out
    drawn = np.load(tmp_path / "s.npz")
    assert drawn["arr_1"].tolist() == [3, 0] and (drawn["arr_0"][0] != drawn["arr_0"][1]).any()
    with pytest.raises(SystemExit):  # with a null class there are three classes
        sample.main([*given, "--cfg_scale", "1", "--class_labels", "3"])
    assert "labels from 0 to 2" in capsys.readouterr().err
    sample.main([*given, "--class_labels", "2"])
    said = capsys.readouterr().out
    assert "the last of its 4 rows is taken for the null class" in said and "--num_classes 4" in said


def test_a_checkpoint_that_says_itself_needs_no_number(tmp_path):
    config = DiTConfig((8, 8), 2, 1, 32, 1, 2, num_classes=3)
    info = {"model": "DiT-Ti/2", "config": config.to_dict()}
    save_file(DiT(config).state_dict(), tmp_path / "w.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    with pytest.raises(ValueError, match="--num_classes 3: .* says itself what it draws"):
        load_pretrained(tmp_path / "w.safetensors", num_classes=3)


@pytest.mark.parametrize("classes", [7, 8])
def test_fine_tuning_does_not_take_the_last_class_for_the_null_class(classes, tmp_path):
    """A table of 8 classes without a null class is loaded into models of 7 and 8 classes that have one."""
    state = meta_state(8, 2)
    found = infer_config(state, "DiT-Ti/2", tmp_path / "w.pt", 8)
    new = DiT(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=classes))
    name = "y_embedder.embedding_table.weight"
    fresh = new.state_dict()[name].clone()
    done = taken_over(new, Weights(state, tmp_path / "w.pt", num_classes=8), found)
    table = new.state_dict()[name]
    assert torch.equal(table[-1], fresh[-1]) and name in done.untrained
    assert torch.equal(table[:-1], state[name] if classes == 8 else fresh[:-1])
    assert ("null class, which the file does not have, is fresh" in done.why[name]) == (classes == 8)
    names = [f"c{i}" for i in range(8)]
    new = DiT(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=2))
    fresh = new.state_dict()[name].clone()
    taken_over(new, Weights(state, tmp_path / "w.pt", {"class_names": names}), found, ["c7", "other"])
    table = new.state_dict()[name]
    assert torch.equal(table[0], state[name][7]) and torch.equal(table[1:], fresh[1:])


# ------------------------------------------------------------------------------------------ verified beside loading


def test_weights_are_loaded_while_they_are_verified(tmp_path, monkeypatch):
    """The model is loaded before the checksum is known, and dropped if the weights turn out to be damaged."""
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
    with open(weights.path, "r+b") as file:  # flip one bit of a bias, which stays finite
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    notes: list[str] = []
    model, weights = pretrained.load_pretrained(run, notes=notes)
    assert seen == [1.0, 1.0, 0.0] and weights.path.parent.name == "step_0000001"
    assert model.final_layer.linear.bias[0].item() == 0 and "step_0000002" in notes[0] and "checksum" in notes[0]
    (run / "checkpoints" / "step_0000002" / "ema.safetensors").write_bytes(b"{")  # can't be loaded at all
    loaded.set()
    assert pretrained.load_pretrained(run, notes=notes)[1].path.parent.name == "step_0000001"
