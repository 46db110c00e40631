"""A public model's weights are exported into a folder like the published one."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from opendit.checkpoint.foreign import open_published
from opendit.common.safe_files import LinkRefused
from opendit.export import export_published
from opendit.export.__main__ import main
from tests.checkpoint import published

STEM = "diffusion_pytorch_model"


@pytest.fixture
def base(tmp_path) -> Path:
    folder = published.write_pipeline(tmp_path / "small", published.weights(), 2)
    (folder / "LICENSE.md").write_text("a licence")
    (folder / "README.md").write_text("a text")
    (folder / "vae" / "code.py").write_text("raise SystemExit")
    (folder / "vae" / "old.bin").write_bytes(b"pickle")
    (folder / "vae" / "deep").mkdir()
    (folder / "vae" / "deep" / "x.json").write_text("{}")
    (folder / "flux1.safetensors").write_bytes(b"the original file")
    return folder


def untouched(base: Path, output: Path, most_bytes: int = 10**9) -> list[str]:
    opened = open_published(base, published.FAMILIES)
    return export_published(opened.tensors(published.shapes()), base, opened, output, most_bytes)


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted((folder / "transformer").glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("most_bytes", [10**9, 2000])
def test_an_untouched_folder_goes_through_without_a_changed_bit(base, tmp_path, most_bytes):
    output = tmp_path / "made" / "tuned"
    assert untouched(base, output, most_bytes) == ["vae/code.py", "vae/old.bin"]
    before, after = all_weights(base), all_weights(output)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    others = {path for path in found if STEM not in path}
    names = "config.json model.safetensors".split()
    components = {f"{component}/{name}" for component in ("vae", "text_encoder") for name in names}
    assert others == {"model_index.json", "LICENSE.md", "transformer/config.json", "vae/deep/x.json", *components}
    assert all((output / name).read_bytes() == (base / name).read_bytes() for name in others)
    if most_bytes == 10**9:
        assert found - others == {f"transformer/{STEM}.safetensors"}
    else:
        index = json.loads((output / "transformer" / f"{STEM}.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) > 2
        assert {f"transformer/{name}" for name in index["weight_map"].values()} < found
    for file in (output / "transformer").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "base": "small", "license": "apache-2.0"}
    assert os.listdir(output.parent) == ["tuned"]
    # Exporting again keeps the name of the base.
    untouched(output, tmp_path / "again")
    with safe_open(next((tmp_path / "again" / "transformer").glob("*.safetensors")), "pt") as opened:
        assert opened.metadata()["base"] == "small"


def test_the_transformer_alone_goes_through(base, tmp_path):
    assert untouched(base / "transformer", tmp_path / "tuned") == []
    assert sorted(os.listdir(tmp_path / "tuned")) == ["transformer"]
    assert open_published(tmp_path / "tuned", published.FAMILIES).pipeline == tmp_path / "tuned"


def test_a_run_is_exported_by_the_command_in_the_published_dtype(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("opendit.checkpoint.foreign.FAMILIES", published.FAMILIES)
    state = {name: (2 * tensor).float().contiguous() for name, tensor in published.ours(published.weights()).items()}
    (tmp_path / "run").mkdir()
    save_file(state, tmp_path / "run" / "ema.safetensors", {"opendit": "{}"})
    argv = ["diffusers", "--ckpt", str(tmp_path / "run"), "--base", str(base), "--output", str(tmp_path / "tuned")]
    main(argv)
    out = capsys.readouterr().out
    assert f"wrote {tmp_path / 'tuned'}" in out and f"note: {base}/vae/code.py holds code, or may" in out
    after = all_weights(tmp_path / "tuned")
    for name, tensor in published.weights().items():
        assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], 2 * tensor), name
    assert (tmp_path / "tuned" / "vae" / "model.safetensors").stat().st_nlink == 2
    main(argv)  # replaces the first one
    assert "is there already and will be replaced" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["run", "small", "tuned"]
    for more, said in (
        (["--vae", "ema"], "--vae"),
        (["--model", "DiT-XL/2"], "--model"),
        (["--base", str(tmp_path / "nothing")], "--base"),
        (["--base", str(tmp_path / "run")], "no public model there"),
        (["--output", str(base)], "--output"),
    ):
        with pytest.raises(SystemExit):
            main([*argv, *more])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["opendit", *argv[1:5], "--output", str(tmp_path / "x.safetensors")])
    assert "--base" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(base, tmp_path):
    state = {name: tensor.contiguous() for name, tensor in published.ours(published.weights()).items()}
    opened, source = open_published(base, published.FAMILIES), tmp_path / "run"
    for other, message in (
        (state | {"more": torch.zeros(1)}, r"run: of the weights, 1 are unexpected \(first: 'more'\)"),
        ({k: v for k, v in state.items() if k != "blocks.0.norm.weight"}, "1 are missing"),
        (state | {"blocks.0.qkv.bias": torch.zeros(35)}, r"run: 'blocks.0.qkv.bias' \(35,\) joined along 0 do not fit"),
        (state | {"blocks.0.norm.weight": torch.zeros(11)}, r"run: 'blocks.0.norm.weight' has the shape \(11,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            export_published(other, source, opened, tmp_path / "out", 10**9)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_through_a_link_nor_over_something_else(base, tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "away")
    with pytest.raises(LinkRefused):
        untouched(base, tmp_path / "link")
    untouched(base, tmp_path / "other")
    (tmp_path / "to_pipeline").symlink_to(tmp_path / "other")
    with pytest.raises(LinkRefused):
        untouched(base, tmp_path / "to_pipeline")
    assert (tmp_path / "to_pipeline").is_symlink()
    (tmp_path / "away" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="away holds something else than a pipeline"):
        untouched(base, tmp_path / "away")
    with pytest.raises(ValueError, match="small would be replaced, and holds"):
        untouched(base, base)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="would be replaced, and holds"):
        untouched(base, tmp_path)
    (base / "vae" / "secret.json").symlink_to(tmp_path / "away" / "letter.txt")
    with pytest.raises(ValueError, match="secret.json is a symbolic link out of"):
        untouched(base, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["away", "link", "model_index.json", "other", "small", "to_pipeline"]
    assert os.listdir(tmp_path / "away") == ["letter.txt"]


def test_what_was_there_stays_if_writing_fails(base, tmp_path, monkeypatch):
    untouched(base, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def full(*args):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("opendit.export.conversion.write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        untouched(base, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(tmp_path)) == ["out", "small"]


def test_files_are_copied_where_they_can_have_no_second_name(base, tmp_path, monkeypatch):
    def refused(*args, **options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refused)
    untouched(base, tmp_path / "out")
    made = tmp_path / "out" / "vae" / "model.safetensors"
    assert made.stat().st_nlink == 1 and made.read_bytes() == (base / "vae" / "model.safetensors").read_bytes()
