"""What an MP4 or MOV file says of itself: how many frames it has, read before a decoder believes it, and their codec.

FFmpeg makes an entry of 24 bytes or more for every sample that a file's tables declare, and decord one of its own: a
file of 2 KB can ask for gigabytes, and the error ends the process. Boxes are named as in ISO/IEC 14496-12.
"""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

MAX_FRAMES = 2**22  # of a clip: 19 hours at 60 frames a second
MAX_TABLES = 2**28  # bytes of all tables of a file; those of 19 hours have a fifth of that
MAX_BOXES = 100_000  # at the top of a file: a fragmented one has two for every few seconds

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")


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
        samples, frames, found = _count(memoryview(file.read(length)))
        codecs += found
        if samples > size:
            return f"declares {samples:,} samples, more than its {size:,} bytes", ""
        if frames > MAX_FRAMES:
            return f"declares {frames:,} frames, more than {MAX_FRAMES:,}", ""
    return None, codecs[0].decode("latin-1") if first == b"ftyp" and len(codecs) == 1 else ""


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, where its contents begin, their length) of the boxes of a file; of none if it is no MP4."""
    at = 0
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind = struct.unpack_from(">I4s", head)
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


def _count(data: memoryview) -> tuple[int, int, list[bytes]]:
    """The most samples that a table of any track declares, and of a video track; the kinds of all video frames."""
    most, video, codecs = 0, 0, []
    todo = [(data, False)]
    while todo:
        data, is_video = todo.pop()
        boxes = list(_boxes(data))
        # A track's handler, which tells its kind, stands before its tables, in the box around them.
        is_video |= any(kind == b"hdlr" and bytes(inside[8:12]) == b"vide" for kind, inside in boxes)
        for kind, inside in boxes:
            if kind in _CONTAINERS:
                todo.append((inside, is_video))
                continue
            if kind == b"stsd" and is_video:  # 4 bytes, how many kinds, and each one's length and letters
                codecs += [bytes(letters) for letters, _ in _boxes(inside[8:])]
            count = _declared(kind, inside)
            most, video = max(most, count), max(video, count if is_video else 0)
    return most, video, codecs


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if length < 8:
            return
        yield kind, data[at + 8 : at + length]
        at += length


def _declared(kind: bytes, data: memoryview) -> int:
    """How many samples one table speaks of."""
    if kind in (b"stts", b"ctts") and len(data) >= 8:  # runs of (count, value)
        runs = np.frombuffer(data[8 : 8 + len(data[8:]) // 8 * 8], ">u4").reshape(-1, 2)
        return int(runs[: struct.unpack_from(">I", data, 4)[0], 0].sum(dtype=np.uint64))
    if kind in (b"stsz", b"stz2") and len(data) >= 12:
        return struct.unpack_from(">I", data, 8)[0]
    if kind == b"trun" and len(data) >= 8:
        return struct.unpack_from(">I", data, 4)[0]
    return 0
