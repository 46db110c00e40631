"""A thousand damaged files are either read or refused in one line that names the file.

Reading may not raise another exception, take more than 5 seconds or use more than 1 GB. hypothesis derives the same
changes in every run: other types and sizes, missing, extra or duplicate keys, nesting, and changed bytes.
"""

import copy
import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.checkpoint.run_folders import MANIFEST
from opendit.checkpoint.tensor_set import damage, read_state, write_manifest
from opendit.common.utils import DataError
from opendit.data import SampleKey, build_dataset
from opendit.data.latents import read_header
from opendit.data.make_latents import make_latents
from opendit.encoders import VAECodec, codec_geometry, load_codec
from opendit.encoders.text import load_text_encoder, text_geometry
from opendit.export.conversion import import_weights
from opendit.models.dit import DiTConfig
from opendit.models.zoo import build_model
from tests.encoders.test_text import save_clip
from tests.encoders.test_vae import small_vae
from tests.models.test_dit import randomised

# Kind of file -> number of damaged files that are read.
EXAMPLES = {
    "metadata": 300, "lora": 60, "weights": 150, "pickle": 100, "manifest": 120, "state": 120, "index": 120,
    "shard": 80, "vae": 80, "clip": 60, "tokenizer": 20, "vae weights": 20, "pipeline": 40,
}  # fmt: skip
TINY = DiTConfig(
    input_size=(4, 4),
    patch_size=2,
    in_channels=1,
    hidden_size=8,
    depth=1,
    num_heads=2,
    num_classes=2,
    norm="rms",
    mlp="swiglu",
)
STATE = {
    "version": 2, "model": "DiT-Ti/2", "step": 10, "epoch": 0, "skipped": 0, "optimizer_steps": 10, "world_size": 1,
    "scaler": {"scale": 65536.0, "growth": 3}, "plugin": "zero2", "precision": "fp16", "fp8": False,
    "attention": "sdpa", "ema": {"files": {"ema.safetensors": 0.9999}, "updates": 10}, "sequence_parallel": None,
    "global_batch": 8, "seed": 0, "objective": {"name": "flow", "shift": 3.0},
}  # fmt: skip

# ------------------------------------------------------------------------------------------ changes

HOSTILE = [
    None, True, False, 0, -1, 1, 7, 65536, 2**31, 10**9, 10**12, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e308, "",
    "x", "10", "a\nb", "\ud800", "\0", "../../x", "/etc/passwd", "x" * 10_000, [], [0], [[]], [None] * 1000, {},
    {"a": 1}, {"__class__": "x"}, [[[[[[[[]]]]]]]], [10**9] * 3, {"kind": "vdit"}, ["a", 1],
]  # fmt: skip
# Text that json.dumps does not write; it replaces a string.
RAW = ["NaN", "-Infinity", "1e999", "[" * 3000, '{"a": 1, "a": 2}', "9" * 1000, "tru", "", "'x'", '"\\ud800"', "\x07"]


def hostile():
    return st.sampled_from(HOSTILE).map(copy.deepcopy)  # later changes may modify it


def places(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


@st.composite
def changed_json(draw, original):
    """Draw ``original`` as JSON bytes after one to three changes."""
    tree, raw = json.loads(json.dumps(original)), None
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([place for place in places(tree) if place] or [("",)]))
        inner = tree
        for key in path:
            inner = inner[key]
        how = draw(st.sampled_from(["replace"] * 4 + ["delete", "add", "wrap", "raw"]))
        if how == "replace":
            inner[last] = draw(hostile() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9))
        elif how == "delete" and isinstance(inner, dict):
            del inner[last]
        elif how == "add" and isinstance(inner, dict):
            inner[draw(st.sampled_from(["more", "", "__init__", "a\nb", "x" * 300]))] = draw(hostile())
        elif how == "wrap":
            inner[last] = draw(st.sampled_from([[inner[last]], {"a": inner[last]}, [inner[last]] * 2]))
        else:
            inner[last], raw = "@RAW@", draw(st.sampled_from(RAW))
        if not tree:
            break
    text = json.dumps(tree)
    if raw is not None:
        text = text.replace('"@RAW@"', raw)
    content = text.encode("utf-8", "surrogatepass")
    return draw(changed_bytes(content)) if draw(st.integers(0, 4)) == 0 else content


@st.composite
def changed_bytes(draw, content):
    """Draw ``content`` with bytes cut off, flipped, removed or inserted, mostly near the beginning."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.sampled_from([8, 64, 1024, len(content)]))
        at = draw(st.integers(0, max(0, min(end, len(content)) - 1)))
        how = draw(st.sampled_from(["flip"] * 4 + ["cut", "drop", "insert", "double"]))
        if how == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del content[at:]
        elif how == "drop":
            del content[at : at + draw(st.integers(1, 40))]
        elif how == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=40))
        else:
            content[at:at] = content[at : at + 200]
    return bytes(content)


# ------------------------------------------------------------------------------------------ the trial


def peak_gb() -> float:
    """Return this process's peak virtual memory in GB."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1e6


def try_all(kind, strategy, put, read, folder):
    """Read EXAMPLES[kind] damaged files; return how many were refused."""
    tried, refused = [], []
    read()  # read the original first, so that imports and caches are not counted

    @settings(
        max_examples=EXAMPLES[kind], deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def trial(content):
        put(content)
        before, started = peak_gb(), time.monotonic()
        try:
            read()
        except Exception as error:
            assert isinstance(error, ValueError | FileNotFoundError | DataError), f"{type(error).__name__}: {error}"
            message = str(error)
            assert "\n" not in message and str(folder) in message and len(message) < 2500, message
            assert "weights_only" not in message
            refused.append(message)
        assert time.monotonic() - started < 5 and peak_gb() - before < 1
        tried.append(content)

    trial()
    assert len(tried) >= EXAMPLES[kind]
    assert len(refused) > len(tried) / 3  # enough of the changes matter
    return len(refused)


def test_there_are_enough_of_them():
    assert sum(EXAMPLES.values()) >= 1000


# ------------------------------------------------------------------------------------------ weights


def info(**more) -> dict:
    return {
        "model": "DiT-Ti/2", "objective": {"name": "edm", "mean": -1.2}, "vae": "none",
        "config": TINY.to_dict() | {"patch_bottleneck": None, "alignment": None, "sprint": None, "uncertainty": False},
        "class_names": ["a", "b"], "captions": [], "text_encoder": None, "image_size": 4, "step": 3,
        "version": 2, **more,
    }  # fmt: skip


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    state = randomised(build_model(TINY)).state_dict()

    def write(metadata=None, tensors=None, name="w.safetensors"):
        text = json.dumps(info()) if metadata is None else metadata
        save_file(state if tensors is None else tensors, tmp_path / name, metadata={METADATA_KEY: text})
        return tmp_path / name

    write.state = state
    return write


def test_metadata(weights, tmp_path):
    path = weights()

    def put(content):
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # safetensors only writes text; test_weights changes the bytes
            text = content.decode("latin-1")
        weights(text)

    try_all("metadata", changed_json(info()), put, lambda: load_pretrained(path), tmp_path)


def test_lora(weights, tmp_path):
    base, layer = weights(), "blocks.0.attn.qkv"
    lora = {f"{layer}.lora_A.default.weight": torch.ones(2, 8), f"{layer}.lora_B.default.weight": torch.ones(24, 2)}
    original = info(lora={"rank": 2, "alpha": 2.0, "base": str(base)})
    path = weights(json.dumps(original), lora, "lora.safetensors")

    def put(content):
        weights(content.decode("utf-8", "replace"), lora, "lora.safetensors")

    try_all("lora", changed_json(original), put, lambda: load_pretrained(path), tmp_path)


def test_weights(weights, tmp_path):
    path = weights()
    try_all("weights", changed_bytes(path.read_bytes()), path.write_bytes, lambda: load_pretrained(path), tmp_path)


def test_pickle(weights, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(weights.state, path)

    def read():
        try:
            load_pretrained(path, "DiT-Ti/2")
        except ValueError as error:
            if "--model DiT-Ti/2: does not fit" in str(error):  # as for the original, which stores no name
                return
            raise

    try_all("pickle", changed_bytes(path.read_bytes()), path.write_bytes, read, tmp_path)


# ------------------------------------------------------------------------------------------ checkpoints


def test_manifest(tmp_path):
    files = {}
    for name in ("model.safetensors", "ema.safetensors", "optimizer_000.safetensors", "state.json"):
        (tmp_path / name).write_text(name)
        files[name] = {"bytes": len(name), "sha256": "0" * 64}
    write_manifest(tmp_path, 2, files)
    path = tmp_path / MANIFEST
    original = json.loads(path.read_text())

    def read():
        problem = damage(tmp_path)  # returns the problem as text
        if problem and str(path) in problem:
            raise ValueError(problem)

    try_all("manifest", changed_json(original), path.write_bytes, read, tmp_path)


def test_state(tmp_path):
    path = tmp_path / "step_0000010" / "state.json"
    path.parent.mkdir()
    path.write_text(json.dumps(STATE))
    try_all("state", changed_json(STATE), path.write_bytes, lambda: read_state(path.parent), tmp_path)


# ------------------------------------------------------------------------------------------ cached latents


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("latents"), build_dataset("digits", 8, seed=0)
    data.images, data.labels = data.images[:9], data.labels[:9]
    codec = VAECodec(small_vae(), name="ema")
    make_latents(data, codec, folder, image_size=8, flips=False, batch_size=9, num_workers=0, shard_size=5)
    return folder


def read_latents(folder):
    data = build_dataset(str(folder), 8, seed=0)
    for row in range(0, len(data), 4):
        assert data[SampleKey(row, 0, 0)].x.shape == data.sample_shape
    data.describe()


def test_index(latents):
    path = latents / "index.json"
    original = path.read_bytes()
    try:
        try_all("index", changed_json(json.loads(original)), path.write_bytes, lambda: read_latents(latents), latents)
    finally:
        path.write_bytes(original)


def test_shard(latents):
    """The index has the damaged shard's size, as if the shard had been written like this."""
    index, path = latents / "index.json", latents / "latents-8-00001-of-00002.tar"
    originals = index.read_bytes(), path.read_bytes()

    def put(content):
        path.write_bytes(content)
        said = json.loads(originals[0])
        said["sizes"][0]["shards"][1]["bytes"] = len(content)
        index.write_text(json.dumps(said))

    def read():
        header = read_header(path)
        assert header is None or isinstance(header[1], dict)
        read_latents(latents)

    try:
        try_all("shard", changed_bytes(originals[1][:1500]).map(lambda c: c + originals[1][1500:]), put, read, latents)
    finally:
        index.write_bytes(originals[0])
        path.write_bytes(originals[1])


# ------------------------------------------------------------------------------------------ folders of encoders


def test_vae_config(tmp_path):
    small_vae().save_pretrained(tmp_path)
    path, loads = tmp_path / "config.json", []

    def read():
        codec_geometry(str(tmp_path), 3)
        if len(loads) < 40:  # each load takes a moment
            loads.append(load_codec(str(tmp_path), channels=3, device="cpu"))

    try_all("vae", changed_json(json.loads(path.read_text())), path.write_bytes, read, tmp_path)


def test_vae_weights(tmp_path):
    small_vae().save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"

    def read():
        load_codec(str(tmp_path), channels=3, device="cpu")

    try_all("vae weights", changed_bytes(path.read_bytes()), path.write_bytes, read, tmp_path)


def test_clip_config(tmp_path):
    save_clip(tmp_path)
    path, loads = tmp_path / "config.json", []

    def read():
        text_geometry(str(tmp_path))
        if len(loads) < 30:
            loads.append(load_text_encoder(str(tmp_path), device="cpu").encode(["a"]))

    try_all("clip", changed_json(json.loads(path.read_text())), path.write_bytes, read, tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_tokenizer(file, tmp_path):
    save_clip(tmp_path)
    path = tmp_path / file
    original = json.loads(path.read_text())
    try_all(
        "tokenizer", changed_json(original), path.write_bytes,
        lambda: load_text_encoder(str(tmp_path), device="cpu"), tmp_path,
    )  # fmt: skip


def test_pipeline(tmp_path):
    """The export reads the configuration of a diffusers pipeline."""
    folder = tmp_path / "pipeline"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"id2label": {"0": "a", "1": "b"}}))
    original = {
        "_class_name": "DiTTransformer2DModel", "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4,
        "patch_size": 2, "sample_size": 8, "in_channels": 4, "num_embeds_ada_norm": 1000,
    }  # fmt: skip
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(original))

    def read():
        try:
            import_weights(str(folder), tmp_path / "out.safetensors", None, None)
        except ValueError as error:
            if "has no .safetensors file" in str(error):  # as for the original
                return
            raise

    try_all("pipeline", changed_json(original), path.write_bytes, read, tmp_path)


def test_a_configuration_of_every_kind_of_field_is_changed():
    """The metadata above has all fields of the dataclass from which the schema is derived."""
    assert {field.name for field in dataclasses.fields(DiTConfig)} <= set(info()["config"])
