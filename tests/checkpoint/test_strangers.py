"""sample.py, train.py and the export refuse untrusted files in one line, and run no code from them."""

import json
import os
import pickle
import resource
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

import opendit
import opendit.export.__main__ as export
import sample
import train
from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import build_model, model_config
from tests.encoders.test_text import save_clip
from tests.encoders.test_vae import small_vae
from tests.models.test_dit import randomised

SIZES = dict(input_size=(8, 8), in_channels=4)
DRAW = "--num_samples 1 --num_sampling_steps 2 --cfg_scale 1 --no_save_png".split()


def write(path, *, info=None, text=None, changes=None, **config):
    """Write a DiT-Ti/2's weights with metadata; ``changes`` replaces tensors."""
    condition = {"text": text} if text else {"num_classes": 3}
    config = model_config("DiT-Ti/2", **{**SIZES, **condition, **config})
    state = randomised(build_model(config)).state_dict()
    state.update(changes or {})
    info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 8, **(info or {})}
    save_file(state, path, metadata={METADATA_KEY: json.dumps(info)})
    return path


def refused(main, argv, capsys, code=2) -> str:
    """Return the one line with which a program ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    told = capsys.readouterr().err.strip() or str(stop.value)
    assert stop.value.code == code
    assert told.count("\n") == 0 and "error: " in told and "Traceback" not in told, told
    return told


def draw(ckpt, tmp_path, capsys, *more) -> str:
    return refused(sample.main, ["--ckpt", ckpt, "--output", tmp_path / "drawn", *DRAW, *more], capsys)


# ------------------------------------------------------------------------------------------ what only a file names


def test_a_vae_that_only_the_metadata_names_is_not_loaded(tmp_path, no_ranks, capsys, monkeypatch):
    vae = tmp_path / "their vae"
    small_vae().save_pretrained(vae)
    ckpt = write(tmp_path / "w.safetensors", info={"vae": str(vae)})
    with monkeypatch.context() as patch:
        patch.setattr("opendit.sampling.model_loading.codec_geometry", lambda *_: pytest.fail("looked at"))
        assert draw(ckpt, tmp_path, capsys).endswith(f"if you trust it, add --vae '{vae}'")
    both = write(tmp_path / "both.safetensors", info={"vae": "a", "text_encoder": "b c"})  # both names in one message
    assert draw(both, tmp_path, capsys).endswith("if you trust it, add --vae a --text_encoder 'b c'")
    with pytest.raises(ValueError, match="if you trust it, add vae='a', text_encoder='b c'$"):
        opendit.load(both)
    with pytest.raises(ValueError, match=f"if you trust it, add vae='{vae}'$"):  # as it can be typed in Python
        opendit.load(ckpt)
    capsys.readouterr()
    sample.main(["--ckpt", str(ckpt), "--output", str(tmp_path / "drawn"), *DRAW, "--vae", str(vae)])
    assert (tmp_path / "drawn" / "grid.png").exists()
    told = refused(export.main, ["diffusers", "--ckpt", ckpt, "--output", tmp_path / "never"], capsys)
    assert told.endswith(f"if you trust it, add --vae '{vae}'") and not (tmp_path / "never").exists()
    for name in ("someone/else", "../x", "a\nb"):
        told = draw(write(tmp_path / "w.safetensors", info={"vae": name}), tmp_path, capsys)
        assert "what only a file names is not loaded" in told


def test_a_text_encoder_that_only_the_metadata_names_is_not_loaded(tmp_path, no_ranks, capsys, monkeypatch):
    clip = tmp_path / "clip"
    save_clip(clip)
    text = TextConfig("clip", 24, 12)
    monkeypatch.setattr("opendit.encoders.folder.probe_hub", lambda endpoint: pytest.fail("asked the hub"))
    for stored in (str(clip), "someone/else", f"someone/else@{'0' * 40}"):
        ckpt = write(tmp_path / "w.safetensors", text=text, info={"text_encoder": stored})
        assert f"add --text_encoder {stored}" in draw(ckpt, tmp_path, capsys)
    ckpt = write(tmp_path / "w.safetensors", text=TextConfig("someone/else", 24, 12))
    assert "add --text_encoder someone/else" in draw(ckpt, tmp_path, capsys)
    ckpt = write(tmp_path / "w.safetensors", text=text, info={"text_encoder": str(clip)})
    argv = ["--ckpt", str(ckpt), "--output", str(tmp_path / "drawn"), *DRAW, "--prompt", "a seven"]
    sample.main([*argv, "--text_encoder", str(clip)])
    ckpt = write(tmp_path / "w.safetensors", text=TextConfig("clip", 32, 12))
    assert "a clip of width 24" in draw(ckpt, tmp_path, capsys, "--text_encoder", clip)


# ------------------------------------------------------------------------------------------ metadata and shapes


def large(**values):
    def of(info):
        info["config"].update(values)

    return of


def drop(key):
    return lambda info: info["config"].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (large(hidden_size=10**9), "config.hidden_size is 1000000000"),
        (large(hidden_size=65536, num_heads=64), "does not hold the model that its configuration describes"),
        (large(depth=1000), "does not hold the model that its configuration describes"),
        (large(num_classes=10_000_000), "does not hold the model that its configuration describes"),
        (large(input_size=[2048, 2048]), "1 of another shape (first: pos_embed)"),
        (large(depth=3), "unexpected (first: blocks.3."),
        (large(num_heads=0), "config.num_heads is 0"),
        (large(patch_size=4, input_size=[16, 16]), "of another shape|does not hold the model"),
        (large(positions="learned"), "does not hold the model|missing"),
        (large(hidden_size=None), "config.hidden_size is null"),
        (large(secret=1), "config.secret is not known"),
        (drop("depth"), "config.depth is missing"),
    ],
)
def test_a_configuration_is_compared_with_the_shapes_before_a_model_is_made(
    change, message, tmp_path, no_ranks, capsys, monkeypatch
):
    path = write(tmp_path / "w.safetensors")
    state, config = load_file(path), model_config("DiT-Ti/2", **SIZES, num_classes=3).to_dict()
    info = {"model": "DiT-Ti/2", "config": json.loads(json.dumps(config)), "vae": "none"}
    change(info)
    save_file(state, path, metadata={METADATA_KEY: json.dumps(info)})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr("opendit.checkpoint.pretrained.empty_model", lambda *_: pytest.fail("a model was made"))
    told = [draw(path, tmp_path, capsys)]
    start = ["--model", "DiT-Ti/2", "--image_size", "8", "--vae", "none", "--num_workers", "0", "--outputs", tmp_path]
    told += [refused(train.main, [*start, "--pretrained", path], capsys)]
    told += [refused(export.main, ["meta", "--ckpt", path, "--output", tmp_path / "never.pt"], capsys)]
    for line in told:
        assert str(path) in line and any(part in line for part in message.split("|")), line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000  # KiB
    assert not (tmp_path / "never.pt").exists()


def test_metadata_that_is_no_json_object(tmp_path, no_ranks, capsys):
    path = write(tmp_path / "w.safetensors")
    state = load_file(path)
    for text in (
        "",
        "{",
        "[]",
        "null",
        "1",
        '{"step": NaN}',
        '{"vae": "a", "vae": "b"}',
        "[" * 100_000,
        '{"lora": {}}',
    ):
        save_file(state, path, metadata={METADATA_KEY: text})
        assert str(path) in draw(path, tmp_path, capsys)


def test_files_that_are_no_safetensors(tmp_path, no_ranks, capsys):
    path, whole = tmp_path / "w.safetensors", write(tmp_path / "whole.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    headers = [whole[:8] + b"[" * header, b"\xff" * 8 + whole[8 : 8 + header], (1 << 40).to_bytes(8, "little")]
    cut = [b"", b"\0" * 7, whole[:100], whole[:-1], whole + b"\0"]
    for content in [*cut, *(start + whole[len(start) :] for start in headers)]:
        path.write_bytes(content)
        assert f"{path} is not a readable safetensors file" in draw(path, tmp_path, capsys)
    path.unlink()
    os.mkfifo(path)
    assert "no checkpoint there" in draw(path, tmp_path, capsys)
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.bool):
        path.unlink(missing_ok=True)
        write(path, changes={"blocks.0.attn.qkv.bias": torch.zeros(384).to(dtype)})
        assert "blocks.0.attn.qkv.bias' holds" in draw(path, tmp_path, capsys)


# ------------------------------------------------------------------------------------------ LoRA


def test_what_lora_adds_must_fit_and_its_base_be_a_regular_file(tmp_path, no_ranks, capsys, monkeypatch):
    base, path = write(tmp_path / "base.safetensors"), tmp_path / "lora.safetensors"
    layer, config = "blocks.0.attn.qkv", model_config("DiT-Ti/2", **SIZES, num_classes=3)
    a, b = f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"
    right = {a: torch.randn(2, 128), b: torch.randn(384, 2)}

    def lora(state, base=base, **changes):
        values = {**config.to_dict(), **changes}
        lora = {"rank": 2, "alpha": 2.0, "base": str(base)}
        info = {"model": "DiT-Ti/2", "config": values, "vae": "none", "image_size": 8, "lora": lora}
        save_file(state, path, metadata={METADATA_KEY: json.dumps(info)})

    lora(right)
    load_pretrained(path)
    monkeypatch.setattr("opendit.checkpoint.pretrained.empty_model", lambda *_: pytest.fail("a model was made"))
    for state in (
        {**right, a: torch.randn(3, 128)},
        {**right, b: torch.randn(128, 2)},
        {a: right[a]},
        {**right, "blocks.9.attn.qkv.lora_A.default.weight": torch.randn(2, 128)},
        {**right, "final_layer.linear.weight": torch.randn(500, 500)},
        {**right, "evil": torch.randn(1)},
    ):
        lora(state)
        assert "fits no layer of the model" in draw(path, tmp_path, capsys)
    lora(right, hidden_size=65536, num_heads=64)
    assert "is another model (hidden_size 128 there, 65536 here" in draw(path, tmp_path, capsys)
    os.mkfifo(tmp_path / "fifo.safetensors")
    for place in (tmp_path / "fifo.safetensors", tmp_path, "/dev/zero", "/no/where"):
        lora(right, base=place)
        assert "which is not there" in draw(path, tmp_path, capsys)


# ------------------------------------------------------------------------------------------ pickles


class Call:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what[0], self.what[1:]


def pickled(tmp_path, name, content, protocol=None):
    path = tmp_path / name
    if protocol is None:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def test_a_pickle_s_refusal_names_the_file_and_the_call_and_gives_no_bad_advice(
    tmp_path, no_ranks, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    harm = Call(open, "evil-was-here", "w")
    command = Call(os.system, "touch evil-was-here")
    files = [
        pickled(tmp_path, f"{i}-{p}.pt", {"x": call}, p)
        for p in (None, 0, 2, 4, 5)
        for i, call in enumerate((harm, command))
    ]
    files += [pickled(tmp_path, "dict.pt", OrderedDict(x=command))]
    for path in files:
        told = draw(path, tmp_path, capsys, "--model", "DiT-Ti/2")
        refused = f"{path} is refused: it would run code when loaded (" in told and (
            "open)" in told or "system)" in told
        )
        assert refused or f"{path} is no .pt file of weights" in told  # torch can't read old protocols at all
        assert "weights_only" not in told and "trusted" not in told and "torch.load" not in told
    assert not (tmp_path / "evil-was-here").exists()


def meta_state(**changes):
    return {**randomised(build_model(model_config("DiT-Ti/2", **SIZES, num_classes=3))).state_dict(), **changes}


def test_pickles_that_hold_no_weights(tmp_path, no_ranks, capsys):
    table, name = "y_embedder.embedding_table.weight", "blocks.0.attn.qkv.bias"
    huge = torch.zeros(1).expand(10**9, 128)
    contents = {
        "is of shape": {"pos_embed": torch.zeros(4)},
        "is of shape |not fit": {"x_embedder.proj.weight": torch.zeros(128, 4, 2)},
        "share memory": {table: huge},
        "larger than the file": {name: torch.zeros(1).expand(10**12)},
        "is a tensor of": {name: torch.zeros(384, dtype=torch.complex64)},
        "is a tensor of int64": {name: torch.zeros(384, dtype=torch.int64)},
        "is a tensor of float32, sparse": {name: torch.zeros(384).to_sparse()},
        "is a tensor of float32, strided, on meta": {name: torch.zeros(384, device="meta")},
        "no parameter's name": {5: torch.zeros(1)},
        "does not fit": {"blocks.x.y": torch.zeros(1)},
    }
    for message, change in contents.items():
        path = pickled(tmp_path, "w.pt", {**meta_state(), **change})
        told = draw(path, tmp_path, capsys, "--model", "DiT-Ti/2", "--vae", "none")
        assert str(path) in told and "\n" not in told and any(part in told for part in message.split("|")), (
            message,
            told,
        )
    for content in (
        1,
        [],
        {},
        None,
        {"a": 1},
        {"ema": 3, "model": 4},
        {"x_embedder.proj.weight": [1.0]},
        torch.zeros(3),
    ):
        path = pickled(tmp_path, "w.pt", content)
        assert "holds no state dict" in draw(path, tmp_path, capsys, "--model", "DiT-Ti/2")
    for content in (b"", b"\x80", b"PK\x03\x04", os.urandom(2000)):
        path.write_bytes(content)
        assert f"{path} is no .pt file of weights, or is damaged" in draw(path, tmp_path, capsys, "--model", "DiT-Ti/2")


def test_archives_that_unpack_to_more_than_they_are(tmp_path, no_ranks, capsys):
    path = pickled(tmp_path, "w.pt", meta_state())
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert "is a compressed archive" in draw(bomb, tmp_path, capsys, "--model", "DiT-Ti/2")
    cut = tmp_path / "cut.pt"  # the pickle claims more than its storages hold
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(cut, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            content = source.read(entry)
            target.writestr(entry.filename, content[:16] if "/data/" in entry.filename else content)
    assert f"{cut} is no .pt file of weights, or is damaged" in draw(cut, tmp_path, capsys, "--model", "DiT-Ti/2")
    old = tmp_path / "old.pt"
    torch.save(meta_state(), old, _use_new_zipfile_serialization=False)
    assert load_pretrained(old, "DiT-Ti/2")[0].config.num_classes == 3  # the format before torch 1.6 is read too
