"""Test that a configuration without a revision keeps its old meaning, also in a resumed run."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import train
from opendit.checkpoint.pretrained import read_config
from opendit.checkpoint.tensor_set import MODEL_SET
from opendit.models.configuration import DiTConfig
from opendit.models.variants import MovieGen, MovieGenConfig
from opendit.models.zoo import model_config
from tests.models.revision_1 import RECORDED, record
from tests.models.test_dit import randomised
from tests.training.test_train import log_of

CONTENT = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", CONTENT)
def test_a_file_without_a_revision_means_what_it_meant(name):
    then = CONTENT[name]
    now = record(then["config"])
    assert "revision" not in then["config"] and now["parameters"] == then["parameters"]
    assert (now["weights"], now["flops"]) == (then["weights"], then["flops"])
    # Processors differ in fp32's exp, used for timestep frequencies; for t = 800, the difference is about 1e-4.
    torch.testing.assert_close(torch.tensor(now["output"]), torch.tensor(then["output"]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", [name for name, then in CONTENT.items() if "adaln" in name or name == "MovieGen"])
def test_the_second_revision_is_another_model(name):
    then = CONTENT[name]
    now = record({**then["config"], "revision": 2})
    if now["parameters"] == then["parameters"]:
        assert (torch.tensor(now["output"]) - torch.tensor(then["output"])).abs().max() > 0.05


def test_moviegen_adds_its_positions_before_every_block():
    """Compare with the model's parts, called one after the other."""
    config = MovieGenConfig((2, 4, 6), (1, 2, 2), 3, 24, 3, 4, num_classes=5, mlp_ratio=2.0, kv_heads=2)
    model = randomised(MovieGen(config)).double()
    # smaller than the learned positions' size
    x, t, y = torch.randn(2, 3, 2, 4, 4).double(), torch.tensor([3, 900]), torch.tensor([0, 5])
    tables = [table.weight for table in model.learned_positions.axes]
    places = [(f, r, c) for f in range(2) for r in range(2) for c in range(2)]
    positions = torch.stack([tables[0][f] + tables[1][r] + tables[2][c] for f, r, c in places])
    h = model.x_embedder(x)
    c = model.t_embedder(t) + model.y_embedder(y)
    for block in model.blocks:
        h = block(h + positions, block.modulate(c))
    expected = model.unpatchify(model.final_layer(h, model.final_layer.modulate(c)), (2, 2, 2))
    torch.testing.assert_close(model(x, t, y), expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weights).sum(), tables) for out in (model(x, t, y), expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


MODELS = {
    "MovieGen": "--model MovieGen-Ti/122 --use_video --num_frames 2 --image_size 16",
    "adaln_lora": "--model DiT-Ti/2 --image_size 16 --adaln_lora 4",
}


def train_on(model: str, outputs: Path, steps: int, *more: str) -> Path:
    fixed = "--data_path mock --num_classes 3 --batch_size 2 --num_workers 0 --log_every 1 --ckpt_every 0"
    argv = f"{fixed} --sample_every 0 --mixed_precision fp32 --max_steps {steps} --outputs {outputs}".split()
    train.main([*MODELS[model].split(), *argv, *more])
    (run,) = outputs.glob("*-*")
    return run


def bits(run: Path) -> dict:
    found = {}
    for path in sorted((run / "checkpoints" / "latest").resolve().glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {(path.name, name): file.get_tensor(name).numpy().tobytes() for name in file.keys()}
    return found


@pytest.mark.parametrize("model", MODELS)
def test_an_old_run_goes_on_as_it_was(model, tmp_path, no_ranks, monkeypatch, capsys):
    """A run from before revisions, resumed with the same command, keeps the same bits."""

    def before_revisions(config) -> dict:
        return {k: v for k, v in to_dict(config).items() if k not in ("revision", "null_class")}

    to_dict = DiTConfig.to_dict
    with monkeypatch.context() as old:
        old.setattr("opendit.training.model_plan.model_config", functools.partial(model_config, revision=1))
        old.setattr(DiTConfig, "to_dict", before_revisions)
        whole = train_on(model, tmp_path / "whole", 4)
        parts = train_on(model, tmp_path / "parts", 2)
    stored = read_config((parts / "checkpoints" / "latest").resolve() / f"{MODEL_SET}.safetensors")
    assert stored.revision == 1 and not stored.shared_modulation and not stored.positions_in_blocks
    assert train_on(model, tmp_path / "parts", 4, "--load", "latest") == parts
    assert [line["loss"] for line in log_of(parts)] == [line["loss"] for line in log_of(whole)]
    assert bits(parts) == bits(whole)
    assert read_config((parts / "checkpoints" / "latest").resolve() / f"{MODEL_SET}.safetensors") == stored

    new = train_on(model, tmp_path / "new", 1)  # the same flags give another model
    assert read_config((new / "checkpoints" / "latest").resolve() / f"{MODEL_SET}.safetensors").revision == 2
    tuned = train_on(model, tmp_path / "tuned", 1, "--pretrained", str(parts))
    assert read_config((tuned / "checkpoints" / "latest").resolve() / f"{MODEL_SET}.safetensors") == stored
    assert "reused" in capsys.readouterr().out
