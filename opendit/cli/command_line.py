"""Command lines to configurations: a dataclass whose fields are flags, recipes, and errors that name what was meant.

Flags are written with underscores (``--batch_size``); dashes are accepted. A boolean flag ``--x`` also has ``--no_x``.
"""

import argparse
import dataclasses
import os
import re
import shlex
import sys
import time
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

from opendit.cli.console import name_of
from opendit.cli.recipes import find_recipe, listing
from opendit.cli.values import Value, one_line, show
from opendit.models.names import nearest

T = TypeVar("T")
# Of a start, not of what is trained: no changes of a recipe.
NO_CHANGE = {"recipe", "dry_run", "outputs", "load"}


class OnThisMachine(ValueError):
    """A mistake that not every machine of a run need see: a folder that isn't there or can't be written."""


@dataclass(frozen=True)
class Flags:
    """A component of a configuration: flags that belong together. A configuration inherits from all of its components,
    in the order in which --help shows them.

    Attributes:
        group: the heading of the component's flags in --help.
        given: the flags that stood on the command line, of the whole configuration.
    """

    group: ClassVar[str]

    given: frozenset[str] = field(default=frozenset(), kw_only=True)

    def part(self, component: type[T]) -> T:
        """The flags of one component alone."""
        return component(**{item.name: getattr(self, item.name) for item in dataclasses.fields(component)})

    def with_part(self: T, part: "Flags") -> T:
        """The configuration with a component in the place of its own."""
        return dataclasses.replace(self, **{item.name: getattr(part, item.name) for item in dataclasses.fields(part)})


def flag(
    default: Any,
    help: str,
    *,
    several: bool = False,
    alone: Any = None,
    alias: str | None = None,
    **bounds: Any,
) -> Any:
    """A configuration field that is also a command-line flag.

    several: it may also be given a list of values. alone: its value where it is given none. alias: another name of it.
    bounds: what it takes, as fields of :class:`opendit.cli.values.Value`; every number needs them.
    """
    metadata = dict(help=help, several=several, alone=alone, alias=alias, bounds=bounds)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flags_of(cls: type) -> list[dataclasses.Field]:
    """The fields of a configuration that are flags, in the order of its components."""
    of = _components(cls)
    order = list(dict.fromkeys(of.values()))
    flags = [item for item in dataclasses.fields(cls) if "help" in item.metadata]
    return sorted(flags, key=lambda item: order.index(of[item.name]))


def groups_of(cls: type) -> dict[str, list[dataclasses.Field]]:
    """The flags of a configuration by their heading in --help."""
    of, groups = _components(cls), {}
    for item in flags_of(cls):
        groups.setdefault(of[item.name].group, []).append(item)
    return groups


def _components(cls: type) -> dict[str, type]:
    """The class that each field of a configuration stands in."""
    return {name: owner for owner in cls.__mro__ for name in owner.__dict__.get("__annotations__", ())}


def value_of(item: dataclasses.Field) -> Value | None:
    """What a flag takes; None for one that is on or off."""
    kind = _scalar_type(item.type)
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return None if kind is bool else Value(kind, **item.metadata["bounds"])


def check_values(config) -> None:
    """Raises ValueError for the first flag whose value is out of its range, wherever that value came from."""
    for item in flags_of(type(config)):
        takes, found = value_of(item), getattr(config, item.name)
        if takes is None or found is None:
            continue
        for value in found if isinstance(found, list) else [found]:
            if problem := takes.problem(value):
                raise ValueError(f"--{item.name} {show(value)}: {problem}")


def settle_idle(config, idle: dict[str, str]) -> list[str]:
    """Of flags that would change nothing, ``idle``: name -> why, as "does nothing without --lora".

    Raises ValueError for the first that stood on the command line; returns a note for each that a recipe sets.
    """
    off = {name for name in idle if getattr(config, name, None) is False}
    refuse_idle(config.given, idle, off)
    defaults = {item.name: item.default for item in flags_of(type(config))}
    recipe = getattr(config, "recipe", None)
    changed = [name for name in idle if recipe and getattr(config, name, None) != defaults.get(name)]
    return [f"--{name} of --recipe {recipe} {idle[name]}" for name in changed]


def refuse_idle(given: Collection[str], idle: dict[str, str], off: Collection[str] = ()) -> None:
    """Raises ValueError for the first flag of ``idle`` that stood on the command line, as --no_NAME if it is ``off``;
    see :func:`settle_idle`."""
    for name, why in idle.items():
        if name in given:
            fix = "leave one of them out" if " with " in why else "add that, or leave it out"
            raise ValueError(f"--{'no_' if name in off else ''}{name} {why}; {fix}")


def speaks(error: Exception | str) -> bool:
    """Whether this process is the one to say what is wrong: of all that see it, the first."""
    rank = "LOCAL_RANK" if isinstance(error, OnThisMachine) else "RANK"
    return os.environ.get(rank, "0") == "0"


def read_flags(cls: type[T], argv: Sequence[str]) -> T:
    """:func:`parse`, and every check that needs neither torch nor a GPU: those across flags. A mistake ends the
    program with exit code 2 and one line."""
    flags = parse(cls, argv)
    try:
        flags.settled(flags.world_size(), has_gpu=True)
    except ValueError as error:
        build_parser(cls).fail(error)
    return flags


def parse(cls: type[T], argv: Sequence[str]) -> T:
    """The configuration that a command line asks for; ``given`` holds the flags that stood on it.

    A recipe's flags come first, as if they stood before the others, but they do not count as given: they are defaults.
    ``--recipe list`` prints the recipes and ends the program. A mistake ends it with exit code 2 and one line.
    """
    parser = build_parser(cls)
    values = _values(parser, argv)
    given, name = frozenset(values), values.get("recipe")
    if name == "list":
        print(listing(), end="")
        parser.exit(0)
    if name is not None:
        try:
            recipe = find_recipe(name)
        except ValueError as error:
            parser.fail(error)
        values = {**_values(parser, shlex.split(recipe.flags)), **values}
    return cls(**values, given=given)


def overridden(config) -> dict[str, tuple[Any, Any]]:
    """What the command line changed of a recipe: flag -> (the recipe's value, the value in use)."""
    recipe = parse(type(config), ["--recipe", config.recipe])
    pairs = {name: (getattr(recipe, name), getattr(config, name)) for name in sorted(config.given - NO_CHANGE)}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def to_dict(config) -> dict:
    """What config.json holds."""
    return {item.name: getattr(config, item.name) for item in flags_of(type(config))}


def build_parser(cls: type) -> "CommandLine":
    """A parser with the flags of a configuration; it returns those alone that stood on the command line."""
    parser = CommandLine(
        prog=name_of(cls.program),
        usage="%(prog)s [FLAG [VALUE]] ...",
        description=cls.__doc__.split("\n\n")[0],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    titled = [(parser.add_argument_group(title), items) for title, items in groups_of(cls).items()]
    for group, item in ((group, item) for group, items in titled for item in items):
        alias, alone = item.metadata["alias"], item.metadata["alone"]
        default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
        shown = "" if default is None or default == [] else f" [{default}]"
        options = dict(help=item.metadata["help"].replace("%", "%%") + shown, default=argparse.SUPPRESS, dest=item.name)
        spellings = [f"--{item.name}"] + ([f"--{alias}"] if alias else [])
        takes, add = value_of(item), group.add_argument
        if takes is None:
            add(*spellings, action="store_const", const=True, **options)
            add(f"--no_{item.name}", action="store_const", const=False, **{**options, "help": argparse.SUPPRESS})
            continue
        options |= dict(type=takes.convert, metavar=takes.metavar)
        if typing.get_origin(_scalar_type(item.type)) is list:
            add(*spellings, nargs="+", **options)
        elif item.metadata["several"]:
            add(*spellings, nargs="+", action=_OneOrMore, **options)
        elif alone is not None:
            add(*spellings, nargs="?", const=alone, **options)
        else:
            add(*spellings, **options)
    if any(item.name == "recipe" for item in flags_of(cls)):
        # nemo_run asks before it starts; its users' command lines say that it need not.
        parser.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


class CommandLine(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, which names the flag and the fix, and exit code 2. On several
    ranks the first one alone prints it."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, "add_help": False, **options})
        self.add_argument("--help", action="help", help="show this and end")
        # No flag has one dash: what begins with one is a value (-inf, a folder's name), as negative numbers are.
        self._negative_number_matcher = re.compile("-[^-]")
        self.defaults: dict[str, Any] = {}

    def option(
        self, name: str, takes: Value, help: str, default: Any = None, alias: str | None = None, **options: Any
    ) -> None:
        """Adds a flag, or a positional argument, with its range and default in --help."""
        shown = "" if default is None else f" [{default}]"
        options = {"metavar": takes.metavar, "type": takes.read, "help": help.replace("%", "%%") + shown, **options}
        if name.startswith("-"):
            options["default"] = argparse.SUPPRESS
            self.defaults[name.lstrip("-")] = default
        self.add_argument(name, *([alias] if alias else []), **options)

    def switch(self, name: str, help: str) -> None:
        """Adds a flag that is off unless it is given."""
        self.defaults[name.lstrip("-")] = False
        self.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=help)

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
        """(values of all flags of :meth:`option` and :meth:`switch`, the names of those that were given)."""
        found = vars(self.parse_args(words))
        chosen = self._subparsers and next(iter(self._subparsers._group_actions)).choices.get(found["command"])
        return {**(chosen or self).defaults, **found}, set(found)

    def parse_known_args(self, args=None, namespace=None):
        """argparse's, of words that may have dashes for underscores, and values that begin with one."""
        words = ["--help" if word == "-h" else underscored(word) for word in (sys.argv[1:] if args is None else args)]
        if self._subparsers is None:
            self._refuse_strangers(words[: words.index("--")] if "--" in words else words)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args=None, namespace=None):
        """argparse's, with what was meant by a word that is no flag."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.fail(self._meant(unknown[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """Says what argparse found, in this program's words, and ends it."""
        message = re.sub(r"^argument ([^:/]+)(/[^:]+)?: ", r"\1: ", message)
        if choice := re.match(r"(.+): invalid choice: '(.*)' \(choose from (.+)\)$", message, re.DOTALL):
            names = [name.strip("'\" ") for name in choice[3].split(",")]
            message = f"{choice[2]}: must be one of {', '.join(names)}; did you mean {nearest(choice[2], names)}?"
        elif re.search(": expected (at least )?one argument$", message):
            message = message.partition(": expected")[0] + " needs a value"
        elif "ignored explicit argument" in message:
            name = message.partition(":")[0]
            off = f", or --no_{name[2:]}" if f"--no_{name[2:]}" in self._option_string_actions else ""
            message = f"{name} takes no value: write {name}{off}"
        elif value := re.match(r"(-\S+|[A-Za-z]\S*): (.*)$", message, re.DOTALL):
            message = f"{value[1]} {value[2]}"  # Value.read's, which begins with the value itself
        self.fail(message)

    def fail(self, error: Exception | str, *, hint: bool = True) -> NoReturn:
        """Ends the program with exit code 2 and one line."""
        more = f" ({self.prog} --help shows all flags)" if hint and "--help" not in str(error) else ""
        if speaks(error):
            print(one_line(f"{self.prog}: error: {error}{more}"), file=sys.stderr, flush=True)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(5)  # torchrun ends all processes once one has ended, and the one that speaks may be slower
        self.exit(2)

    def _refuse_strangers(self, words: list[str]) -> None:
        """Ends the program for a flag that there is not, and for a value of one that takes none."""
        named = any(not action.option_strings for action in self._actions)  # positional arguments
        for before, word in zip(["", *words], words, strict=False):
            flag_before = self._option_string_actions.get(before)
            if word.startswith("--"):
                if word.partition("=")[0] not in self._option_string_actions:
                    self.fail(self._meant(word))
            elif flag_before is not None and flag_before.nargs == 0 and not named:
                off = f", or --no_{before[2:]}" if f"--no_{before[2:]}" in self._option_string_actions else ""
                self.fail(f"{before} takes no value, not {show(word)}: write {before}{off}")

    def _meant(self, word: str) -> str:
        """What to say of a word that is no flag: the one most like it, also for another program's ``optim.lr=1e-4``."""
        flags = sorted(self._option_string_actions)
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            return f"{name}: no such flag; did you mean {nearest(name, flags)}? (--help shows all)"
        if equals:
            flag_name = nearest(f"--{name.split('.')[-1]}", flags)
            return f"{word}: flags are written --name value; did you mean {flag_name} {value}? (--help shows all)"
        return f"{word}: a value without a flag; flags are written --name value (--help shows all)"


def underscored(word: str) -> str:
    """--data-path=x-y -> --data_path=x-y; a word that is no flag stays."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _values(parser: CommandLine, words: Sequence[str]) -> dict[str, Any]:
    """The values of the flags among ``words``; words that are none end the program."""
    values = vars(parser.parse_args(list(words)))
    values.pop("yes", None)
    return values


def _scalar_type(annotation) -> type:
    """int for ``int | None``, str for ``str``, ..."""
    if isinstance(annotation, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


class _OneOrMore(argparse.Action):
    """Of a flag that takes several values: one alone is kept as it is."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)
