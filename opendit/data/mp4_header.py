"""Read the number of frames and the codec from the header of an MP4 or MOV file, before a decoder believes it.

FFmpeg makes an entry of 24 bytes or more for every sample that a file's tables declare, and decord one of its own: a
file of 2 KB can ask for gigabytes, and the error ends the process. Boxes are named as in ISO/IEC 14496-12.
"""

import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, cast

import numpy as np

from opendit.data.mp4_track import PlainTrack, dolby_profile, plain_track

MAX_FRAMES = 2**22  # of a clip: 19 hours at 60 frames a second
MAX_TABLES = 2**28  # bytes of all tables of a file; those of 19 hours have a fifth of that
MAX_BOXES = 100_000  # at the top of a file, of which a fragmented one has two for every few seconds; and in one of them
_MOST_PARTS = 8  # read of a file inside of another one, before all of it is read

FRAGMENTED = "fragmented"  # instead of the kind of frames
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
# Bytes of an entry of the tables that begin with a version, flags and the number of their entries.
_ENTRY = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4}
_TABLES = (*_ENTRY, b"stsz", b"stz2", b"trun")
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_HEAD, _NUMBER = struct.Struct(">I4s"), struct.Struct(">I")


def read_tables(file: BinaryIO) -> tuple[str | None, str, PlainTrack | None]:
    """(Why a file's tables can't be believed, or None: also for what is no MP4 or so broken that no table is found; the
    four letters of the only kind of frames of its only video track, ``FRAGMENTED`` of a file whose tables stand among
    its frames, or nothing if there is no one such kind or the file does not begin as an MP4 has to; this track, if it
    is plain).

    Raises OSError if the file can't be read.
    """
    size = os.fstat(file.fileno()).st_size
    read, samples, frames, first, fragmented, codecs, tables = 0, 0, 0, b"", False, [], b""
    try:
        for kind, begin, length in _top_boxes(file, size):
            first = first or kind
            if kind not in (b"moov", b"moof"):
                continue
            fragmented |= kind == b"moof"
            read += length
            if read > MAX_TABLES:
                return f"tables of {read:,} bytes, more than {MAX_TABLES:,}", "", None
            file.seek(begin)
            tables = file.read(length)
            more, shown, found = _count(tables)
            # Of a fragmented file every fragment has samples of its own.
            samples, frames, codecs = samples + more, frames + shown, codecs + found
            if samples > size:
                return f"declares {samples:,} samples, more than its {size:,} bytes", "", None
            if frames > MAX_FRAMES:
                return f"declares {frames:,} frames, more than {MAX_FRAMES:,}", "", None
    except ValueError as error:
        return str(error), "", None
    if fragmented:
        return None, FRAGMENTED, None
    if first != b"ftyp" or len(codecs) != 1:
        return None, "", None
    return None, codecs[0].decode("latin-1"), plain_track(tables, partial(_read_at, file), size)


def read_movie(file: BinaryIO) -> bytes:
    """The contents of an MP4's first ``moov`` box, nothing of what has none. Raises OSError, or ValueError after too
    many boxes."""
    for kind, begin, length in _top_boxes(file, os.fstat(file.fileno()).st_size):
        if kind == b"moov":
            file.seek(begin)
            return file.read(min(length, MAX_TABLES))
    return b""


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    return os.pread(file.fileno(), count, at)


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
    """Return (offset, bytes) of the parts of a file of ``size`` bytes that describe all its frames, and of at least
    the first ``least`` bytes; None for what is no MP4, or keeps tables with its frames, so that all of it is needed.

    read: (at, count) -> so many bytes of the file from there."""
    file = _Parts(read, size, least)
    try:
        for kind, begin, length in _top_boxes(cast(BinaryIO, file), size):
            if kind == b"moof" or kind == b"moov" and length > size // 2:
                return None
            if kind == b"moov":
                file.seek(begin)
                tables = file.read(length)
                fragmented = any(inner == b"mvex" for inner, _, _ in _boxes(tables, 0, len(tables), MAX_BOXES))
                return None if fragmented or len(tables) < length else file.parts
    except ValueError:  # of a file that is refused when it is read
        pass
    return None


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, where its contents begin, their length) of the boxes of a file; of none if it is no MP4. Raises ValueError
    after too many."""
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
    raise ValueError(f"more than {MAX_BOXES:,} boxes")


def _count(data: bytes) -> tuple[int, int, list[bytes]]:
    """The most samples that a table of any track declares, and of a video track; the kinds of all video frames.

    Raises ValueError for colours that can't be converted, and for a table with more entries than it has room for:
    FFmpeg takes what follows it for entries."""
    most, video, codecs, left = 0, 0, [], MAX_BOXES
    todo = [(0, len(data), False)]
    while todo:
        first, last, is_video = todo.pop()
        boxes = _boxes(data, first, last, left)
        left -= len(boxes)
        # A track's handler, which tells its kind, stands before its tables, in the box around them.
        for kind, begin, end in boxes:
            is_video |= kind == b"hdlr" and data[begin + 8 : min(begin + 12, end)] == b"vide"
        for kind, begin, end in boxes:
            if kind in _CONTAINERS:
                todo.append((begin, end, is_video))
            elif kind == b"stsd" and is_video:  # 4 bytes, how many kinds, and each one's length and letters
                for letters, first, last in _boxes(data, begin + 8, end, left):
                    codecs.append(letters)
                    if (profile := dolby_profile(data[first:last])) is not None:
                        raise ValueError(
                            f"Dolby Vision of profile {profile}, whose colours can't be converted; make it HDR10 or SDR"
                        )
            elif kind in _TABLES:
                count = _declared(kind, data, begin, end)
                most, video = max(most, count), max(video, count if is_video else 0)
    return most, video, codecs


def _boxes(data: bytes, at: int, last: int, most: int) -> list[tuple[bytes, int, int]]:
    """(kind, where its contents begin and end) of the boxes in data[at:last]. Raises ValueError for too many."""
    found = []
    while at + 8 <= last:
        length, kind = _HEAD.unpack_from(data, at)
        begin = at + 8
        if length == 1 and at + 16 <= last:
            length, begin = struct.unpack_from(">Q", data, begin)[0], at + 16
        elif length == 0:  # up to the end of the box around it
            length = last - at
        if at + length < begin:
            break
        found.append((kind, begin, min(at + length, last)))
        at += length
        if len(found) > most:
            raise ValueError(f"more than {MAX_BOXES:,} boxes")
    return found


def _declared(kind: bytes, data: bytes, begin: int, end: int) -> int:
    """Return the number of samples that a table in data[begin:end] declares. Raises ValueError, see :func:`_count`."""
    size = end - begin
    _check(kind, 8, size)
    number = _NUMBER.unpack_from(data, begin + 4)[0]  # of entries, or for stsz the size of all samples, if that is one
    if kind in _ENTRY:
        _check(kind, number * _ENTRY[kind], size - 8)
        if kind not in (b"stts", b"ctts"):
            return 0
        runs = np.frombuffer(data, ">u4", number * 2, begin + 8)[::2]  # of (count, value)
        return int(runs.sum(dtype=np.uint64))
    if kind == b"trun":
        flags = _NUMBER.unpack_from(data, begin)[0]
        fields = sum(flags >> bit & 1 for bit in (8, 9, 10, 11))  # duration, size, flags and offset of each sample
        _check(kind, number * fields * 4, size - 8 - 4 * ((flags & 1) + (flags >> 2 & 1)))
        return number
    _check(kind, 12, size)
    samples = _NUMBER.unpack_from(data, begin + 8)[0]
    if kind == b"stz2":
        _check(kind, samples * (number & 0xFF) // 8, size - 12)
    elif number == 0:
        _check(kind, samples * 4, size - 12)
    return samples


def _check(kind: bytes, needed: int, room: int) -> None:
    if needed > room:
        raise ValueError(f"its table {kind.decode()} declares more entries than it holds")
