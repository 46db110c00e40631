"""Animations (GIF, WebP, APNG, AVIF and FLIC): find them, count and time their frames, and read them as clips."""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.data.colours import conversion_of, note_codes
from opendit.data.files import TIME_LIMIT, problem
from opendit.data.medium import MAX_FRAMES, Timeline
from opendit.data.picture_file import PictureFile, on_white, opened_picture, upright, upright_size

# Suffixes of files that may be still pictures or animations.
SUFFIXES = frozenset((".gif", ".webp", ".png", ".apng", ".avif", ".avifs", ".fli", ".flc"))
HEAD = 64  # bytes that :func:`may_be_animation` looks at
_MOST_CHUNKS = 1 << 22  # maximum number of chunks read from a file


def may_be_animation(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` has a format with animations, even if it is a still picture.

    head: the first ``HEAD`` bytes, or the whole file if it is shorter."""
    return _format(head) is not None


def is_animation(path: str | Path) -> bool:
    """Return True if a file is an animation with more than one frame; False also if it can't be read."""
    try:
        if problem(path) is not None:
            return False
        with open(path, "rb") as file:
            return is_animated(file)
    except OSError:
        return False


def is_animated(file: BinaryIO) -> bool:
    """Return True if an open file is an animation with more than one frame; False also if it is damaged."""
    try:
        return count_frames(file, 2) > 1
    except Exception:  # Pillow raises errors of nearly any type
        return False


def _format(head: bytes) -> str | None:
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and b"avis" in head[8 : min(int.from_bytes(head[:4], "big"), HEAD)]:
        return "AVIF"
    return "FLIC" if head[4:6] in (b"\x11\xaf", b"\x12\xaf") and head[12:14] == b"\x08\0" else None


def count_frames(file: BinaryIO, most: int) -> int:
    """Count the frames of a file, up to ``most``; 0 if its format has no animations."""
    at = file.tell()
    try:
        file.seek(0)
        kind = _format(file.read(HEAD))
        if kind in _WALKS:
            file.seek(0)
            return sum(1 for _, _ in zip(_WALKS[kind](file), range(most), strict=False))
        if kind is None:
            return 0
        file.seek(0)
        with Image.open(file, formats=("AVIF", "FLI")) as image:
            return getattr(image, "n_frames", 1)
    finally:
        file.seek(at)


def durations_of(file: BinaryIO) -> list[float] | None:
    """Return the duration of each frame in seconds, from the file's tables. Return None for a format that stores each
    duration with its frame."""
    at = file.tell()
    try:
        file.seek(0)
        kind = _format(file.read(HEAD))
        file.seek(0)
        return list(_WALKS[kind](file)) if kind in _WALKS else None
    finally:
        file.seek(at)


def _gif(file: BinaryIO) -> Iterator[float]:
    """Yield the delay of each image of a GIF89a. The delay, in hundredths of a second, is in the block before the
    image."""
    head = file.read(13)
    _pass_over(file, 3 << (head[10] & 7) + 1 if head[10] & 0x80 else 0)
    delay = 0
    for _ in range(_MOST_CHUNKS):
        kind = file.read(1)
        if kind == b"!":
            label = file.read(1)
            for number, block in enumerate(_blocks(file)):
                if label == b"\xf9" and number == 0 and len(block) >= 3:
                    delay = struct.unpack_from("<H", block, 1)[0]
        elif kind == b",":
            head = file.read(9)
            if len(head) < 9:
                return
            _pass_over(file, (3 << (head[8] & 7) + 1 if head[8] & 0x80 else 0) + 1)
            if not file.read(1):  # an image without data
                return
            file.seek(-1, os.SEEK_CUR)
            yield delay / 100
            delay = 0
            for _ in _blocks(file):
                pass
        elif kind in (b"", b";"):
            return


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while (length := file.read(1)) not in (b"", b"\0"):
        yield file.read(length[0])


def _png(file: BinaryIO) -> Iterator[float]:
    """Yield the delays in an APNG's fcTL chunks. Yield nothing for a PNG without an acTL chunk before the image."""
    file.seek(8)
    left, animated = 0, False
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            return
        length, kind = struct.unpack(">I4s", head)
        if kind == b"acTL":
            left, animated = int.from_bytes(file.read(4), "big"), True
            length -= 4
        elif kind == b"IEND" or kind == b"IDAT" and not animated or animated and not left:
            return
        elif kind == b"fcTL" and length == 26:
            seconds, parts = struct.unpack_from(">HH", file.read(26), 20)
            length, left = 0, left - 1
            yield seconds / (parts or 100)
        _pass_over(file, length + 4)


def _webp(file: BinaryIO) -> Iterator[float]:
    """Yield the durations in a WebP's ANMF chunks, which are in milliseconds."""
    file.seek(12)
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            return
        kind, length = struct.unpack("<4sI", head)
        length += length & 1
        if kind == b"ANMF" and length >= 16:
            frame = file.read(16)
            length -= 16
            yield int.from_bytes(frame[12:15], "little") / 1000
        _pass_over(file, length)


def _pass_over(file: BinaryIO, length: int) -> None:
    file.seek(length, os.SEEK_CUR)


_WALKS = {"GIF": _gif, "PNG": _png, "WEBP": _webp}


_SHORTEST, _USUAL = 0.011, 0.1  # seconds; browsers show a frame for 100 ms if its duration is 10 ms or less


class AnimationReader:
    """Reads an animation, with the interface of the readers in ``opendit.data.video_readers``. It always starts at the
    first frame, because each frame is drawn over the previous ones.

    most_pixels: maximum number of pixels in a frame. The constructor and all methods raise BadSample, naming
    the file and the reason."""

    def __init__(self, path: str, most_pixels: int):
        self._path, self._most_pixels = path, most_pixels
        with self._opened() as (file, image):
            self._first = int(bool(getattr(image, "default_image", False)))  # 1: skip a picture before the animation
            self.length, self.declared = count_frames(file, MAX_FRAMES + 1), image.width * image.height
            if self.length == 0:
                raise ValueError("a still picture, not a clip")
            if self.length > MAX_FRAMES:
                raise ValueError(f"more than {MAX_FRAMES:,} frames")
            self._check_pixels(image)
            self._canvas, self._size = image.size, upright_size(image)

    def _check_pixels(self, image: Image.Image) -> None:
        if image.width * image.height > self._most_pixels:
            raise ValueError(f"frames of {image.width:,} x {image.height:,} pixels, more than {self._most_pixels:,}")

    def size(self) -> tuple[int, int]:
        """Return (height, width) of the frames as they are shown."""
        return self._size

    def timeline(self) -> Timeline:
        """Return the time at which each frame is first shown, from the durations in the file."""
        seconds = np.cumsum(self.durations) - self.durations
        return Timeline(seconds)

    @cached_property
    def durations(self) -> np.ndarray:
        """Duration of each frame in seconds, (frames,) float64. A duration of at most 10 ms counts as 100 ms."""
        with self._opened() as (file, image):
            found = durations_of(file)
            if found is None:
                found = [frame.info.get("duration", 0) / 1000 for frame in self._frames(file, image, self.length)]
            durations = np.array(found[: self.length], np.float64)
            return np.where(durations < _SHORTEST, _USUAL, durations)

    def read(self, indices: Sequence[int]) -> Tensor:
        """Return the frames at ``indices``, which must be ascending, as (T, H, W, 3) uint8."""
        wanted, found = set(indices), {}
        with self._opened() as (file, image):
            conversion = conversion_of(image)
            for number, frame in enumerate(self._frames(file, image, max(wanted) + 1)):
                if number in wanted:
                    # Pillow enlarges the canvas for a GIF frame that exceeds it; players crop the frame.
                    shown = upright(frame.convert("RGBA").crop((0, 0, *self._canvas)))
                    colours = shown.convert("RGB")
                    if conversion is not None:
                        colours = conversion[1](colours.convert(conversion[0]))
                    found[number] = np.asarray(on_white(colours, shown.getchannel("A")))
        return torch.from_numpy(np.stack([found[index] for index in indices]))

    def _frames(self, file: PictureFile, image: Image.Image, count: int) -> Iterator[Image.Image]:
        for number in range(count):
            if time.monotonic() > file.deadline:
                raise TimeoutError(f"not read within {file.time_limit:g} seconds")
            try:
                image.seek(self._first + number)
                self._check_pixels(image)
                image.load()
            except EOFError:
                raise ValueError(f"damaged: frame {count - 1} is needed, {number} frames can be decoded") from None
            yield image

    @contextmanager
    def _opened(self) -> Iterator[tuple[PictureFile, Image.Image]]:
        with opened_picture(self._path, None, TIME_LIMIT) as (file, image):
            note_codes(image, file)
            yield file, image
