"""Read headers of clips: check tables before FFmpeg uses them, and find hidden borders.

FFmpeg allocates at least 24 bytes for every sample in an MP4's tables. A damaged file of 2 KB can declare enough
samples to exhaust memory. MP4 boxes are named as in ISO/IEC 14496-12, and H.264 fields as in ITU-T H.264, 7.3."""

import os
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import BinaryIO, cast

import numpy as np

MAX_FRAMES = 2**22  # maximum frames of a clip: 19 hours at 60 frames per second
MAX_TABLES = 2**28  # maximum bytes of a file's tables
# Maximum boxes at a file's top level, and inside a top-level box. A fragmented file has two top-level boxes for each
# few seconds.
MAX_BOXES = 100_000
_MOST_PARTS = 8  # maximum ranges to read in ``table_parts``
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
# Bytes per entry, for tables that begin with a version, flags and the entry count.
_ENTRY = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4}
_TABLES = (*_ENTRY, b"stsz", b"stz2", b"trun")
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_HEAD, _NUMBER = struct.Struct(">I4s"), struct.Struct(">I")
_VISUAL_SAMPLE_ENTRY = 78  # bytes of a visual sample entry before its child boxes
_SLICES, _SLICE_OF_IDR = (1, 2, 3, 4), 5  # types of NAL units in H.264
_INTRA = (2, 4, 7, 9)  # slice types that refer to no other frame


def problem_of_tables(path: str) -> str | None:
    """Return why an MP4 must not be decoded: its tables are invalid or too large, or its colours can't be converted.
    Return None for a good MP4 and for other files. Raises OSError."""
    read, samples, frames = 0, 0, 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            for kind, begin, length in _top_boxes(file, size):
                if kind not in (b"moov", b"moof"):
                    continue
                read += length
                if read > MAX_TABLES:
                    return f"tables of {read:,} bytes, more than {MAX_TABLES:,}"
                file.seek(begin)
                more, shown = _count(file.read(length))
                # Every fragment declares only its own samples.
                samples, frames = samples + more, frames + shown
                if samples > size:
                    return f"declares {samples:,} samples, more than its {size:,} bytes"
                if frames > MAX_FRAMES:
                    return f"declares {frames:,} frames, more than {MAX_FRAMES:,}"
        except ValueError as error:
            return str(error)
    return None


class _Parts:
    """File-like object that records the bytes read in ``parts``, as (offset, bytes). least: minimum bytes per read.
    read, size: see :func:`table_parts`."""

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
    """Return the ranges of an MP4 that locate its frames, as (offset, bytes), including the first ``least`` bytes.
    Return None if the file must be read completely: it is invalid, fragmented, or mostly tables.

    read: function (offset, count) -> bytes. size: the file's bytes."""
    file = _Parts(read, size, least)
    try:
        for kind, begin, length in _top_boxes(cast(BinaryIO, file), size):
            if kind == b"moof" or kind == b"moov" and length > size // 2:
                return None
            if kind == b"moov":
                file.seek(begin)
                tables = file.read(length)
                fragmented = any(inner == b"mvex" for inner, _, _ in list_boxes(tables, 0, len(tables), MAX_BOXES))
                return None if fragmented or len(tables) < length else file.parts
    except ValueError:  # the decoder will report the invalid file
        pass
    return None


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, offset, length) for the contents of each top-level box in an MP4; nothing for other files. Raises
    ValueError after ``MAX_BOXES`` boxes."""
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
        elif length == 0:  # the box extends to the end of the file
            length = size - at
        if length < begin:
            return
        yield kind, at + begin, min(length, size - at) - begin
        at += length
        if at >= size:
            return
    raise ValueError(f"more than {MAX_BOXES:,} boxes")


def _count(data: bytes) -> tuple[int, int]:
    """Return the largest sample count in a moov or moof box's tables, and the largest in its video tables. Raises
    ValueError for colours that can't be converted, and for a table that declares more entries than it holds."""
    most, video, left = 0, 0, MAX_BOXES
    todo = [(0, len(data), False)]
    while todo:
        first, last, is_video = todo.pop()
        boxes = list_boxes(data, first, last, left)
        left -= len(boxes)
        # The handler box tells if the track is video.
        for kind, begin, end in boxes:
            is_video |= kind == b"hdlr" and data[begin + 8 : min(begin + 12, end)] == b"vide"
        for kind, begin, end in boxes:
            if kind in _CONTAINERS:
                todo.append((begin, end, is_video))
            elif kind == b"stsd" and is_video:  # version and flags, the number of codecs, then a box per codec
                for _, first, last in list_boxes(data, begin + 8, end, left):
                    if (profile := dolby_profile(data[first:last])) is not None:
                        raise ValueError(
                            f"Dolby Vision of profile {profile}, whose colours can't be converted; make it HDR10 or SDR"
                        )
            elif kind in _TABLES:
                count = _declared(kind, data, begin, end)
                most, video = max(most, count), max(video, count if is_video else 0)
    return most, video


def list_boxes(
    data: bytes, at: int = 0, last: int | None = None, most: int = MAX_BOXES
) -> list[tuple[bytes, int, int]]:
    """Return (kind, begin of the contents, end of the contents) for each box in data[at:last]. Raises ValueError for
    more than ``most`` boxes."""
    found, last = [], len(data) if last is None else last
    while at + 8 <= last:
        length, kind = _HEAD.unpack_from(data, at)
        begin = at + 8
        if length == 1 and at + 16 <= last:
            length, begin = struct.unpack_from(">Q", data, begin)[0], at + 16
        elif length == 0:  # the box extends to the end of the outer box
            length = last - at
        if at + length < begin:
            break
        found.append((kind, begin, min(at + length, last)))
        at += length
        if len(found) > most:
            raise ValueError(f"more than {MAX_BOXES:,} boxes")
    return found


def _declared(kind: bytes, data: bytes, begin: int, end: int) -> int:
    """Return the sample count that a table in data[begin:end] declares. Raises ValueError if the table is too short for
    its entries, because FFmpeg would read beyond the table."""
    size = end - begin
    _check(kind, 8, size)
    number = _NUMBER.unpack_from(data, begin + 4)[0]  # number of entries; in stsz the size of each sample, or 0
    if kind in _ENTRY:
        _check(kind, number * _ENTRY[kind], size - 8)
        if kind not in (b"stts", b"ctts"):
            return 0
        runs = np.frombuffer(data, ">u4", number * 2, begin + 8)[::2]  # counts of the (count, value) pairs
        return int(runs.sum(dtype=np.uint64))
    if kind == b"trun":
        flags = _NUMBER.unpack_from(data, begin)[0]
        # Bits 8 to 11 tell if a sample has a duration, a size, flags and an offset.
        fields = sum(flags >> bit & 1 for bit in (8, 9, 10, 11))
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


def _clean_aperture(codecs: bytes) -> "Crop | None":
    """Return the crop in the ``clap`` box of a video track's ``stsd`` box; None without a valid box."""
    _, begin, end = list_boxes(codecs, 8)[0]
    entry = codecs[begin:end]
    parts = named_boxes(entry, _VISUAL_SAMPLE_ENTRY)
    if len(parts.get(b"clap", b"")) < 32:
        return None
    fields = struct.unpack_from(">IIIIiIiI", parts[b"clap"])
    if 0 in fields[1::2]:
        return None
    across, down, right, below = (Fraction(a, b) for a, b in zip(fields[::2], fields[1::2], strict=True))
    width, height = struct.unpack_from(">HH", entry, 24)
    left, top = int((width - across) / 2 + right), int((height - down) / 2 + below)
    cut = left, width - int(across) - left, top, height - int(down) - top
    return cut if min(cut) >= 0 else None


def named_boxes(data: bytes, at: int = 0) -> dict[bytes, bytes]:
    """Return {kind: contents} of the boxes in data[at:], only the first of each kind. Raises as :func:`list_boxes`."""
    found: dict[bytes, bytes] = {}
    for kind, begin, end in list_boxes(data, at):
        found.setdefault(kind, data[begin:end])
    return found


def dolby_profile(entry: bytes) -> int | None:
    """Return the Dolby Vision profile of a sample entry that other players can't show; None for other entries."""
    parts = named_boxes(entry, _VISUAL_SAMPLE_ENTRY)
    box = parts.get(b"dvcC") or parts.get(b"dvvC") or b""
    return box[2] >> 1 if len(box) >= 5 and box[4] >> 4 == 0 else None


def begins_anew(sample: bytes, length: int) -> bool:
    """Return True if an H.264 frame's first slice refers to no other frame. sample: the frame's bytes. length: bytes of
    the size before each NAL unit; 0 if start codes separate the units. Raises ValueError if the slice's header is
    incomplete."""
    for unit in _units(sample, length):
        kind = unit[0] & 31
        if kind == _SLICE_OF_IDR:
            return True
        if kind in _SLICES:
            return _slice_type(unit[1:9]) in _INTRA
    return False


def _slice_type(header: bytes) -> int:
    """Return the slice type from a slice header. Raises ValueError if the header is incomplete."""
    bits, at, number = "".join(f"{byte:08b}" for byte in header), 0, 0
    for _ in range(2):
        end = bits.index("1", at)
        at, number = 2 * end - at + 1, int(bits[end : 2 * end - at + 1], 2) - 1
    return number


def _units(sample: bytes, length: int) -> Iterator[bytes]:
    if not length:
        yield from (unit for unit in sample.split(b"\0\0\1")[1:] if unit)
        return
    at = 0
    while at + length < len(sample):
        end = at + length + int.from_bytes(sample[at : at + length], "big")
        yield sample[at + length : end]
        if end <= at + length:
            return
        at = end


Crop = tuple[int, int, int, int]  # columns to cut off at left and right, rows at top and bottom
_READ = 1 << 16  # bytes to read from the start of a Matroska file
_SEGMENT, _TRACKS, _TRACK, _KIND, _VIDEO = 0x18538067, 0x1654AE6B, 0xAE, 0x83, 0xE0
_CROPS = (0x54CC, 0x54DD, 0x54BB, 0x54AA)  # elements' identifiers in the order of Crop


def container_crop(name: str, container: str, number: int) -> Crop:
    """Return borders that players hide but FFmpeg does not cut off; zeros if there are none.

    MP4 has a clean aperture, Matroska crop fields. container: FFmpeg's name of the container. number: number of the
    video stream."""
    first = container.split(",")[0]
    if first not in ("mov", "matroska"):
        return 0, 0, 0, 0
    try:
        with open(name, "rb") as file:
            crops = _mp4_crops(file) if first == "mov" else _matroska_crops(file)
    except (OSError, ValueError, LookupError, StopIteration, struct.error):
        return 0, 0, 0, 0
    found = crops[number] if number < len(crops) else None
    return found or (0, 0, 0, 0)


def _mp4_crops(file: BinaryIO) -> list[Crop | None]:
    boxes = _top_boxes(file, os.fstat(file.fileno()).st_size)
    begin, length = next(((begin, length) for kind, begin, length in boxes if kind == b"moov"), (0, 0))
    file.seek(begin)
    movie, found = file.read(min(length, MAX_TABLES)), []
    for kind, begin, end in list_boxes(movie) if b"clap" in movie else ():
        if kind == b"trak":
            media = named_boxes(named_boxes(movie[begin:end]).get(b"mdia", b""))
            if media.get(b"hdlr", b"")[8:12] == b"vide":
                tables = named_boxes(named_boxes(media.get(b"minf", b"")).get(b"stbl", b""))
                found.append(_clean_aperture(tables[b"stsd"]))
    return found


def _matroska_crops(file: BinaryIO) -> list[Crop | None]:
    data = file.read(_READ)
    found: list[Crop | None] = []
    for segment in (inside for kind, inside in _elements(data) if kind == _SEGMENT):
        for tracks in (inside for kind, inside in _elements(segment) if kind == _TRACKS):
            for track in (dict(_elements(inside)) for kind, inside in _elements(tracks) if kind == _TRACK):
                if int.from_bytes(track.get(_KIND, b""), "big") == 1:
                    video = dict(_elements(track.get(_VIDEO, b"")))
                    left, right, top, bottom = (int.from_bytes(video.get(kind, b""), "big") for kind in _CROPS)
                    found.append((left, right, top, bottom))
    return found


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (identifier, contents) for EBML elements. The last element may be incomplete."""
    at = 0
    while at < len(data):
        length = 9 - data[at].bit_length()
        identifier, at = int.from_bytes(data[at : at + length], "big"), at + length
        if length > 4 or at >= len(data):
            return
        length = 9 - data[at].bit_length()
        size = int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
        at += length
        if size == (1 << 7 * length) - 1:  # unknown size: the element extends to the end
            size = len(data) - at
        yield identifier, data[at : at + size]
        at += size
