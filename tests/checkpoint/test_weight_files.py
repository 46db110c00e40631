"""Weights in several files, as transformers and diffusers write them: the export and its readers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

import sample
import train
from opendit.checkpoint.pretrained import find_weights, load_pretrained, read_config
from opendit.checkpoint.tensor_set import open_set, shared_out, write_weights
from opendit.common.utils import read_size
from opendit.export.__main__ import main
from tests.checkpoint.test_checkpoint import ARGV, run_to


@pytest.fixture(scope="module")
def run(tmp_path_factory, module_no_ranks) -> Path:
    """Return a run with sharded checkpoints."""
    outputs = tmp_path_factory.mktemp("run")
    run_to(outputs, 2, "--checkpoint_format", "sharded")
    return outputs / "000-DiT-Ti-2"


@pytest.fixture(scope="module")
def module_no_ranks():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


def average_of(run: Path) -> dict[str, torch.Tensor]:
    with open_set(run / "checkpoints" / "latest" / "ema.shards.json") as tensors:
        return dict(tensors)


def drawn(tmp_path: Path, *ckpt: object) -> np.ndarray:
    argv = ["--num_sampling_steps", "1", "--cfg_scale", "1", "--class_labels", "1", "3", "--batch_size", "2"]
    output = tmp_path / "drawn"
    sample.main(["--ckpt", *map(str, ckpt), *argv, "--output", str(output), "--npz", str(output / "s.npz")])
    return np.load(output / "s.npz")["arr_0"]


def test_a_run_of_shards_becomes_one_file_or_several_and_all_are_read(run, tmp_path, capsys):
    state = average_of(run)
    (tmp_path / "one").mkdir()
    (tmp_path / "parts").mkdir()
    one, parts = tmp_path / "one" / "weights.safetensors", tmp_path / "parts" / "model.safetensors"
    main(["opendit", "--ckpt", str(run), "--output", str(one)])
    main(["opendit", "--ckpt", str(run / "checkpoints" / "latest"), "--output", str(parts), "--max_shard_size", "2MB"])
    index = parts.with_name("model.safetensors.index.json")
    assert f"wrote {one}: DiT-Ti/2" in (said := capsys.readouterr().out) and f"wrote {index}: DiT-Ti/2" in said
    found = json.loads(index.read_text())
    files = sorted(path.name for path in parts.parent.glob("*.safetensors"))
    assert len(files) > 2 and files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    merged = {name: tensor for file in files for name, tensor in load_file(parts.with_name(file)).items()}
    assert found["weight_map"].keys() == merged.keys() == load_file(one).keys() == state.keys()
    assert found["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for name, tensor in state.items():
        assert torch.equal(merged[name], tensor) and torch.equal(load_file(one)[name], tensor)
        assert name in load_file(parts.with_name(found["weight_map"][name]))
    assert all(parts.with_name(file).stat().st_size < 2e6 + 20_000 for file in files)
    # The folder, its index, the single file, the run and its shards' index are the same model.
    pictures = [drawn(tmp_path, path) for path in (parts.parent, index, one, run, find_weights(run))]
    assert all(np.array_equal(pictures[0], other) for other in pictures)
    assert read_config(index) == read_config(one) == read_config(find_weights(run))
    argv = [*ARGV, "--max_steps", "1", "--lr", "1e-30", "--no_save", "--outputs"]
    train.main([*argv, str(tmp_path / "tuned"), "--pretrained", str(parts.parent)])
    train.main([*argv, str(tmp_path / "tuned"), "--pretrained", str(run)])
    assert capsys.readouterr().out.count("--pretrained: reused") == 2


def test_one_form_takes_the_place_of_the_other(run, tmp_path):
    output = tmp_path / "w.safetensors"
    for size, count in (("1MB", 4), ("2MB", 3), ("50GB", 1), ("1MB", 4)):
        main(["opendit", "--ckpt", str(run), "--output", str(output), "--max_shard_size", size])
        left = sorted(path.name for path in tmp_path.iterdir())
        assert (output.name in left) == (count == 1) and ("w.safetensors.index.json" in left) == (count > 1), left
        parts = [name for name in left if "-of-" in name]
        assert not parts or len(parts) > 2
        assert all(name.endswith(f"-of-{len(parts):05d}.safetensors") for name in parts)
        model, _ = load_pretrained(tmp_path / ("w.safetensors" if count == 1 else "w.safetensors.index.json"))
        assert all(torch.equal(value, average_of(run)[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("most", [1, 100, 1000, 4000, 10**9])
def test_tensors_are_shared_out_as_by_huggingface_hub(most):
    torch.manual_seed(0)
    state = {f"t{i}": torch.zeros(int(size)) for i, size in enumerate(torch.randint(1, 300, (40,)))}
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=most)
    kinds = {name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()}
    assert sorted(map(sorted, shared_out(kinds, most))) == sorted(map(sorted, theirs.filename_to_tensors.values()))


@pytest.mark.parametrize("size", ["", "5 GB", "0GB", "-1GB", "GB", "5PB", "9999999999GB"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="--max_shard_size"):
        read_size(size, "--max_shard_size")
    assert (read_size("5GB", ""), read_size("2GiB", ""), read_size("300MB", "")) == (5 * 10**9, 2**31, 3 * 10**8)


BROKEN = {
    "a file is missing": (lambda folder, index: (folder / index["weight_map"]["pos_embed"]).unlink(), "is missing"),
    "a path out of the folder": (
        lambda _, index: index["weight_map"].update(pos_embed="../w.safetensors"),
        "plain name",
    ),
    "an absolute path": (lambda _, index: index["weight_map"].update(pos_embed="/etc/passwd"), "plain name"),
    "a tensor in another file": (lambda _, index: swap(index["weight_map"]), "does not say that|not in the file"),
    "a tensor left out": (lambda _, index: index["weight_map"].pop("pos_embed"), "does not say that"),
    "a tensor too many": (lambda _, index: index["weight_map"].update(more=index["weight_map"]["pos_embed"]), "more"),
    "no weights": (lambda _, index: index["weight_map"].clear(), "names no weights"),
    "a number": (lambda _, index: index.update(weight_map=7), "weight_map"),
}


def swap(places: dict[str, str]) -> None:
    first, *_, last = places
    places[first], places[last] = places[last], places[first]


@pytest.mark.parametrize("form", BROKEN)
def test_an_index_that_is_not_so_is_refused(form, run, tmp_path):
    write_weights(tmp_path / "model.safetensors", average_of(run), {"format": "pt"}, 2_000_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change, message = BROKEN[form]
    change(tmp_path, index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message) as refusal:
        load_pretrained(tmp_path, "DiT-Ti/2")
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_link_out_of_the_folder_is_not_followed(run, tmp_path):
    (tmp_path / "w").mkdir()
    write_weights(tmp_path / "w" / "model.safetensors", average_of(run), {"format": "pt"}, 2_000_000)
    part = next((tmp_path / "w").glob("*-00001-of-*"))
    part.symlink_to(part.rename(tmp_path / "outside.safetensors"))
    with pytest.raises(ValueError, match="symbolic link out of"):
        load_pretrained(tmp_path / "w", "DiT-Ti/2")
