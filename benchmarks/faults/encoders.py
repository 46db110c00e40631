"""Faults: malicious text encoders, VAEs, pickles and latents. Nothing in them may be executed or downloaded."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.checkpoints import AVERAGE, MODEL, flip, seal, truncate, with_metadata
from benchmarks.faults.lab import Lab, add, fault
from benchmarks.faults.materials import pictures, random_vae, text_encoder

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
class Stranger: pass
"""


def marker(lab: Lab) -> Path:
    """Return the path of a file that exists if untrusted code was executed."""
    return lab.folder / "was-run"


def evil(lab: Lab, path: Path) -> None:
    """Write a pickle that creates the marker when it is loaded."""

    class Touch:
        def __reduce__(self):
            return os.system, (f"touch {marker(lab)}",)

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Touch(), protocol=2))
        file.writestr("archive/version", "3\n")


def with_config(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


# ------------------------------------------------------------------------------------------ encoders


def code_beside(lab: Lab, folder: Path) -> None:
    (folder / "stranger.py").write_text(CODE.format(marker=str(marker(lab))))


def auto_map_of_tokenizer(lab: Lab, folder: Path) -> None:
    code_beside(lab, folder)
    classes = {"AutoTokenizer": ["stranger.Stranger", "stranger.Stranger"]}
    with_config(folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="Stranger")


def auto_map_of_model(lab: Lab, folder: Path) -> None:
    code_beside(lab, folder)
    with_config(folder / "config.json", auto_map={"AutoModel": "stranger.Stranger", "AutoConfig": "stranger.Stranger"})


def only_a_pickle(lab: Lab, folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        evil(lab, folder / name)


def adapter(lab: Lab, folder: Path) -> None:
    with_config(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="stranger/base", r=4)
    evil(lab, folder / "adapter_model.bin")


def weights_cut(lab: Lab, folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        truncate(path)


def no_weights(lab: Lab, folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def huge(lab: Lab, folder: Path) -> None:
    with_config(folder / "config.json", hidden_size=10**9, vocab_size=10**9, block_out_channels=[10**9] * 3)


def config_list(lab: Lab, folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def index_elsewhere(lab: Lab, folder: Path) -> None:
    """Write an index of several files that names a file outside the folder."""
    (weights,) = folder.glob("*.safetensors")
    outside = weights.rename(folder.parent / "outside.safetensors")
    names = {"x": f"../{outside.name}"}
    (folder / f"{weights.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def with_encoder(make: Callable[[Lab], Path], flag: str, harm: Callable[[Lab, Path], None]) -> Callable[[Lab], None]:
    """Return a fault that trains with a harmed folder. Training must refuse the folder with one line or ignore the
    harm, and must not execute the folder's code."""

    def judge(lab: Lab) -> None:
        folder = make(lab)
        harm(lab, folder)
        data = pictures(lab)
        if flag == "--text_encoder":
            (data / "table.csv").write_text("path,text\n" + "".join(f"cat/{n:02d}.png,a cat\n" for n in range(8)))
            data = data / "table.csv"
        more = ("--data_path", data, "--image_size", 16, "--max_steps", 4, flag, folder)
        lab.ends(lab.train(*more), {0, 2}, within=60)
        if lab.outcome.codes == [2]:
            lab.require(lab.outcome.message.startswith("error: "), f"said {lab.outcome.message}")
        lab.require(not marker(lab).exists(), "a stranger's code was run")

    return judge


HARMS = {
    "auto_map_tokenizer": ("a tokenizer with code of its own (auto_map)", auto_map_of_tokenizer),
    "auto_map_model": ("a configuration with code of its own (auto_map)", auto_map_of_model),
    "only_a_pickle": ("weights in a pickle only", only_a_pickle),
    "adapter": ("an adapter_config.json and a pickled adapter", adapter),
    "weights_cut": ("truncated weights", weights_cut),
    "no_weights": ("no weights", no_weights),
    "huge": ("sizes of 1e9", huge),
    "config_list": ("a list for a configuration", config_list),
    "index_elsewhere": ("an index of weights outside the folder", index_elsewhere),
}
for _name, (_what, _harm) in HARMS.items():
    if not _name.startswith("auto_map"):
        add(f"vae_{_name}", "encoders", f"a VAE with {_what}", with_encoder(random_vae, "--vae", _harm))
    add(
        f"text_{_name}", "encoders", f"a text encoder with {_what}", with_encoder(text_encoder, "--text_encoder", _harm)
    )


# ------------------------------------------------------------------------------------------ pickles


@fault("a .pt that runs code when it is unpickled: sample.py, --pretrained and the export")
def evil_pickle(lab: Lab) -> None:
    path = lab.folder / "evil.pt"
    evil(lab, path)
    out = lab.folder / "out.safetensors"
    for program in (
        lab.sample(path, "--model", "DiT-Ti/2"),
        lab.train("--pretrained", path)[0],
        lab.start("opendit.export", "opendit", "--ckpt", path, "--model", "DiT-Ti/2", "--output", out),
    ):
        lab.refused(program, "error: .*evil.pt")
        lab.require("weights_only" not in lab.said, "quotes advice to set weights_only")
    lab.require(not marker(lab).exists(), "a stranger's code was run")


@fault("the same, renamed to .safetensors, as a checkpoint's weights")
def pickle_as_safetensors(lab: Lab) -> None:
    newest = lab.prepared()
    for name in (MODEL, AVERAGE):
        evil(lab, newest / name)
    seal(newest)
    lab.refused(lab.train("--load", newest), f"error: .*{MODEL}")
    lab.refused(lab.sample(newest), f"error: .*{AVERAGE}")
    lab.require(not marker(lab).exists(), "a stranger's code was run")


@fault("a checkpoint whose metadata names a folder of pickles as its VAE")
def metadata_names_pickles(lab: Lab) -> None:
    newest, folder = lab.prepared(), random_vae(lab)
    only_a_pickle(lab, folder)
    with_metadata(newest / AVERAGE, lambda info: {**info, "vae": str(folder)})
    seal(newest)
    lab.refused(lab.sample(newest), "error: .*(vae|VAE|safetensors)")
    lab.require(not marker(lab).exists(), "a stranger's code was run")


# ------------------------------------------------------------------------------------------ latents


def latents(lab: Lab) -> Path:
    """Return a copy of cached latents for this fault: four shards of small pictures."""

    def fill(folder: Path) -> None:
        argv = f"latents --data_path {pictures(lab)} --image_size 16 --shard_size 12 --num_workers 1".split()
        program = lab.start("preprocess.py", *argv, "--vae", random_vae(lab), "--output", folder)
        lab.programs.wait(lambda: program.code() is not None, 120, "preprocess.py latents")
        if program.code():
            raise RuntimeError(program.said())

    return Path(shutil.copytree(lab.shared.once("latents", fill), lab.folder / "latents"))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.tar"))[1]


def in_index(**changes: object) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / "index.json"
        (index,) = json.loads(path.read_text())["sizes"]
        with_config(path, sizes=[index | changes])

    return harm


LATENTS = {
    "shard_flipped": ("a bit of a shard flipped", lambda folder: flip(shard(folder)), "latents-16-00001"),
    "shard_cut": ("a truncated shard", lambda folder: truncate(shard(folder)), "latents-16-00001"),
    "shard_missing": ("a shard missing", lambda folder: shard(folder).unlink(), "latents-16-00001"),
    "index_image_size": ("an index with a word for its size", in_index(image_size="x"), "index.json|image_size"),
    "index_counts": ("an index that counts 1e12 pictures", in_index(count=10**12, total=10**12, rows=10**12), "index"),
    "index_scaling": ("a scaling factor of null", in_index(scaling_factor=None), "index.json|scaling_factor"),
    "index_shards": ("an index whose shards are ../x", in_index(shards=["../x.tar"]), "index.json|shard"),
    "index_no_json": (
        "an index of half a line",
        lambda folder: truncate(folder / "index.json"),
        "index.json|unfinished",
    ),
}
for _name, (_what, _harm, _says) in LATENTS.items():

    def _make(lab: Lab, harm=_harm, says=_says) -> None:
        folder = latents(lab)
        harm(folder)
        programs = lab.train("--data_path", folder, "--image_size", 16, "--vae", random_vae(lab), "--max_steps", 400)
        lab.ends(programs, {1, 2}, f"error: .*({says})", within=60)

    add(_name, "encoders", f"cached latents with {_what}", _make)
