"""Colours of a video track, by the description of its frames in an MP4 or MOV file (ISO/IEC 14496-12, 8.5.2).

They tell whether a reader that knows nothing of HDR may decode the file, without asking FFmpeg, which takes as long as
decoding a few frames of a small clip. Parameter sets of H.264 are read as in ITU-T H.264, 7.3.2.1 and annex E.
"""

import struct
from collections.abc import Iterator

from opendit.data.colours import UNSPECIFIED, is_high_definition, kind_of_colours, unknown_matrix

_FIXED = 78  # bytes of a description before its boxes
_MOST_BOXES = 100
_WITH_CHROMA_FORMAT = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles


def is_plain(entry: bytes) -> bool:
    """Return whether a description, without its length and its four letters, says that the colours are SDR of BT.709 or
    BT.601, or says nothing and is of a small clip, whose colours are taken for BT.601's. False where that can't be
    told."""
    if len(entry) < _FIXED:
        return False
    codes = []
    for kind, inside in _boxes(entry):
        if kind == b"colr" and inside[:4] in (b"nclx", b"nclc") and len(inside) >= 10:
            codes.append(struct.unpack_from(">3H", inside, 4))
        elif kind == b"vpcC" and len(inside) >= 10:
            codes.append(tuple(inside[7:10]))
        elif kind == b"avcC":
            try:
                codes.append(_h264_codes(inside))
            except IndexError:
                return False
    if is_high_definition(*struct.unpack_from(">2H", entry, 24)) and all(each[2] == UNSPECIFIED for each in codes):
        return False
    return not any(kind_of_colours(*each[:2]) or unknown_matrix(each[2]) for each in codes)


def dolby_profile(entry: bytes) -> int | None:
    """Return the profile of Dolby Vision whose pictures have no other form than Dolby's; None of all others."""
    for kind, inside in _boxes(entry):
        if kind in (b"dvcC", b"dvvC") and len(inside) >= 5 and inside[4] >> 4 == 0:
            return inside[2] >> 1
    return None


def _boxes(entry: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = _FIXED
    for _ in range(_MOST_BOXES):
        if at + 8 > len(entry):
            return
        length, kind = struct.unpack_from(">I4s", entry, at)
        if length < 8:
            return
        yield kind, entry[at + 8 : at + length]
        at += length


def _h264_codes(configuration: bytes) -> tuple[int, int, int]:
    """Return (primaries, transfer, matrix) of the first sequence parameter set. Raises IndexError where it ends early,
    or has what few files have."""
    length = struct.unpack_from(">H", configuration, 6)[0] if configuration[5] & 31 else 0
    bits = _Bits(configuration[8 : 8 + length].replace(b"\0\0\3", b"\0\0"))
    bits.take(8)  # the kind of unit
    profile = bits.take(8)
    bits.take(16)
    bits.number()
    if profile in _WITH_CHROMA_FORMAT:
        if bits.number() == 3:
            bits.take(1)
        bits.number(), bits.number(), bits.take(1)
        if bits.take(1):
            raise IndexError("scaling lists")
    bits.number()
    order = bits.number()
    if order == 0:
        bits.number()
    elif order == 1:
        bits.take(1), bits.number(), bits.number()
        for _ in range(min(bits.number(), 256)):
            bits.number()
    bits.number(), bits.take(1), bits.number(), bits.number()
    if not bits.take(1):
        bits.take(1)
    bits.take(1)
    if bits.take(1):  # cropping
        bits.number(), bits.number(), bits.number(), bits.number()
    if not bits.take(1):
        return UNSPECIFIED, UNSPECIFIED, UNSPECIFIED
    if bits.take(1) and bits.take(8) == 255:  # the shape of pixels
        bits.take(32)
    if bits.take(1):
        bits.take(1)
    if bits.take(1):
        bits.take(4)
        if bits.take(1):
            return bits.take(8), bits.take(8), bits.take(8)
    return UNSPECIFIED, UNSPECIFIED, UNSPECIFIED


class _Bits:
    def __init__(self, data: bytes):
        data = data[:64]
        self._bits, self._at = f"{int.from_bytes(data):0{8 * len(data)}b}" if data else "", 0

    def take(self, count: int) -> int:
        end = self._at + count
        if end > len(self._bits):
            raise IndexError("the end")
        value, self._at = int(self._bits[self._at : end], 2), end
        return value

    def number(self) -> int:
        """An Exp-Golomb code, of either sign: only its length matters where it has one."""
        zeros = self._bits.find("1", self._at) - self._at
        if zeros < 0:
            raise IndexError("the end")
        self._at += zeros
        return self.take(zeros + 1) - 1
