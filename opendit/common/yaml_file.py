"""Read YAML from untrusted sources within limits on size, depth, aliases and time.

PyYAML's composer crashes on deep nesting, and expands merge keys without a limit. This module therefore builds values
from the parser's events, without recursion, and checks every limit before memory grows.

A value is a string, number, true, false, null, list, or dictionary with string keys. Ordinary files give the same
values as ``yaml.safe_load``, except that dates and times such as ``1:30`` stay strings. Infinities and NaNs are
accepted. These are refused: tags except ``!!str``, ``!!seq`` and ``!!map``; duplicate keys; keys that are not strings;
and numbers such as ``010`` that depend on the YAML version.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from opendit.common.json_file import DIGITS, parse_json, read_bounded
from opendit.common.utils import printable, shown

MOST_BYTES = 1 << 20
TIME_LIMIT = 30.0  # seconds
MOST_VALUES = 2_000_000  # maximum number of values, including keys; each repetition by an alias counts
MOST_DEPTH = 64
MOST_ALIASES = 10_000
MOST_DIRECTIVES = 16  # maximum number of lines that begin with %; libyaml takes quadratic time for them

_TRUE, _FALSE = ("yes", "true", "on"), ("no", "false", "off")  # YAML 1.1's words, also written as Yes and YES
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]*[01][01_]*|0x[0-9a-fA-F_]*[0-9a-fA-F][0-9a-fA-F_]*)")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_OF_TEXT = ("!", "tag:yaml.org,2002:str")
_OF = {list: "tag:yaml.org,2002:seq", dict: "tag:yaml.org,2002:map"}


def read_yaml(path: Path, name: str, most: int = MOST_BYTES) -> Any:
    """Return the content of a YAML file of at most ``most`` bytes. A ``.json`` file is read as JSON.

    Raises ValueError with one line that begins with ``name`` and, for invalid YAML, gives the line in the file.
    """
    try:
        content = read_bounded(path, most)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except OSError as error:
        raise ValueError(f"{name}: {path} can't be read ({error.strerror}); allow it, or give another one") from error
    return parse_json(content, name) if path.suffix == ".json" else parse_yaml(content, name)


def parse_yaml(content: bytes, name: str) -> Any:
    """Return the value of a YAML text in UTF-8. Raises ValueError as :func:`read_yaml`."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}: not UTF-8; save it as UTF-8") from error
    if len(found := list(_directives(text))) > MOST_DIRECTIVES:
        raise ValueError(f"{name}, line {text.count(chr(10), 0, found[-1]) + 1}: too many lines that begin with %")
    try:
        return _Builder(len(content)).read(text)
    except _BadValue as error:
        raise ValueError(f"{name}, line {error.line}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        why = printable(error.problem or error.context or "")[:200]
        raise ValueError(f"{name}{line}: not YAML that can be read ({why}); correct it") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{name}, line {line}: a control character, which YAML does not have; remove it") from error


def _directives(text: str) -> Iterator[int]:
    """Yield the offsets of lines that begin with %. Stop after ``MOST_DIRECTIVES`` + 1 lines."""
    for count, found in enumerate(re.finditer(r"^%", text, re.MULTILINE)):
        if count > MOST_DIRECTIVES:
            return
        yield found.start()


class _BadValue(Exception):
    """Error for a value that is refused. line: the value's line in the file."""

    def __init__(self, event: yaml.Event, why: str):
        super().__init__(why)
        self.line = event.start_mark.line + 1


@dataclass
class _Finished:
    """A value that has been read completely.

    Attributes:
        plain_merge: True for the merge key ``<<``.
        values, letters: number of values and of characters in this value, with aliases expanded.
        depth: levels of nested lists and dictionaries, including the value itself.
    """

    value: Any
    plain_merge: bool = False
    values: int = 1
    letters: int = 0
    depth: int = 0


class _Open:
    """A list or dictionary that has not been read to the end."""

    def __init__(self, event: Any, value: list[Any] | dict[str, Any]):
        self.anchor, self.value, self.event = event.anchor, value, event
        self.key: Any = None
        self.has_key = False
        self.merge: list[dict[str, Any]] | None = None
        self.size = _Finished(value, depth=1)


class _Builder:
    def __init__(self, most_letters: int):
        self.most_letters, self.end = most_letters, time.monotonic() + TIME_LIMIT
        self.open: list[_Open] = []
        self.anchors: dict[str, _Finished | None] = {}  # None: the value is not complete yet
        self.values = self.letters = self.aliases = 0
        self.root: Any = None

    def read(self, text: str) -> Any:
        documents = 0
        events: Iterator[Any] = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for number, event in enumerate(events):
            if number % 1024 == 0 and time.monotonic() > self.end:
                raise _BadValue(event, f"reading took more than {TIME_LIMIT:.0f} seconds; make it smaller")
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _BadValue(event, "a second document begins here; keep one a file")
            elif isinstance(event, yaml.ScalarEvent):
                self._count(event, 1, len(event.value))
                known = _Finished(_scalar(event), _is_merge(event), letters=len(event.value))
                self._keep(event.anchor, known)
                self._add(event, known)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._begin(event, [] if isinstance(event, yaml.SequenceStartEvent) else {})
            elif isinstance(event, yaml.CollectionEndEvent):
                self._finish()
        return self.root

    def _count(self, event: yaml.Event, values: int, letters: int) -> None:
        self.values += values
        self.letters += letters
        if self.values > MOST_VALUES:
            raise _BadValue(event, f"more than {MOST_VALUES:,} values, with aliases written out; make it smaller")
        if self.letters > 2 * self.most_letters + 4096:
            raise _BadValue(event, "aliases repeat more text than the file has; write it without them")

    def _keep(self, anchor: str | None, known: _Finished | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = known

    def _begin(self, event: Any, value: list[Any] | dict[str, Any]) -> None:
        if event.tag not in (None, "!", _OF[type(value)]):
            raise _BadValue(event, f"the tag {printable(event.tag)[:60]} is not read; leave it out")
        if len(self.open) >= MOST_DEPTH:
            raise _BadValue(event, f"nested more than {MOST_DEPTH} levels deep; make it flatter")
        self._count(event, 1, 0)
        if self.open and isinstance(self.open[-1].value, dict) and not self.open[-1].has_key:
            raise _BadValue(event, "a key that is a list or a dictionary; a key is a text")
        self._keep(event.anchor, None)
        self.open.append(_Open(event, value))

    def _finish(self) -> None:
        done = self.open.pop()
        if (
            isinstance(done.value, dict) and done.merge is not None
        ):  # merged keys come first; the dictionary's other keys override them
            own = dict(done.value)
            done.value.clear()
            for merged in reversed(done.merge):
                done.value.update(merged)
            done.value.update(own)
        self._keep(done.anchor, done.size)
        self._add(done.event, done.size)

    def _alias(self, event: yaml.AliasEvent) -> None:
        self.aliases += 1
        if self.aliases > MOST_ALIASES:
            raise _BadValue(event, f"more than {MOST_ALIASES:,} aliases; write it without them")
        if event.anchor not in self.anchors:
            raise _BadValue(event, f"the alias *{printable(event.anchor)[:60]} has no anchor before it")
        known = self.anchors[event.anchor]
        if known is None:
            raise _BadValue(event, f"*{printable(event.anchor)[:60]} is inside of what it repeats")
        if len(self.open) + known.depth > MOST_DEPTH:
            raise _BadValue(event, f"nested more than {MOST_DEPTH} levels deep, with aliases written out")
        self._count(event, known.values, known.letters)
        self._add(event, known)

    def _add(self, event: yaml.Event, known: _Finished) -> None:
        """Add a finished value to the innermost open list or dictionary, or make it the root."""
        if not self.open:
            self.root = known.value
            return
        inner = self.open[-1]
        inner.size.values += known.values
        inner.size.letters += known.letters
        inner.size.depth = max(inner.size.depth, known.depth + 1)
        if isinstance(inner.value, list):
            inner.value.append(known.value)
        elif inner.has_key:
            inner.has_key = False
            if inner.key is _MERGE:
                inner.merge = _merged(event, known.value)
            else:
                inner.value[inner.key] = known.value
        else:
            inner.key, inner.has_key = self._key(event, inner, known), True

    def _key(self, event: yaml.Event, inner: _Open, known: _Finished) -> Any:
        if known.plain_merge:
            if inner.merge is not None:
                raise _BadValue(event, "the key << is there twice; give it a list")
            return _MERGE
        if not isinstance(known.value, str):
            raise _BadValue(event, f"the key {shown(known.value)} is no text; put quotes around it")
        if known.value in inner.value:
            raise _BadValue(event, f"the key {shown(known.value)} is there twice")
        return known.value


_MERGE = object()


def _is_merge(event: yaml.ScalarEvent) -> bool:
    return event.value == "<<" and event.tag is None and event.implicit[0]


def _merged(event: yaml.Event, value: Any) -> list[dict[str, Any]]:
    """Return the dictionaries that a merge key ``<<`` copies."""
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(part, dict) for part in found):
        raise _BadValue(event, "<< takes over keys of a dictionary, or of a list of them")
    return found


def _scalar(event: yaml.ScalarEvent) -> Any:
    """Convert a scalar to a Python value. Raises _BadValue."""
    if event.tag in _OF_TEXT:
        return event.value
    if event.tag is not None:
        raise _BadValue(event, f"the tag {printable(event.tag)[:60]} is not read; leave it out")
    text = event.value
    if not event.implicit[0]:  # a quoted or block scalar
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in (text.lower(), text.upper(), text.capitalize()) and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if text[0] not in "+-.0123456789":
        return text
    if _OCTAL.fullmatch(text):
        fix = "write it without the zeros, or put quotes around a text"
        raise _BadValue(event, f"{shown(text)} is octal to some programs and decimal to others; {fix}")
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    is_int, is_float = _INT.fullmatch(text), _FLOAT.fullmatch(text)
    if not is_int and not is_float:
        return text
    if len(text) > DIGITS:
        raise _BadValue(event, f"the number {text[:20]}... is out of range")
    plain = text.replace("_", "")
    return int(plain, 0) if is_int else float(plain)


def require(true: object, where: str, message: str) -> None:
    """Raise ValueError unless ``true`` holds. The message begins with ``where``."""
    if not true:
        raise ValueError(f"{where}: {message}")


def require_known(found: dict[Any, Any], known: Sequence[str], where: str, hints: Mapping[str, str] = {}) -> None:
    """Raise ValueError for a key that is not in ``known``. hints: unknown key -> text appended to the message."""
    if unknown := next((key for key in found if key not in known), None):
        keys = ", ".join(known[:20])
        raise ValueError(f"{where}: has the unknown key {shown(unknown)}; known here: {keys}{hints.get(unknown, '')}")


def positive(value: Any, what: str, where: str) -> Fraction:
    """Return a positive number as an exact fraction. Raises ValueError. what: name of the number in the message."""
    try:  # YAML reads 1e3 as a string, so also accept strings
        number = float(value) if type(value) in (int, float, str) and len(str(value)) <= 100 else 0.0
        if 1e-15 < number < 1e15:
            return Fraction(str(value))
    except ValueError:
        pass
    found = repr(value) if type(value) is float else shown(value)
    raise ValueError(f"{where}: {what} must be a number above 0, not {found}; leave it out to train without it")
