"""Find the commands in the documentation pages, and check them with the parsers of their programs."""

import contextlib
import importlib
import re
import shlex
from typing import NamedTuple

import preprocess
from opendit.config.command_line import parse
from opendit.config.console import OnThisMachine
from opendit.config.evaluate import EvaluateConfig
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig

BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", flags=re.M | re.S)
IN_A_TABLE = re.compile(r"^\|.*$", flags=re.M)
INLINE = re.compile(r"`((?:python|opendit|torchrun|bash|sbatch|pip) [^`]+)`")
COMMENT = re.compile(r"(?:^|\s)#.*", flags=re.M)
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
FILE = re.compile(r"^```\w+\n(# ([\w/-]+\.\w+)\b.*?)^```", flags=re.M | re.S)

CONFIGS = {"train.py": TrainConfig, "sample.py": SampleConfig, "evaluate": EvaluateConfig}
CONFIGS |= {"train": TrainConfig, "sample": SampleConfig}
PARSERS = {
    "export": "opendit.export.__main__",
    "links": "opendit.cli.links",
    "models": "opendit.models.__main__",
}
PARSERS |= {"cli.links": "opendit.cli.links"}


class Command(NamedTuple):
    """The words of a command, and the line of the page where the command begins."""

    line: int
    words: list[str]


def commands(text: str) -> list[Command]:
    """Return the commands in a page's shell blocks and tables, in their order, without comments.

    Variables that a block sets are replaced by their values. Commands with other variables, or with "..." as a word,
    are left out.
    """
    found = []
    for block in BLOCK.finditer(text):
        line, variables = text.count("\n", 0, block.start()) + 2, {}
        for joined in re.split(r"(?<!\\)\n", block[1]):
            for part in re.split(r" && | \| |; ", COMMENT.sub("", joined.replace("\\\n", " "))):
                for name, value in variables.items():
                    part = re.sub(rf"\${name}\b", value, part)
                words = _words(part)
                if len(words) == 1 and re.match(r"[A-Z]\w*=", words[0]):
                    name, _, value = words[0].partition("=")
                    variables[name] = value
                elif words:
                    found.append(Command(line, words))
            line += joined.count("\n") + 1
    for row in IN_A_TABLE.finditer(text):
        line = text.count("\n", 0, row.start()) + 1
        found += [Command(line, words) for inline in INLINE.findall(row[0]) if (words := _words(inline))]
    return sorted(found, key=lambda command: command.line)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Return (line, code) of a page's Python blocks, except blocks that are the content of a file."""
    blocks = [(text.count("\n", 0, block.start()) + 2, block[1]) for block in PYTHON.finditer(text)]
    return [(line, code) for line, code in blocks if code not in files(text).values()]


def files(text: str) -> dict[str, str]:
    """Return the names and contents of the files that a page shows: blocks that begin with a comment with a file's
    name."""
    return {block[2]: block[1] for block in FILE.finditer(text)}


def _words(text: str) -> list[str]:
    """Split one command into words; return none for a command that can't be run as printed."""
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    return [] if any("$" in word or word == "..." for word in words) else words


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the name and arguments of one of OpenDiT's programs in a command; None if the command runs another
    program."""
    names = ("train.py", "sample.py", "preprocess.py")
    scripts = {"train_img.sh": [], "train_video.sh": ["--use_video"]}  # flags that they add
    for place, word in enumerate(words):
        if word in names:
            return word, words[place + 1 :]
        if word in scripts and len(words) > place + 1:
            return "train.py", [*scripts[word], *words[place + 1 :]]
        if word == "opendit" or (word.startswith("opendit.") and words[place - 1] == "-m"):
            name = words[place + 1] if word == "opendit" and len(words) > place + 1 else word.partition(".")[2]
            rest = words[place + (2 if word == "opendit" else 1) :]
            return {"evaluation": "evaluate"}.get(name, name), rest
    return None


def check(name: str, words: list[str]) -> bool:
    """Parse a command with its program's parser. Return False if there is nothing to check.

    Raises SystemExit for a wrong flag, and ValueError for flags that do not fit together.
    """
    if any(word in ("--help", "-h", "list") or word.startswith("--help") for word in words):
        return False
    if name == "evaluate" and words[:1] == ["plot"]:
        importlib.import_module("opendit.evaluation.__main__").build_plot_parser().parse_args(words[1:])
    elif name in CONFIGS:
        if CONFIGS[name] is TrainConfig and "--dry_run" not in words and "--load" not in words:
            words = [*words, "--dry_run", "8"]  # a dry run checks flags across each other
            with contextlib.suppress(OnThisMachine):  # a file of the reader's; files are checked last
                parse(TrainConfig, words).resolve(8, has_gpu=True)
        parse(CONFIGS[name], words)
    elif name in ("preprocess.py", "preprocess"):
        preprocess.build_parser("").parse_args(words)
    elif name in PARSERS:
        importlib.import_module(PARSERS[name]).build_parser().parse_args(words)
    else:
        return False
    return True
