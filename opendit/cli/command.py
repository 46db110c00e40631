# pyright: standard
"""The console command ``opendit``, which runs one of the programs.

opendit train --model DiT-S/2 --data_path FOLDER
opendit sample --ckpt outputs/000-DiT-S-2 --class_labels 0 1
torchrun --standalone --nproc_per_node=8 -m opendit train ...
"""

import importlib
import sys
from types import ModuleType

from opendit import __version__
from opendit.cli.programs import program
from opendit.config import console
from opendit.config.console import print_error
from opendit.config.flags import nearest, show
from opendit.config.preprocess import build_parser as preprocess_parser

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
    """Return the text of ``opendit --help``."""
    lines = [f"  {name:<12}{about}" for name, about in COMMANDS.items()]
    return "\n".join(["usage: opendit COMMAND ...", "", *lines, "", "opendit COMMAND --help shows a command's flags."])


def module_of(command: str) -> ModuleType:
    """Import the module of a command."""
    return program(command) if command in SCRIPTS else importlib.import_module(MODULES[command][0])


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
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
        hint = f"here it is preprocess {command}" if inside else f"did you mean {nearest(command, COMMANDS)}?"
        print_error(f"{show(command)}: no such command; {hint}")
        return 2
    with console.started_as(command):
        return module_of(command).main(words[1:]) or 0
