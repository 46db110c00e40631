"""Strict JSON, and rules for the values in it: what a file that somebody else wrote is read with.

A rule is a function of a value and its place ("config.hidden_size") that raises :class:`Invalid` where the value breaks
it. Rules build no object from what they look at, so a file costs no more than its own bytes until all of it is checked.

(A library for this, such as pydantic, would need the bounds written into the models' dataclasses, does not look for
duplicate keys or the size and depth of a file, and has errors of several lines. These are a few functions.)
"""

import json
import re
from collections.abc import Callable, Hashable
from typing import Any

from opendit.common.utils import shown

Rule = Callable[[Any, str], None]

CONTAINERS = 1_000_000
LARGEST = 2**53


class Invalid(ValueError):
    """A value that breaks its rule: the message names its place and what is allowed there."""


# ------------------------------------------------------------------------------------------ rules


def whole(low: int, high: int = LARGEST) -> Rule:
    """An integer from ``low`` to ``high``; true and false are none."""

    def rule(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _not(value, place, f"an integer from {low:,} to {high:,}")

    return rule


def number(low: float = -1e12, high: float = 1e12, above: bool = False) -> Rule:
    """A finite number from ``low``, or with ``above`` from above it, to ``high``; true and false are none."""

    def rule(value: Any, place: str) -> None:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise _not(value, place, f"a number {'above' if above else 'from'} {low:g} to {high:g}")

    return rule


def string(most: int = 4096, pattern: str | None = None, what: str = "") -> Rule:
    """A string of at most ``most`` characters, all of which match the regular expression ``pattern`` (said as
    ``what``)."""

    def rule(value: Any, place: str) -> None:
        if not isinstance(value, str) or len(value) > most:
            raise _not(value, place, f"a string of at most {most:,} characters")
        if pattern is not None and re.fullmatch(pattern, value) is None:
            raise _not(value, place, what)

    return rule


def one_of(*values: Hashable) -> Rule:
    """One of these, and of the same type."""

    def rule(value: Any, place: str) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            raise _not(value, place, "one of " + ", ".join(json.dumps(known) for known in values))

    return rule


truth = one_of(True, False)
nothing = one_of(None)


def either(*rules: Rule) -> Rule:
    """Any one of the rules; the message is the last one's."""

    def rule(value: Any, place: str) -> None:
        for rule in rules[:-1]:
            try:
                return rule(value, place)
            except Invalid:
                continue
        rules[-1](value, place)

    return rule


def optional(rule: Rule) -> Rule:
    """null, or what the rule takes."""
    return either(nothing, rule)


def listed(rule: Rule, least: int = 0, most: int = CONTAINERS) -> Rule:
    """A list of ``least`` to ``most`` values that keep the rule."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            raise _not(value, place, f"a list of {sizes} values")
        for index, item in enumerate(value):
            rule(item, f"{place}[{index}]")

    return check


def mapping(key: Rule, rule: Rule, most: int = CONTAINERS) -> Rule:
    """An object of any keys that keep the rule ``key`` and values that keep ``rule``."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict) or len(value) > most:
            raise _not(value, place, f"an object of at most {most:,} keys")
        for name, item in value.items():
            key(name, f"a key of {place}")
            rule(item, f"{place}[{shown(name)}]")

    return check


def record(required: dict[str, Rule], more: dict[str, Rule] | None = None, others: Rule | None = None) -> Rule:
    """An object with all keys of ``required`` and any of ``more``; other keys are refused, or keep the rule
    ``others``."""
    known = {**required, **(more or {})}

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _not(value, place, "an object")
        for key in required:
            if key not in value:
                raise Invalid(f"{_within(place, key)} is missing")
        for key, item in value.items():
            rule = known.get(key, others)
            if rule is None:
                raise Invalid(f"{_within(place, key)} is not known to this version of OpenDiT")
            rule(item, _within(place, key))

    return check


def plain(depth: int = 4, most: int = 65536) -> Rule:
    """Any JSON of at most ``depth`` levels, with strings of at most ``most`` characters."""

    def check(value: Any, place: str, depth: int = depth) -> None:
        if isinstance(value, dict | list):
            if depth == 0:
                raise Invalid(f"{place} is nested too deeply")
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                check(item, _within(place, key), depth - 1)
        elif isinstance(value, str) and len(value) > most:
            raise _not(value, place, f"a string of at most {most:,} characters")

    return check


def _within(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    key = key if re.fullmatch(r"[\w.-]{1,60}", key, re.ASCII) else shown(key)
    return f"{place}.{key}" if place else key


def _not(value: Any, place: str, wanted: str) -> Invalid:
    return Invalid(f"{place or 'the content'} is {shown(value)}, not {wanted}")
