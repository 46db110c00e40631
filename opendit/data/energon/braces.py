"""Names of many tars in one: ``part-{000..127}.tar`` and ``{left,right}.tar``, as shells have them."""

import re
from itertools import product

MOST = 1_000_000  # names of one pattern

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")


def expand_braces(pattern: str) -> list[str]:
    """The names, in the order of the pattern. Raises ValueError for braces that do not match, or for too many names."""
    names = [""]
    for part in _parts(pattern):
        if len(names) * len(part) > MOST:
            raise ValueError(f"{pattern!r} names more than {MOST:,} tars")
        names = [before + after for before, after in product(names, part)]
    return names


def _parts(pattern: str) -> list[list[str]]:
    """What stands one after the other: the choices of each."""
    parts, text, at = [], "", 0
    while at < len(pattern):
        if pattern[at] == "}":
            raise ValueError(f"{pattern!r} has a }} without its {{")
        if pattern[at] != "{":
            text, at = text + pattern[at], at + 1
            continue
        end = _end(pattern, at)
        parts += [[text], _choices(pattern[at + 1 : end])]
        text, at = "", end + 1
    return [*parts, [text]]


def _end(pattern: str, start: int) -> int:
    depth = 0
    for at in range(start, len(pattern)):
        depth += (pattern[at] == "{") - (pattern[at] == "}")
        if depth == 0:
            return at
    raise ValueError(f"{pattern!r} has a {{ without its }}")


def _choices(inner: str) -> list[str]:
    if (found := _RANGE.fullmatch(inner)) is not None:
        return _numbers(found[1], found[2], int(found[3] or 1))
    items, depth, start = [], 0, 0
    for at, letter in enumerate(inner):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            items.append(inner[start:at])
            start = at + 1
    if not items:  # {x} is itself
        return ["{" + name + "}" for name in expand_braces(inner)]
    return [name for item in [*items, inner[start:]] for name in expand_braces(item)]


def _numbers(first: str, last: str, step: int) -> list[str]:
    padded = any(re.match(r"-?0\d", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    low, high, step = int(first), int(last), abs(step) or 1
    if abs(high - low) // step >= MOST:
        raise ValueError(f"{{{first}..{last}}} names more than {MOST:,} tars")
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]
