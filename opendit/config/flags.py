"""Parse command lines into configurations: dataclasses whose fields are flags, with recipes as defaults.

Flags are written with underscores (``--batch_size``); dashes are accepted. A boolean flag ``--x`` also has ``--no_x``.
"""

import argparse
import dataclasses
import shlex
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

from opendit.config.console import name_of
from opendit.config.parser import CommandLine
from opendit.config.recipes import find_recipe, listing
from opendit.config.values import Value, show

P = TypeVar("P", bound="ProgramFlags")
# Flags of a start, not of what is trained: they don't count as changes of a recipe.
NO_CHANGE = {"recipe", "config", "dry_run", "outputs", "load"}


@dataclass(frozen=True)
class Flags:
    """Base of a component: flags that belong together. A configuration inherits from all of its components, in the
    order in which --help shows them.

    Attributes:
        group: the heading of the component's flags in --help, as "Title: what they are about".
        given: all flags of the configuration that were on the command line.
    """

    group: ClassVar[str]

    given: frozenset[str] = field(default=frozenset(), kw_only=True)


class ProgramFlags(Protocol):
    """Interface of a program's configuration, besides being a frozen dataclass of :class:`Flags`."""

    program: ClassVar[str]  # as it is started
    examples: ClassVar[tuple[str, ...]]

    def world_size(self) -> int: ...

    def settled(self, world_size: int, has_gpu: bool) -> Any: ...


def flag(
    default: Any,
    help: str,
    *,
    several: bool = False,
    alone: Any = None,
    alias: str | None = None,
    common: bool | str = False,
    **bounds: Any,
) -> Any:
    """Declare a configuration field that is also a command-line flag.

    several: allow a list of values. alone: the value of the flag without one. alias: another name. common: --help shows
    it without ``all``, with these words or the first clause of ``help``. bounds: allowed values, as fields of
    :class:`opendit.config.values.Value`; every number needs them, and its unit.
    """
    metadata = dict(help=help, several=several, alone=alone, alias=alias, common=common, bounds=bounds)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flags_of(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a configuration that are flags, in the order of its components."""
    of = _components(cls)
    order = list(dict.fromkeys(of.values()))
    flags = [item for item in dataclasses.fields(cls) if "help" in item.metadata]
    return sorted(flags, key=lambda item: order.index(of[item.name]))


def groups_of(cls: type[Any]) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return the flags of a configuration by the title of their heading in --help."""
    return {heading.partition(":")[0]: items for heading, items in headings_of(cls).items()}


def headings_of(cls: type[Any]) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return the flags of a configuration by their heading in --help. Components with the same title share the heading
    of the first one."""
    of, titles, groups = _components(cls), {}, {}
    for item in flags_of(cls):
        heading = titles.setdefault(of[item.name].group.partition(":")[0], of[item.name].group)
        groups.setdefault(heading, []).append(item)
    return groups


def _components(cls: type[Any]) -> dict[str, type[Any]]:
    """Return the component that declares each field of a configuration."""
    return {name: owner for owner in cls.__mro__ for name in owner.__dict__.get("__annotations__", ())}


def value_of(item: dataclasses.Field[Any]) -> Value | None:
    """Return the allowed values of a flag; None for a switch."""
    kind = _scalar_type(item.type)
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return None if kind is bool else Value(kind, **item.metadata["bounds"])


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Return a flag's default; a new list if it takes several values."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def check_values(config: Any) -> None:
    """Raises ValueError for the first flag whose value is out of its range, wherever that value came from."""
    for item in flags_of(type(config)):
        takes, found = value_of(item), getattr(config, item.name)
        if takes is None or found is None:
            continue
        for value in found if isinstance(found, list) else [found]:
            if problem := takes.problem(value):
                raise ValueError(f"--{item.name} {show(value)}: {problem}")


def settle_idle(config: Any, idle: dict[str, str]) -> list[str]:
    """Refuse flags that would change nothing. idle: name -> why, as "does nothing without --lora".

    Raises ValueError for the first that was on the command line. Returns a note for each that a recipe sets.
    """
    off = {name for name in idle if getattr(config, name, None) is False}
    refuse_idle(config.given, idle, off)
    defaults = {item.name: default_of(item) for item in flags_of(type(config))}
    recipe = getattr(config, "recipe", None)
    changed = [name for name in idle if recipe and name in defaults and getattr(config, name) != defaults[name]]
    return [f"--{name} of --recipe {recipe} {idle[name]}" for name in changed]


def refuse_idle(given: Collection[str], idle: dict[str, str], off: Collection[str] = ()) -> None:
    """Raises ValueError for the first flag of ``idle`` that was on the command line, as --no_NAME if it is ``off``; see
    :func:`settle_idle`."""
    for name, why in idle.items():
        if name in given:
            fix = "leave one of them out" if " with " in why else "add that, or leave it out"
            raise ValueError(f"--{'no_' if name in off else ''}{name}: {why}; {fix}")


def read_flags(cls: type[P], argv: Sequence[str]) -> P:
    """Parse a command line and check it across flags, without torch or a GPU. A mistake ends the program with exit code
    2 and one line."""
    flags = parse(cls, argv)
    try:
        flags.settled(flags.world_size(), has_gpu=True)
    except ValueError as error:
        build_parser(cls).fail(error)
    return flags


def parse(cls: type[P], argv: Sequence[str]) -> P:
    """Parse a command line into a configuration, whose ``given`` holds the flags that were on it.

    The flags of a recipe are defaults: they don't count as given. Those of a file, --config, do; the command line
    overrides them. ``--recipe list`` prints the recipes and ends the program. A mistake ends it with exit code 2 and
    one line.
    """
    parser = build_parser(cls)
    values = _values(parser, argv)
    if (file := values.get("config")) is not None:
        values = {**_values_of_file(cls, parser, file), **values}
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
    return cast(Callable[..., P], cls)(**values, given=given)


def _values_of_file(cls: type[Any], parser: CommandLine, file: str) -> dict[str, Any]:
    """Return the values of the flags in a YAML file, whose keys are their names. A mistake ends the program."""
    from opendit.common.yaml_file import read_yaml  # which few command lines need

    parser.source = f"--config {file}: "
    try:
        content = read_yaml(Path(file).expanduser(), f"--config {file}")
    except (ValueError, OSError) as error:
        parser.source = ""
        parser.fail(error)
    if not isinstance(content, dict) or "config" in content:
        parser.fail("must be flags and their values, as lr: 1e-4, without another config")
    switches = {item.name for item in flags_of(cls) if value_of(item) is None}
    words: list[str] = []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in switches:
            if not isinstance(value, bool):
                parser.fail(f"{key} {show(value)}: a switch; give true or false")
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:  # null: the default
            several = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(repr(each) if isinstance(each, float) else str(each) for each in several)]
    values = _values(parser, words)
    parser.source = ""
    return values


def to_yaml(config: Any) -> str:
    """Return a YAML file for --config that repeats a run: its recipe, and the flags that were given."""
    import yaml

    named = {"recipe": config.recipe} if config.recipe else {}
    given = {item.name: getattr(config, item.name) for item in flags_of(type(config)) if item.name in config.given}
    kept = {name: value for name, value in given.items() if name not in NO_CHANGE}
    return yaml.safe_dump({**named, **kept}, sort_keys=False, allow_unicode=True)


def overridden(config: Any) -> dict[str, tuple[Any, Any]]:
    """Return the flags of a recipe that the command line changed: flag -> (the recipe's value, the value in use)."""
    recipe = parse(type(config), ["--recipe", config.recipe])
    pairs = {name: (getattr(recipe, name), getattr(config, name)) for name in sorted(config.given - NO_CHANGE)}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def to_dict(config: Any) -> dict[str, Any]:
    """Return all flags and their values, as config.json holds them."""
    return {item.name: getattr(config, item.name) for item in flags_of(type(config))}


def build_parser(cls: type[ProgramFlags]) -> CommandLine:
    """Build a parser with the flags of a configuration. It returns only those that are on the command line."""
    parser = CommandLine(name_of(cls.program), (cls.__doc__ or "").split("\n\n")[0], cls.examples)
    for heading, items in headings_of(cls).items():
        parser.heading(heading)
        for item in items:
            _add(parser, item)
    if any(item.name == "recipe" for item in flags_of(cls)):
        # Command lines written for nemo_run, which asks before it starts, contain --yes.
        parser.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add(parser: CommandLine, item: dataclasses.Field[Any]) -> None:
    told, takes = item.metadata, value_of(item)
    default = default_of(item)
    if takes is None:
        return parser.switch(f"--{item.name}", told["help"], default, told["common"])
    options = {}
    if typing.get_origin(_scalar_type(item.type)) is list:
        options = dict(nargs="+")
    elif told["several"]:
        options = dict(nargs="+", action=_OneOrMore)
    elif told["alone"] is not None:
        options = dict(nargs="?", const=told["alone"])
    alias = f"--{told['alias']}" if told["alias"] else None
    parser.option(f"--{item.name}", takes, told["help"], default, alias, told["common"], type=takes.convert, **options)


def _values(parser: CommandLine, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the flags among ``words``. Unknown words end the program."""
    values = vars(parser.parse_args(list(words)))
    values.pop("yes", None)
    return values


def _scalar_type(annotation) -> type[Any]:
    """Return int for ``int | None``, str for ``str``, and so on."""
    if isinstance(annotation, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


class _OneOrMore(argparse.Action):
    """Store several values as a list, and a single one as it is."""

    def __call__(self, parser, namespace, values, option_string=None):
        assert values  # nargs is +
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)
