"""What an MP4 or MOV file says of itself: how many frames it has, read before a decoder believes it, and their codec.

FFmpeg makes an entry of 24 bytes or more for every sample that a file's tables declare, and decord one of its own: a
file of 2 KB can ask for gigabytes, and the error ends the process. Boxes are named as in ISO/IEC 14496-12.
"""

import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

import numpy as np

MAX_FRAMES = 2**22  # of a clip: 19 hours at 60 frames a second
MAX_TABLES = 2**28  # bytes of all tables of a file; those of 19 hours have a fifth of that
MAX_BOXES = 100_000  # at the top of a file: a fragmented one has two for every few seconds
_MOST_PARTS = 8  # read of a file inside of another one, before all of it is read

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_TABLES = (b"stts", b"ctts", b"stsz", b"stz2", b"trun")
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_HEAD, _NUMBER = struct.Struct(">I4s"), struct.Struct(">I")


def read_tables(file: BinaryIO) -> tuple[str | None, str]:
    """(Why a file's tables can't be believed, or None: also for what is no MP4 or so broken that no table is found; the
    four letters of the only kind of frames of its only video track, or none if there is no one such kind or the file
    does not begin as an MP4 has to).

    Raises OSError if the file can't be read.
    """
    size = os.fstat(file.fileno()).st_size
    read, first, codecs = 0, b"", []
    for kind, begin, length in _top_boxes(file, size):
        first = first or kind
        if kind not in (b"moov", b"moof"):
            continue
        read += length
        if read > MAX_TABLES:
            return f"tables of {read:,} bytes, more than {MAX_TABLES:,}", ""
        file.seek(begin)
        samples, frames, found = _count(file.read(length))
        codecs += found
        if samples > size:
            return f"declares {samples:,} samples, more than its {size:,} bytes", ""
        if frames > MAX_FRAMES:
            return f"declares {frames:,} frames, more than {MAX_FRAMES:,}", ""
    return None, codecs[0].decode("latin-1") if first == b"ftyp" and len(codecs) == 1 else ""


class _Parts:
    """Something that is read part by part, as a file: what was read stays in ``parts``, (where it begins, bytes)."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, least: int):
        self.parts: list[tuple[int, bytes]] = []
        self._read, self._size, self._least, self._at = read, size, least, 0

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, count: int) -> bytes:
        at, end = self._at, min(self._at + count, self._size)
        for begin, part in self.parts:
            if begin <= at and end <= begin + len(part):
                return part[at - begin : end - begin]
        if end <= at or len(self.parts) == _MOST_PARTS:
            return b""
        self.parts.append((at, self._read(at, min(max(count, self._least), self._size - at))))
        return self.parts[-1][1][:count]


def table_parts(read: Callable[[int, int], bytes], size: int, least: int) -> list[tuple[int, bytes]] | None:
    """(Where it begins, bytes) of the parts of a file of ``size`` bytes that tell of all its frames, and of at least
    the first ``least`` bytes; None for what is no MP4, or keeps tables with its frames, so that all of it is needed.

    read: (at, count) -> so many bytes of the file from there."""
    file = _Parts(read, size, least)
    for kind, begin, length in _top_boxes(cast(BinaryIO, file), size):
        if kind == b"moof" or kind == b"moov" and length > size // 2:
            return None
        if kind == b"moov":
            file.seek(begin)
            tables = file.read(length)
            fragmented = any(inner == b"mvex" for inner, _, _ in _boxes(tables, 0, len(tables)))
            return None if fragmented or len(tables) < length else file.parts
    return None


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, where its contents begin, their length) of the boxes of a file; of none if it is no MP4."""
    at = 0
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind = _HEAD.unpack_from(head)
        if at == 0 and kind not in _FIRST:
            return
        begin = 8
        if length == 1 and len(head) == 16:
            length, begin = struct.unpack_from(">Q", head, 8)[0], 16
        elif length == 0:  # up to the end of the file
            length = size - at
        if length < begin:
            return
        yield kind, at + begin, min(length, size - at) - begin
        at += length
        if at >= size:
            return


def _count(data: bytes) -> tuple[int, int, list[bytes]]:
    """The most samples that a table of any track declares, and of a video track; the kinds of all video frames."""
    most, video, codecs = 0, 0, []
    todo = [(0, len(data), False)]
    while todo:
        first, last, is_video = todo.pop()
        boxes = _boxes(data, first, last)
        # A track's handler, which tells its kind, stands before its tables, in the box around them.
        for kind, begin, end in boxes:
            is_video |= kind == b"hdlr" and data[begin + 8 : min(begin + 12, end)] == b"vide"
        for kind, begin, end in boxes:
            if kind in _CONTAINERS:
                todo.append((begin, end, is_video))
            elif kind == b"stsd" and is_video:  # 4 bytes, how many kinds, and each one's length and letters
                codecs += [letters for letters, _, _ in _boxes(data, begin + 8, end)]
            elif kind in _TABLES:
                count = _declared(kind, data, begin, end)
                most, video = max(most, count), max(video, count if is_video else 0)
    return most, video, codecs


def _boxes(data: bytes, at: int, last: int) -> list[tuple[bytes, int, int]]:
    """(kind, where its contents begin and end) of the boxes in data[at:last]."""
    found = []
    while at + 8 <= last:
        length, kind = _HEAD.unpack_from(data, at)
        if length < 8:
            break
        found.append((kind, at + 8, min(at + length, last)))
        at += length
    return found


def _declared(kind: bytes, data: bytes, begin: int, end: int) -> int:
    """How many samples the table in data[begin:end] speaks of."""
    size = end - begin
    if kind in (b"stts", b"ctts") and size >= 8:  # runs of (count, value)
        runs = np.frombuffer(data, ">u4", (size - 8) // 8 * 2, begin + 8)[::2]
        return int(runs[: _NUMBER.unpack_from(data, begin + 4)[0]].sum(dtype=np.uint64))
    if kind in (b"stsz", b"stz2") and size >= 12:
        return _NUMBER.unpack_from(data, begin + 8)[0]
    if kind == b"trun" and size >= 8:
        return _NUMBER.unpack_from(data, begin + 4)[0]
    return 0
