"""Read the header of a clip's file before a decoder is asked: it is quick, and a decoder believes anything.

MP4 files are read by ``opendit.data.mp4``, AVI files here. Chunks of AVI are named as in Microsoft's description of
it, fields of MPEG-4 as in ISO/IEC 14496-2, 6.2.3.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from opendit.data.animations import HEAD, may_be_animation
from opendit.data.mp4 import PlainTrack, read_tables

IN_ORDER = "MPEG-4 without B frames"
ANIMATION = "animation"
_READ = 2**15  # bytes of an AVI's beginning; writers leave gaps of 2 or 4 KB between its parts
_MPEG4 = (b"FMP4", b"XVID", b"DIVX", b"DX50")  # names in AVI files
_PIXEL_SHAPE_FOLLOWS = 15


class ContainerHeader(NamedTuple):
    """problem: why the file can't be believed, or None. codec: the four letters of an MP4's only video track,
    ``IN_ORDER`` for an AVI file that declares it, ``ANIMATION`` for picture formats with animations; empty where more
    of the file has to be read. track: the only video track of an MP4 whose frames are found by their numbers."""

    problem: str | None
    codec: str = ""
    track: PlainTrack | None = None


def read_header(path: str) -> ContainerHeader:
    """Read a file's header; it is empty for an unknown format. Raises OSError if the file can't be read."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
        if may_be_animation(head):
            return ContainerHeader(None, ANIMATION)
        if head[:4] == b"RIFF":
            return ContainerHeader(None, IN_ORDER if has_no_b_frames(file) else "")
        return ContainerHeader(*read_tables(file))


# ------------------------------------------------------------------------------------------ AVI


def has_no_b_frames(file: BinaryIO) -> bool:
    """Return True if the beginning of an AVI declares that its MPEG-4 frames are stored in the order they are shown.

    False if the first frame is not within ``_READ`` bytes, and for every other kind of file. Asking FFmpeg takes as
    long as decoding several frames of a small clip. Raises OSError if the file can't be read.
    """
    file.seek(0)
    data = memoryview(file.read(_READ))
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"AVI ":
        return False
    tracks: list[tuple[bytes, bytes]] = []  # of video: the codec, and the bytes after its description
    first = b""
    for kind, inside in _chunks(data[12:]):
        if kind == b"hdrl":
            tracks += [track for name, parts in _chunks(inside) if name == b"strl" for track in _video_tracks(parts)]
        elif kind == b"movi":
            first = next((bytes(frame) for name, frame in _chunks(inside) if name[2:] in (b"dc", b"db")), b"")
    if len(tracks) != 1 or tracks[0][0] not in _MPEG4 or not first:
        return False
    said = [*_low_delays(tracks[0][1]), *_low_delays(first)]
    return bool(said) and all(said)


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, contents) of the chunks, the last one cut off where the data end; for a list its own name."""
    at = 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        inside = data[at + 8 : at + 8 + length]
        yield (bytes(inside[:4]), inside[4:]) if kind == b"LIST" else (kind, inside)
        at += 8 + length + length % 2


def _video_tracks(parts: memoryview) -> Iterator[tuple[bytes, bytes]]:
    described = dict(_chunks(parts))
    if bytes(described.get(b"strh", b"")[:4]) == b"vids":
        description = bytes(described.get(b"strf", b""))
        yield description[16:20], description[40:]


def _low_delays(stream: bytes) -> Iterator[bool]:
    """Yield, for every video object layer in a stream's bytes, True if it declares that there are no B frames."""
    at = stream.find(b"\0\0\1")
    while 0 <= at < len(stream) - 3:
        if 0x20 <= stream[at + 3] <= 0x2F:
            yield _low_delay(stream[at + 4 : at + 12])
        at = stream.find(b"\0\0\1", at + 3)


def _low_delay(layer: bytes) -> bool:
    bits = "".join(f"{byte:08b}" for byte in layer)
    at = 1 + 8  # random_accessible_vol, video_object_type_indication
    at += 1 + (7 if bits[at : at + 1] == "1" else 0)  # is_object_layer_identifier: its version and priority
    shape, at = bits[at : at + 4], at + 4
    at += 16 if shape and int(shape, 2) == _PIXEL_SHAPE_FOLLOWS else 0
    return bits[at : at + 1] == "1" and bits[at + 3 : at + 4] == "1"  # vol_control_parameters, then low_delay
