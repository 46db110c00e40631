"""Read YAML from untrusted sources with PyYAML's loader, within limits on size, depth, aliases and time.

PyYAML's composer crashes on deep nesting, and expands merge keys without a limit. So a first pass over the parser's
events checks every limit before the loader runs.

Ordinary files give the same values as ``yaml.safe_load``, except that dates and times such as ``1:30`` stay strings.
These are refused: tags except ``!!str``, ``!!seq`` and ``!!map``; duplicate keys; keys that are not strings; and
numbers such as ``010`` that depend on the YAML version.
"""

import re
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import islice
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

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]*[01][01_]*|0x[0-9a-fA-F_]*[0-9a-fA-F][0-9a-fA-F_]*)$")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(
    r"(?:(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_MERGE = "tag:yaml.org,2002:merge"


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
    for found in islice(re.finditer(r"^%", text, re.MULTILINE), MOST_DIRECTIVES, None):
        raise ValueError(f"{name}, line {text.count(chr(10), 0, found.start()) + 1}: too many lines that begin with %")
    try:
        _check(text, 2 * len(content) + 4096)
        return yaml.load(text, _Loader)
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


class _BadValue(Exception):
    """Error for a value that is refused. line: the value's line in the file."""

    def __init__(self, at: yaml.Event | yaml.Node, why: str):
        super().__init__(why)
        self.line = at.start_mark.line + 1


def _check(text: str, most_letters: int) -> None:
    """Raise _BadValue for a text that exceeds a limit, or has a refused tag or number. An alias counts as much as the
    value that it repeats. most_letters: maximum characters of all values."""
    end, documents, aliases, values, letters = time.monotonic() + TIME_LIMIT, 0, 0, 0, 0
    anchors: dict[str | None, list[int] | None] = {}  # name -> [values, letters, depth]; None while the value is open
    opened: list[tuple[str | None, list[int]]] = []  # anchor and size of each list and dictionary that is open
    events: Any = yaml.parse(text, _Loader)
    for number, event in enumerate(events):
        if number % 1024 == 0 and time.monotonic() > end:
            raise _BadValue(event, f"reading took more than {TIME_LIMIT:.0f} seconds; make it smaller")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _BadValue(event, "a second document begins here; keep one a file")
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
            anchors[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            name = f"*{printable(event.anchor)[:60]}"
            if aliases > MOST_ALIASES:
                raise _BadValue(event, f"more than {MOST_ALIASES:,} aliases; write it without them")
            if event.anchor not in anchors:
                raise _BadValue(event, f"the alias {name} has no anchor before it")
            if (size := anchors[event.anchor]) is None:
                raise _BadValue(event, f"{name} is inside of what it repeats")
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            anchors[event.anchor] = size = [1, len(event.value), 0]
        elif isinstance(event, yaml.CollectionStartEvent):
            _check_tag(event, "seq" if isinstance(event, yaml.SequenceStartEvent) else "map")
            anchors[event.anchor], size = None, [1, 0, 1]
        else:
            continue
        if isinstance(event, yaml.NodeEvent):
            values, letters = values + size[0], letters + size[1]
            if len(opened) + size[2] > MOST_DEPTH:
                raise _BadValue(event, f"nested more than {MOST_DEPTH} levels deep, with aliases written out")
            if values > MOST_VALUES:
                raise _BadValue(event, f"more than {MOST_VALUES:,} values, with aliases written out; make it smaller")
            if letters > most_letters:
                raise _BadValue(event, "aliases repeat more text than the file has; write it without them")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, size))
        elif opened:
            outer = opened[-1][1]
            outer[:] = outer[0] + size[0], outer[1] + size[1], max(outer[2], 1 + size[2])


def _check_tag(event: Any, kind: str) -> None:
    if event.tag not in (None, "!", f"tag:yaml.org,2002:{kind}"):
        raise _BadValue(event, f"the tag {printable(event.tag)[:60]} is not read; leave it out")


def _check_scalar(event: yaml.ScalarEvent) -> None:
    _check_tag(event, "str")
    text = event.value
    if event.tag is None and event.implicit[0]:  # neither quoted nor a block scalar
        if _OCTAL.fullmatch(text):
            fix = "write it without the zeros, or put quotes around a text"
            raise _BadValue(event, f"{shown(text)} is octal to some programs and decimal to others; {fix}")
        if len(text) > DIGITS and (_INT.match(text) or _FLOAT.match(text)):
            raise _BadValue(event, f"the number {text[:20]}... is out of range")


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """PyYAML's safe loader without dates, and with unique strings as keys."""

    yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] in ("bool", "null", "merge")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Return a node's dictionary. Keys from ``<<`` come first."""
        own = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _BadValue(key_node, f"the key {shown(key)} is no text; put quotes around it")
            if (key_node.tag, key) in own:
                raise _BadValue(key_node, f"the key {shown(key)} is there twice")
            own.add((key_node.tag, key))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_MERGE, lambda loader, node: node.value)  # the value "<<" is plain text


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
