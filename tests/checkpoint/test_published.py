"""Public models' folders: how they are read, and that a wrong folder is refused in one line."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from opendit.checkpoint.foreign import open_published
from opendit.checkpoint.matched import DeviceReader, fill
from opendit.parallel.layout import Shard
from tests.checkpoint import published

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SINGLE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    return published.write_pipeline(tmp_path / "small", published.weights(), 3)


@pytest.mark.parametrize("files", [1, 4])
def test_weights_are_read_under_our_names(tmp_path, files):
    theirs = published.weights()
    folder = published.write_pipeline(tmp_path / "small", theirs, files)
    for named in (folder, folder / "transformer"):
        opened = open_published(named, published.FAMILIES)
        assert opened.family is published.FAMILY and opened.spec["single"] == 2
        assert (opened.index is None) == (named != folder) and opened.config["patch_size"] == 2
        tensors, expected = opened.tensors(published.shapes()), published.ours(theirs)
        assert tensors.keys() == expected.keys() and set(tensors.dtypes.values()) == {"BF16"}
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
            assert torch.equal(tensors.read(name, dtype=torch.float32), tensor.float())


def test_a_model_on_the_meta_device_is_filled(folder):
    opened = open_published(folder, published.FAMILIES)
    model, expected = published.network(), published.ours(published.weights())
    tensors = opened.tensors(published.shapes())
    fill(model, tensors)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected[name])
        parameter.data.zero_()  # the parameter must not share the file's memory
        assert torch.equal(tensors[name], expected[name])
    opened = open_published(folder, published.FAMILIES)
    fill(model, opened.tensors(published.shapes()))  # into allocated memory
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    model = published.network()
    fill(model, opened.tensors(published.shapes()), dtype=torch.float32)
    assert all(torch.equal(parameter, expected[name].float()) for name, parameter in model.named_parameters())
    del model.blocks[3].gate
    with pytest.raises(ValueError, match=r"small.*: of the model's weights, 1 are unexpected \(first: 'blocks.3.gate"):
        fill(model, opened.tensors(published.shapes()))


@pytest.mark.parametrize("size", [2, 48, 1 << 20])  # buffer size in bytes: one element, a few, everything
def test_pieces_through_the_buffers_are_the_tensor(folder, size):
    tensors = open_published(folder, published.FAMILIES).tensors(published.shapes())
    reader = DeviceReader(tensors, "cpu", otherwise=lambda name, shard: torch.full(shard.shape, 7.0), buffer_bytes=size)
    for name, tensor in published.ours(published.weights()).items():
        for slices in ((), ((0, ((1, 4),)),), ((None, ((5, 11),)),), ((None, ((0, 0),)),)):
            shard = Shard((), slices)
            shard = Shard(tuple(shard.take(tensor).shape), slices)
            assert torch.equal(reader.copied(name, shard), shard.take(tensor)), (name, slices)
            assert torch.equal(reader(f"_orig_mod.{name}", shard), shard.take(tensor))
    assert torch.equal(reader("lora_A", Shard((2,), ())), torch.full((2,), 7.0))


def test_the_hubs_cache_is_read_through_its_links(tmp_path):
    real = published.write_pipeline(tmp_path / "real", published.weights(), 2)
    snapshot = tmp_path / "models--org--small" / "snapshots" / ("0" * 40)
    (tmp_path / "models--org--small" / "blobs").mkdir(parents=True)
    for i, file in enumerate(sorted(path for path in real.rglob("*") if path.is_file())):
        link, blob = snapshot / file.relative_to(real), tmp_path / "models--org--small" / "blobs" / str(i)
        link.parent.mkdir(parents=True, exist_ok=True)
        os.rename(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for named in (snapshot, snapshot / "transformer"):
        tensors = open_published(named, published.FAMILIES).tensors(published.shapes())
        assert torch.equal(tensors["blocks.0.norm.weight"], published.weights()["transformer_blocks.0.norm.weight"])


# ------------------------------------------------------------------------------------------ what is refused


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    content.update(values)
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def rewrite(folder: Path, add=(), drop=(), **other) -> None:
    state = published.weights() | {name: torch.zeros(3) for name in add} | other
    file = next(iter(sorted((folder / "transformer").glob("*.safetensors"))))
    for old in (folder / "transformer").glob("*.safetensors*"):
        old.unlink()
    save_file({name: tensor for name, tensor in state.items() if name not in drop}, file.with_name(SINGLE))


def first_file(folder: Path) -> Path:
    return sorted((folder / "transformer").glob("*.safetensors"))[0]


def truncate(folder: Path) -> None:
    os.truncate(first_file(folder), first_file(folder).stat().st_size - 5)


def pickle_only(folder: Path) -> None:
    for old in (folder / "transformer").glob("*.safetensors*"):
        old.unlink()
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"x")


def link_out(path: Path) -> None:
    away = path.parents[2] / "elsewhere"
    os.rename(path, away)
    path.symlink_to(away)


def weight_map(folder: Path, change_map) -> None:
    path = folder / "transformer" / INDEX
    content = json.loads(path.read_text())
    change_map(content["weight_map"])
    path.write_text(json.dumps(content))


CONFIG = "transformer/config.json"
WRONG = {
    "no folder": (lambda f: os.rename(f, f.with_name("x")), "small: no public model there; give a folder with"),
    "no config": (lambda f: (f / CONFIG).unlink(), "small: no public model there; give a folder with transformer/"),
    "no json": (lambda f: (f / CONFIG).write_text("{"), "config.json is not JSON: "),
    "no class": (lambda f: change(f / CONFIG, _class_name="gone"), "config.json: _class_name is missing"),
    "other class": (
        lambda f: change(f / CONFIG, _class_name="Other"),
        "config.json: _class_name is 'Other'; read are SmallTransformer2DModel",
    ),
    "family refuses": (lambda f: change(f / CONFIG, patch_size=3), "config.json: patch_size 3 is not known"),
    "key is missing": (lambda f: change(f / CONFIG, num_layers="gone"), "config.json: 'num_layers' is missing"),
    "no number": (lambda f: change(f / CONFIG, num_layers="2"), "config.json: .*str"),
    "many layers": (lambda f: change(f / CONFIG, num_layers=10**6), "num_layers is 1000000; read are 0 to 1,024"),
    "large number": (lambda f: change(f / CONFIG, width=1 << 30), "width is 1073741824; read are"),
    "long list": (lambda f: change(f / CONFIG, axes=[1] * 5000), "axes is longer than 4,096"),
    "code": (lambda f: change(f / CONFIG, auto_map={"x": "y"}), "config.json: auto_map names code to run"),
    "quantised": (lambda f: change(f / CONFIG, quantization_config={"b": 4}), "quantization_config asks for a package"),
    "fewer layers": (
        lambda f: change(f / CONFIG, num_layers=1),
        r"index.json: of the weights of a SmallTransformer2DModel as config.json has it, 7 are unexpected \(first: "
        r"'transformer_blocks.1.norm.weight'\)",
    ),
    "other pipeline": (
        lambda f: change(f / "model_index.json", _class_name="Other"),
        "model_index.json: _class_name is 'Other', not SmallPipeline",
    ),
    "other component": (
        lambda f: change(f / "model_index.json", vae=["diffusers", "Other"]),
        "model_index.json: vae is 'diffusers', 'Other', not AutoencoderKL of diffusers",
    ),
    "no component": (lambda f: change(f / "model_index.json", vae="gone"), "model_index.json: vae is null, not"),
    "other transformer": (
        lambda f: change(f / "model_index.json", transformer=["evil", "Code"]),
        "model_index.json: transformer is a list of 2, not SmallTransformer2DModel of diffusers",
    ),
    "second network": (
        lambda f: change(f / "model_index.json", transformer_2=["diffusers", "SmallTransformer2DModel"]),
        "model_index.json: it has a second network, 'transformer_2'",
    ),
    "index elsewhere": (lambda f: link_out(f / "transformer" / INDEX), "index.json is a symbolic link out of"),
    "missing file": (lambda f: first_file(f).unlink(), "no diffusion_pytorch_model-00001-of-00003.safetensors in"),
    "no weights": (lambda f: [p.unlink() for p in (f / "transformer").glob("*.safe*")], f"no {SINGLE} in"),
    "truncated": (truncate, "00001-of-00003.safetensors is not a readable safetensors file"),
    "pickle only": (pickle_only, "only diffusion_pytorch_model.bin, and pickled weights are not read"),
    "both": (lambda f: save_file(published.weights(), f / "transformer" / SINGLE), "transformer holds both"),
    "names ../x": (
        lambda f: weight_map(f, lambda m: m.update({"patch_embedding.weight": "../x.safetensors"})),
        "index.json: weight_map.patch_embedding.weight is '../x.safetensors': it should be the plain name of a file",
    ),
    "empty index": (lambda f: weight_map(f, dict.clear), "index.json names no weights"),
    "index has less": (
        lambda f: weight_map(f, lambda m: m.pop("patch_embedding.weight")),
        "index.json does not say that .*safetensors holds 'patch_embedding.weight'",
    ),
    "index has more": (
        lambda f: weight_map(f, lambda m: m.update(more=first_file(f).name)),
        "index.json: 'more' is not in the file that it names",
    ),
    "link out": (lambda f: link_out(first_file(f)), "00001-of-00003.safetensors is a symbolic link out of"),
    "config elsewhere": (lambda f: link_out(f / CONFIG), "config.json is a symbolic link out of"),
    "extra": (
        lambda f: rewrite(f, add=["other.weight"]),
        r"diffusion_pytorch_model.safetensors: of the weights .*, 1 are unexpected \(first: 'other.weight'\)",
    ),
    "missing": (
        lambda f: rewrite(f, drop=["single_blocks.1.up.weight"]),
        r"1 are missing \(first: 'single_blocks.1.up.weight'\)",
    ),
    "integers": (
        lambda f: rewrite(f, **{"single_blocks.1.up.weight": torch.zeros(3, dtype=torch.int64)}),
        "'single_blocks.1.up.weight' holds I64; weights are one of",
    ),
    "shape": (
        lambda f: rewrite(f, **{"transformer_blocks.0.norm.weight": torch.zeros(13)}),
        r"model.safetensors: 'transformer_blocks.0.norm.weight' has the shape \(13,\), and blocks.0.norm.weight has "
        r"\(12,\)",
    ),
    "transposed": (
        lambda f: rewrite(f, **{"patch_embedding.weight": torch.zeros(6, 24)}),
        r"'patch_embedding.weight' has the shape \(6, 24\), and x_embedder.weight has \(12, 12\)",
    ),
    "joined shape": (
        lambda f: rewrite(f, **{"transformer_blocks.1.to_v.weight": torch.zeros(12, 11)}),
        r"'transformer_blocks.1.to_v.weight' \(12, 11\) joined along 0 do not fit blocks.1.qkv.weight \(36, 12\)",
    ),
    "joined size": (
        lambda f: rewrite(f, **{"transformer_blocks.1.to_v.weight": torch.zeros(11, 12)}),
        "joined along 0 do not fit blocks.1.qkv.weight",
    ),
    "split size": (
        lambda f: rewrite(f, **{"single_blocks.0.proj_out.weight": torch.zeros(12, 35)}),
        r"'single_blocks.0.proj_out.weight' \(12, 35\) joined along 1 do not fit blocks.2.proj.weight \(12, 12\), "
        r"blocks.2.fc2.weight \(12, 24\)",
    ),
    "fewer dimensions": (
        lambda f: rewrite(f, **{"single_blocks.0.proj_out.weight": torch.zeros(12)}),
        r"'single_blocks.0.proj_out.weight' \(12,\) joined along 1 do not fit",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_folder_is_refused_in_one_line(folder, what):
    spoil, message = WRONG[what]
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        open_published(folder, published.FAMILIES).tensors(published.shapes())
    said = str(raised.value)
    assert "\n" not in said and said.startswith((str(folder), "no ")) and len(said) < 700


def test_damaged_bytes_are_refused_in_one_line_or_do_no_harm(folder):
    files = [folder / "model_index.json", *sorted((folder / "transformer").iterdir())]
    content, chance, outcomes = {path: path.read_bytes() for path in files}, random.Random(0), Counter()
    for _ in range(250):
        path = chance.choice(files)
        changed = bytearray(content[path])
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(min(len(changed), 1500))
            instead = chance.choice(
                (b"9", b"[", b"{", b"null", b"1e9", b'"', b"-", b"", bytes([chance.randrange(256)]))
            )
            changed[at : at + chance.randrange(3)] = instead
        path.write_bytes(changed)
        try:
            tensors = open_published(folder, published.FAMILIES).tensors(published.shapes())
            outcomes[all(tensor.numel() for tensor in tensors.values())] += 1
        except (ValueError, OSError) as error:
            assert "\n" not in str(error) and len(str(error)) < 900
            outcomes[type(error)] += 1
        path.write_bytes(content[path])
    assert outcomes[True] and outcomes[ValueError] > 150


def test_names_that_a_family_has_twice_or_not_at_all_are_refused(folder):
    opened = open_published(folder, published.FAMILIES)
    with pytest.raises(ValueError, match=r"of our weights, 1 are unexpected \(first: 'more'\)"):
        opened.tensors(published.shapes() | {"more": (1,)})
    with pytest.raises(ValueError, match=r"of our weights, 1 are missing \(first: 'blocks.0.norm.weight'\)"):
        opened.tensors({k: v for k, v in published.shapes().items() if k != "blocks.0.norm.weight"})


# ------------------------------------------------------------------------------------------ memory

MEASURED = """
import sys, threading
from opendit.checkpoint.matched import DeviceReader, fill
from opendit.checkpoint.foreign import open_published
from opendit.parallel.layout import Shard
from tests.checkpoint import published

def read(field, file="/proc/self/status"):
    return sum(int(line.split()[1]) << 10 for line in open(file) if line.startswith(field))

def mapped():
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if line[0] in "0123456789abcdef":
            inside = line.rstrip().endswith(".safetensors")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total

width, rank, ranks = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
shapes = published.shapes(width)
opened = open_published(sys.argv[1], published.FAMILIES)
tensors = opened.tensors(shapes)
before, most, held = read("RssAnon"), 0, []
stop = threading.Event()

def watch():
    global most
    while not stop.wait(0.002):
        most = max(most, read("RssAnon"))

thread = threading.Thread(target=watch)
thread.start()
opened_mapped = mapped()
if ranks == 1:
    model = published.network(width)
    fill(model, tensors)
    held = list(model.parameters())
else:
    reader = DeviceReader(tensors, "cpu")
    for name, shape in shapes.items():
        edges = [i * shape[0] // ranks for i in (rank, rank + 1)]
        shard = Shard((edges[1] - edges[0], *shape[1:]), ((0, (tuple(edges),)),))
        held.append(reader(name, shard).float())
stop.set()
thread.join()
size = sum(tensor.nbytes for tensor in held)
print(size, most - before - size, opened_mapped, mapped(), sum(t.nbytes for t in opened.files.values()))
"""


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_more_memory_than_the_shards_and_no_more_of_the_files_than_the_rank_needs(tmp_path, ranks):
    width = 2048
    folder = published.write_pipeline(tmp_path / "large", published.weights(width), 3)
    argv = [sys.executable, "-c", MEASURED, str(folder), str(width), str(ranks // 2), str(ranks)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    size, above, at_first, mapped, whole = map(int, done.stdout.split())
    assert whole > 150e6
    assert abs(size / (1 if ranks == 1 else 2) - whole / ranks) < 1e5  # the rank's copies are in fp32
    assert above < 50 << 20  # the largest shard made from several pieces, and its fp32 copy
    assert at_first < 2 << 20
    # A page fault maps up to 2 MiB at either end of a range, and there are 10 large tensors.
    assert mapped < whole / ranks + 10 * (4 << 20)
