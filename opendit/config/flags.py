"""Declare flags and their allowed values.

A configuration is a frozen dataclass that inherits from components. A component is a subclass of :class:`Flags`. Its
fields are flags on one subject; :func:`flag` creates them.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

Bounds = dict[str, Any]  # allowed values of a flag, as fields of Value


def between(at_least: float, at_most: float, unit: str) -> Bounds:
    """Return the bounds of a number, both included."""
    return {"at_least": at_least, "at_most": at_most, "unit": unit}


# Bounds that several flags share. They exclude values with which a run would crash before it could report the mistake.
COUNT: Bounds = {"at_least": 1, "at_most": 10**9}
FROM_0: Bounds = {"at_least": 0, "at_most": 10**9}
ABOVE_0: Bounds = {"above": 0, "at_most": 1e38}  # up to about the largest fp32 number
SHARE: Bounds = {"at_least": 0, "below": 1, "unit": "share"}
BATCH: Bounds = between(1, 65_536, "samples")
SCALE: Bounds = between(1, 1000, "factor")  # factor by which a picture is enlarged
SIDE: Bounds = between(1, 16_384, "pixels")
FRAMES: Bounds = between(1, 16_384, "frames")
FPS: Bounds = {"above": 0, "at_most": 1000, "unit": "rate"}  # frames per second
WORKERS: Bounds = between(0, 256, "processes")
# the range of torch's generators and of the kernels' random numbers
SEED: Bounds = between(0, 2**63 - 1, "seed")
# 1,000: the number of noise levels of ddpm's models
SAMPLING_STEPS: Bounds = between(1, 1000, "steps")
GUIDANCE: Bounds = between(0, 1000, "scale")

NUMBERS = {int: "whole number", float: "number"}
_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Value:
    """Allowed values of a flag.

    Attributes:
        kind: int, float or str.
        choices: allowed words.
        counted: the one choice that may be followed by :N, a number from 1 to 99,999.
        free: True to allow any text. Otherwise text must be a valid name, such as a file's.
        unit: unit of a number ("steps", "seconds") or kind of text ("folder"), for --help.
    """

    kind: type[Any] = str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False
    choices: tuple[str, ...] | None = None
    counted: str | None = None
    free: bool = False
    unit: str | None = None

    def read(self, text: str) -> Any:
        """Convert a word of the command line and check its range. Raises ArgumentTypeError, as argparse expects."""
        value = self.convert(text)
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def convert(self, text: str) -> Any:
        """Convert a word and check it against ``choices``; ranges are checked later. Raises ArgumentTypeError."""
        value = text if self.kind is str else _number(self.kind, text)
        if value is None:
            raise argparse.ArgumentTypeError(f"{show(text)}: no {NUMBERS[self.kind]}; give {self.describe()}")
        if self.choices is not None and (problem := self.problem(value)):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def problem(self, value: Any) -> str | None:
        """Return a message if a value is not allowed, otherwise None."""
        if self.counted is not None and re.fullmatch(rf"{self.counted}:[1-9]\d{{0,4}}", str(value), re.ASCII):
            return None
        if self.choices is not None and value not in self.choices:
            words, meant = ", ".join(self.choices), nearest(str(value), self.choices, cutoff=0.5)
            return f"not known; give one of {words}" + (f"; did you mean {meant}?" if meant else "")
        if self.kind is str:
            return None if self.free else _problem_of_name(value)
        fits = isinstance(value, int | float) and not math.isnan(value) and (self.infinite or abs(value) != math.inf)
        fits = fits and (self.at_least is None or value >= self.at_least) and (self.above is None or value > self.above)
        fits = fits and (self.at_most is None or value <= self.at_most) and (self.below is None or value < self.below)
        return None if fits else f"out of range; give {self.describe()}"

    def describe(self) -> str:
        """Describe the allowed values, for example "a whole number from 1 to 16,384"."""
        if self.kind is str:
            return "one of " + ", ".join(self.choices) if self.choices else "text"
        return f"a {NUMBERS[self.kind]} {self._bounds()}".strip()

    def _bounds(self) -> str:
        shown = lambda bound: f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"  # noqa: E731
        if self.at_least is not None and self.at_most is not None:
            return f"from {shown(self.at_least)} to {shown(self.at_most)}"
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {shown(bound)}" for word, bound in words.items() if bound is not None)

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value in --help; None for plain text."""
        if self.unit is not None:
            return self.unit.upper().replace(" ", "_")
        if self.choices is not None:
            return "WORD"
        return None if self.kind is str else "NUMBER"

    def allowed(self) -> str:
        """Return the range or the words as in --help: "1 to 16,384", "above 0", "zero2, ddp"; "" for text."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind is str:
            return ""
        bounds = replace(self, at_most=None) if self.at_most is not None and self.at_most >= 10**8 else self
        return bounds._bounds().removeprefix("from ")


def whole(at_least: int, at_most: int, unit: str | None = None) -> Value:
    return Value(int, at_least=at_least, at_most=at_most, unit=unit)


def one_of(choices: tuple[str, ...]) -> Value:
    return Value(choices=tuple(choices))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.0) -> str:
    """Return the name most similar to ``name``, ignoring case; "" if no similarity reaches ``cutoff``, 0 to 1."""
    spelled = {valid.lower(): valid for valid in names}
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else ""


def show(value: Any) -> str:
    """Format a value for a message, in quotes if it is empty or blank."""
    return str(value) if str(value).strip() else repr(value)


def _problem_of_name(name: str) -> str | None:
    if not name.strip():
        return "empty; give a name"
    longest = max(map(len, os.fsencode(name).split(b"/")))
    return "too long for the name of a file; give a shorter one" if longest > 255 or len(name) > 4000 else None


def _number(kind: type[Any], text: str) -> int | float | None:
    """Convert text to a number, or return None. Rejects 1_000, spaces and other scripts' digits."""
    if kind is int:
        return int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    try:
        # adding 0.0 turns -0.0 into 0.0
        return float(text) + 0.0 if text.isascii() and not re.search(r"[_\s]", text) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Setting:
    """A flag that sets a configuration field of an objective or architecture. type: None for the type of ``default``.
    bounds: fields of :class:`Value`."""

    flag: str
    default: Any
    help: str
    type: str | None = None
    bounds: dict[str, Any] = field(default_factory=dict)

    @property
    def annotation(self) -> Any:
        """Type of the flag's field, for example ``float``, or ``float | None`` if the default is None."""
        kind: Any = type(self.default) if self.type is None else _TYPES[self.type]
        return kind | None if self.default is None else kind


@dataclass(frozen=True)
class Flags:
    """Base class of components. A configuration lists its components in the order of --help.

    Attributes:
        group: heading of the component's flags in --help, as "Title: subject".
        given: names of the flags that the user has set, in all components.
    """

    group: ClassVar[str]

    given: frozenset[str] = field(default=frozenset(), kw_only=True)


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
    """Declare a field of a component.

    Args:
        several: True to allow a list of values.
        alone: value of the flag if no value follows it on the command line.
        alias: second name of the flag.
        common: show the flag in the short --help, with this text, or with the first clause of ``help`` if True.
        bounds: allowed values, as fields of :class:`Value`. A number needs bounds and a unit.
    """
    metadata = dict(help=help, several=several, alone=alone, alias=alias, common=common, bounds=bounds)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def flags_of(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a configuration that are flags, in the order of its components."""
    of = _components(cls)
    order = list(dict.fromkeys(of.values()))
    flags = [item for item in dataclasses.fields(cls) if "help" in item.metadata]
    return tuple(sorted(flags, key=lambda item: order.index(of[item.name])))


def headings_of(cls: type[Any]) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return heading -> flags, as --help shows them. Components with equal titles share the first's heading."""
    of, titles, groups = _components(cls), {}, {}
    for item in flags_of(cls):
        heading = titles.setdefault(of[item.name].group.partition(":")[0], of[item.name].group)
        groups.setdefault(heading, []).append(item)
    return groups


def _components(cls: type[Any]) -> dict[str, type[Any]]:
    return {name: owner for owner in cls.__mro__ for name in owner.__dict__.get("__annotations__", ())}


def scalar_type(item: dataclasses.Field[Any]) -> Any:
    """Return the type of a flag's value: ``int`` for ``int | None``, ``list[str]`` for ``list[str]``."""
    if isinstance(item.type, types.UnionType):
        return next(each for each in typing.get_args(item.type) if each is not type(None))
    return item.type


def value_of(item: dataclasses.Field[Any]) -> Value | None:
    """Return the allowed values of a flag; None for a switch."""
    kind = scalar_type(item)
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return None if kind is bool else Value(kind, **item.metadata["bounds"])


def default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def to_dict(config: Any) -> dict[str, Any]:
    """Return all flags and their values, in the form of config.json."""
    return {item.name: getattr(config, item.name) for item in flags_of(type(config))}


def check_values(config: Any) -> None:
    """Raise ValueError for the first flag with a value out of range, even one that a recipe sets."""
    for item in flags_of(type(config)):
        takes, found = value_of(item), getattr(config, item.name)
        if takes is None or found is None:
            continue
        for value in found if isinstance(found, list) else [found]:
            if problem := takes.problem(value):
                raise ValueError(f"--{item.name} {show(value)}: {problem}")


def check_unused(config: Any, unused: dict[str, str]) -> list[str]:
    """Reject flags without effect. unused: flag -> reason, such as "does nothing without --lora". Raises ValueError for
    the first such flag from the user. Return a note for each from a recipe."""
    off = {name for name in unused if getattr(config, name, None) is False}
    reject_unused(config.given, unused, off)
    defaults = {item.name: default_of(item) for item in flags_of(type(config))}
    recipe = getattr(config, "recipe", None)
    changed = [name for name in unused if recipe and name in defaults and getattr(config, name) != defaults[name]]
    return [f"--{name} of --recipe {recipe} {unused[name]}" for name in changed]


def reject_unused(given: Collection[str], unused: dict[str, str], off: Collection[str] = ()) -> None:
    """Raise ValueError for the first flag of ``unused`` (flag -> reason) that the user set. off: flags set by
    --no_NAME."""
    for name, why in unused.items():
        if name in given:
            fix = "leave one of them out" if " with " in why else "add that, or leave it out"
            raise ValueError(f"--{'no_' if name in off else ''}{name}: {why}; {fix}")
