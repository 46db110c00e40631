"""Reads the headers of a tar's members, each within limits: ustar, PAX and GNU long names.

Python's tarfile reads what an extension header declares into memory, whatever its size, follows a chain of them by
recursion, and takes the first header that it can't read for the end. Sound tars read here as tarfile reads them.
Refused beside damaged ones: sparse members, a size or name that one member has twice, and global names and sizes.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from opendit.data.files import printable

BLOCK = 512
MOST_EXTENSION = 1 << 20  # bytes of one extension header
MOST_EXTENSIONS = 8  # of them before one member
LONGEST = 4096  # bytes of a name
_FITS = 8**11  # the header has room for smaller sizes

_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_NUMBER = re.compile(rb"\d{1,19}")


class TarError(ValueError):
    """A tar that is damaged, or refused. The message goes on after its name."""


class NoTar(TarError):
    """A file that does not begin as a tar, or ends inside of a block. The message is why."""


@dataclass(frozen=True)
class Member:
    """A member of a tar. start: offset of its first header; at, size: of its content; end: where the next header is.
    regular: whether it is a file."""

    name: str
    start: int
    at: int
    size: int
    end: int
    regular: bool


def members(file: BinaryIO) -> Iterator[Member]:
    """Yield the members of a tar in its order. Raises TarError, also if the end-of-archive mark is missing; OSError."""
    length = file.seek(0, os.SEEK_END)
    at, chain = 0, _Extensions()
    while True:
        file.seek(at)
        block = file.read(BLOCK)
        if not at and (len(block) < BLOCK or any(block) and not _is_header(block)):
            raise NoTar("it begins with no header" if block else "it is empty")
        if at > length or 0 < len(block) < BLOCK:
            raise NoTar("it ends inside of a block; copy it again")
        if not block:
            raise TarError("is truncated: it has no end-of-archive mark; copy it again")
        if not any(block):
            if chain.start is not None:
                raise TarError(f"is damaged: no member follows the header at byte {chain.start:,}; copy it again")
            return
        if not _is_header(block):
            raise TarError(f"is damaged: no member's header at byte {at:,}; copy it again")
        kind, size = block[156:157], _number(block[124:136], at)
        if kind in b"xXgLK":
            chain.count += 1
            if chain.count > MOST_EXTENSIONS:
                raise TarError(f"has more than {MOST_EXTENSIONS} extension headers in a row at byte {at:,}; repack it")
            if size > MOST_EXTENSION:
                raise TarError(f"has an extension header of {size:,} bytes at byte {at:,}; repack it")
            content = file.read(size)
            if len(content) < size:
                raise TarError(f"is truncated inside of the header at byte {at:,}; copy it again")
            chain.add(kind, content, at)
            at += BLOCK + _padded(size)
            continue
        member = _member(block, kind, size, at, chain)
        if member.at + member.size > length or member.end - BLOCK >= length:
            raise TarError(f"is truncated inside of {printable(member.name)}; copy it again")
        yield member
        at, chain = member.end, _Extensions()


@dataclass
class _Extensions:
    """The extension headers before one member. start: where its first one is; global ones are not its own."""

    start: int | None = None
    count: int = 0
    name: bytes | None = None
    size: int | None = None
    sparse: bool = False

    def add(self, kind: bytes, content: bytes, at: int) -> None:
        if kind != b"g" and self.start is None:
            self.start = at
        if kind == b"L":
            self._set_name(content.partition(b"\0")[0], at)
        elif kind in b"xXg":
            for key, value in _records(content, at):
                if kind == b"g" and (key in (b"path", b"size") or key.startswith(b"GNU.sparse.")):
                    raise TarError(f"gives all members one {key.decode()} at byte {at:,}; repack it")
                if key == b"path":
                    self._set_name(value.rstrip(b"/"), at)
                elif key == b"size":
                    self._set_size(value, at)
                self.sparse |= key.startswith(b"GNU.sparse.")

    def _set_name(self, name: bytes, at: int) -> None:
        if not name or len(name) > LONGEST:
            raise TarError(f"has a name of {len(name):,} bytes at byte {at:,}; from 1 to {LONGEST:,} are read")
        if self.name not in (None, name):
            raise TarError(f"gives a member two names at byte {at:,}; repack it")
        self.name = name

    def _set_size(self, value: bytes, at: int) -> None:
        if _NUMBER.fullmatch(value) is None:
            raise TarError(f"is damaged: a size that is no number at byte {at:,}; copy it again")
        if self.size not in (None, int(value)):
            raise TarError(f"gives a member two sizes at byte {at:,}; repack it")
        self.size = int(value)


_LENGTH = re.compile(rb"(\d{1,7}) ")


def _records(content: bytes, at: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records of a PAX header, each ``LENGTH KEY=VALUE`` and a line break."""
    begin = 0
    while begin < len(content) and content[begin] != 0:
        found = _LENGTH.match(content, begin)
        end = begin + int(found[1]) if found else 0
        key, is_there, value = content[found.end() : end - 1].partition(b"=") if found else (b"", b"", b"")
        if not key or not is_there or end > len(content) or content[end - 1 : end] != b"\n":
            raise TarError(f"is damaged: no PAX header at byte {at:,}; copy it again")
        yield key, value
        begin = end


def _member(block: bytes, kind: bytes, size: int, at: int, chain: _Extensions) -> Member:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    name = (prefix + b"/" + name if prefix else name) if chain.name is None else chain.name
    folder = kind == b"\0" and block[:100].partition(b"\0")[0].endswith(b"/")  # in tars of old writers
    shown = os.fsdecode(name)
    if kind == b"S" or chain.sparse:
        raise TarError(f"stores {printable(shown)} with holes; pack it without --sparse")
    if chain.size is not None:
        if size not in (0, chain.size) and chain.size < _FITS:
            raise TarError(f"gives {printable(shown)} two sizes, {size:,} and {chain.size:,}; repack it")
        size = chain.size
    regular, begin = kind in _REGULAR and not folder, at + BLOCK
    stored = 0 if kind in _WITHOUT_CONTENT or folder else size
    return Member(
        shown,
        at if chain.start is None else chain.start,
        begin,
        size if regular else 0,
        begin + _padded(stored),
        regular,
    )


def _is_header(block: bytes) -> bool:
    """Return True if a block has the checksum of a header; old writers took bytes for signed."""
    try:
        told = _number(block[148:156], 0)
    except TarError:
        return False
    rest = block[:148] + block[156:]
    total = sum(rest) + 8 * ord(" ")
    return told in (total, total - 256 * sum(byte > 127 for byte in rest))


def _number(field: bytes, at: int) -> int:
    """Return a number of a header: octal digits or, after a byte 128, binary."""
    if field[0] == 128:
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0].strip()
    if field[0] == 255 or re.fullmatch(rb"[0-7]*", text) is None:
        raise TarError(f"is damaged: no number, or a negative one, in the header at byte {at:,}; copy it again")
    return int(text or b"0", 8)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
