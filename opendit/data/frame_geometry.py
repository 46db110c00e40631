"""Crop, stretch and turn decoded frames as a player does, by the file's metadata."""

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.nn.functional import interpolate

from opendit.data.mp4 import clean_apertures, read_movie

Crop = tuple[int, int, int, int]  # rows and columns cut off: left, right, top, bottom

_READ = 1 << 16  # bytes of a Matroska file's beginning
_SEGMENT, _TRACKS, _TRACK, _KIND, _VIDEO = 0x18538067, 0x1654AE6B, 0xAE, 0x83, 0xE0
_CROPS = (0x54CC, 0x54DD, 0x54BB, 0x54AA)  # in the order of Crop
_MOST_STRETCH = 100  # ratio of a pixel's sides; more is a mistake


class Geometry:
    """Geometric changes for every frame of a stream: ``crop`` cuts off what the container hides, pixels that are not
    square are stretched along their longer side, and then the display matrix turns and mirrors.

    stream: PyAV's. crop: from :func:`container_crop`."""

    def __init__(self, stream: Any, crop: Crop = (0, 0, 0, 0)):
        self.crop = crop
        self.pixel = Fraction(stream.sample_aspect_ratio or 1)
        if not Fraction(1, _MOST_STRETCH) <= self.pixel <= _MOST_STRETCH:
            self.pixel = Fraction(1)

    def size(self, frame: Any) -> tuple[int, int]:
        """Return (height, width) of one of PyAV's frames as it is shown."""
        height, width = self._stretched(*self._cut(frame.height, frame.width))
        a, b, c, d = _matrix(frame)
        return (width, height) if _swaps(a, b, c, d) else (height, width)

    def declared(self, height: int, width: int) -> int:
        """Return the number of pixels of a frame of this coded size as it is shown."""
        height, width = self._stretched(*self._cut(height, width))
        return height * width

    def changes_more_than_turns(self, frame: Any) -> bool:
        """Return True if a frame is cut, stretched or mirrored."""
        a, b, c, d = _matrix(frame)
        return any(self.crop) or self.pixel != 1 or a * d - b * c < 0

    def __call__(self, frame: Any, pixels: np.ndarray) -> np.ndarray:
        """Return the pixels (H, W, C) uint8 of one of PyAV's frames as they are shown."""
        left, _, top, _ = self.crop
        height, width = self._cut(*pixels.shape[:2])
        if (height, width) != pixels.shape[:2]:
            pixels = pixels[top : top + height, left : left + width]
        pixels = _stretch(pixels, *self._stretched(height, width))
        a, b, c, d = _matrix(frame)
        # A pixel at (x, y) is shown at (a x + c y, b x + d y).
        if _swaps(a, b, c, d):
            pixels, across, down = pixels.swapaxes(0, 1), c, b
        else:
            across, down = a, d
        return pixels[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        left, right, top, bottom = self.crop
        fits = left + right < width and top + bottom < height
        return (height - top - bottom, width - left - right) if fits else (height, width)

    def _stretched(self, height: int, width: int) -> tuple[int, int]:
        if self.pixel >= 1:
            return height, round(width * self.pixel)
        return round(height / self.pixel), width


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    if (found := frame.side_data.get("DISPLAYMATRIX")) is None:
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack_from("=5i", bytes(found))
    return a, b, c, d


def _swaps(a: int, b: int, c: int, d: int) -> bool:
    """Return True if rows become columns; any rotation counts as the nearest quarter turn."""
    return abs(b) + abs(c) > abs(a) + abs(d)


def _stretch(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    if pixels.shape[:2] == (height, width):
        return pixels
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    stretched = interpolate(tensor, (height, width), mode="bicubic", antialias=True)
    return stretched[0].permute(1, 2, 0).numpy()


def container_crop(name: str, container: str, number: int) -> Crop:
    """Return the borders that a file's container hides of its video stream ``number``.

    They lie outside an MP4's clean aperture, or are cropped by a Matroska file; FFmpeg's libraries leave that to
    players. container: FFmpeg's name."""
    first = container.split(",")[0]
    if first not in ("mov", "matroska"):
        return 0, 0, 0, 0
    try:
        with open(name, "rb") as file:
            if first == "mov":
                movie = read_movie(file)
                crops = clean_apertures(movie) if b"clap" in movie else []
            else:
                crops = _matroska_crops(file)
    except (OSError, ValueError, LookupError, StopIteration, struct.error):
        return 0, 0, 0, 0
    found = crops[number] if number < len(crops) else None
    return found or (0, 0, 0, 0)


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
    """Yield (identifier, contents) of EBML elements, the last one cut off where the data end."""
    at = 0
    while at < len(data):
        length = 9 - data[at].bit_length()
        identifier, at = int.from_bytes(data[at : at + length], "big"), at + length
        if length > 4 or at >= len(data):
            return
        length = 9 - data[at].bit_length()
        size = int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
        at += length
        if size == (1 << 7 * length) - 1:  # not known: up to the end
            size = len(data) - at
        yield identifier, data[at : at + size]
        at += size
