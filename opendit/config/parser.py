"""The argument parser of all programs: strict, one line for a mistake, --help by component."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from opendit.config.errors import say, speaks
from opendit.config.help_page import REQUIRED, HelpEntry, Section, about_of, entry, examples_of, page
from opendit.config.values import Value, nearest, show


class CommandLine(argparse.ArgumentParser):
    """A parser that answers a mistake with exit code 2 and one line, which names the flag and the fix. With several
    ranks only the first prints it. Every flag belongs to a heading.

    Args:
        prog: how the program was started.
        doc: the program's docstring; the commands in it are the examples of --help.
        examples: other examples instead.
        options: argparse's.
    """

    def __init__(self, prog: str, doc: str = "", examples: Sequence[str] | None = None, **options: Any):
        options = {"allow_abbrev": False, "add_help": False, "description": about_of(doc), **options}
        super().__init__(prog, **options)
        self.examples = examples_of(doc) if examples is None else examples
        self.add_argument("--help", action=_Help, nargs="?", default=argparse.SUPPRESS, help="show this and end")
        # No flag begins with a single dash: such a word is a value (-inf, the name of a folder, a negative number).
        self._negative_number_matcher = re.compile("-[^-]")
        self.source = ""  # begins messages about words that are not from the command line
        self.defaults: dict[str, Any] = {}
        self.sections: list[Section] = []
        self.commands: dict[str, CommandLine] = {}
        self.taken: list[tuple[argparse.Action, Value]] = []  # for the completion in shells

    def heading(self, heading: str) -> None:
        """Begin a heading of --help, ``"Title: what it is about"``, for the flags that are added next."""
        new = Section.headed(heading)
        known = [section for section in self.sections if section.title == new.title]
        self.sections = [section for section in self.sections if section not in known] + (known or [new])

    def option(
        self,
        name: str,
        takes: Value,
        help: str,
        default: Any = None,
        alias: str | None = None,
        common: bool | str = False,
        **options: Any,
    ) -> None:
        """Add a flag or a positional argument, with its range and default in --help.

        common: as of :func:`opendit.config.flags.flag`. options: argparse's.
        """
        shown = {name: options[name] for name in ("nargs", "metavar", "required") if name in options}
        self._show(entry(name, takes, help, default, common=common, alias=alias, **shown))
        options = {"metavar": takes.metavar, "type": takes.read, "help": help.replace("%", "%%"), **options}
        if name.startswith("-"):
            options["default"] = argparse.SUPPRESS
            self.defaults[name.lstrip("-")] = default
        self.taken.append((self.add_argument(name, *([alias] if alias else []), **options), takes))

    def switch(self, name: str, help: str, default: bool | None = False, common: bool | str = False) -> None:
        """Add a switch ``--x`` and its opposite ``--no_x``."""
        bare = name.lstrip("-")
        self.defaults[bare] = default
        self._show(entry(name, None, help, default, common=common))
        options: dict[str, Any] = dict(action="store_const", dest=bare, default=argparse.SUPPRESS)
        self.add_argument(name, const=True, help=help.replace("%", "%%"), **options)
        self.add_argument(f"--no_{bare}", const=False, help=f"not --{bare}", **options)

    def command(self, name: str, about: str, heading: str = "Commands: what can be done") -> "CommandLine":
        """Add a subcommand and return its parser."""
        if self._subparsers is None:
            self._commands = self.add_subparsers(dest="command", metavar="COMMAND")
        self.heading(heading)
        self._show(HelpEntry(name, name, about))
        self.commands[name] = self._commands.add_parser(
            name, help=about, description=f"{about[:1].upper()}{about[1:]}."
        )
        self.commands[name].examples = [line for line in self.examples if f" {name} " in f"{line} "]
        return self.commands[name]

    def _show(self, shown: HelpEntry) -> None:
        if not self.sections:
            raise TypeError(f"{shown.written} has no heading: call heading() before")
        self.sections[-1].entries.append(shown)

    def format_help(self, topic: str | None = None) -> str:
        """Return the text of --help. topic: "all", a heading, a flag or a subcommand. Raises ValueError for another."""
        if topic in self.commands:
            return self.commands[topic].format_help("all")
        entries = [one for section in self.sections for one in section.entries]
        words = [one.written for one in entries if not one.written.startswith("-") or REQUIRED in one.values]
        usage = "COMMAND [FLAG [VALUE]] ..." if self.commands else " ".join([*words, "[FLAG [VALUE]] ..."])
        text = page(self.prog, usage, self.description or "", self.sections, self.examples, topic)
        if self.commands and topic == "all":
            text += "".join(f"\n{command.format_help('all')}" for command in self.commands.values())
        elif self.commands and topic is None:
            text += f"\n{self.prog} COMMAND --help shows a command's flags.\n"
        return text

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
        """Parse words. Returns (values of all flags of :meth:`option` and :meth:`switch`, names of the given ones)."""
        found = vars(self.parse_args(words))
        chosen = self.commands.get(found.get("command", ""), self)
        return {**chosen.defaults, **found}, set(found)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but accept dashes for underscores, and values that begin with a dash."""
        words = ["--help" if word == "-h" else underscored(word) for word in (sys.argv[1:] if args is None else args)]
        if not self.commands:
            self._refuse_strangers(words[: words.index("--")] if "--" in words else words)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does; the error about an unknown flag says which one was probably meant."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.fail(self._meant(unknown[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """Reword an error of argparse and end the program."""
        message = re.sub(r"^argument ([^:/]+)(/[^:]+)?: ", r"\1: ", message)
        name = message.partition(":")[0]
        if choice := re.match(r"(.+): invalid choice: '(.*)' \(choose from (.+)\)$", message, re.DOTALL):
            names = [name.strip("'\" ") for name in choice[3].split(",")]
            message = f"{choice[2]}: no such {choice[1].lower()}; did you mean {nearest(choice[2], names)}?"
        elif re.search(": expected (at least )?one argument$", message):
            message = f"{name}: no value; give {self._wanted(name)}"
        elif missing := re.match(r"the following arguments are required: ([^,\s]+)", message):
            message = f"{missing[1]}: missing; give {self._wanted(missing[1])}"
        elif "ignored explicit argument" in message:
            message = f"{name}: takes no value; write {self._both(name)}"
        elif value := re.match(r"(-\S+|[A-Za-z]\S*): (.*)$", message, re.DOTALL):
            message = f"{value[1]} {value[2]}"  # Value.read's, which begins with the value itself
        self.fail(message)

    def fail(self, error: Exception | str) -> NoReturn:
        """End the program with exit code 2 and one line."""
        if speaks(error):
            say(f"{self.source}{error}" if self.source else error)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(5)  # torchrun ends all processes once one has ended; the rank that prints may be slower
        self.exit(2)

    def _wanted(self, name: str) -> str:
        """Describe the allowed values of a flag or positional argument."""
        for action, takes in self.taken:
            if name in action.option_strings or name == action.metavar:
                text = takes.kind is str and takes.choices is None
                return f"{name} {action.metavar or 'TEXT'}" if text and name.startswith("-") else takes.describe()
        return "one of " + ", ".join(self.commands)

    def _both(self, name: str) -> str:
        """Return a switch and its opposite, for a message."""
        return f"{name}, or --no_{name[2:]}" if f"--no_{name[2:]}" in self._option_string_actions else name

    def _refuse_strangers(self, words: list[str]) -> None:
        """End the program for an unknown flag, and for the value of a switch."""
        named = any(not action.option_strings for action in self._actions)  # positional arguments
        for before, word in zip(["", *words], words, strict=False):
            flag_before = self._option_string_actions.get(before)
            if word.startswith("--"):
                if word.partition("=")[0] not in self._option_string_actions:
                    self.fail(self._meant(word))
            elif flag_before is not None and flag_before.nargs == 0 and not named:
                self.fail(f"{before} {show(word)}: takes no value; write {self._both(before)}")

    def _meant(self, word: str) -> str:
        """Describe an unknown flag, with the most similar one. ``optim.lr=1e-4`` of other programs is understood."""
        flags, shows_all = sorted(self._option_string_actions), f"({self.prog} --help all shows all)"
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            return f"{name}: no such flag; did you mean {nearest(name, flags)}? {shows_all}"
        if equals:
            flag_name = nearest(f"--{name.split('.')[-1]}", flags)
            return f"{word}: no flag; did you mean {flag_name} {value}? {shows_all}"
        return f"{word}: a value without a flag; write --name value {shows_all}"


def underscored(word: str) -> str:
    """Turn --data-path=x-y into --data_path=x-y. A word that is not a flag stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class _Help(argparse.Action):
    """Print --help, --help all or --help TOPIC."""

    def __call__(self, parser, namespace, values, option_string=None):
        assert isinstance(parser, CommandLine) and (values is None or isinstance(values, str))
        try:
            print(parser.format_help(values), end="")
        except ValueError as error:
            parser.fail(error)
        parser.exit()
