"""Convert HDR and wide-gamut colours to BT.709 and sRGB, the colours that models are trained on.

Primaries and transfers are numbered as in ITU-T H.273. LittleCMS converts pictures with ICC profiles. A
:class:`Conversion` converts other files in these steps:

1. Decode the signal to linear light in units of SDR white. HDR's white is 203 nits (BT.2408).
   PQ: EOTF of SMPTE ST 2084. HLG: inverse OETF, then the OOTF for 1,000 nits, gamma 1.2 (BT.2100).
   SDR clips: power of 2.4 (BT.1886). SDR pictures: their gamma or sRGB's curve.
2. Convert the primaries to BT.709's by a matrix. Negative values are outside the gamut and become 0.
3. For HDR, compress each channel x above ``KNEE``, so that 10,000 nits become 1 (extended Reinhard):
   y = KNEE + (1 - KNEE) t (1 + t / T^2) / (1 + t), where t = (x - KNEE) / (1 - KNEE), and T is t at 10,000 nits.
4. Encode the light as an SDR signal: by the power 1 / 2.4 for clips and by sRGB's curve for pictures.
"""

import io
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageCms

from opendit.data.container_header import list_boxes, named_boxes

PQ, HLG = 16, 18  # numbers of two HDR transfers
WHITE_NITS = 203.0
KNEE = 0.9
_MOST_NITS, _HLG_NITS, _HLG_GAMMA = 10_000.0, 1000.0, 1.2
_CHUNK = 1 << 16  # pixels to convert at once; fits in the processor's cache

_D65, _DCI = (0.3127, 0.3290), (0.314, 0.351)
# Code of the primaries in a clip's metadata -> (x, y) of red, green, blue and white.
_PRIMARIES = {
    1: ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060), _D65),
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    11: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _DCI),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
}
_WIDE = {9: "BT.2020", 11: "DCI-P3", 12: "Display P3"}
_GAMMAS = {4: 2.2, 5: 2.8, 8: 1.0}  # pictures with a power law: transfer -> gamma
UNSPECIFIED = 2  # number for unspecified primaries, transfer or matrix
# Number of an RGB to YCbCr matrix -> (red's weight, blue's weight) in luma.
MATRICES = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 5: (0.299, 0.114), 6: (0.299, 0.114), 7: (0.212, 0.087)}
MATRICES |= {9: (0.2627, 0.0593)}
# Matrices for which FFmpeg's scaler would give wrong colours.
_NO_MATRIX = {10: "BT.2020 with constant luminance", 11: "YDzDx", 14: "ICtCp", 15: "IPT-C2"}
_NO_MATRIX |= dict.fromkeys((12, 13), "chromaticity-derived")

_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
Chromaticities = tuple[tuple[float, float], ...]


def kind_of_colours(primaries: int, transfer: int) -> str:
    """Return a name such as "HDR (PQ)" or "wide gamut (BT.2020)" if the colours need conversion, else ""."""
    if transfer in (PQ, HLG):
        return "HDR (PQ)" if transfer == PQ else "HDR (HLG)"
    return f"wide gamut ({_WIDE[primaries]})" if primaries in _WIDE else ""


def unknown_matrix(matrix: int) -> str:
    return _NO_MATRIX.get(matrix, "")


def is_high_definition(width: int, height: int) -> bool:
    """Return True if players assume BT.709's matrix for a clip of this size, False for BT.601's."""
    return width >= 1280 or height > 576


class Conversion:
    """Converts pixels to 8-bit BT.709 or sRGB.

    Args:
        to_light: maps signals in [0, 1], float64, to light in units of white, or to HLG's scene light in [0, 1].
        matrix: (3, 3) from the light's primaries to BT.709's.
        to_signal: maps light in units of white to signals in [0, 1].
        hlg: apply HLG's OOTF before the matrix, and divide by white.
    """

    def __init__(
        self,
        to_light: Callable[[np.ndarray], np.ndarray],
        matrix: np.ndarray,
        to_signal: Callable[[np.ndarray], np.ndarray],
        *,
        hlg: bool = False,
    ):
        self._to_light, self._tables = to_light, {}
        self._matrix = matrix.astype(np.float32)
        self._codes = (to_signal(_BINS) * 255).round().clip(0, 255).astype(np.uint8)
        gain = _HLG_NITS / WHITE_NITS * _BINS ** (_HLG_GAMMA - 1)
        self._ootf = gain.astype(np.float32) if hlg else None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Convert (H, W, 3) uint8 or uint16 to uint8. The largest value of the dtype is the signal 1.0."""
        return self._by_rows(pixels.shape[:2], pixels.dtype, lambda rows: [pixels[rows, :, n] for n in range(3)])

    def from_yuv(self, planes: Sequence[np.ndarray], bits: int, full: bool, matrix: int) -> np.ndarray:
        """Convert planes (H, W) of Y, Cb and Cr to (H, W, 3) uint8. bits: bits per value. full: True for full range,
        False for limited range. matrix: a key of ``MATRICES``."""
        red, blue = MATRICES[matrix]
        unit = 1 << (bits - 8)
        black, luma, chroma = (0, 256 * unit - 1, 256 * unit - 1) if full else (16 * unit, 219 * unit, 224 * unit)

        def signals(rows: slice) -> list[np.ndarray]:
            y, cb, cr = (plane[rows].astype(np.float32) for plane in planes)
            y = (y - np.float32(black)) * np.float32(1 / luma)
            r = y + (cr - np.float32(128 * unit)) * np.float32(2 * (1 - red) / chroma)
            b = y + (cb - np.float32(128 * unit)) * np.float32(2 * (1 - blue) / chroma)
            g = (y - np.float32(red) * r - np.float32(blue) * b) * np.float32(1 / (1 - red - blue))
            return [(x * np.float32(65535) + np.float32(0.5)).clip(0, 65535).astype(np.uint16) for x in (r, g, b)]

        return self._by_rows(planes[0].shape, np.dtype(np.uint16), signals)

    def _by_rows(
        self, shape: tuple[int, ...], dtype: np.dtype, signals: Callable[[slice], list[np.ndarray]]
    ) -> np.ndarray:
        if dtype not in self._tables:
            most = np.iinfo(dtype).max
            self._tables[dtype] = self._to_light(np.arange(most + 1) / most).astype(np.float32)
        table, out = self._tables[dtype], np.empty((*shape, 3), np.uint8)
        count = max(1, _CHUNK // max(1, shape[1]))
        for first in range(0, shape[0], count):
            rows = slice(first, first + count)
            # Only table look-ups and sums of products are used, because they are bit-identical on every machine.
            light = [table[part] for part in signals(rows)]
            if self._ootf is not None:
                gain = self._ootf[_bin(_weighted(light, _LUMINANCE))]
                light = [part * gain for part in light]
            for colour, weights in enumerate(self._matrix):
                out[rows, :, colour] = self._codes[_bin(_weighted(light, weights))]
        return out


_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)  # BT.2100's weights of red, green and blue

# Tables are indexed by the upper bits of the light's float32 value, and ``_BINS`` has each bin's middle. An 8-bit
# result is off by at most 0.03 of a level. The first bin includes 0 and negative values.
_SHIFT, _LEAST, _MOST = 12, 2.0**-30, 64.0
_FIRST = int(np.float32(_LEAST).view(np.int32)) >> _SHIFT
_LAST = (int(np.float32(_MOST).view(np.int32)) >> _SHIFT) - 1
_BINS = ((np.arange(_FIRST, _LAST + 1, dtype=np.int32) << _SHIFT) + (1 << _SHIFT >> 1)).view(np.float32)
_BINS = _BINS.astype(np.float64)
_BINS[0] = 0.0


def _bin(light: np.ndarray) -> np.ndarray:
    return (light.view(np.int32) >> _SHIFT).clip(_FIRST, _LAST) - _FIRST


def _weighted(light: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
    return light[0] * weights[0] + light[1] * weights[1] + light[2] * weights[2]


def matrix_of(primaries: int, transfer: int, matrix: int, width: int, height: int) -> int:
    """Return the number of a clip's matrix or, if unspecified, the number that players assume."""
    if matrix != UNSPECIFIED:
        return matrix
    if transfer in (PQ, HLG) or primaries == 9:
        return 9
    return 1 if is_high_definition(width, height) else 6


@cache
def of_clip(primaries: int, transfer: int) -> Conversion | None:
    """Return the conversion for a clip's signals; None for SDR without a wide gamut."""
    if not kind_of_colours(primaries, transfer):
        return None
    known = primaries if primaries in _PRIMARIES else 9
    if transfer not in (PQ, HLG):
        return Conversion(lambda x: x**2.4, to_bt709(_PRIMARIES[known]), lambda x: x ** (1 / 2.4))
    return _of_hdr(known, transfer, lambda x: x ** (1 / 2.4))


@cache
def of_picture(primaries: int, transfer: int) -> Conversion | None:
    """Return the conversion for a picture's signals; None for sRGB, BT.709 and unknown codes. primaries, transfer:
    codes in PNG's cICP or AVIF's nclx."""
    if transfer in (PQ, HLG):
        return _of_hdr(primaries if primaries in _PRIMARIES else 9, transfer, encode_srgb)
    if primaries not in _WIDE and transfer not in _GAMMAS:
        return None
    gamma = _GAMMAS.get(transfer)
    to_light = decode_srgb if gamma is None else lambda x: x**gamma
    return Conversion(to_light, to_bt709(_PRIMARIES.get(primaries, _PRIMARIES[1])), encode_srgb)


@lru_cache(maxsize=16)
def of_gamma(gamma: float | None, chromaticities: Chromaticities | None) -> Conversion:
    """Return the conversion for a picture with signal = light ** ``gamma``; a ``gamma`` of None means sRGB's curve.
    chromaticities: see :func:`to_bt709`; None means sRGB's."""
    matrix = to_bt709(_PRIMARIES[1] if chromaticities is None else chromaticities)
    return Conversion(decode_srgb if gamma is None else lambda x: x ** (1 / gamma), matrix, encode_srgb)


def _of_hdr(primaries: int, transfer: int, encode: Callable[[np.ndarray], np.ndarray]) -> Conversion:
    to_light = decode_hlg if transfer == HLG else lambda x: decode_pq(x) / WHITE_NITS
    return Conversion(to_light, to_bt709(_PRIMARIES[primaries]), lambda x: encode(compress(x)), hlg=transfer == HLG)


def decode_pq(signal: np.ndarray) -> np.ndarray:
    """Convert PQ signals in [0, 1] to nits."""
    m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
    power = signal ** (1 / m2)
    return _MOST_NITS * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)


def decode_hlg(signal: np.ndarray) -> np.ndarray:
    """Convert HLG signals in [0, 1] to scene light in [0, 1]."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)


def decode_srgb(signal: np.ndarray) -> np.ndarray:
    return np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4)


def encode_srgb(light: np.ndarray) -> np.ndarray:
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def compress(light: np.ndarray) -> np.ndarray:
    """Compress light in units of white to [0, 1], with 10,000 nits as 1. See the module's docstring."""
    most = (_MOST_NITS / WHITE_NITS - KNEE) / (1 - KNEE)
    above = np.maximum(light - KNEE, 0) / (1 - KNEE)
    return np.minimum(light, KNEE) + (1 - KNEE) * above * (1 + above / most**2) / (1 + above)


def to_bt709(chromaticities: Chromaticities) -> np.ndarray:
    """Return the (3, 3) matrix from light in these primaries to light in BT.709's. The white is adapted by Bradford's
    method.

    chromaticities: (x, y) of red, green, blue and white. Raises ValueError for degenerate primaries."""
    try:
        white, wanted = (_BRADFORD @ _xyz(each[3]) for each in (chromaticities, _PRIMARIES[1]))
        adapted = np.linalg.solve(_BRADFORD, np.diag(wanted / white) @ _BRADFORD)
        matrix = np.linalg.solve(_to_xyz(_PRIMARIES[1]), adapted @ _to_xyz(chromaticities))
    except (np.linalg.LinAlgError, ZeroDivisionError) as error:
        raise ValueError("its primaries span no colours") from error
    if not np.isfinite(matrix).all() or abs(matrix).max() > 100:
        raise ValueError("its primaries span no colours")
    return matrix


def _xyz(point: tuple[float, float]) -> np.ndarray:
    x, y = point
    return np.array([x / y, 1.0, (1 - x - y) / y])


def _to_xyz(chromaticities: Chromaticities) -> np.ndarray:
    columns = np.stack([_xyz(point) for point in chromaticities[:3]], axis=1)
    return columns * np.linalg.solve(columns, _xyz(chromaticities[3]))


MAX_PROFILE = 2**22  # maximum bytes of an ICC profile
_CODES = "cicp"  # key of (primaries, transfer) in Image.info
_CHUNKS = 1000  # maximum PNG chunks to search
_SRGB_GAMMA, _SRGB_PRIMARIES = 1 / 2.2, (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)

Convert = Callable[[Image.Image], Image.Image]


def note_codes(image: Image.Image, file: BinaryIO) -> None:
    """Store a PNG's or AVIF's colour codes in ``image.info``, because Pillow ignores them. file: the opened file."""
    find = {"PNG": _png_codes, "AVIF": _avif_codes}.get(image.format or "")
    if find is None:
        return
    at = file.tell()
    if codes := find(file):
        image.info[_CODES] = codes
    file.seek(at)


def kind_of_picture(image: Image.Image) -> str:
    """Return "HDR (PQ)" or "HDR (HLG)" by the codes from :func:`note_codes`; "" if the picture is not HDR."""
    kind = kind_of_colours(*image.info.get(_CODES, (1, 1)))
    return kind if kind.startswith("HDR") and _codes_count(image) else ""


def conversion_of(image: Image.Image) -> tuple[str, Convert] | None:
    """Return (mode, function) to convert a picture's colours to sRGB; None if no conversion is needed or possible.

    The function converts a picture in ``mode`` ("RGB", "L" or "CMYK", 8 bits per channel) to "RGB". As in browsers, a
    damaged, unsuitable or too large ICC profile is ignored."""
    info = image.info
    if _codes_count(image):
        convert = of_picture(*info[_CODES])
        return None if convert is None else ("RGB", _by(convert))
    if profile := info.get("icc_profile"):
        return _by_profile(profile, image.mode)
    if image.format == "PNG" and "srgb" not in info and ("gamma" in info or "chromaticity" in info):
        return _by_gamma(info.get("gamma"), info.get("chromaticity"))
    return None


def _codes_count(image: Image.Image) -> bool:
    return _CODES in image.info and not (image.format == "AVIF" and image.info.get("icc_profile"))


def _by(convert: Conversion) -> Convert:
    return lambda image: Image.fromarray(convert(np.asarray(image)))


def _by_profile(profile: bytes, mode: str) -> tuple[str, Convert] | None:
    if len(profile) < 128 or len(profile) > MAX_PROFILE:
        return None
    # Bytes 16 to 19 of a profile are its colour space.
    grey = mode in ("1", "L", "LA", "La") or mode.startswith(("I", "F"))
    wanted = {b"GRAY": "L" if grey else "", b"CMYK": "CMYK" if mode == "CMYK" else ""}.get(profile[16:20], "")
    if profile[16:20] == b"RGB " and mode not in ("CMYK", "LAB"):
        wanted = "RGB"
    transform = transform_of(profile, wanted) if wanted else None
    return None if transform is None else (wanted, transform)


@lru_cache(maxsize=16)
def transform_of(profile: bytes, mode: str) -> Convert | None:
    """Return a function that converts pictures in ``mode`` from an ICC profile to sRGB, with perceptual intent.

    Return None for a damaged profile, or if all "RGB" or "L" colours change by at most one level of 255, as between
    variants of the sRGB profile."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # Without this flag, LittleCMS converts "L" by a coarse table: dark greys in linear light are off by 9 levels.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        made = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)
        if mode == "CMYK":
            return made.apply
        probe = _PROBES[mode]
        found = np.asarray(made.apply(probe))
        if abs(found.astype(int) - np.asarray(probe.convert("RGB"))).max() <= 1:
            return None
        return made.apply if mode == "RGB" else lambda image: Image.fromarray(found[0][np.asarray(image)])
    except Exception:  # Pillow raises several types for a profile that LittleCMS rejects
        return None


def _probes() -> dict[str, Image.Image]:
    steps = np.linspace(0, 255, 18).round().astype(np.uint8)
    lattice = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, 18, 3)
    greys = np.arange(256, dtype=np.uint8)[None]
    return {"RGB": Image.fromarray(lattice), "L": Image.fromarray(greys)}


_PROBES = _probes()


def _by_gamma(gamma: Any, chromaticities: Any) -> tuple[str, Convert] | None:
    """Return ("RGB", function) for PNG's gAMA and cHRM; None if both are sRGB's or invalid. As in libpng, values close
    to sRGB's count as sRGB's."""
    if gamma is not None and (not 0.05 <= gamma <= 10 or abs(gamma / _SRGB_GAMMA - 1) <= 0.05):
        gamma = None
    if chromaticities is not None:
        found = np.array(chromaticities, float)
        if found.shape != (8,) or abs(found - _SRGB_PRIMARIES).max() <= 0.001:
            chromaticities = None
    if gamma is None and chromaticities is None:
        return None
    pairs = None
    if chromaticities is not None:
        white, red, green, blue = (tuple(chromaticities[at : at + 2]) for at in (0, 2, 4, 6))
        pairs = red, green, blue, white
    try:
        return "RGB", _by(of_gamma(gamma, pairs))
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------ codes of H.273


def _png_codes(file: BinaryIO) -> tuple[int, int] | None:
    """Return (primaries, transfer) in a PNG's cICP chunk; None if there is none."""
    at = 8
    for _ in range(_CHUNKS):
        file.seek(at)
        head = file.read(12)
        if len(head) < 12 or head[4:8] in (b"IDAT", b"IEND"):
            return None
        length = struct.unpack(">I", head[:4])[0]
        if head[4:8] == b"cICP" and length == 4:
            return head[8], head[9]
        at += 12 + length
    return None


def _avif_codes(file: BinaryIO) -> tuple[int, int] | None:
    """Return (primaries, transfer) in an AVIF's first colour box of type nclx; None if there is none."""
    file.seek(0)
    # "meta" begins with a version and flags, "colr" with its type.
    properties = named_boxes(named_boxes(file.read(1 << 16)).get(b"meta", b""), 4).get(b"iprp", b"")
    found = named_boxes(properties).get(b"ipco", b"")
    for kind, begin, end in list_boxes(found):
        if kind == b"colr" and found[begin : begin + 4] == b"nclx" and end - begin >= 8:
            return struct.unpack_from(">HH", found, begin + 4)
    return None
