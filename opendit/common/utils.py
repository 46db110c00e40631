"""Small helpers for every package: lazy imports, an error for users, SHA-256, and text for messages.

This module imports only Python's standard library.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HASH_BLOCK = 4 << 20  # bytes that are read at a time


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DataError(RuntimeError):
    """Error for data that can't be used. The message tells the user why, without a traceback."""


def import_when_used(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` (PEP 562) and ``__all__`` of a package or module that re-exports names lazily.

    A source module is imported when one of its names is first used, so that flags can be checked without torch.
    ``modules``: source module -> names to re-export, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # later uses bypass this function
        return value

    return get, sorted(homes)


# ------------------------------------------------------------------------------------------ SHA-256


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits. Raises OSError."""
    digest, block = hashlib.sha256(), memoryview(bytearray(HASH_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


class HashedStream(NamedTuple):
    """An input of :func:`hash_parts`: ``length`` bytes that are read in blocks and need not fit in memory."""

    length: int
    blocks: Iterable[bytes]


def hash_parts(*parts: bytes | str | HashedStream) -> str:
    """Return the SHA-256 of several inputs. Each is hashed after its length: ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, HashedStream):
            digest.update(part.length.to_bytes(8, "little"))
            for block in part.blocks:
                digest.update(block)
            continue
        part = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------ text for messages


def printable(text: str | Path) -> str:
    """Return text as one line of UTF-8. Other characters and bytes become Python's escapes."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(c: str) -> str:
    if "\udc80" <= c <= "\udcff":  # Python's form of a byte that is not UTF-8
        return f"\\x{ord(c) - 0xDC00:02x}"
    return c.encode("unicode_escape").decode()


def shown(value: Any) -> str:
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else f"{ascii(value[:60])}..."
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 30 else f"{text[:30]}..."


def read_size(text: str, name: str) -> int:
    """Convert ``1GB``, ``64MiB`` or a bare number to bytes. Raises ValueError that begins with ``name``."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]?)(i?)b?", text.lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else 0
    if found is None or not 1 <= size <= 1e15 or (found[3] and not found[2]):
        raise ValueError(f"{name} {text}: no size; give one such as 200MB or 1GB")
    return int(size)
