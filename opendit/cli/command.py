# pyright: standard
"""The console command ``opendit`` for all programs, and ``opendit.train`` for train.py.

opendit train --model DiT-S/2 --data_path FOLDER
opendit sample --ckpt outputs/000-DiT-S-2 --class_labels 0 1
torchrun --standalone --nproc_per_node=8 -m opendit train ...
"""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from opendit import __version__
from opendit.config import console
from opendit.config.command_line import parse
from opendit.config.console import print_error
from opendit.config.flags import flags_of, nearest, show
from opendit.config.names import PYTHON
from opendit.config.preprocess import build_parser as preprocess_parser
from opendit.config.train import TrainConfig


def program(name: str) -> ModuleType:
    """Import the script ``name``.py from a wheel or the repository, once. Raises ModuleNotFoundError."""
    full = f"opendit.cli.scripts.{name}"
    if full in sys.modules:
        return sys.modules[full]
    here = Path(__file__).resolve().parent
    places = [here / "scripts" / f"{name}.py", here.parents[1] / f"{name}.py"]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise ModuleNotFoundError(f"{name}.py is neither {places[0]} nor {places[1]}: install OpenDiT again", name=name)
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None  # always true for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full]
        raise
    return module


def train(config: TrainConfig, data: Any = None) -> Path:
    """Run train.py with the flags of ``config`` in this process. Return the run's folder; None with --dry_run.

    ``data`` replaces ``data_path``: an ``opendit.data.MediaDataset``, or a map-style data set of dictionaries with the
    keys "image" or "video" and "text" or "label" (docs/python.md). A field at its default value counts as an omitted
    flag. To use several processes, call this function in a script that torchrun starts.

    Raises ValueError for a configuration that can't work. If the run fails, raises the run's error, or RuntimeError
    if that error is unknown.
    """
    config = as_given(config)
    if data is not None:
        if "data_path" in config.given and config.data_path != PYTHON:
            raise ValueError(f"--data_path {config.data_path}: opendit.train got data, too; leave one of them out")
        config = replace(config, data_path=PYTHON, given=config.given | {"data_path"})
    config.resolve(config.world_size(), has_gpu=True)  # run the checks that need neither torch nor a GPU
    try:
        from opendit.data.python_data import offer

        with offer(data):
            return program("train").start(config)
    except SystemExit as stop:
        if isinstance(stop.__context__, Exception):
            raise stop.__context__ from None
        raise RuntimeError("the run failed; what it has printed says why") from stop


def as_given(config: TrainConfig) -> TrainConfig:
    """Mark each field that differs from its default as set by the user. A recipe or a YAML file can change all other
    fields. A parsed configuration is returned unchanged."""
    if config.given:
        return config
    plain = TrainConfig()
    changed = {item.name: getattr(config, item.name) for item in flags_of(TrainConfig)}
    changed = {name: value for name, value in changed.items() if value != getattr(plain, name)}
    named = [word for name in ("recipe", "config") if (value := getattr(config, name)) for word in (f"--{name}", value)]
    base = parse(TrainConfig, named) if named else plain
    return replace(base, **changed, given=base.given | frozenset(changed))


SCRIPTS = {
    "train": "trains a model (train.py)",
    "sample": "draws pictures or clips from a checkpoint (sample.py)",
    "preprocess": "tables of captioned media, cached latents (preprocess.py)",
}
MODULES = {
    "evaluate": ("opendit.evaluation.__main__", "FID and its kin, FVD, CLIP score of a run or of samples"),
    "page": ("opendit.sampling.page.__main__", "draws, shows runs and compares in a browser"),
    "export": ("opendit.export.__main__", "to and from diffusers' and Meta's formats"),
    "links": ("opendit.cli.links", "measures this machine's rates and links, for --parallel auto"),
    "completion": ("opendit.cli.completion", "prints a shell's completion of commands, flags and values"),
    "models": ("opendit.models.__main__", "lists the models: parameters, work, memory"),
}
COMMANDS = {**SCRIPTS, **{name: about for name, (_, about) in MODULES.items()}}


def usage() -> str:
    lines = [f"  {name:<12}{about}" for name, about in COMMANDS.items()]
    return "\n".join(["usage: opendit COMMAND ...", "", *lines, "", "opendit COMMAND --help shows a command's flags."])


def module_of(command: str) -> ModuleType:
    return program(command) if command in SCRIPTS else importlib.import_module(MODULES[command][0])


def main(argv: list[str] | None = None) -> int:
    console.prepare_console()
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else "--help"
    if command in ("--help", "-h"):
        print(usage())
        return 0
    if command == "--version":
        print(f"opendit {__version__}")
        return 0
    if command not in COMMANDS:
        inside = command in preprocess_parser("").commands
        like = nearest(command, COMMANDS, cutoff=0.5)
        hint = f"did you mean {like}?" if like else "opendit --help lists all"
        hint = f"here it is preprocess {command}" if inside else hint
        print_error(f"{show(command)}: no such command; {hint}")
        return 2
    with console.started_as(command):
        return module_of(command).main(words[1:]) or 0
