"""Read untrusted picture files of any format as 8-bit sRGB, and crop them as ADM and Meta's DiT do."""

import io
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from opendit.data.base import COLOURS, BadSample, to_pixels
from opendit.data.colours import Convert, conversion_of, kind_of_picture, note_codes
from opendit.data.files import TIME_LIMIT, printable, problem

# Maximum pixels in a picture, as in Pillow. A pixel may take 12 bytes, in total 2 GiB.
MAX_PIXELS = 178_956_970
MAX_WHOLE_FILE = 2**28  # maximum bytes of a file that Pillow reads completely before decoding
MAX_SCANS = 500  # maximum scans in a progressive JPEG, because each scan takes time; about ten are usual
LONGEST = 16  # a picture with a larger ratio of sides is cropped before enlarging

ORIENTATION = 274  # EXIF tag; values from 5 on swap width and height
SAMPLE_FORMAT = 339  # TIFF tag; the value 1 means unsigned integers

WHITE = (255, 255, 255)  # colour behind transparent pixels

# Formats that Pillow opens but this module refuses. EPS files are programs. For the rest, Pillow reads only headers.
NO_PICTURES = ("EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF")


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in Image.ID if name not in NO_PICTURES)


@cache
def picture_suffixes() -> frozenset[str]:
    """Return the suffixes of all formats that this module decodes, in lower case with a dot."""
    names = {*_formats(), "MPO"}  # MPO: JPEG files with several pictures, opened as JPEG
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in names)


def start_of_crop(down: int, across: int, place: tuple[float, float] | None) -> tuple[int, int]:
    """Return a crop's first row and column. down, across: pixels by which the crop can move. place: fractions of
    ``down`` and ``across`` in [0, 1); None for the centre."""
    if place is None:
        return down // 2, across // 2
    return int(place[0] * (down + 1)), int(place[1] * (across + 1))


def center_crop(image: Image.Image, size: int, place: tuple[float, float] | None = None) -> Image.Image:
    """Return ADM's crop of size x size pixels, by default at the centre.

    The picture is halved by a box filter while both sides stay at least ``size``. Then it is resized bicubically until
    the shorter side is ``size``, and cropped. The pixels equal ``center_crop_arr`` in guided-diffusion (Dhariwal and
    Nichol). Published FID numbers are based on this crop.

    A picture with a ratio of sides above ``LONGEST`` is cropped before enlarging, to save memory. Its pixels differ
    from ADM's by at most one level of 255. place: see :func:`start_of_crop`."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    top, left = start_of_crop(height - size, width - size, place)
    if scale > 1 and max(image.size) > LONGEST * min(image.size):
        across, down = image.width / width, image.height / height  # picture pixels per crop pixel
        return _enlarge(image, size, (left * across, top * down, (left + size) * across, (top + size) * down))
    image = image.resize((width, height), resample=Image.Resampling.BICUBIC)
    return image.crop((left, top, left + size, top + size))


def fill_crop(image: Image.Image, height: int, width: int, place: tuple[float, float] | None = None) -> Image.Image:
    """Return the largest crop with the aspect ratio width : height, resized to width x height pixels. A square is
    cropped by :func:`center_crop`."""
    if height == width:
        return center_crop(image, height, place)
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    across, down = width / scale, height / scale  # the crop's size in the picture's pixels
    at = (0.5, 0.5) if place is None else place
    left, top = (image.width - across) * at[1], (image.height - down) * at[0]
    box = (max(0.0, left), max(0.0, top), min(image.width, left + across), min(image.height, top + down))
    return image.resize((width, height), resample=Image.Resampling.BICUBIC, box=box)


def to_tensor(image: Image.Image, flip: bool, as_bytes: bool = False) -> Tensor:
    """Convert an 8-bit picture, grey or RGB, to (C, H, W): float32 in [-1, 1], or uint8 with ``as_bytes``."""
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    pixels = pixels.flip(-1) if flip else pixels
    return pixels if as_bytes else to_pixels(pixels)


def picture_size(path: str, content: bytes | None = None) -> tuple[int, int]:
    """Return (height, width) of the upright picture, read from the file's header. Raises BadSample."""
    with opened_picture(path, content) as (_, image):
        return upright_size(image)


# Suffixes of files that may be still pictures or animations, and Pillow's names of these formats.
ANIMATION_SUFFIXES = frozenset((".gif", ".webp", ".png", ".apng", ".avif", ".avifs", ".fli", ".flc"))
_ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF", "FLI")
# First bytes of formats that hold animations. A still AVIF begins otherwise.
_SIGNATURES = re.compile(
    rb"GIF8[79]a|\x89PNG\r\n\x1a\n|RIFF....WEBP|....ftyp(?:....)*?avis|....[\x11\x12]\xaf.{6}\x08\0", re.DOTALL
)


def has_animation_format(path: str) -> bool:
    """Return True if a file's format can hold animations, even if the file is a still picture. Raises OSError."""
    with open(path, "rb") as file:
        return _SIGNATURES.match(file.read(64)) is not None


def is_animation(path: str | Path) -> bool:
    """Return True if a file is an animation with several frames, False also if it can't be read."""
    with suppress(BadSample), opened_picture(str(path)) as (_, image):
        return image.format in _ANIMATIONS and getattr(image, "is_animated", False)
    return False


def is_animated(file: BinaryIO) -> bool:
    """Return True if an open file is an animation with several frames, False also if it is damaged."""
    try:
        with Image.open(file, formats=_ANIMATIONS) as image:
            return getattr(image, "is_animated", False)
    except Exception:  # Pillow raises errors of nearly any type
        return False


@contextmanager
def opened_picture(
    path: str, content: bytes | None = None, time_limit: float = TIME_LIMIT
) -> Iterator[tuple["PictureFile", Image.Image]]:
    """Yield a picture's file and its undecoded Pillow image. Any error in the block becomes a BadSample."""
    if content is None and (why := problem(path)) is not None:
        raise BadSample(path, why)
    try:
        with PictureFile(path, time_limit, content) as file, open_picture_file(file) as image:
            yield file, image
    except BadSample:
        raise
    except Exception as error:  # Pillow's decoders raise errors of nearly any type
        raise BadSample(path, reason(error)) from error


def _enlarge(image: Image.Image, size: int, box: tuple[float, float, float, float]) -> Image.Image:
    """Enlarge a box of a picture to size x size pixels. box: (left, top, right, bottom) in the picture's pixels."""
    margin = 3  # bicubic interpolation reads two pixels beyond the box
    left, top = max(0, math.floor(box[0]) - margin), max(0, math.floor(box[1]) - margin)
    right, bottom = (math.ceil(end) + margin for end in box[2:])
    image = image.crop((left, top, min(right, image.width), min(bottom, image.height)))
    box = (box[0] - left, box[1] - top, box[2] - left, box[3] - top)
    return image.resize((size, size), resample=Image.Resampling.BICUBIC, box=box)


class PictureFile(io.BufferedReader):
    """An open file that limits the time and size of reads, because decoders request what a damaged header claims."""

    def __init__(self, path: str, time_limit: float, content: bytes | None = None):
        super().__init__(io.FileIO(path) if content is None else io.BytesIO(content))
        self.time_limit, self.deadline = time_limit, time.monotonic() + time_limit
        self.bytes = os.fstat(self.fileno()).st_size if content is None else len(content)

    def read(self, size: int | None = -1) -> bytes:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"not read within {self.time_limit:g} seconds")
        if size is None or size < 0:
            if self.bytes > MAX_WHOLE_FILE:
                raise ValueError(
                    f"a file of {self.bytes:,} bytes, more than {MAX_WHOLE_FILE:,} in a format of its kind"
                )
            return super().read()
        return super().read(min(size, self.bytes))

    def readline(self, size: int | None = -1) -> bytes:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"not read within {self.time_limit:g} seconds")
        return super().readline(MAX_WHOLE_FILE if size is None or size < 0 else size)


def read_picture(path: str, time_limit: float = TIME_LIMIT, content: bytes | None = None) -> Image.Image:
    """Read a picture file as upright 8-bit sRGB, with transparent pixels blended onto white.

    Colours are converted as in ``opendit.data.colours``. Only the first frame of an animation is read.

    Grey pictures with more than 8 bits are scaled to 0..255. Values of 16 bits are divided by 257, even if stored as
    32-bit integers. Floating-point values may range from 0 to 1, 255 or 65,535; the smallest range that fits is used.
    Other values are scaled from [min(0, minimum), maximum].

    content: bytes of a picture inside another file; ``path`` is then only its name.

    Raises BadSample if the file is no regular file or no picture, is too large, or takes more than ``time_limit``
    seconds."""
    with opened_picture(path, content, time_limit) as (file, image):
        note_codes(image, file)
        image.load()
        # Pillow reads a TIFF's 32-bit integers as signed, but they are unsigned unless a tag says otherwise.
        tags = getattr(image, "tag_v2", {SAMPLE_FORMAT: (2,)})
        unsigned = image.mode == "I" and tags.get(SAMPLE_FORMAT, (1,)) in (1, (1,))
        conversion = conversion_of(image)  # before upright() makes a copy without the file's format
        kind = kind_of_picture(image)
        picture = _to_rgb(upright(image), unsigned, conversion)
        picture.info[COLOURS] = kind
        return picture


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an opened picture like :func:`read_picture`, but without rotation. May raise any exception."""
    image.load()
    return _to_rgb(image, False, conversion_of(image))


def open_picture_file(file: PictureFile) -> Image.Image:
    """Return a file's undecoded image. Raises Pillow's errors, and ValueError for a picture of refused size."""
    image = Image.open(file, formats=_formats())
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise ValueError(_too_large(f"{image.width:,} x {image.height:,} pixels"))
    if pixels == 0:
        raise ValueError("a picture without pixels")
    if image.info.get("progressive") and pixels > 2**20 and _scans(file) > MAX_SCANS:
        raise ValueError(f"a JPEG of {_scans(file):,} scans, more than {MAX_SCANS}: it would take minutes to decode")
    return image


def _scans(file: PictureFile) -> int:
    """Count the scans in a JPEG file. The file's position is restored."""
    at, count, last = file.tell(), 0, b""
    file.seek(0)
    while part := file.read(2**20):
        count += (last + part).count(b"\xff\xda")
        last = part[-1:] if part[-1:] == b"\xff" else b""
    file.seek(at)
    return count


def _too_large(size: str) -> str:
    return f"{size}, more than the {MAX_PIXELS:,} of the largest picture that is read; scale it down or remove it"


def reason(error: Exception) -> str:
    """Return a short, one-line reason why a picture can't be read."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "not a picture in any known format"
    if isinstance(error, Image.DecompressionBombError):
        return _too_large("a picture of too many pixels")
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(text)[:200] or type(error).__name__


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of a picture after :func:`upright`."""
    turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if turned else (image.height, image.width)


def upright(image: Image.Image) -> Image.Image:
    """Rotate and mirror a picture by its EXIF orientation. A broken EXIF block is ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _to_rgb(image: Image.Image, unsigned: bool, conversion: tuple[str, Convert] | None) -> Image.Image:
    key = image.info.get("transparency")
    if image.mode.startswith("I") or image.mode == "F":  # convert() would turn values above 255 white
        numbers = np.asarray(image).view(np.uint32) if unsigned else np.asarray(image)
        grey = _to_bytes(numbers, image.mode, conversion)
        if isinstance(key, int):
            grey[numbers == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "RGB" and key is not None:
        # Pillow keeps only the upper bytes of 16-bit values, so convert the transparent colour accordingly.
        deep = isinstance(key, tuple) and any(value > 255 for value in key)
        image.info["transparency"] = tuple(value >> 8 for value in key) if deep else key
    if key is None and image.mode not in ("LA", "La", "PA", "RGBA", "RGBa"):
        return _converted(image, conversion)
    image = image.convert("RGBA")
    alpha = image.getchannel("A")
    # Like browsers, blend sRGB values without linearising them.
    return on_white(_converted(image.convert("RGB"), conversion), alpha)


def _converted(image: Image.Image, conversion: tuple[str, Convert] | None) -> Image.Image:
    if conversion is None:
        return image.convert("RGB")
    mode, convert = conversion
    return convert(image if image.mode == mode else image.convert(mode))


def on_white(picture: Image.Image, alpha: Image.Image) -> Image.Image:
    """Return an RGB picture blended onto white with ``alpha``, a picture of mode "L"."""
    if alpha.getextrema() == (255, 255):
        return picture
    blended = Image.new("RGB", picture.size, WHITE)
    blended.paste(picture, mask=alpha)
    return blended


def _to_bytes(numbers: np.ndarray, mode: str, conversion: tuple[str, Convert] | None) -> np.ndarray:
    """Convert a grey picture (H, W) with more than 8 bits to uint8, as in :func:`read_picture`."""
    levels = np.arange(256)
    if conversion is not None:  # convert 256 grey levels, and interpolate between them
        ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
        levels = np.asarray(_converted(ramp, conversion))[0, :, 1].astype(float)
    lowest, highest = numbers.min().item(), numbers.max().item()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError("a picture with values that are not finite")
    usual = (1, 255, 65535) if mode == "F" else (65535,)
    white = next((white for white in usual if 0 <= lowest and highest <= white), None)
    lowest, highest = (0, white) if white else (min(0, lowest), max(highest, lowest + 1))
    out = np.empty(numbers.shape, np.uint8)
    for row in range(0, len(numbers), 256):  # 256 rows at a time, because a large picture would take gigabytes
        part = numbers[row : row + 256]
        if white == 65535:
            scaled = part.astype(np.float32) / 257
        else:
            scaled = (part.astype(np.float64) - lowest) * (255 / (highest - lowest))
        out[row : row + 256] = (scaled if conversion is None else np.interp(scaled, np.arange(256), levels)).round()
    return out
