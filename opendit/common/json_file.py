"""Read strict JSON within limits, without pydantic.

The reader limits a file's bytes, its nesting depth and a number's digits, and rejects duplicate keys. Errors are
ValueErrors of one line with the file and the problem. pydantic models for JSON are in opendit/common/json_models.py.
"""

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from opendit.common.utils import shown

MIB = 1 << 20
# Maximum number of lists and objects in a file. An empty list takes few bytes in the file, but up to 200 in memory.
CONTAINERS = 1_000_000
DEPTH = 64  # maximum depth of nested lists and objects
DIGITS = 400  # maximum number of characters in a number; a double has at most 309 digits before its point
LARGEST = 2**53  # largest integer; some programs round larger ones


def read_json(path: Path, most: int) -> Any:
    """Return the content of a JSON file of at most ``most`` bytes. Raises OSError, or ValueError with the path."""
    return parse_json(read_bounded(path, most), str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most ``most`` bytes. Raises OSError, or ValueError with the path."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > most:
        raise ValueError(f"{path} has {max(size, len(content)):,} bytes; such a file has at most {most:,}")
    return content


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading and return a descriptor. Opening a named pipe does not block.

    Raises OSError, or ValueError with the path if the file is not regular.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        if error.errno == errno.ENXIO:  # the path is a socket
            raise ValueError(f"{path} is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is no regular file")
    return handle


def parse_json(content: bytes | str, source: str) -> Any:
    """Return the value of a JSON text in UTF-8 without duplicate keys, NaN or Infinity. Raises ValueError that names
    ``source``."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        if text.count("[") + text.count("{") > CONTAINERS:
            raise ValueError(f"more than {CONTAINERS:,} lists and objects")
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float, parse_int=_int
        )
        _check_depth(value)
        return value
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


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEPTH} levels deep")


def _items(outer: dict[str, Any] | list[Any]) -> list[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    return [item for item in values if isinstance(item, dict | list)]


def within(place: str, key: str | int) -> str:
    """Return the path of a value in JSON, such as "starts[3].flags". place: path of the enclosing object or list."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    key = key if re.fullmatch(r"[\w.-]{1,60}", key, re.ASCII) else shown(key)
    return f"{place}.{key}" if place else key
