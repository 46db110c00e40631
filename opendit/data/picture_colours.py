"""Colours of pictures to sRGB, by what their files say of them: an ICC profile, PNG's chunks, AVIF's colour box.

What counts is the first that a file has, as in PNG's third edition and in browsers: cICP, an ICC profile, sRGB, gAMA
with cHRM; of AVIF the profile before the box. A file that says nothing holds sRGB. EXIF's ColorSpace says nothing here,
nor in browsers.
"""

import io
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageCms

from opendit.data import colours

MAX_PROFILE = 2**22  # bytes of a profile that is read; those of presses have up to three million
_CODES = "cicp"  # in Image.info: (primaries, transfer) of H.273
_CHUNKS, _BOXES = 1000, 1000  # that are looked through
_SRGB_GAMMA, _SRGB_PRIMARIES = 1 / 2.2, (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)

Convert = Callable[[Image.Image], Image.Image]


def note_codes(image: Image.Image, file: BinaryIO) -> None:
    """Keep what Pillow passes over, of a PNG or AVIF that it has opened and not yet decoded, in ``image.info``."""
    find = {"PNG": _png_codes, "AVIF": _avif_codes}.get(image.format or "")
    if find is None:
        return
    at = file.tell()
    if codes := find(file):
        image.info[_CODES] = codes
    file.seek(at)


def kind_of_picture(image: Image.Image) -> str:
    """Return "HDR (PQ)", "HDR (HLG)" or, of pictures that are not, ""."""
    kind = colours.kind_of_colours(*image.info.get(_CODES, (1, 1)))
    return kind if kind.startswith("HDR") and _codes_count(image) else ""


def conversion_of(image: Image.Image) -> tuple[str, Convert] | None:
    """Return (mode, function) that take a picture's colours to sRGB; None where there is nothing to do.

    mode: "RGB", "L" or "CMYK": the function takes pictures of this mode, 8 bits a channel, to RGB. A profile that is
    broken, larger than ``MAX_PROFILE`` or made for other channels than the picture's is passed over, as in browsers.
    """
    info = image.info
    if _codes_count(image):
        convert = colours.of_picture(*info[_CODES])
        return None if convert is None else ("RGB", _by(convert))
    if profile := info.get("icc_profile"):
        return _by_profile(profile, image.mode)
    if image.format == "PNG" and "srgb" not in info and ("gamma" in info or "chromaticity" in info):
        return _by_gamma(info.get("gamma"), info.get("chromaticity"))
    return None


def _codes_count(image: Image.Image) -> bool:
    return _CODES in image.info and not (image.format == "AVIF" and image.info.get("icc_profile"))


def _by(convert: colours.Conversion) -> Convert:
    return lambda image: Image.fromarray(convert(np.asarray(image)))


def _by_profile(profile: bytes, mode: str) -> tuple[str, Convert] | None:
    if len(profile) < 128 or len(profile) > MAX_PROFILE:
        return None
    # Bytes 16 to 20 of a profile name the channels that it is made for.
    grey = mode in ("1", "L", "LA", "La") or mode.startswith(("I", "F"))
    wanted = {b"GRAY": "L" if grey else "", b"CMYK": "CMYK" if mode == "CMYK" else ""}.get(profile[16:20], "")
    if profile[16:20] == b"RGB " and mode not in ("CMYK", "LAB"):
        wanted = "RGB"
    transform = transform_of(profile, wanted) if wanted else None
    return None if transform is None else (wanted, transform)


@lru_cache(maxsize=16)
def transform_of(profile: bytes, mode: str) -> Convert | None:
    """Return the transform of a profile, perceptual as Pillow's default is; None of one that is broken, and of one that
    moves no colour by more than one level of 255: sRGB's own profiles differ by that."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # Of greys LittleCMS else makes a coarse table, which is wrong by 9 levels where a dark grey is light itself.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        made = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)
        if mode == "CMYK":
            return made.apply
        probe = _PROBES[mode]
        found = np.asarray(made.apply(probe))
        if abs(found.astype(int) - np.asarray(probe.convert("RGB"))).max() <= 1:
            return None
        return made.apply if mode == "RGB" else lambda image: Image.fromarray(found[0][np.asarray(image)])
    except Exception:  # LittleCMS refuses what it likes
        return None


def _probes() -> dict[str, Image.Image]:
    steps = np.linspace(0, 255, 18).round().astype(np.uint8)
    lattice = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, 18, 3)
    greys = np.arange(256, dtype=np.uint8)[None]
    return {"RGB": Image.fromarray(lattice), "L": Image.fromarray(greys)}


_PROBES = _probes()


def _by_gamma(gamma: Any, chromaticities: Any) -> tuple[str, Convert] | None:
    """Convert by PNG's gAMA and cHRM. Numbers within 5 % and 0.001 (libpng's bounds) of sRGB's stand for sRGB itself,
    and numbers that make no sense are ignored."""
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
        return "RGB", _by(_of_gamma(gamma, pairs))
    except ValueError:
        return None


_of_gamma = lru_cache(maxsize=16)(colours.of_gamma)


# ------------------------------------------------------------------------------------------ codes of H.273


def _png_codes(file: BinaryIO) -> tuple[int, int] | None:
    """Return (primaries, transfer) of a PNG's cICP chunk."""
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
    """Return (primaries, transfer) of an AVIF's first colour box of the kind nclx."""
    file.seek(0)
    data = file.read(1 << 16)
    for meta in _inside(data, b"meta", 0, len(data)):
        for properties in _inside(data, b"iprp", meta[0] + 4, meta[1]):
            for container in _inside(data, b"ipco", *properties):
                for begin, end in _inside(data, b"colr", *container):
                    if data[begin : begin + 4] == b"nclx" and end - begin >= 8:
                        return struct.unpack_from(">HH", data, begin + 4)
    return None


def _inside(data: bytes, wanted: bytes, at: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield where the contents of the boxes of one kind in data[at:last] begin and end."""
    for _ in range(_BOXES):
        if at + 8 > last:
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        if length < 8:  # a length of 64 bits, or up to the end: of no box that is looked for
            return
        if kind == wanted:
            yield at + 8, min(at + length, last)
        at += length
