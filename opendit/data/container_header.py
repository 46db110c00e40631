"""Check the header of a clip's file before a decoder opens the file. The check is fast, whereas decoders trust every
header.

FFmpeg allocates at least 24 bytes for every sample that an MP4's tables declare, and decord allocates another entry. A
file of 2 KB can thus make them allocate gigabytes, and the failure ends the process. Therefore the tables are checked
first. The tables also show whether a file's only video track is plain, that is, whether a decoder that seeks frames by
number returns the same frames as decoding from the start.

MP4 boxes are named as in ISO/IEC 14496-12, fields of H.264 as in ITU-T H.264, 7.3.2.1 and E.1.1, chunks of AVI as in
Microsoft's description of the format, and fields of MPEG-4 as in ISO/IEC 14496-2, 6.2.3.
"""

import os
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache, partial
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from opendit.data.animations import HEAD, may_be_animation
from opendit.data.colours import UNSPECIFIED, is_high_definition, kind_of_colours, unknown_matrix
from opendit.data.medium import MAX_FRAMES

MAX_TABLES = 2**28  # maximum bytes of a file's tables; those of a 19-hour file take a fifth of this
# Maximum number of boxes at the top level of a file, and inside a box. A fragmented file has two per few seconds.
MAX_BOXES = 100_000
_MOST_PARTS = 8  # maximum number of separate reads for one file inside a tar

FRAGMENTED = "fragmented"  # returned instead of a codec
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
# Bytes per entry, for the kinds of tables that begin with a version, flags and the number of entries.
_ENTRY = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4}
_TABLES = (*_ENTRY, b"stsz", b"stz2", b"trun")
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_HEAD, _NUMBER = struct.Struct(">I4s"), struct.Struct(">I")

ReadAt = Callable[[int, int], bytes]  # (offset, number of bytes) -> these bytes of the file

_VISUAL_SAMPLE_ENTRY = 78  # bytes of a visual sample entry before its child boxes
_ONE = 1 << 16  # the number 1 in a transformation matrix (16.16 fixed point)
_UPRIGHT = (_ONE, 0, 0, _ONE)
_QUARTER_TURNS = (_UPRIGHT, (0, _ONE, -_ONE, 0), (-_ONE, 0, 0, -_ONE), (0, -_ONE, _ONE, 0))
_SLICES, _SLICE_OF_IDR, _MORE_INFORMATION = (1, 2, 3, 4), 5, 6  # kinds of NAL units of H.264
_INTRA = (2, 4, 7, 9)  # slice types that refer to no other frame
_DISPLAY_ORIENTATION = 47  # type of the SEI message that rotates a frame for display
_CHROMA_FOLLOWS = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles with a chroma format field
_EXTENDED_SAR = 255
_EXAMINED = 16  # number of evenly spaced sync samples examined per track
_BEGINNING = 1024  # bytes read per sync sample; x264 writes its settings, 700 bytes, before the first frame


class PlainTrack(NamedTuple):
    """A video track that shows each of its frames once, upright or rotated by quarter turns, with square pixels.

    Decoding can start at every frame that the track marks as a sync sample. Frames stored before a sync sample are also
    shown before it. The colours are SDR in BT.709 or BT.601.

    times: (frames,) int64, ascending, time of each frame in units of ``time_base`` seconds."""

    times: np.ndarray
    time_base: Fraction


def read_tables(file: BinaryIO) -> tuple[str | None, str, PlainTrack | None]:
    """Check the tables of an MP4, and look for a plain track.

    Returns:
        A tuple of three values. (1) The reason why the tables are invalid. It is None if they are valid, if the file is
        not an MP4, or if the file is so damaged that no table is found. (2) The four-letter code of the only codec, if
        the file begins like an MP4 and has a single video track with one codec. It is ``FRAGMENTED`` if the tables are
        distributed among the frames, otherwise "". (3) The video track if it is plain, otherwise None.

    Raises:
        OSError: the file can't be read.
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
            # In a fragmented file every fragment declares only its samples, so the numbers are added.
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
    """Return the contents of an MP4's first ``moov`` box, or b"" if there is none.

    Raises OSError; ValueError after too many boxes."""
    for kind, begin, length in _top_boxes(file, os.fstat(file.fileno()).st_size):
        if kind == b"moov":
            file.seek(begin)
            return file.read(min(length, MAX_TABLES))
    return b""


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    return os.pread(file.fileno(), count, at)


class _Parts:
    """File-like object that reads parts of a file and stores each part in ``parts`` as (offset, bytes)."""

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
    """Return (offset, bytes) of the parts of a file of ``size`` bytes that describe all its frames.

    The parts include at least the first ``least`` bytes. Return None if the whole file is needed, because it is not an
    MP4 or is fragmented. read: (at, count) -> ``count`` bytes of the file from offset ``at``."""
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
    except ValueError:  # an invalid file; reading all of it will report the error
        pass
    return None


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, offset of the contents, length of the contents) of a file's top-level boxes. Yield nothing if the
    file is not an MP4.

    Raises ValueError after ``MAX_BOXES`` boxes."""
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


def _count(data: bytes) -> tuple[int, int, list[bytes]]:
    """Return (largest number of samples in a table of any track, largest number in a video track, all video codecs).

    Raises ValueError for colours that can't be converted, and for a table that declares more entries than its size
    allows, because FFmpeg would read the bytes after the table as entries."""
    most, video, codecs, left = 0, 0, [], MAX_BOXES
    todo = [(0, len(data), False)]
    while todo:
        first, last, is_video = todo.pop()
        boxes = _boxes(data, first, last, left)
        left -= len(boxes)
        # The handler box, which tells if a track is video, is a sibling of the box with the track's tables.
        for kind, begin, end in boxes:
            is_video |= kind == b"hdlr" and data[begin + 8 : min(begin + 12, end)] == b"vide"
        for kind, begin, end in boxes:
            if kind in _CONTAINERS:
                todo.append((begin, end, is_video))
            elif kind == b"stsd" and is_video:  # 4 bytes, the number of codecs, then a box per codec
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


def _boxes(data: bytes, at: int = 0, last: int | None = None, most: int = MAX_BOXES) -> list[tuple[bytes, int, int]]:
    """Return (kind, offset of the contents, end of the contents) of each box in data[at:last].

    Raises ValueError for more than ``most`` boxes."""
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
    """Return the number of samples that a table in data[begin:end] declares. Raises ValueError as in :func:`_count`."""
    size = end - begin
    _check(kind, 8, size)
    number = _NUMBER.unpack_from(data, begin + 4)[0]  # number of entries; in stsz the common size of the samples, or 0
    if kind in _ENTRY:
        _check(kind, number * _ENTRY[kind], size - 8)
        if kind not in (b"stts", b"ctts"):
            return 0
        runs = np.frombuffer(data, ">u4", number * 2, begin + 8)[::2]  # the counts of (count, value) pairs
        return int(runs.sum(dtype=np.uint64))
    if kind == b"trun":
        flags = _NUMBER.unpack_from(data, begin)[0]
        fields = sum(flags >> bit & 1 for bit in (8, 9, 10, 11))  # flags: has duration, size, flags, offset
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


# ------------------------------------------------------------------------------------------ a plain track


def plain_track(moov: bytes, read: ReadAt, size: int) -> PlainTrack | None:
    """Return the only video track of a file if it is certainly a plain track; otherwise None.

    moov: contents of the file's ``moov`` box. read: reads bytes of the file, to examine its sync samples. size: size of
    the file."""
    try:
        return _plain_track(moov, read, size)
    except (KeyError, IndexError, ValueError, ZeroDivisionError, StopIteration, struct.error):
        return None


def clean_apertures(moov: bytes) -> list[tuple[int, int, int, int] | None]:
    """Return, for each video track, the pixels that its ``clap`` box crops, (left, right, top, bottom); None for a
    track without this box."""
    return [_clean_aperture(*_entry(tables)) for _, _, tables in _video_tracks(moov)]


def _clean_aperture(entry: bytes, parts: dict[bytes, bytes]) -> tuple[int, int, int, int] | None:
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


def _plain_track(moov: bytes, read: ReadAt, size: int) -> PlainTrack | None:
    (track, media, tables), *others = _video_tracks(moov)
    entry, parts = _entry(tables)
    movie = _inside(moov, b"mvhd")
    header = track[b"tkhd"]
    if others or _matrix(movie, 36 if movie[0] == 0 else 48) != _UPRIGHT:
        return None
    if _matrix(header, 40 if header[0] == 0 else 52) not in _QUARTER_TURNS or b"clap" in parts:
        return None
    if b"pasp" in parts and len(set(struct.unpack_from(">2I", parts[b"pasp"]))) > 1:
        return None
    if not _has_plain_colours(entry, parts):
        return None
    times, order = _times(tables)
    timescale, duration = _scale(media[b"mdhd"]), int(times[1] - times[0]) if len(times) > 1 else 0
    if b"edts" in track and not _shows_all(track[b"edts"], times, duration, Fraction(timescale, _scale(movie))):
        return None
    if b"stss" in tables:
        sync = np.frombuffer(tables[b"stss"], ">u4", offset=8).astype(np.int64) - 1
    elif b"avcC" in parts:  # H.264, whose sync samples are examined below
        sync = np.arange(len(times))
    else:
        return None
    if not len(sync) or sync[0] != 0 or not is_closed(order, sync):
        return None
    places, sizes = _places(tables, size)
    if len(sizes) != len(times):
        return None
    if b"avcC" in parts:
        length = (parts[b"avcC"][4] & 3) + 1
        if not all(describe_frames(each).square for each in _parameter_sets(parts[b"avcC"])):
            return None
        chosen = sync if len(sync) <= _EXAMINED else sync[np.linspace(0, len(sync) - 1, _EXAMINED).astype(np.int64)]
        for sample in chosen.tolist():
            if not begins_anew(read(places(sample), min(_BEGINNING, int(sizes[sample]))), length):
                return None
    return PlainTrack(times, Fraction(1, timescale))


def _named(data: bytes, at: int = 0) -> dict[bytes, bytes]:
    """Return a dictionary: kind of box -> contents of the first box of that kind."""
    found: dict[bytes, bytes] = {}
    for kind, begin, end in _boxes(data, at):
        found.setdefault(kind, data[begin:end])
    return found


def _inside(data: bytes, kind: bytes) -> bytes:
    return next(data[begin:end] for found, begin, end in _boxes(data) if found == kind)


def _video_tracks(moov: bytes) -> list[tuple[dict[bytes, bytes], dict[bytes, bytes], dict[bytes, bytes]]]:
    """Return, for each video track, the boxes in the track, in its media box and in its sample table box."""
    found = []
    for kind, begin, end in _boxes(moov):
        if kind == b"trak":
            track = _named(moov[begin:end])
            media = _named(track.get(b"mdia", b""))
            if media.get(b"hdlr", b"")[8:12] == b"vide":
                found.append((track, media, _named(_named(media.get(b"minf", b"")).get(b"stbl", b""))))
    return found


def dolby_profile(entry: bytes) -> int | None:
    """Return the Dolby Vision profile in a track's sample entry if the pictures can only be shown as Dolby Vision;
    otherwise None."""
    parts = _named(entry, _VISUAL_SAMPLE_ENTRY)
    box = parts.get(b"dvcC") or parts.get(b"dvvC") or b""
    return box[2] >> 1 if len(box) >= 5 and box[4] >> 4 == 0 else None


def _has_plain_colours(entry: bytes, parts: dict[bytes, bytes]) -> bool:
    """Return True for frames that are described as SDR in BT.709 or BT.601, and for small frames without a description,
    because decoders and players both assume BT.601 for them."""
    codes = []
    if parts.get(b"colr", b"")[:4] in (b"nclx", b"nclc"):
        codes.append(struct.unpack_from(">3H", parts[b"colr"], 4))
    elif b"av1C" in parts:  # AV1 may describe its colours in the stream, which is not read here
        return False
    if b"vpcC" in parts:
        codes.append(struct.unpack_from("3B", parts[b"vpcC"], 7))
    if b"avcC" in parts:
        codes += [describe_frames(each).colours for each in _parameter_sets(parts[b"avcC"])]
    if any(kind_of_colours(*each[:2]) or unknown_matrix(each[2]) for each in codes):
        return False
    width, height = struct.unpack_from(">HH", entry, 24)
    return any(each[2] != UNSPECIFIED for each in codes) or not is_high_definition(width, height)


def _entry(tables: dict[bytes, bytes]) -> tuple[bytes, dict[bytes, bytes]]:
    _, begin, end = _boxes(tables[b"stsd"], 8)[0]
    entry = tables[b"stsd"][begin:end]
    return entry, _named(entry, _VISUAL_SAMPLE_ENTRY)


def _matrix(header: bytes, at: int) -> tuple[int, ...] | None:
    a, b, u, c, d, v, _, _, w = struct.unpack_from(">9i", header, at)
    return (a, b, c, d) if (u, v, w) == (0, 0, 1 << 30) else None


def _scale(header: bytes) -> int:
    """Return the time scale of an mvhd or mdhd box, in ticks per second."""
    return struct.unpack_from(">I", header, 12 if header[0] == 0 else 20)[0]


def _times(tables: dict[bytes, bytes]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (display times of the frames, ascending; display index of each stored frame).

    The second value is None if frames are stored in display order. Raises ValueError if two frames have the same time.
    """
    lengths = np.frombuffer(tables[b"stts"], ">u4", offset=8).reshape(-1, 2).astype(np.int64)
    durations = np.repeat(lengths[:, 1], lengths[:, 0])
    times = np.cumsum(durations) - durations
    order = None
    if b"ctts" in tables:
        offsets = np.frombuffer(tables[b"ctts"], ">i4", offset=8).reshape(-1, 2).astype(np.int64)
        times = times + np.repeat(offsets[:, 1], offsets[:, 0])
        by_time = np.argsort(times, kind="stable")
        times, order = times[by_time], np.empty(len(by_time), np.int64)
        order[by_time] = np.arange(len(by_time))
    if not (times[1:] > times[:-1]).all():
        raise ValueError("two frames of one time")
    return times, order


def is_closed(order: np.ndarray | None, sync: np.ndarray) -> bool:
    """Return True if, for every sync sample, the frames stored before it are shown before it, and the frames stored
    after it are shown after it. order: display index of each stored frame, or None, see :func:`_times`."""
    if order is None:
        return True
    return bool((order[sync] == sync).all() and (np.maximum.accumulate(order)[sync] == sync).all())


def _shows_all(edits: bytes, times: np.ndarray, duration: int, ticks: Fraction) -> bool:
    """Return True if the edit list shows all frames in one edit at normal speed, perhaps after a pause.

    duration: duration of a frame. ticks: media ticks per movie tick; edit durations are rounded to movie ticks."""
    table = _inside(edits, b"elst")
    form, step = (">Iihh", 12) if table[0] == 0 else (">Qqhh", 20)
    count = struct.unpack_from(">I", table, 4)[0]
    entries = [struct.unpack_from(form, table, 8 + step * number) for number in range(min(count, 3))]
    while entries and entries[0][1] == -1:  # an empty edit is a pause
        entries, count = entries[1:], count - 1
    if count != 1 or len(entries) != 1:
        return False
    length, start, rate, fraction = entries[0]
    last = int(times[-1]) + duration
    return (rate, fraction) == (1, 0) and 0 <= start <= times[0] and start + (length + 1) * ticks >= last


def _places(tables: dict[bytes, bytes], size: int) -> tuple[Callable[[int], int], np.ndarray]:
    """Return (function from the index of a sample to its offset in the file, sizes of the samples).

    Raises ValueError if a sample extends beyond the end of the file."""
    same, count = struct.unpack_from(">II", tables[b"stsz"], 4)
    sizes = np.full(count, same) if same else np.frombuffer(tables[b"stsz"], ">u4", count, 12)
    sizes = sizes.astype(np.int64)
    kind, name = (">u8", b"co64") if b"co64" in tables else (">u4", b"stco")
    chunks = np.frombuffer(tables[name], kind, offset=8).astype(np.int64)
    runs = np.frombuffer(tables[b"stsc"], ">u4", offset=8).reshape(-1, 3).astype(np.int64)
    of_chunks = np.repeat(runs[:, 1], np.diff(runs[:, 0] - 1, append=len(chunks)))
    if runs[0, 0] != 1 or len(of_chunks) != len(chunks) or of_chunks.min() < 1 or of_chunks.sum() != count:
        raise ValueError("chunks of other samples")
    first = np.cumsum(of_chunks) - of_chunks
    if (chunks + np.add.reduceat(sizes, first)).max() > size:
        raise ValueError("samples behind the end")

    def place(sample: int) -> int:
        chunk = int(np.searchsorted(first, sample, side="right")) - 1
        return int(chunks[chunk]) + int(sizes[first[chunk] : sample].sum())

    return place, sizes


def begins_anew(sample: bytes, length: int, intra: bool = False) -> bool:
    """Return True if an H.264 frame can be decoded without earlier frames, and is shown without rotation.

    Args:
        sample: bytes of the frame, at least up to the beginning of its first slice.
        length: number of bytes of the size field before each NAL unit; 0 if NAL units are separated by start codes.
        intra: also accept a slice that refers to no other frame, even though later frames may refer to earlier frames.
    """
    for unit in _units(sample, length):
        kind = unit[0] & 31
        if kind == _SLICE_OF_IDR:
            return True
        if kind in _SLICES:
            return intra and _Bits(unit[1:9]).slice_kind() in _INTRA
        if kind == _MORE_INFORMATION and not intra and _DISPLAY_ORIENTATION in _messages(unit[1:]):
            return False
    return False


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


def _messages(data: bytes) -> Iterator[int]:
    """Yield the type of each message in a NAL unit of supplemental enhancement information (SEI)."""
    data = data.replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(data):
        numbers = []
        for _ in range(2):  # the type and the size of the message
            number = 0
            while at < len(data) - 1 and data[at] == 255:
                number, at = number + 255, at + 1
            numbers.append(number + data[at])
            at += 1
            if at >= len(data):
                break
        yield numbers[0]
        at += numbers[1] if len(numbers) == 2 else len(data)


def _parameter_sets(configuration: bytes) -> list[bytes]:
    """Return the sequence parameter sets of an avcC box."""
    found, at = [], 6
    for _ in range(configuration[5] & 31):
        length = struct.unpack_from(">H", configuration, at)[0]
        found.append(configuration[at + 2 : at + 2 + length])
        at += 2 + length
    return found


class _Bits:
    """Reads fields from a bit string. Raises IndexError when reading past the end."""

    def __init__(self, data: bytes):
        self._bits, self._at = "".join(f"{byte:08b}" for byte in data), 0

    def flag(self) -> bool:
        self._at += 1
        return self._bits[self._at - 1] == "1"

    def number(self, bits: int) -> int:
        self._at += bits
        return int(self._bits[self._at - bits : self._at], 2)

    def golomb(self) -> int:
        """Read an unsigned Exp-Golomb number. A signed number has the same length, but is not decoded correctly."""
        end = self._bits.index("1", self._at)
        zeros, self._at = end - self._at, end
        return self.number(zeros + 1) - 1

    def skip(self, *kinds: str) -> None:
        """Skip fields: "u" is one bit, "ue" an Exp-Golomb number."""
        for kind in kinds:
            self.flag() if kind == "u" else self.golomb()

    def slice_kind(self) -> int:
        self.golomb()  # address of the first macroblock
        return self.golomb()


class FrameDescription(NamedTuple):
    """The description of frames in an H.264 sequence parameter set.

    square: True if pixels are square. colours: primaries, transfer and matrix, numbered as in H.273."""

    square: bool
    colours: tuple[int, int, int]


@lru_cache(1024)
def describe_frames(parameters: bytes) -> FrameDescription:
    """Parse an H.264 sequence parameter set. Pixels without an aspect ratio count as square.

    Raises IndexError or ValueError if the parameter set can't be parsed."""
    bits = _Bits(parameters[1:].replace(b"\0\0\3", b"\0\0"))
    profile = bits.number(8)
    bits.number(16)
    bits.golomb()
    if profile in _CHROMA_FOLLOWS:
        chroma = bits.golomb()
        if chroma == 3:
            bits.flag()
        bits.skip("ue", "ue", "u")
        if bits.flag():
            raise ValueError("scaling lists")  # rare, and not supported here
    bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.skip("u", "ue", "ue")
        for _ in range(min(bits.golomb(), 255)):
            bits.golomb()
    bits.skip("ue", "u", "ue", "ue")
    if not bits.flag():
        bits.flag()
    bits.flag()
    if bits.flag():
        for _ in range(4):
            bits.golomb()
    square, colours = True, (UNSPECIFIED, UNSPECIFIED, UNSPECIFIED)
    if not bits.flag():
        return FrameDescription(square, colours)
    if bits.flag():
        shape = bits.number(8)
        if shape == _EXTENDED_SAR:
            wide, high = bits.number(16), bits.number(16)
            square = wide == high or 0 in (wide, high)
        else:
            square = shape in (0, 1)
    if bits.flag():  # overscan
        bits.flag()
    if bits.flag():
        bits.number(4)  # the video format and the range flag
        if bits.flag():
            colours = bits.number(8), bits.number(8), bits.number(8)
    return FrameDescription(square, colours)


IN_ORDER = "MPEG-4 without B frames"
ANIMATION = "animation"
_READ = 2**15  # bytes read from the beginning of an AVI; there may be gaps of 2 or 4 KB between its parts
_MPEG4 = (b"FMP4", b"XVID", b"DIVX", b"DX50")  # names of MPEG-4 codecs in AVI files
_PIXEL_SHAPE_FOLLOWS = 15


class ContainerHeader(NamedTuple):
    """The information in a file's header.

    Attributes:
        problem: the reason why the file is invalid, or None.
        codec: for an MP4, the four-letter codec of the only video track, or ``FRAGMENTED``. ``IN_ORDER`` for an AVI
            that declares that it has no B frames. ``ANIMATION`` for a picture format with animations. Otherwise "".
        track: the only video track of an MP4, if it is plain, see :class:`PlainTrack`.
    """

    problem: str | None
    codec: str = ""
    track: PlainTrack | None = None


def read_header(path: str) -> ContainerHeader:
    """Read a file's header. For an unknown format all fields are empty. Raises OSError if the file can't be read."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
        if may_be_animation(head):
            return ContainerHeader(None, ANIMATION)
        if head[:4] == b"RIFF":
            return ContainerHeader(None, IN_ORDER if has_no_b_frames(file) else "")
        return ContainerHeader(*read_tables(file))


# ------------------------------------------------------------------------------------------ AVI


def has_no_b_frames(file: BinaryIO) -> bool:
    """Return True if the beginning of an AVI declares that its MPEG-4 frames are stored in display order.

    Return False for other formats, and if the first frame is not within ``_READ`` bytes. To find this out, FFmpeg would
    need as long as for decoding several frames of a small clip. Raises OSError if the file can't be read."""
    file.seek(0)
    data = memoryview(file.read(_READ))
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"AVI ":
        return False
    tracks: list[tuple[bytes, bytes]] = []  # (codec, bytes after the description) of each video track
    first = b""
    for kind, inside in _chunks(data[12:]):
        if kind == b"hdrl":
            tracks += [track for name, parts in _chunks(inside) if name == b"strl" for track in _avi_tracks(parts)]
        elif kind == b"movi":
            first = next((bytes(frame) for name, frame in _chunks(inside) if name[2:] in (b"dc", b"db")), b"")
    if len(tracks) != 1 or tracks[0][0] not in _MPEG4 or not first:
        return False
    said = [*_low_delays(tracks[0][1]), *_low_delays(first)]
    return bool(said) and all(said)


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, contents) of each chunk in ``data``. A list has the list's name. The last chunk may be cut off at
    the end of ``data``."""
    at = 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        inside = data[at + 8 : at + 8 + length]
        yield (bytes(inside[:4]), inside[4:]) if kind == b"LIST" else (kind, inside)
        at += 8 + length + length % 2


def _avi_tracks(parts: memoryview) -> Iterator[tuple[bytes, bytes]]:
    described = dict(_chunks(parts))
    if bytes(described.get(b"strh", b"")[:4]) == b"vids":
        description = bytes(described.get(b"strf", b""))
        yield description[16:20], description[40:]


def _low_delays(stream: bytes) -> Iterator[bool]:
    """Yield a bool for each video object layer in ``stream``: True if the layer declares that it has no B frames."""
    at = stream.find(b"\0\0\1")
    while 0 <= at < len(stream) - 3:
        if 0x20 <= stream[at + 3] <= 0x2F:
            yield _low_delay(stream[at + 4 : at + 12])
        at = stream.find(b"\0\0\1", at + 3)


def _low_delay(layer: bytes) -> bool:
    bits = "".join(f"{byte:08b}" for byte in layer)
    at = 1 + 8  # random_accessible_vol, video_object_type_indication
    at += 1 + (7 if bits[at : at + 1] == "1" else 0)  # is_object_layer_identifier, then a version and a priority
    shape, at = bits[at : at + 4], at + 4
    at += 16 if shape and int(shape, 2) == _PIXEL_SHAPE_FOLLOWS else 0
    return bits[at : at + 1] == "1" and bits[at + 3 : at + 4] == "1"  # vol_control_parameters, then low_delay
