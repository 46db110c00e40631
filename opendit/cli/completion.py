"""Prints a shell's completion script for ``opendit``: commands, flags, values of flags, and files.

opendit completion bash > ~/.local/share/bash-completion/completions/opendit
opendit completion zsh > ~/.zfunc/_opendit
"""

import argparse
import copy
import importlib
import sys

from opendit.cli.command import COMMANDS, MODULES
from opendit.config.command_line import CommandLine
from opendit.config.command_line import build_parser as build_from_flags
from opendit.config.console import name_of, prepare_console
from opendit.config.evaluate import EvaluateConfig
from opendit.config.flags import one_of
from opendit.config.preprocess import build_parser as build_preprocess
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("path", "folder", "file", "csv", "csv2", "data")  # units of flags with files as values
CONFIGS = {"train": TrainConfig, "sample": SampleConfig, "evaluate": EvaluateConfig}


def build_parser() -> CommandLine:
    parser = CommandLine(name_of("python -m opendit.cli.completion"), __doc__ or "")
    parser.heading("Shell: which one's script is printed")
    parser.option("shell", one_of(SHELLS), "the shell", metavar="SHELL")
    return parser


def parser_of(command: str) -> CommandLine:
    if command in CONFIGS:
        return build_from_flags(CONFIGS[command])
    if command == "preprocess":
        return build_preprocess("")
    return importlib.import_module(MODULES[command][0]).build_parser()


def script(shell: str) -> str:
    """Return a shell's completion script for all commands. Raises ImportError without shtab."""
    import shtab

    whole = argparse.ArgumentParser("opendit", add_help=False)
    commands = whole.add_subparsers()

    def add(to, name: str, about: str, parser: CommandLine) -> None:
        for action, takes in parser.arguments:
            action.choices = takes.choices
            if takes.choices is None and (
                takes.unit in FILES or action.metavar in ("ROOT", "CSV", "DIR", "RUN", "DATA")
            ):
                setattr(action, "complete", shtab.FILE)  # noqa: B010 (shtab's attribute, not argparse's)
        if parser.commands:
            nested = to.add_parser(name, help=about, add_help=False).add_subparsers()
            for inner, of in parser.commands.items():
                add(nested, inner, of.description or "", of)
        else:
            to.add_parser(name, help=about, parents=[parser], add_help=False)

    for command, about in COMMANDS.items():
        # add() would change a cached parser, so add a copy
        add(commands, command, about, copy.deepcopy(parser_of(command)))
    return shtab.complete(whole, shell)


def main(argv: list[str]) -> None:
    prepare_console()
    parser = build_parser()
    options, _ = parser.read(argv)
    try:
        print(script(options["shell"]))
    except ImportError:
        parser.fail("completion needs shtab, which is not installed; pip install 'opendit[completion]'")


if __name__ == "__main__":
    main(sys.argv[1:])
