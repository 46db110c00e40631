"""Strict JSON, and rules for the values in it: what a file that somebody else wrote is read with.

A rule is a function of a value and its place ("config.hidden_size") that raises :class:`Invalid` where the value breaks
it. Rules build no object from what they look at, so a file costs no more than its own bytes until all of it is checked.

(A library for this, such as pydantic, would need the bounds written into the models' dataclasses, does not look for
duplicate keys or the size and depth of a file, and has errors of several lines. These are a few functions.)
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

Rule = Callable[[Any, str], None]

MIB = 1 << 20
CONTAINERS = 1_000_000  # lists and objects in one file: an empty one takes 1 byte there and up to 200 in memory
DIGITS = 400  # of a number; a double needs 17, and has 309 before its point at most
LARGEST = 2**53  # integers above it are not exact in every program that reads JSON


class Invalid(ValueError):
    """A value that breaks its rule: the message names its place and what is allowed there."""


# ------------------------------------------------------------------------------------------ strict JSON


def read_json(path: Path, most: int) -> Any:
    """The content of a JSON file of at most ``most`` bytes.

    Raises ValueError with one line that names the file: it is no regular file, too large, not UTF-8 or not strict JSON
    (see :func:`parse_json`); OSError if it can't be opened.
    """
    return parse_json(read_bounded(path, most), str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of a regular file that has at most ``most``. Raises ValueError naming it, and OSError."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > most:
        raise ValueError(f"{path} has {max(size, len(content)):,} bytes; such a file has at most {most:,}")
    return content


def open_regular(path: str | Path) -> int:
    """Return the descriptor of a regular file, opened for reading. Raises ValueError naming a path at which something
    else is, such as a named pipe, whose opening would wait without end; OSError."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ValueError(f"{path} is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is no regular file")
    return handle


def parse_json(content: bytes | str, source: str) -> Any:
    """The value of a JSON text, which must be UTF-8, hold each key of an object once, and no NaN or Infinity.

    source: the file it comes from, for messages. Raises ValueError with one line that begins with it.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        if text.count("[") + text.count("{") > CONTAINERS:
            raise ValueError(f"more than {CONTAINERS:,} lists and objects")
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not JSON: byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError(f"{source} is not JSON that can be read: it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error.msg} at line {error.lineno}") from error
    except ValueError as error:
        raise ValueError(f"{source} is not strict JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} is there twice")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _float(text: str) -> float:
    value = float(text[:DIGITS])
    if len(text) > DIGITS or not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}... is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"the number {text[:20]}... is out of range")
    return int(text)


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


def shown(value: Any) -> str:
    """A short form of a value for a message of one line, whatever is in it."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else f"{ascii(value[:60])}..."
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 30 else f"{text[:30]}..."


def _within(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    key = key if re.fullmatch(r"[\w.-]{1,60}", key, re.ASCII) else shown(key)
    return f"{place}.{key}" if place else key


def _not(value: Any, place: str, wanted: str) -> Invalid:
    return Invalid(f"{place or 'the content'} is {shown(value)}, not {wanted}")
