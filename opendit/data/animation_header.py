"""Find animations, and the number and durations of their frames, without decoding them."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from opendit.data.files import problem

# Of files that are pictures or clips by what is in them.
SUFFIXES = frozenset((".gif", ".webp", ".png", ".apng", ".avif", ".avifs", ".fli", ".flc"))
HEAD = 64  # bytes of a file by which :func:`may_be_animation` tells
_MOST_CHUNKS = 1 << 22  # of a file


def may_be_animation(head: bytes) -> bool:
    """Return whether a file that begins with ``head``, ``HEAD`` bytes or all of it, is of a format that has animations,
    be it a still picture or not."""
    return _format(head) is not None


def is_animation(path: str | Path) -> bool:
    """True if a file holds more than one frame of an animation; False if it can't be read."""
    try:
        if problem(path) is not None:
            return False
        with open(path, "rb") as file:
            return is_animated(file)
    except OSError:
        return False


def is_animated(file: BinaryIO) -> bool:
    """True if an open file holds more than one frame of an animation; False if it is broken."""
    try:
        return count_frames(file, 2) > 1
    except Exception:  # Pillow raises nearly every type there is
        return False


def _format(head: bytes) -> str | None:
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and b"avis" in head[8 : min(int.from_bytes(head[:4], "big"), HEAD)]:
        return "AVIF"
    return "FLIC" if head[4:6] in (b"\x11\xaf", b"\x12\xaf") and head[12:14] == b"\x08\0" else None


def count_frames(file: BinaryIO, most: int) -> int:
    """Count the frames of a file, up to ``most``."""
    at = file.tell()
    try:
        file.seek(0)
        kind = _format(file.read(HEAD))
        if kind in _WALKS:
            file.seek(0)
            return sum(1 for _, _ in zip(_WALKS[kind](file), range(most), strict=False))
        if kind is None:
            return 0
        file.seek(0)
        with Image.open(file, formats=("AVIF", "FLI")) as image:
            return getattr(image, "n_frames", 1)
    finally:
        file.seek(at)


def durations_of(file: BinaryIO) -> list[float] | None:
    """Seconds of each frame by what stands before it; None of a format that tells them with the frames."""
    at = file.tell()
    try:
        file.seek(0)
        kind = _format(file.read(HEAD))
        file.seek(0)
        return list(_WALKS[kind](file)) if kind in _WALKS else None
    finally:
        file.seek(at)


def _gif(file: BinaryIO) -> Iterator[float]:
    """GIF89a: the delays of its images, in hundredths of a second in the block before each."""
    head = file.read(13)
    _pass_over(file, 3 << (head[10] & 7) + 1 if head[10] & 0x80 else 0)
    delay = 0
    for _ in range(_MOST_CHUNKS):
        kind = file.read(1)
        if kind == b"!":
            label = file.read(1)
            for number, block in enumerate(_blocks(file)):
                if label == b"\xf9" and number == 0 and len(block) >= 3:
                    delay = struct.unpack_from("<H", block, 1)[0]
        elif kind == b",":
            head = file.read(9)
            if len(head) < 9:
                return
            _pass_over(file, (3 << (head[8] & 7) + 1 if head[8] & 0x80 else 0) + 1)
            if not file.read(1):  # a picture of which nothing is there
                return
            file.seek(-1, os.SEEK_CUR)
            yield delay / 100
            delay = 0
            for _ in _blocks(file):
                pass
        elif kind in (b"", b";"):
            return


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while (length := file.read(1)) not in (b"", b"\0"):
        yield file.read(length[0])


def _png(file: BinaryIO) -> Iterator[float]:
    """APNG: the delays of its fcTL chunks; nothing of a PNG that says before its picture that it is no animation."""
    file.seek(8)
    left, animated = 0, False
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            return
        length, kind = struct.unpack(">I4s", head)
        if kind == b"acTL":
            left, animated = int.from_bytes(file.read(4), "big"), True
            length -= 4
        elif kind == b"IEND" or kind == b"IDAT" and not animated or animated and not left:
            return
        elif kind == b"fcTL" and length == 26:
            seconds, parts = struct.unpack_from(">HH", file.read(26), 20)
            length, left = 0, left - 1
            yield seconds / (parts or 100)
        _pass_over(file, length + 4)


def _webp(file: BinaryIO) -> Iterator[float]:
    """WebP: the milliseconds of its ANMF chunks."""
    file.seek(12)
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            return
        kind, length = struct.unpack("<4sI", head)
        length += length & 1
        if kind == b"ANMF" and length >= 16:
            frame = file.read(16)
            length -= 16
            yield int.from_bytes(frame[12:15], "little") / 1000
        _pass_over(file, length)


def _pass_over(file: BinaryIO, length: int) -> None:
    file.seek(length, os.SEEK_CUR)


_WALKS = {"GIF": _gif, "PNG": _png, "WEBP": _webp}
