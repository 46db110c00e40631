"""Names of many tars in one: ``part-{000..127}.tar`` and ``{left,right}.tar``, as shells have them."""

import re
from collections.abc import Iterable
from itertools import product

from opendit.common.utils import shown

MOST = 1_000_000  # names of all patterns of a file
MOST_BYTES = 1 << 27  # characters of these names together
MOST_DEPTH, MOST_PARTS = 16, 1_000  # of one pattern
_DIGITS = 18  # of a number in braces

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", re.ASCII)


def expand_braces(pattern: str) -> list[str]:
    """Return the names, in the order of the pattern. Raises ValueError for braces that do not match, or for more names,
    or longer ones, than the limits above allow."""
    return expand_all([pattern])


def expand_all(patterns: Iterable[str]) -> list[str]:
    """Return the names of several patterns, one pattern after the other. The limits hold for all of them together."""
    names: list[str] = []
    size = 0
    for pattern in patterns:
        _check_depth(pattern)
        found = _expand(pattern, pattern)
        names += found
        size += sum(map(len, found))
        _check(pattern, len(names), size)
    return names


def _check(pattern: str, names: int, size: int) -> None:
    if names > MOST or size > MOST_BYTES:
        raise ValueError(f"{shown(pattern)} names more than {MOST:,} tars, or names of {MOST_BYTES:,} characters")


def _check_depth(pattern: str) -> None:
    depth = 0
    for found in re.finditer(r"[{}]", pattern):
        depth += 1 if found[0] == "{" else -1
        if depth < 0:
            raise ValueError(f"{shown(pattern)} has a }} without its {{")
        if depth > MOST_DEPTH:
            raise ValueError(f"{shown(pattern)} has braces more than {MOST_DEPTH} levels deep")
    if depth:
        raise ValueError(f"{shown(pattern)} has a {{ without its }}")


def _expand(text: str, pattern: str) -> list[str]:
    """Return the names of a part of ``pattern``, which messages show. Its braces match."""
    if "{" not in text:
        return [text]
    parts = _parts(text, pattern)
    names, size = [""], 0
    for part in parts:
        size = size * len(part) + sum(map(len, part)) * len(names)
        _check(pattern, len(names) * len(part), size)
        names = [before + after for before, after in product(names, part)]
    return names


def _parts(text: str, pattern: str) -> list[list[str]]:
    """Return what follows each other: the choices of each part."""
    parts, start, at = [], 0, 0
    for found in re.finditer(r"[{}]", text):
        if found.start() < at:
            continue  # inside of braces that are done
        at = found.start()
        end = _end(text, at)
        parts += [[text[start:at]], _choices(text[at + 1 : end], pattern)]
        if len(parts) > MOST_PARTS:
            raise ValueError(f"{shown(pattern)} has more than {MOST_PARTS:,} parts")
        start = at = end + 1
    return [*parts, [text[start:]]]


def _end(text: str, start: int) -> int:
    """Return where the brace at ``start`` ends."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise AssertionError("braces that match end")


def _choices(inner: str, pattern: str) -> list[str]:
    if (found := _RANGE.fullmatch(inner)) is not None:
        return _numbers(found[1], found[2], found[3] or "1", pattern)
    items, level, start = [], 0, 0
    for found in re.finditer(r"[{},]", inner):
        level += (found[0] == "{") - (found[0] == "}")
        if found[0] == "," and level == 0:
            items.append(inner[start : found.start()])
            start = found.end()
    if not items:  # {x} is itself
        return ["{" + name + "}" for name in _expand(inner, pattern)]
    names, size = [], 0
    for item in [*items, inner[start:]]:
        names += (found := _expand(item, pattern))
        size += sum(map(len, found))
        _check(pattern, len(names), size)
    return names


def _numbers(first: str, last: str, step: str, pattern: str) -> list[str]:
    if max(map(len, (first, last, step))) > _DIGITS:
        raise ValueError(f"{shown(pattern)} has a number of more than {_DIGITS} digits")
    padded = any(re.match(r"-?0\d", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    low, high, by = int(first), int(last), abs(int(step)) or 1
    _check(pattern, abs(high - low) // by + 1, 0)
    numbers = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    return [f"{number:0{width}d}" for number in numbers]
