"""Strict JSON files: read within bounds, and checked before anything in them is used."""

import dataclasses
import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from opendit.common.rules import Invalid, Rule, string, whole
from opendit.common.utils import shown

MIB = 1 << 20
CONTAINERS = 1_000_000  # lists and objects in one file: an empty one takes 1 byte there and up to 200 in memory
DIGITS = 400  # of a number; a double needs 17, and has 309 before its point at most
LARGEST = 2**53  # integers above it are not exact in every program that reads JSON


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


COUNT = whole(0)
NAME = string(4096)
PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
FILE = string(255, PLAIN_NAME, "the plain name of a file in the same folder")
SHA256 = string(64, "[0-9a-f]{64}", "a SHA-256 in 64 hexadecimal digits")


@dataclasses.dataclass(frozen=True)
class FileKind:
    """The rule that files of one kind must meet, and the most bytes that are read of one."""

    rule: Rule
    most_bytes: int


def checked(value: Any, kind: FileKind, source: Path | str) -> Any:
    """``value`` if it keeps the kind's rule; else ValueError with one line that names the source and the field."""
    try:
        kind.rule(value, "")
    except Invalid as error:
        raise ValueError(f"{source}: {error}") from error
    return value


def read_file(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file.

    Raises ValueError with one line that names the file and the field that breaks the rule; OSError if it can't be
    opened."""
    return checked(read_json(path, kind.most_bytes), kind, path)


def parse_text(text: str, kind: FileKind, source: Path | str) -> Any:
    """The JSON that a safetensors file has as metadata. Raises ValueError as :func:`read_file`."""
    if len(text) > kind.most_bytes:
        raise ValueError(f"{source} has metadata of {len(text):,} characters; at most {kind.most_bytes:,} are read")
    return checked(parse_json(text, f"the metadata of {source}"), kind, source)
