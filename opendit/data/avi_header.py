"""Tell from an AVI file's first bytes whether it holds MPEG-4 whose frames are stored in the order they are shown.

Asking FFmpeg takes as long as decoding several frames of a small clip. Chunks are named as in Microsoft's description
of AVI, fields as in ISO/IEC 14496-2, 6.2.3.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

_READ = 2**15  # bytes of the file's beginning; those who write AVI leave gaps of 2 or 4 KB between its parts
_MPEG4 = (b"FMP4", b"XVID", b"DIVX", b"DX50")  # as AVI files name it
_PIXEL_SHAPE_FOLLOWS = 15


def has_no_b_frames(file: BinaryIO) -> bool:
    """Return True if the file's beginning, up to its first frame, says so; False if it doesn't, if it does not reach
    that far, and for every other kind of file.

    Raises OSError if the file can't be read.
    """
    file.seek(0)
    data = memoryview(file.read(_READ))
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"AVI ":
        return False
    tracks: list[tuple[bytes, bytes]] = []  # of video: codec, and what follows its description
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
    """(name, contents) of the chunks, the last one cut off where the data end; of a list its own name."""
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
