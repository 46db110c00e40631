"""Tell from its tables alone whether the only video track of an MP4 or MOV file is plain.

A plain track shows all of its frames, each once, upright or turned by quarter turns, with square pixels; it can be
decoded from every frame that it calls a sync sample, and no frame shown later is stored before one. Its colours are SDR
of BT.709 or BT.601. Of such a file the frames that a decoder finds by their numbers are those that decoding from the
start gives. Boxes are named as in ISO/IEC
14496-12, fields of H.264 as in ITU-T H.264, 7.3.2.1 and E.1.1.
"""

import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from opendit.data.colours import UNSPECIFIED, is_high_definition, kind_of_colours, unknown_matrix

ReadAt = Callable[[int, int], bytes]  # (where, how many bytes) -> these bytes of the file
Box = tuple[bytes, int, int]  # kind, where its contents begin and end

_VISUAL_SAMPLE_ENTRY = 78  # bytes before the boxes inside of one
_ONE = 1 << 16  # as matrices have it
_UPRIGHT = (_ONE, 0, 0, _ONE)
_QUARTER_TURNS = (_UPRIGHT, (0, _ONE, -_ONE, 0), (-_ONE, 0, 0, -_ONE), (0, -_ONE, _ONE, 0))
_SLICES, _SLICE_OF_IDR, _MORE_INFORMATION = (1, 2, 3, 4), 5, 6  # kinds of NAL units of H.264
_INTRA = (2, 4, 7, 9)  # kinds of slices
_DISPLAY_ORIENTATION = 47  # a kind of supplemental enhancement information, by which a frame is shown turned
_CHROMA_FOLLOWS = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles
_EXTENDED_SAR = 255
_LOOKED_AT = 16  # sync samples of a track, spread evenly
_BEGINNING = 1024  # bytes of each; x264 writes 700 of its settings before the first


class PlainTrack(NamedTuple):
    """times: (frames,) int64, rising, when each frame is shown; of time_base seconds each."""

    times: np.ndarray
    time_base: Fraction


def plain_track(moov: bytes, read: ReadAt, size: int) -> PlainTrack | None:
    """The only video track of a file whose box ``moov`` has these contents; None if it is not plain, or says so in a
    way that is not understood here.

    read, size: of the file, whose sync samples are looked at.
    """
    try:
        return _plain_track(moov, read, size)
    except (KeyError, IndexError, ValueError, ZeroDivisionError, StopIteration, struct.error):
        return None


def clean_apertures(moov: bytes) -> list[tuple[int, int, int, int] | None]:
    """The box ``clap`` of each video track: pixels cut off at the left, right, top and bottom; None of one without."""
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
    elif b"avcC" in parts:  # whose samples are looked at
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
        chosen = sync if len(sync) <= _LOOKED_AT else sync[np.linspace(0, len(sync) - 1, _LOOKED_AT).astype(np.int64)]
        for sample in chosen.tolist():
            if not begins_anew(read(places(sample), min(_BEGINNING, int(sizes[sample]))), length):
                return None
    return PlainTrack(times, Fraction(1, timescale))


def _boxes(data: bytes, at: int = 0) -> Iterator[Box]:
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        begin = at + 8
        if length == 1:
            length, begin = struct.unpack_from(">Q", data, begin)[0], at + 16
        elif length == 0:
            length = len(data) - at
        if at + length < begin:
            return
        yield kind, begin, min(at + length, len(data))
        at += length


def _named(data: bytes, at: int = 0) -> dict[bytes, bytes]:
    """The contents of the boxes by their kinds, of the first of each kind."""
    found: dict[bytes, bytes] = {}
    for kind, begin, end in _boxes(data, at):
        found.setdefault(kind, data[begin:end])
    return found


def _inside(data: bytes, kind: bytes) -> bytes:
    return next(data[begin:end] for found, begin, end in _boxes(data) if found == kind)


def _video_tracks(moov: bytes) -> list[tuple[dict[bytes, bytes], dict[bytes, bytes], dict[bytes, bytes]]]:
    """The boxes of each: of the track, of its media, and of its tables."""
    found = []
    for kind, begin, end in _boxes(moov):
        if kind == b"trak":
            track = _named(moov[begin:end])
            media = _named(track.get(b"mdia", b""))
            if media.get(b"hdlr", b"")[8:12] == b"vide":
                found.append((track, media, _named(_named(media.get(b"minf", b"")).get(b"stbl", b""))))
    return found


def dolby_profile(entry: bytes) -> int | None:
    """The profile of Dolby Vision whose pictures have no other form than Dolby's, by the description of a track's
    frames; None of all others."""
    parts = _named(entry, _VISUAL_SAMPLE_ENTRY)
    box = parts.get(b"dvcC") or parts.get(b"dvvC") or b""
    return box[2] >> 1 if len(box) >= 5 and box[4] >> 4 == 0 else None


def _has_plain_colours(entry: bytes, parts: dict[bytes, bytes]) -> bool:
    """Return True for frames that are described as SDR of BT.709 or BT.601, and for small ones without a description:
    decoders take these for BT.601's, as players do."""
    codes = []
    if parts.get(b"colr", b"")[:4] in (b"nclx", b"nclc"):
        codes.append(struct.unpack_from(">3H", parts[b"colr"], 4))
    elif b"av1C" in parts:  # they are in the stream
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
    _, begin, end = next(_boxes(tables[b"stsd"], 8))
    entry = tables[b"stsd"][begin:end]
    return entry, _named(entry, _VISUAL_SAMPLE_ENTRY)


def _matrix(header: bytes, at: int) -> tuple[int, ...] | None:
    a, b, u, c, d, v, _, _, w = struct.unpack_from(">9i", header, at)
    return (a, b, c, d) if (u, v, w) == (0, 0, 1 << 30) else None


def _scale(header: bytes) -> int:
    """Ticks a second, of a mvhd or mdhd box."""
    return struct.unpack_from(">I", header, 12 if header[0] == 0 else 20)[0]


def _times(tables: dict[bytes, bytes]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (the rising times at which frames are shown, each frame's number in this order by its number in the file;
    None if the two are the same). Raises ValueError if two are shown at once."""
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
    """Return True if frames stored before a sync sample are shown before it, and those stored after it later."""
    if order is None:
        return True
    return bool((order[sync] == sync).all() and (np.maximum.accumulate(order)[sync] == sync).all())


def _shows_all(edits: bytes, times: np.ndarray, duration: int, ticks: Fraction) -> bool:
    """Return True for one edit at the usual speed from the first frame to the last, perhaps after a pause.

    duration: of a frame. ticks: of the media in one of the movie, to which the edits' durations were rounded."""
    table = _inside(edits, b"elst")
    form, step = (">Iihh", 12) if table[0] == 0 else (">Qqhh", 20)
    count = struct.unpack_from(">I", table, 4)[0]
    entries = [struct.unpack_from(form, table, 8 + step * number) for number in range(min(count, 3))]
    while entries and entries[0][1] == -1:  # nothing is shown for this long
        entries, count = entries[1:], count - 1
    if count != 1 or len(entries) != 1:
        return False
    length, start, rate, fraction = entries[0]
    last = int(times[-1]) + duration
    return (rate, fraction) == (1, 0) and 0 <= start <= times[0] and start + (length + 1) * ticks >= last


def _places(tables: dict[bytes, bytes], size: int) -> tuple[Callable[[int], int], np.ndarray]:
    """(sample -> where it begins in the file, the samples' sizes). Raises ValueError if one ends behind the file."""
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
    """Return True if an H.264 frame can be decoded without any before it, and is shown as it is.

    sample: at least the beginning of its first slice. length: bytes of the sizes before its NAL units; 0 of units that
    follow start codes. intra: whether it is enough that the slice refers to no other, though later frames may refer to
    what was before."""
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
    """The kinds of the messages in a NAL unit of supplemental enhancement information."""
    data = data.replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(data):
        numbers = []
        for _ in range(2):  # its kind and its size
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
    """The sequence parameter sets of an avcC box."""
    found, at = [], 6
    for _ in range(configuration[5] & 31):
        length = struct.unpack_from(">H", configuration, at)[0]
        found.append(configuration[at + 2 : at + 2 + length])
        at += 2 + length
    return found


class _Bits:
    """Reads a string of bits from its beginning. Raises IndexError after its end."""

    def __init__(self, data: bytes):
        self._bits, self._at = "".join(f"{byte:08b}" for byte in data), 0

    def flag(self) -> bool:
        self._at += 1
        return self._bits[self._at - 1] == "1"

    def number(self, bits: int) -> int:
        self._at += bits
        return int(self._bits[self._at - bits : self._at], 2)

    def golomb(self) -> int:
        """An unsigned Exp-Golomb number; of a signed one something that has as many bits."""
        end = self._bits.index("1", self._at)
        zeros, self._at = end - self._at, end
        return self.number(zeros + 1) - 1

    def skip(self, *kinds: str) -> None:
        """Skips fields: "u" of one bit, "ue" an Exp-Golomb number."""
        for kind in kinds:
            self.flag() if kind == "u" else self.golomb()

    def slice_kind(self) -> int:
        self.golomb()  # its first macroblock
        return self.golomb()


class FrameDescription(NamedTuple):
    """square: whether pixels are. colours: primaries, transfer and matrix, as H.273 numbers them."""

    square: bool
    colours: tuple[int, int, int]


@lru_cache(1024)
def describe_frames(parameters: bytes) -> FrameDescription:
    """Read an H.264 sequence parameter set. Pixels without an aspect ratio are square. Raises IndexError or ValueError
    if it can't be read."""
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
            raise ValueError("scaling lists")  # which are rare: what follows them is not looked for
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
        bits.number(4)  # the format of before, and the range
        if bits.flag():
            colours = bits.number(8), bits.number(8), bits.number(8)
    return FrameDescription(square, colours)
