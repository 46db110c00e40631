"""Checkpoint files: contents, damage, and which checkpoints are found and kept."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import sample
import train
from opendit.checkpoint.pretrained import load_pretrained, read_info
from opendit.checkpoint.save import OPTIMIZER, share_out
from opendit.checkpoint.tensor_set import damage, read_manifest, write_manifest
from opendit.common.tensor_files import write_tensors

ARGV = "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --log_every 1 --sample_every 0".split()
ARGV += "--mixed_precision fp32 --sample_steps 1 --sample_cfg_scale 1 --batch_size 4".split()


def run_to(outputs: Path, steps: int, *more: str) -> Path:
    """Train in this process; return the folder of checkpoints."""
    train.main([*ARGV, "--max_steps", str(steps), "--ckpt_every", "1", "--outputs", str(outputs), *more])
    return outputs / "000-DiT-Ti-2" / "checkpoints"


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))


# ------------------------------------------------------------------------------------------ files


def test_our_safetensors_are_what_the_library_reads(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(7).bfloat16(),
        "strided": torch.randn(6, 4).t(),
        "long": torch.arange(3),
    }
    entry = write_tensors(tmp_path / "x.safetensors", tensors, {"opendit": '{"vae": "é"}'})
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    assert read_info(tmp_path / "x.safetensors") == {"vae": "é"}
    digest = subprocess.run(["sha256sum", tmp_path / "x.safetensors"], capture_output=True, text=True).stdout.split()[0]
    assert entry == {"bytes": (tmp_path / "x.safetensors").stat().st_size, "sha256": digest}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_write_about_as_much(ranks):
    sizes = {f"p{i}": size for i, size in enumerate([1000, 1000, 1000, 900, 700, 300, 70, 7, 1] * 12)}
    owner = share_out(sizes, ["model", "ema"], ranks)
    assert len(owner) == 3 * len(sizes) and set(owner.values()) == set(range(ranks))
    for file in ("model", "ema"):
        assert len({rank for (name, _), rank in owner.items() if name == file}) == 1
    load = [0] * ranks
    for (file, name), rank in owner.items():
        load[rank] += sizes[name] * (2 if file == OPTIMIZER else 1)
    # A weights file is not split, so it is the largest share from 4 ranks on.
    assert max(load) <= max(4 * sum(sizes.values()) / ranks, sum(sizes.values())) + 2000


# ------------------------------------------------------------------------------------------ damage


def damaged_forms(content: bytes) -> dict[str, bytes | None]:
    """Return damaged versions of a file: without its last byte, with one bit flipped, and missing (None)."""
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return {"truncated": content[:-1], "flipped": flipped, "missing": None}


def put(path: Path, content: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def test_damage_is_named_before_a_weight_is_touched(tmp_path, no_ranks, capsys, monkeypatch):
    checkpoints = run_to(tmp_path, 2)
    newest, earlier = checkpoints / "step_0000002", checkpoints / "step_0000001"
    monkeypatch.setattr("opendit.training.build.build_model_and_engine", lambda spec: pytest.fail("weights were made"))

    def refused() -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_to(tmp_path, 3, "--load", str(newest))
        assert stop.value.code == 2
        return capsys.readouterr().err

    names = [path.name for path in newest.iterdir()]
    assert sorted(names) == ["ema.safetensors", "manifest.json", "model.safetensors", "optimizer_000.safetensors",
                             "state.json"]  # fmt: skip
    for name in names:
        content = (newest / name).read_bytes()
        for damaged in damaged_forms(content).values():
            put(newest / name, damaged)
            message = refused()
            assert str(newest / name) in message, (name, message)
            assert f"intact is --load {earlier}" in message, (name, message)
            put(newest / name, content)
    (earlier / "ema.safetensors").write_bytes(b"")
    (newest / "model.safetensors").unlink()
    assert "there is no intact checkpoint before it" in refused()


@pytest.mark.parametrize("which", ["ema", "model"])
def test_damaged_weights_are_named_and_not_used(which, tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 2)
    newest, file = checkpoints / "step_0000002", f"{which}.safetensors"
    drawing = ["--output", str(tmp_path / "drawn"), "--weights", which]
    training = [*ARGV, "--outputs", str(tmp_path / "new")]
    content = (newest / file).read_bytes()
    for form, damaged in damaged_forms(content).items():
        put(newest / file, damaged)
        commands = [(sample.main, [*drawing, "--ckpt", str(newest)])]
        if damaged is not None:
            commands += [(sample.main, [*drawing, "--ckpt", str(newest / file)])]
            commands += [(train.main, [*training, "--pretrained", str(newest / file)])]
        elif which == "ema":
            commands += [(train.main, [*training, "--pretrained", str(newest)])]
        for main, argv in commands:
            capsys.readouterr()
            with pytest.raises(SystemExit) as stop:
                main(argv)
            assert not list(tmp_path.glob("drawn/**/*.png")) + list(tmp_path.glob("new/*/checkpoints/step*"))
            message = capsys.readouterr().err
            assert stop.value.code == 2 and message.startswith("error: "), (form, argv)
            assert file in message and ("is missing" if damaged is None else "is damaged") in message, message
            assert f"take {checkpoints / 'step_0000001'}, whose weights are intact" in message, message
        load_pretrained(newest, which={"ema": "model", "model": "ema"}[which])  # the other file is intact
    put(checkpoints / "step_0000001" / file, content[:-1])
    with pytest.raises(ValueError, match="take another checkpoint"):
        load_pretrained(newest, which=which)
    put(newest / file, content)
    load_pretrained(newest, which=which)
    (newest / "manifest.json").unlink()
    load_pretrained(newest, which=which)  # a single weights file has no manifest


def test_another_version_is_refused(tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 1)
    state = json.loads((checkpoints / "latest/state.json").read_text())
    (checkpoints / "latest/state.json").write_text(json.dumps({**state, "version": 1}))
    with pytest.raises(SystemExit):
        run_to(tmp_path, 2, "--load", "latest")
    assert "has checkpoint version 1, this program reads 2" in capsys.readouterr().err


def test_what_a_kill_left_is_found_and_tidied(tmp_path, no_ranks):
    checkpoints = run_to(tmp_path, 2)
    (checkpoints / ".step_0000003.incomplete").mkdir()
    (checkpoints / "step_0000002").rename(checkpoints / ".step_0000002.replaced")  # killed between two renames
    (checkpoints / "step_0000001").rename(tmp_path / "away")
    assert not (checkpoints / "latest").exists()
    run_to(tmp_path, 3, "--load", "latest")
    assert steps_in(checkpoints) == [2, 3] and not list(checkpoints.glob(".step*"))
    lines = [json.loads(line) for line in (checkpoints.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


# ------------------------------------------------------------------------------------------ what is kept


def test_keep_deletes_old_ones_only(tmp_path, no_ranks):
    checkpoints = run_to(tmp_path, 5, "--ckpt_keep", "2")
    assert steps_in(checkpoints) == [4, 5]
    run_to(tmp_path, 6, "--ckpt_keep", "1", "--load", "latest")
    assert steps_in(checkpoints) == [5, 6]  # 5 is in use
    # Going back to 5 replaces the later checkpoint 6; it does not count as a kept one.
    run_to(tmp_path, 6, "--ckpt_keep", "1", "--load", str(checkpoints / "step_0000005"))
    assert steps_in(checkpoints) == [5, 6] and os.readlink(checkpoints / "latest") == "step_0000006"


def test_a_copy_without_links_goes_on_from_its_newest_checkpoint(tmp_path, no_ranks):
    checkpoints = run_to(tmp_path, 2)
    latest = checkpoints / "latest"
    latest.unlink()
    shutil.copytree(checkpoints / "step_0000002", latest)
    run_to(tmp_path, 3, "--load", "latest")
    assert os.readlink(latest) == "step_0000003" and damage(checkpoints / "latest.before0") is None
    run_to(tmp_path, 4, "--load", "latest")
    assert steps_in(checkpoints) == [1, 2, 3, 4] and os.readlink(latest) == "step_0000004"


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors"])
def test_weights_of_other_shapes_are_refused_before_a_model_is_made(name, tmp_path, no_ranks, capsys, monkeypatch):
    newest = run_to(tmp_path, 1) / "step_0000001"
    metadata = read_metadata(newest / name)
    tensors = {key: value.clone() for key, value in load_file(newest / name).items()}  # copies, not views
    tensors["blocks.0.mlp.fc1.weight"] = tensors["blocks.0.mlp.fc1.weight"].t()
    files = {**read_manifest(newest), name: write_tensors(newest / name, tensors, metadata)}
    write_manifest(newest, 2, files)
    monkeypatch.setattr("opendit.training.build.build_model_and_engine", lambda spec: pytest.fail("weights were made"))
    with pytest.raises(SystemExit) as stop:
        run_to(tmp_path, 2, "--load", str(newest))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"{name} is a checkpoint of another model" in said and "blocks.0.mlp.fc1.w" in said


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()
