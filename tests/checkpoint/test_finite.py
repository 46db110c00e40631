"""Non-finite weights are neither saved nor loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import opendit.training.build
import sample
import train
from opendit.checkpoint.pretrained import METADATA_KEY, read_info
from opendit.checkpoint.tensor_set import damage, not_finite, read_manifest, write_manifest
from opendit.common.tensor_files import write_tensors
from opendit.export.__main__ import main as export
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from tests.checkpoint.test_checkpoint import ARGV, run_to, steps_in
from tests.ranks import run_ranks

BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", BAD)
def test_one_value_is_found_wherever_it_is(dtype, value):
    for place in (0, 500, 1000):
        bad = torch.zeros(1001)
        bad[place] = value
        assert not_finite({"a": torch.full((3,), 6e4).to(dtype), "b": bad.to(dtype)}) == "b"
    largest = torch.full((7, 5), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    good = {"largest": largest, "none": torch.empty(0, dtype=dtype), "numbers": torch.arange(3)}
    assert not_finite(good) is None  # their sum would overflow


def spoil(engine, ema, part: str) -> None:
    if part == "moments":
        engine.moments("x_embedder.proj.weight")["exp_avg_sq"][-1:] = float("inf")
    else:
        tensors = ema.averages[0] if part == "ema" else engine.masters()
        tensors["blocks.1.mlp.fc1.weight"][-1:] = float("nan")


def blow_up(mesh, outputs: str, part: str) -> int | None:
    """Spoil a part of the state on the last rank before the save of step 3, although all gradients were finite."""

    class Spoiling(opendit.training.build.Checkpoints):
        def save(self, state):
            if state["step"] == 3 and mesh.rank == mesh.world_size - 1:
                spoil(self.engine, self.ema, part)
            super().save(state)

    opendit.training.build.Checkpoints = Spoiling
    try:
        run_to(Path(outputs), 3, "--lr", "1e-30")
    except SystemExit as stop:
        return stop.code
    return None


@pytest.mark.parametrize(("part", "ranks"), [("weights", 1), ("ema", 2), ("moments", 1)])
def test_a_save_refuses_what_is_not_finite(part, ranks, tmp_path, capfd):
    assert run_ranks(ranks, blow_up, str(tmp_path), part) == [1] * ranks
    checkpoints = tmp_path / "000-DiT-Ti-2" / "checkpoints"
    assert steps_in(checkpoints) == [1, 2] and not list(checkpoints.glob(".step*"))
    assert os.readlink(checkpoints / "latest") == "step_0000002" and damage(checkpoints / "latest") is None
    name = {"moments": "exp_avg_sq.x_embedder.proj.weight"}.get(part, "blocks.1.mlp.fc1.weight")
    said = capfd.readouterr().out
    assert "step 3: NOT SAVED" in said and f"{name} in " in said and "intact is" in said


def skipping_at_the_end(mesh, outputs: str, steps: int, signalled: bool) -> int | None:
    """One rank's losses are not finite from step 4 on; the run ends in step 5, or gets a signal there."""
    true_inputs = train.Inputs.of

    def inputs(self, batch):
        given = true_inputs(self, batch)
        if batch.step + 1 == 5 and signalled:
            os.kill(os.getpid(), 15)
        bad = batch.step + 1 >= 4 and mesh.rank == mesh.world_size - 1
        return given._replace(noise=given.noise * float("nan")) if bad else given

    train.Inputs.of = inputs
    try:
        run_to(Path(outputs), steps, "--ckpt_every", "3")
    except SystemExit as stop:
        return stop.code
    return None


@pytest.mark.parametrize(("ranks", "signalled"), [(1, False), (2, True)])
def test_a_last_save_while_steps_are_skipped_leaves_the_good_state(ranks, signalled, tmp_path, capfd):
    steps = 50 if signalled else 5
    assert run_ranks(ranks, skipping_at_the_end, str(tmp_path), steps, signalled) == [1] * ranks
    checkpoints = tmp_path / "000-DiT-Ti-2" / "checkpoints"
    assert steps_in(checkpoints) == [3] and os.readlink(checkpoints / "latest") == "step_0000003"
    said = capfd.readouterr().out
    assert "NOT SAVED, the gradients of this step were not finite" in said and "step_0000003" in said


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "bad.safetensors"
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10)
    state = DiT(config).state_dict()
    state["blocks.0.attn.qkv.weight"][5, 5] = float("inf")
    info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 8}
    save_file(state, path, metadata={METADATA_KEY: json.dumps(info)})
    torch.save(state, path.with_suffix(".pt"))
    return path


@pytest.mark.parametrize("kind", [".safetensors", ".pt"])
def test_weights_that_are_not_finite_are_not_taken(kind, weights, tmp_path, no_ranks, capsys):
    path = str(weights.with_suffix(kind))
    starts = {
        sample.main: ["--ckpt", path, "--model", "DiT-Ti/2", "--output", str(tmp_path / "o")],
        export: ["meta", "--ckpt", path, "--model", "DiT-Ti/2", "--output", str(tmp_path / "m.pt")],
        train.main: [*ARGV, "--max_steps", "1", "--pretrained", path, "--outputs", str(tmp_path / "runs")],
    }
    for program, argv in starts.items():
        with pytest.raises(SystemExit) as stop:
            program(argv)
        said = capsys.readouterr().err + str(stop.value.code)
        assert "error: " in said and f"{path}: blocks.0.attn.qkv.weight holds values that are not finite" in said
    assert not (tmp_path / "m.pt").exists() and not list((tmp_path / "o").glob("*"))


def test_a_checkpoint_that_is_not_finite_is_not_resumed(tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 1)
    folder = checkpoints / "step_0000001"
    path = folder / "model.safetensors"
    info = {METADATA_KEY: json.dumps(read_info(path))}
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}  # copies, not views
    state["final_layer.linear.bias"][0] = float("nan")
    files = {**read_manifest(folder), path.name: write_tensors(path, state, info)}
    write_manifest(folder, 2, files)
    with pytest.raises(SystemExit) as stop:
        run_to(tmp_path, 2, "--load", "latest")
    said = capsys.readouterr().err
    assert stop.value.code in (1, 2) and "what is stored of final_layer.linear.bias is not finite" in said
    assert "Traceback" not in said
    assert steps_in(checkpoints) == [1]
