"""SHA-256 of files and of lists of parts."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

BLOCK = 4 << 20  # bytes that are read at once


def sha256_of(path: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


class HashedStream(NamedTuple):
    """A part of ``length`` bytes that is hashed block by block, as the whole would be, and never in memory whole."""

    length: int
    blocks: Iterable[bytes]


def hash_parts(*parts: bytes | str | HashedStream) -> str:
    """SHA-256 over the parts, each preceded by its length so that no two lists of parts collide."""
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
