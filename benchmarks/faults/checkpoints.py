"""Faults: damaged checkpoints, and forged checkpoints with correct checksums.

If the newest checkpoint is damaged, ``--load PATH`` must refuse it, and ``--load latest`` must resume from the
checkpoint before it. Every program that reads a forged checkpoint must refuse it with one line, before allocating
memory for it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.faults.lab import RUN, Lab, add, differing, fault
from opendit.checkpoint.run_folders import MANIFEST
from opendit.checkpoint.tensor_set import write_manifest

MODEL, AVERAGE, MOMENTS, STATE = "model.safetensors", "ema.safetensors", "optimizer_000.safetensors", "state.json"


# ------------------------------------------------------------------------------------------ damage


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def damaged(file: str, harm: Callable[[Path], None]) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        newest = lab.prepared()
        harm(newest / file)
        lab.refused(lab.train("--load", newest), f"error: .*{file}")
        lab.goes_on(lab.train("--load", "latest"), 0, f"(step_0000012|latest).*{file}")
        lab.same_weights()

    return make


for _what, _harm in {"a bit flipped": flip, "half of it": truncate, "no byte": empty, "missing": Path.unlink}.items():
    for _file in (MODEL, AVERAGE, MOMENTS, STATE, MANIFEST):
        _form = "is missing" if _what == "missing" else f"has {_what}" + (" only" if _what == "half of it" else "")
        _name = f"{_what.replace(' ', '_')}_{_file.split('.')[0]}"
        add(_name, "checkpoints", f"the newest checkpoint's {_file} {_form}", damaged(_file, _harm))


@fault("every checkpoint of the run is damaged")
def all_damaged(lab: Lab) -> None:
    newest = lab.prepared()
    for folder in newest.parent.glob("step_*"):
        truncate(folder / MODEL)
    lab.refused(lab.train("--load", "latest"), "error: .*(damaged|intact)")


@fault("the link latest leads nowhere")
def latest_dangles(lab: Lab) -> None:
    newest = lab.prepared()
    link = newest.parent / "latest"
    link.unlink()
    link.symlink_to("step_9999999")
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.same_weights()


# ------------------------------------------------------------------------------------------ forgeries


def seal(folder: Path, **more: dict) -> None:
    """Write a manifest that matches a checkpoint's files."""
    entries = {}
    for path in folder.iterdir():
        if path.name != MANIFEST and path.is_file():
            entries[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    write_manifest(folder, json.loads((folder / MANIFEST).read_text())["version"], {**entries, **more})


def with_header(path: Path, change: Callable[[dict], dict | bytes]) -> None:
    """Rewrite the header of a safetensors file. ``change`` returns the new header, as JSON or as bytes."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    made = change(json.loads(content[8 : 8 + size]))
    text = made if isinstance(made, bytes) else json.dumps(made).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def with_metadata(path: Path, change: Callable[[dict], dict | str]) -> None:
    """Rewrite the metadata of a weights file."""

    def of_header(header: dict) -> dict:
        made = change(json.loads(header["__metadata__"]["opendit"]))
        return {**header, "__metadata__": {"opendit": made if isinstance(made, str) else json.dumps(made)}}

    with_header(path, of_header)


def config(**changes: object) -> Callable[[dict], dict]:
    """Return a function that changes the model's configuration in the metadata."""
    return lambda info: {**info, "config": {**info["config"], **changes}}


READERS = ("load", "sample", "pretrained")


def forged(harm: Callable[[Path], None], says: str, readers: Sequence[str] = READERS) -> Callable[[Lab], None]:
    """Return a fault in which ``harm`` changes a checkpoint. The checkpoint gets a new manifest, and all readers must
    refuse it."""

    def make(lab: Lab) -> None:
        newest = lab.prepared()
        harm(newest)
        seal(newest)
        for reader in readers:
            program = lab.sample(newest) if reader == "sample" else lab.train(f"--{reader}", newest)
            # A resume builds the model before it reads weights, so errors in the weights end a run that has begun.
            lab.ends(program, {1, 2} if reader == "load" else {2}, f"error: .*({says})")

    return make


def in_weights(change: Callable[[dict], dict | str]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for name in (MODEL, AVERAGE):
            with_metadata(folder / name, change)

    return harm


METADATA = {
    "hidden_size_1e9": ("hidden_size is 1e9", config(hidden_size=10**9), "hidden_size"),
    "hidden_size_word": ("hidden_size is a word", config(hidden_size="large"), "hidden_size"),
    "depth_0": ("depth is 0", config(depth=0), "depth"),
    "depth_1e9": ("depth is 1e9", config(depth=10**9), "depth"),
    "heads_minus_3": ("num_heads is -3", config(num_heads=-3), "num_heads"),
    "classes_1e12": ("num_classes is 1e12", config(num_classes=10**12), "num_classes"),
    "channels_null": ("in_channels is null", config(in_channels=None), "in_channels"),
    "input_size_list": ("input_size is [1e6, [], {}]", config(input_size=[1e6, [], {}]), "input_size"),
    "unknown_field": ("an unknown field __class__", config(__class__="os.system"), "__class__"),
    "config_missing": ("no configuration", lambda info: {k: v for k, v in info.items() if k != "config"}, "config"),
    "config_list": ("the configuration is a list", lambda info: {**info, "config": [1]}, "config"),
    "metadata_no_json": ("it is no JSON", lambda info: "{'model': 'DiT'}", MODEL[:5] + "|" + AVERAGE),
    "metadata_number": ("it is a number", lambda info: "7", MODEL[:5] + "|" + AVERAGE),
    "metadata_deep": ("it is 100,000 brackets deep", lambda info: "[" * 100_000, MODEL[:5] + "|" + AVERAGE),
    "metadata_nan": ("label_drop is NaN and sizes Infinity", config(hidden_size=float("inf")), "JSON"),
    "class_names_number": ("class_names is a number", lambda info: {**info, "class_names": 7}, "class_names"),
    "objective_word": ("the objective is a word", lambda info: {**info, "objective": "x"}, "objective"),
    "vae_is_a_hub_name": ("the VAE is one of a hub", lambda info: {**info, "vae": "stranger/vae"}, "stranger/vae|vae"),
}
for _name, (_what, _change, _says) in METADATA.items():
    # A resume takes the model from the flags, and --pretrained also takes the VAE from them.
    _only = {
        "vae_is_a_hub_name": ["sample"],
        "config_missing": ["sample"],
        "class_names_number": ["sample", "pretrained"],
    }
    _judge = forged(in_weights(_change), _says, _only.get(_name, READERS))
    add(_name, "checkpoints", f"metadata of weights: {_what}", _judge)


def in_state(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        made = change(json.loads((folder / STATE).read_text()))
        (folder / STATE).write_text(made if isinstance(made, str) else json.dumps(made))

    return harm


def without(key: str) -> Callable[[dict], dict]:
    return lambda state: {k: v for k, v in state.items() if k != key}


STATES = {
    "state_list": ("is a list", lambda state: [state]),
    "state_without_step": ("has no step", without("step")),
    "state_step_word": ("has the step 'twelve'", lambda state: {**state, "step": "twelve"}),
    "state_step_minus": ("has step -5", lambda state: {**state, "step": -5}),
    "state_step_1e30": ("has step 1e30", lambda state: {**state, "step": 10**30}),
    "state_without_ema": ("says nothing of the average", without("ema")),
    "state_ema_file": (
        "names ../../x as its average",
        lambda state: {**state, "ema": {**state["ema"], "files": {"../../x.safetensors": 0.9999}}},
    ),
    "state_scaler_list": ("has a list as its loss scaler", lambda state: {**state, "scaler": [1]}),
    "state_optimizer_steps": ("counts null optimizer steps", lambda state: {**state, "optimizer_steps": None}),
    "state_version": ("is of version 99", lambda state: {**state, "version": 99}),
    "state_deep": ("is 100,000 brackets deep", lambda state: "[" * 100_000),
    "state_digits": ("has a number of 10,000 digits", lambda state: '{"version": 2, "step": ' + "9" * 10_000 + "}"),
}
for _name, (_what, _change) in STATES.items():
    add(_name, "checkpoints", f"state.json {_what}", forged(in_state(_change), "state.json|version", ["load"]))


def header_of_2_to_the_60(folder: Path) -> None:
    for name in (MODEL, AVERAGE):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes((2**60).to_bytes(8, "little") + content[8:])


def other_shapes(folder: Path) -> None:
    def change(header: dict) -> dict:
        for entry in header.values():
            if len(entry.get("shape", ())) == 2:
                entry["shape"] = entry["shape"][::-1]
        return header

    for name in (MODEL, AVERAGE):
        with_header(folder / name, change)


def not_a_number(folder: Path) -> None:
    for name in (MODEL, AVERAGE):
        content = bytearray((folder / name).read_bytes())
        size = int.from_bytes(content[:8], "little")
        start = 8 + size + json.loads(content[8 : 8 + size])["blocks.0.mlp.fc1.weight"]["data_offsets"][0]
        content[start : start + 4] = b"\x00\x00\xc0\x7f"  # a float32 NaN
        (folder / name).write_bytes(content)


FILES = {
    "header_2_to_60": ("a header of 2^60 bytes", header_of_2_to_the_60, "safetensors"),
    "other_shapes": ("matrices transposed", other_shapes, "shape"),
    "weights_nan": ("one weight is NaN", not_a_number, "finite|NaN"),
}
for _name, (_what, _harm, _says) in FILES.items():
    add(_name, "checkpoints", f"weights file: {_what}", forged(_harm, _says))


@fault("a file of moments that the manifest does not list is put beside the others")
def planted_moments(lab: Lab) -> None:
    newest = lab.prepared()
    planted = newest / "optimizer_999.safetensors"
    planted.write_bytes((newest / MOMENTS).read_bytes()[:-4096] + bytes(4096))
    lab.goes_on(lab.train("--load", newest), 0)
    planted.unlink()
    lab.same_weights()


def link_out(folder: Path) -> None:
    outside = folder.parents[2] / "outside.safetensors"
    for name in (MODEL, AVERAGE):
        (folder / name).rename(outside.with_name(name))
        (folder / name).symlink_to(outside.with_name(name))


def pipe_in_place(folder: Path) -> None:
    for name in (MODEL, AVERAGE):
        (folder / name).unlink()
        os.mkfifo(folder / name)


def folder_in_place(folder: Path) -> None:
    for name in (MODEL, AVERAGE):
        (folder / name).unlink()
        (folder / name).mkdir()


def unsealed(harm: Callable[[Path], None], says: str) -> Callable[[Lab], None]:
    """Return a fault like ``forged``, but with the old manifest."""

    def make(lab: Lab) -> None:
        newest = lab.prepared()
        harm(newest)
        lab.refused(lab.train("--load", newest), f"error: .*({says})")
        lab.refused(lab.sample(newest), f"error: .*({says})")

    return make


add("link_out", "checkpoints", "weights files are links to files outside the run", unsealed(link_out, "link"))
add("pipe_in_place", "checkpoints", "named pipes in place of the weights", unsealed(pipe_in_place, "safetensors"))
add("folder_in_place", "checkpoints", "folders in place of the weights", unsealed(folder_in_place, "safetensors"))


def manifest(change: Callable[[dict], object]) -> Callable[[Lab], None]:
    """Return a fault: ``change`` changes the manifest's list of files, and the manifest's checksum is right."""

    def make(lab: Lab) -> None:
        newest = lab.prepared()
        path = newest / MANIFEST
        content = json.loads(path.read_text())
        files = change(content["files"])
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**content, "files": files, "sha256": digest}))
        lab.refused(lab.train("--load", newest), f"error: .*{MANIFEST}")
        lab.refused(lab.sample(newest), f"error: .*({MANIFEST}|{AVERAGE})")

    return make


ENTRY = {"bytes": 1, "sha256": "0" * 64}
MANIFESTS = {
    "manifest_dotdot": ("names ../../../outside", lambda files: {**files, "../../../outside": ENTRY}),
    "manifest_absolute": ("names /etc/passwd", lambda files: {**files, "/etc/passwd": ENTRY}),
    "manifest_list": ("lists files in a list", lambda files: list(files)),
    "manifest_words": ("gives words for sizes", lambda files: {n: {**e, "bytes": "many"} for n, e in files.items()}),
    "manifest_without_weights": ("lists no weights", lambda files: {n: e for n, e in files.items() if n == STATE}),
    "manifest_numbers": ("gives numbers for entries", lambda files: dict.fromkeys(files, 7)),
}
for _name, (_what, _change) in MANIFESTS.items():
    add(_name, "checkpoints", f"manifest.json {_what}", manifest(_change))


# ------------------------------------------------------------------------------------------ tables and averages


@fault("--pretrained with a position table that was rounded to bf16, and a resume")
def rounded_table(lab: Lab) -> None:
    """Check that the run reports that it computes the table, and that a resume uses the same table bit for bit."""
    given = lab.folder / "base.safetensors"
    state, metadata = load_file(lab.prepared() / MODEL), {}
    with safe_open(lab.run / "checkpoints" / "latest" / MODEL, "pt") as file:
        metadata = file.metadata()
    shutil.rmtree(lab.outputs)
    state["pos_embed"] = state["pos_embed"].bfloat16().float()
    save_file(state, given, metadata)
    start = ("--pretrained", given)
    says = "pos_embed is not the computed one"
    lab.goes_on(lab.train(*start, "--max_steps", 8), 0, says)
    whole = lab.folder / "whole"
    shutil.move(lab.outputs, whole)
    lab.goes_on(lab.train(*start, "--max_steps", 4), 0, says)
    lab.goes_on(lab.train("--load", "latest", "--max_steps", 8), 0)
    lab.require(differing(whole / RUN, lab.run) is None, "the resumed run is another one")


@fault("a run of 12 steps whose average must not hold its initial weights")
def short_average(lab: Lab) -> None:
    newest = lab.prepared()
    first, last, average = (
        load_file(path) for path in (newest.parent / "step_0000004" / MODEL, newest / MODEL, newest / AVERAGE)
    )
    moved = sum(float((last[name] - first[name]).norm()) for name in last)
    behind = sum(float((last[name] - average[name]).norm()) for name in last)
    lab.require(behind < 0.5 * moved, f"the average lags by {behind / moved:.0%} of the way from step 4 to step 12")
    lab.untouched()
