"""Command lines to configurations: a dataclass whose fields are flags, recipes, and errors that name what was meant.

Flags are written with underscores (``--batch_size``); dashes are accepted. A boolean flag ``--x`` also has ``--no_x``.
"""

import argparse
import dataclasses
import shlex
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from typing import Any, TypeVar

from opendit.models.zoo import nearest
from opendit.recipes import find_recipe, listing

T = TypeVar("T")
# Of a start, not of what is trained: no changes of a recipe.
NO_CHANGE = {"recipe", "dry_run", "outputs", "load"}
GROUPS = ("Model", "Data", "Training", "Sampling", "Speed", "Run", "Output")  # their order in --help


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] | None = None,
    several: bool = False,
    alone: Any = None,
    alias: str | None = None,
) -> Any:
    """A configuration field that is also a command-line flag.

    several: it may also be given a list of values. alone: its value where it is given none. alias: another name of it.
    """
    metadata = dict(help=help, group=group, choices=choices, several=several, alone=alone, alias=alias)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flags_of(cls: type) -> list[dataclasses.Field]:
    """The fields of a configuration that are flags."""
    return [item for item in dataclasses.fields(cls) if "group" in item.metadata]


def parse(cls: type[T], argv: Sequence[str]) -> T:
    """The configuration that a command line asks for; ``given`` holds the flags that stood on it.

    A recipe's flags come first, as if they stood before the others, but they do not count as given: they are defaults.
    ``--recipe list`` prints the recipes and ends the program, a mistake prints it and what was meant and ends it too.
    """
    parser = build_parser(cls)
    values = _values(parser, [_underscored(word) for word in argv])
    given, name = frozenset(values), values.get("recipe")
    if name == "list":
        print(listing(), end="")
        parser.exit(0)
    if name is not None:
        try:
            recipe = find_recipe(name)
        except ValueError as error:
            parser.error(str(error))
        values = {**_values(parser, shlex.split(recipe.flags)), **values}
    return cls(**values, given=given)


def overridden(config) -> dict[str, tuple[Any, Any]]:
    """What the command line changed of a recipe: flag -> (the recipe's value, the value in use)."""
    recipe = parse(type(config), ["--recipe", config.recipe])
    pairs = {name: (getattr(recipe, name), getattr(config, name)) for name in sorted(config.given - NO_CHANGE)}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def build_parser(cls: type) -> argparse.ArgumentParser:
    """A parser with the flags of a configuration; it returns those alone that stood on the command line."""
    parser = argparse.ArgumentParser(
        description=cls.__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    flags = flags_of(cls)
    names = sorted({item.metadata["group"] for item in flags}, key=GROUPS.index)
    groups = {name: parser.add_argument_group(name) for name in names}
    for item in flags:
        group, alias, alone = (item.metadata[key] for key in ("group", "alias", "alone"))
        default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
        shown = "" if default is None or default == [] else f" [{default}]"
        options = dict(help=item.metadata["help"].replace("%", "%%") + shown, default=argparse.SUPPRESS, dest=item.name)
        spellings = [f"--{item.name}"] + ([f"--{alias}"] if alias else [])
        kind, add = _scalar_type(item.type), groups[group].add_argument
        if kind is bool:
            add(*spellings, action="store_const", const=True, **options)
            add(f"--no_{item.name}", action="store_const", const=False, **{**options, "help": argparse.SUPPRESS})
        elif typing.get_origin(kind) is list:
            add(*spellings, type=typing.get_args(kind)[0], nargs="+", **options)
        elif item.metadata["several"]:
            add(*spellings, type=kind, nargs="+", action=_OneOrMore, **options)
        elif alone is not None:
            add(*spellings, type=kind, nargs="?", const=alone, **options)
        else:
            add(*spellings, type=kind, choices=item.metadata["choices"], **options)
    if any(item.name == "recipe" for item in flags):
        # nemo_run asks before it starts; its users' command lines say that it need not.
        parser.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _underscored(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _values(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """The values of the flags among ``words``; words that are none end the program."""
    found, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_meant(unknown[0], sorted(parser._option_string_actions)))
    values = vars(found)
    values.pop("yes", None)
    return values


def _meant(word: str, flags: list[str]) -> str:
    """What to say of a word that is no flag: the one most like it, also for another program's ``optim.lr=1e-4``."""
    name, equals, value = word.partition("=")
    if word.startswith("-"):
        return f"{name}: no such flag; did you mean {nearest(name, flags)}? (--help shows all)"
    if equals:
        flag_name = nearest(f"--{name.split('.')[-1]}", flags)
        return f"{word}: flags are written --name value; did you mean {flag_name} {value}?"
    return f"{word}: a value without a flag; flags are written --name value"


def _scalar_type(annotation) -> type:
    """int for ``int | None``, str for ``str``, ..."""
    if isinstance(annotation, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


class _OneOrMore(argparse.Action):
    """Of a flag that takes several values: one alone is kept as it is."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)
