"""Patterns of dotted names: how plans and rules of initialisation speak of a model's parameters and modules."""

import functools
import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def fits(pattern: str, name: str) -> bool:
    """Return True if a name fits a pattern: ``*`` is one part between dots, ``**`` one or more."""
    return _expression(pattern).fullmatch(name) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern:
    words = {"*": r"[^.]+", "**": r".+"}
    return re.compile(r"\.".join(words.get(word, re.escape(word)) for word in pattern.split(".")))


def value_of(name: str, by_pattern: Mapping[str, Value], of: str) -> Value:
    """Return the value of the one pattern that fits a parameter's name.

    of: names the patterns in the error. Raises ValueError unless exactly one pattern fits."""
    found = [pattern for pattern in by_pattern if fits(pattern, name)]
    if len(found) != 1:
        raise ValueError(f"parameter {name}: one pattern of {of} has to fit it, not {len(found)} {found}")
    return by_pattern[found[0]]
