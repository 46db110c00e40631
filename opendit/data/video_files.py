"""Decode clips with torchcodec or PyAV to equal pixels, and write MP4 files.

A file's frames are the frames that FFmpeg decodes from the start. A reader that seeks may return other frames, for
example if the file has hidden frames. So a file's packets are examined first. If seeking may be unsafe, PyAV decodes
from the start (``opendit.data.clips``)."""

import os
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from opendit.common.safe_files import path_of, replacing
from opendit.data.base import ROUNDING
from opendit.data.colours import (
    MATRICES,
    UNSPECIFIED,
    Conversion,
    conversion_of,
    is_high_definition,
    kind_of_colours,
    matrix_of,
    note_codes,
    of_clip,
    unknown_matrix,
)
from opendit.data.container_header import MAX_FRAMES, Crop, begins_anew, container_crop
from opendit.data.files import TIME_LIMIT
from opendit.data.picture_file import PictureFile, on_white, opened_picture, upright, upright_size


class Timeline(NamedTuple):
    """Display times of a clip's frames. seconds: (frames,) float64, ascending."""

    seconds: np.ndarray

    @property
    def end(self) -> float:
        """End of the last frame, if it lasts as long as the median frame. A single frame lasts 0 s."""
        if len(self.seconds) < 2:
            return float(self.seconds[-1])
        return float(self.seconds[-1] + np.median(np.diff(self.seconds)))

    @property
    def rate(self) -> float:
        """Frames per second; 0 for a single frame. Equally spaced frames have the mean rate. Otherwise, the median
        distance between frames gives the rate."""
        if len(self.seconds) < 2:
            return 0.0
        gaps = np.diff(self.seconds)
        mean = (self.seconds[-1] - self.seconds[0]) / len(gaps)
        even = np.abs(gaps - mean).max() <= ROUNDING
        return round(float(1 / (mean if even else np.median(gaps))), 6)

    def count(self, fps: float) -> int:
        """Return the number of frames in the clip at ``fps`` frames per second."""
        return max(1, int(np.ceil((self.end - self.seconds[0] - ROUNDING) * fps)))

    def shown_at(self, times: np.ndarray) -> list[int]:
        """Return the index of the frame that a player shows at each time, within ``ROUNDING``."""
        found = np.searchsorted(self.seconds, times + ROUNDING, side="right") - 1
        return found.clip(0, len(self.seconds) - 1).tolist()


_MOST_STRETCH = 100  # largest plausible ratio of a pixel's sides


class Geometry:
    """Transform from a stream's decoded frames to the frames that players show.

    Cut off ``crop`` (from :func:`container_crop`). Then stretch pixels that are not square along their longer side.
    Then rotate and mirror by the display matrix. stream: PyAV stream."""

    def __init__(self, stream: Any, crop: Crop = (0, 0, 0, 0)):
        self.crop = crop
        self.pixel = Fraction(stream.sample_aspect_ratio or 1)
        if not Fraction(1, _MOST_STRETCH) <= self.pixel <= _MOST_STRETCH:
            self.pixel = Fraction(1)

    def size(self, frame: Any) -> tuple[int, int]:
        height, width = self._stretched(*self._cut(frame.height, frame.width))
        a, b, c, d = _matrix(frame)
        return (width, height) if _swaps(a, b, c, d) else (height, width)

    def declared(self, height: int, width: int) -> int:
        """Return the number of shown pixels for a frame of this coded size."""
        height, width = self._stretched(*self._cut(height, width))
        return height * width

    def changes_more_than_turns(self, frame: Any) -> bool:
        a, b, c, d = _matrix(frame)
        return any(self.crop) or self.pixel != 1 or a * d - b * c < 0

    def __call__(self, frame: Any, pixels: np.ndarray) -> np.ndarray:
        """Return the displayed pixels of a PyAV frame. pixels: decoded pixels, (H, W, C) uint8."""
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
    """Return True if rows become columns. A rotation is rounded to the nearest quarter turn."""
    return abs(b) + abs(c) > abs(a) + abs(d)


def _stretch(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    if pixels.shape[:2] == (height, width):
        return pixels
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    stretched = interpolate(tensor, (height, width), mode="bicubic", antialias=True)
    return stretched[0].permute(1, 2, 0).numpy()


READERS = ("torchcodec", "pyav")  # order of ``auto``, fastest first
CHOICES = ("auto", "torchcodec", "decord", "pyav")  # decord, from an earlier version, now selects PyAV
# Containers that hold a clip themselves, unlike playlists and devices.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif,mpegvideo,h264,hevc,m4v,ivf,obu,av1,rm,mxf,nut,dv,wtv,apng"
_OF_LIBVPX = {"vp8": "libvpx", "vp9": "libvpx-vp9", "libvpx": "libvpx", "libvpx-vp9": "libvpx-vp9"}
_BT709, _FULL_RANGE = 1, 2  # H.273's number of a matrix; FFmpeg's number of a colour range
_SEEKABLE = ("mov", "matroska", "avi")  # containers with a reliable frame index
# Codecs in which every packet may be a key frame.
_KEYS_ONLY = "mjpeg prores dnxhd ffv1 png rawvideo dvvideo huffyuv utvideo jpeg2000 v210".split()
_SMALLEST = 16  # minimum bytes of a new frame in MPEG-4; shorter packets repeat the previous frame


@dataclass(frozen=True)
class Contents:
    """Facts about a file's frames, found without decoding."""

    container: str
    codec: str
    time_base: Fraction
    length: int  # number of packets with visible frames
    # True if FFmpeg decodes exactly ``length`` frames; False if the number is unknown before decoding.
    counted: bool
    # Display times of the frames, ascending, in units of time_base; None if a frame lacks a time or two are equal.
    times: np.ndarray | None
    keys: list[tuple[int, int]]  # (display time, decoding time) of frames where decoding can begin
    rate: float  # the container's frames per second; 0 if unknown
    crop: Crop  # borders to hide
    # True if only :class:`ToRgb` gives the colours of players: for HDR, a wide gamut, transparency, or high definition
    # without a named matrix.
    converted: bool = False

    @property
    def seekable(self) -> bool:
        return self.counted and self.times is not None and self.container.split(",")[0] in _SEEKABLE

    def timeline(self) -> Timeline:
        if self.times is None:
            return Timeline(np.arange(self.length) / (self.rate or 1.0))
        return Timeline(self.times * float(self.time_base))


class NoVideo(ValueError):
    """Raised for a file with only sound or subtitles."""


class UnknownColours(ValueError):
    """Raised for colours that can't be converted."""


class Reader(Protocol):
    """An open clip."""

    length: int  # number of frames
    declared: int  # pixels per frame, from the file's header

    def size(self) -> tuple[int, int]: ...

    def timeline(self) -> Timeline: ...

    def read(self, indices: Sequence[int]) -> Tensor:
        """Return the frames at ascending ``indices`` as (T, H, W, 3) uint8. May raise any exception."""
        ...


def open_container(name: str) -> Any:
    """Open a file with PyAV, unless its container may refer to other files. name: from ``name_for_ffmpeg``."""
    import av

    return av.open(name, options={"format_whitelist": _CONTAINERS, "protocol_whitelist": "file,fd,pipe"})


def video_stream(file: Any) -> Any:
    """Return the stream that players show: FFmpeg's best stream that is no cover picture. Raises NoVideo."""
    from av.stream import Disposition

    streams = file.streams.video
    if not streams:
        raise NoVideo("no video stream")
    best = file.streams.best("video") or streams[0]
    if Disposition.attached_pic in best.disposition:
        return next((each for each in streams if Disposition.attached_pic not in each.disposition), best)
    return best


class Packet(NamedTuple):
    """A packet's times and flags."""

    shown: int | None  # display time
    decoded: int | None  # decoding time
    key: bool
    hidden: bool  # True if an edit list hides the frame
    holds: bool  # True if complete and shown; in a key frame, decoding must also be able to begin


def look_up(name: str, *, whole: bool = True) -> Contents:
    """Return the :class:`Contents` of a file. whole: False if only the file's tables are present. Raises NoVideo,
    UnknownColours, or libav's errors."""
    with open_container(name) as file:
        stream = video_stream(file)
        context = stream.codec_context
        container, codec = file.format.name, context.name
        if unknown := unknown_matrix(int(context.colorspace)):
            raise UnknownColours(f"its colours are coded as {unknown}, which can't be converted; make it HDR10 or SDR")
        packets = _packets(file, stream, whole)
        shown = [packet.shown for packet in packets if not packet.hidden]
        times = rising_times(shown)
        # AVI stores no times. FFmpeg's guesses are wrong if frames are not stored in display order.
        guessed = container == "avi" and (context.has_b_frames or codec not in ("mpeg4", "mjpeg"))
        halves = context.field_order > 1 and container.split(",")[0] not in _SEEKABLE  # a packet may be half a frame
        counted = not guessed and not halves and times is not None and _can_be_counted(packets, times, codec)
        keys = [
            (p.shown, p.shown if p.decoded is None else p.decoded) for p in packets if p.key and p.shown is not None
        ]
        return Contents(
            container,
            codec,
            Fraction(stream.time_base or 1),
            len(shown),
            counted,
            None if guessed else times,
            sorted(keys),
            float(stream.average_rate or 0),
            crop_of(name, file, stream),
            bool(colours_of(stream)) or _shows_alpha(stream) or _needs_matrix(context),
        )


def colours_of(stream: Any) -> str:
    context = stream.codec_context
    return kind_of_colours(int(context.color_primaries), int(context.color_trc))


def _needs_matrix(pictures: Any) -> bool:
    """Return True for YUV in high definition without a named matrix. pictures: codec context or frame."""
    if int(pictures.colorspace) != UNSPECIFIED or not is_high_definition(pictures.width, pictures.height):
        return False
    return pictures.format is not None and not pictures.format.is_rgb


def _shows_alpha(stream: Any) -> bool:
    pixels = stream.codec_context.format
    return _alpha_aside(stream) or (pixels is not None and any(part.is_alpha for part in pixels.components))


def _alpha_aside(stream: Any) -> bool:
    """Return True if a VP8 or VP9 stream has alpha in side data, which FFmpeg's native decoders ignore."""
    metadata = {name.lower(): value for name, value in stream.metadata.items()}
    return metadata.get("alpha_mode") == "1" and stream.codec_context.name in _OF_LIBVPX


def decoded(file: Any, stream: Any) -> Iterator[Any]:
    """Decode a PyAV stream's frames, with alpha, from the current position. Raises libav's errors."""
    if not _alpha_aside(stream):
        yield from file.decode(stream)
        return
    import av

    decoder: Any = av.CodecContext.create(_OF_LIBVPX[stream.codec_context.name], "r")
    decoder.thread_count = 1
    for packet in file.demux(stream):
        yield from decoder.decode(packet if packet.size else None)


def _packets(file: Any, stream: Any, whole: bool) -> list[Packet]:
    """Return a stream's packets, without empty ones. whole: if False, only the first packet is complete, and ``holds``
    is False for packets with unknown contents."""
    codec, settings = stream.codec_context.name, stream.codec_context.extradata or b""
    length = (settings[4] & 3) + 1 if settings[:1] == b"\1" and len(settings) > 6 else 0
    found: list[Packet] = []
    only_keys = True
    for packet in file.demux(stream):
        if not packet.size:
            continue
        holds = not packet.is_corrupt
        only_keys &= packet.is_keyframe
        if codec == "h264" and only_keys:
            holds &= (whole or not found) and begins_anew(bytes(packet), length)
        elif codec in ("vp8", "vp9"):
            # Without contents, only MP4's packets are known to be shown, because MP4 requires this.
            holds &= not _is_unseen(codec, packet) if whole else file.format.name.startswith("mov")
        elif codec == "mpeg4":
            holds &= packet.size >= _SMALLEST
        found.append(Packet(packet.pts, packet.dts, packet.is_keyframe, packet.is_discard, holds))
    return found


def _can_be_counted(packets: list[Packet], times: np.ndarray, codec: str) -> bool:
    """Return True if decoding from the start gives one frame per packet that is not hidden."""
    first = packets[0]
    if not first.key or not all(packet.holds for packet in packets):
        return False
    if len(packets) > 1 and all(packet.key for packet in packets) and codec not in _KEYS_ONLY:
        return False  # the file does not list its key frames
    # Frames that are shown before the first key frame refer to missing frames.
    if first.shown != times[0] and not first.hidden:
        return False
    # With several edits, a decoder restarts inside the file and loses frames that refer to hidden frames.
    hidden = [packet.shown for packet in packets if packet.hidden]
    stored = [packet.decoded for packet in packets if packet.decoded is not None]
    return all(time is not None and not times[0] <= time <= times[-1] for time in hidden) and stored == sorted(stored)


def crop_of(name: str, file: Any, stream: Any) -> Crop:
    return container_crop(name, file.format.name, [each.index for each in file.streams.video].index(stream.index))


def rising_times(times: list[int | None]) -> np.ndarray | None:
    """Return the sorted times; None if there are no times, a time is unknown, or two times are equal."""
    if not times or None in times:
        return None
    ordered = np.sort(np.array(times, dtype=np.int64))
    return ordered if bool((np.diff(ordered) > 0).all()) else None


def _is_unseen(codec: str, packet: Any) -> bool:
    """Return True if a VP8 or VP9 packet has only a reference frame that is never shown."""
    data = memoryview(packet)
    if codec == "vp8":
        return not data[0] >> 4 & 1
    header = f"{data[0]:08b}{data[1] if len(data) > 1 else 0:08b}"
    at = 5 if header[2:4] == "11" else 4  # the bit after the profile
    holds_several = data[-1] & 0xE0 == 0xC0
    return not holds_several and header[at] == "0" and header[at + 2] == "0"


class ToRgb:
    """Converter from PyAV frames to RGB, with torchcodec's pixels.

    HDR and wide gamuts are converted as in ``opendit.data.colours``. Transparent frames are blended onto white."""

    def __init__(self):
        from av.video.reformatter import VideoReformatter

        self._of: tuple[Any, ...] | None = None
        self._graph: Any = None
        self._reformatter = VideoReformatter()  # reused, because making its tables takes 0.2 ms

    def __call__(self, frame: Any) -> np.ndarray:
        """Return (H, W, 3) uint8 pixels, not yet cropped, stretched or rotated."""
        deep = max(part.bits for part in frame.format.components) > 8
        alpha = any(part.is_alpha for part in frame.format.components)
        conversion = of_clip(int(frame.color_primaries), int(frame.color_trc))
        if conversion is not None:
            shown, mask = self._converted(frame, conversion, alpha)
        else:
            if _needs_matrix(frame):
                frame.colorspace = _BT709
            wanted = "rgba" if alpha else "rgb24"
            # PyAV's conversion of more than 8 bits differs from torchcodec's.
            pixels = self._scaled(frame, wanted) if deep else self._reformatter.reformat(frame, format=wanted)
            pixels = pixels.to_ndarray()
            shown, mask = pixels[..., :3], pixels[..., 3] if alpha else None
        if mask is None:
            return shown
        opaque = Image.fromarray(np.ascontiguousarray(shown))
        return np.asarray(on_white(opaque, Image.fromarray(np.ascontiguousarray(mask))))

    def _converted(self, frame: Any, conversion: Conversion, alpha: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the converted pixels (H, W, 3) uint8, and alpha (H, W) uint8 or None."""
        codes = int(frame.color_primaries), int(frame.color_trc), int(frame.colorspace)
        matrix, name = matrix_of(*codes, frame.width, frame.height), frame.format.name
        parts = frame.format.components
        if frame.format.is_rgb or matrix not in MATRICES or len({part.plane for part in parts}) < len(parts):
            pixels = self._scaled(frame, "rgba64le" if alpha else "rgb48le").to_ndarray()
            return conversion(pixels[..., :3]), (pixels[..., 3] >> 8).astype(np.uint8) if alpha else None
        # FFmpeg's scaler would change the luma of 4:2:0 by up to 1 %, so convert the planes here.
        bits = parts[0].bits
        kind = np.dtype(np.uint8 if bits == 8 else ">u2" if name.endswith("be") else "<u2")
        planes = [_numbers(plane, kind, frame.height, frame.width) for plane in frame.planes]
        mask = (planes.pop() >> (bits - 8)).astype(np.uint8) if alpha else None
        if len(planes) == 1:
            planes += [np.full_like(planes[0], 1 << (bits - 1))] * 2
        full = int(frame.color_range) == _FULL_RANGE or name.startswith("yuvj")
        return conversion.from_yuv(planes, bits, full, matrix), mask

    def _scaled(self, frame: Any, pixels: str) -> Any:
        from av.filter import Graph

        of = (frame.width, frame.height, frame.format.name, pixels)
        if self._of != of:
            graph = Graph()
            source = graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1)
            )
            parts = [graph.add("scale", "flags=bicubic"), graph.add("format", pixels), graph.add("buffersink")]
            for first, second in zip([source, *parts], parts, strict=False):
                first.link_to(second)
            graph.configure()
            self._of, self._graph = of, graph
        self._graph.push(frame)
        return self._graph.pull()


def _numbers(plane: Any, kind: np.dtype, height: int, width: int) -> np.ndarray:
    """Return a PyAV frame's plane as (height, width). Values of a subsampled plane are repeated."""
    numbers = np.frombuffer(plane, kind).reshape(plane.height, -1)[:, : plane.width]
    down, across = -(-height // plane.height), -(-width // plane.width)
    return numbers.repeat(down, 0).repeat(across, 1)[:height, :width]


class TorchCodecReader:
    """Reader that uses torchcodec, for frames that need no stretching or mirroring."""

    def __init__(self, name: str, contents: Contents):
        decoders = import_torchcodec()
        self._contents = contents
        self._decoder = decoders.VideoDecoder(name, num_ffmpeg_threads=1, dimension_order="NHWC")
        self.length, metadata = contents.length, self._decoder.metadata
        self.declared: int = (metadata.width or 0) * (metadata.height or 0)
        if len(self._decoder) != self.length:
            raise ValueError(f"{len(self._decoder)} frames, {self.length} packets")
        with open_container(name) as file:
            stream = video_stream(file)
            frame = next(file.decode(stream))
            # Leave frames that need more than a rotation to another reader.
            shown = Geometry(stream, contents.crop)
            if shown.changes_more_than_turns(frame) or shown.size(frame) != self.size():
                raise ValueError("frames that are shown otherwise")

    def size(self) -> tuple[int, int]:
        height, width = self._decoder[0].shape[:2]
        return height, width

    def timeline(self) -> Timeline:
        return self._contents.timeline()

    def read(self, indices: Sequence[int]) -> Tensor:
        times = self._contents.times
        if times is None:
            raise ValueError("no times")
        batch = self._decoder.get_frames_at(list(indices))
        # The returned times show if torchcodec has returned the requested frames.
        wanted = torch.from_numpy(times[list(indices)] * float(self._contents.time_base))
        if not torch.allclose(batch.pts_seconds.double(), wanted, rtol=0, atol=1e-4):
            raise ValueError("other frames than asked for")
        return batch.data


class PyAVReader:
    """Reader that uses PyAV. It decodes from the last key frame before the first requested frame."""

    def __init__(self, name: str, contents: Contents):
        self._file, self._contents = open_container(name), contents
        self._stream = video_stream(self._file)
        context = self._stream.codec_context
        context.thread_count = 1
        self.length = contents.length
        self._coded = context.height, context.width
        self.declared = Geometry(self._stream, contents.crop).declared(*self._coded)

    def size(self) -> tuple[int, int]:
        return Geometry(self._stream, self._contents.crop).size(next(decoded(self._file, self._stream)))

    def timeline(self) -> Timeline:
        return self._contents.timeline()

    def read(self, indices: Sequence[int]) -> Tensor:
        if self._contents.times is None or not self._contents.keys:
            raise ValueError("no times")
        wanted = self._contents.times[list(indices)].tolist()
        start = max((key for key in self._contents.keys if key[0] <= wanted[0]), default=self._contents.keys[0])
        self._file.seek(start[1], stream=self._stream)
        geometry, to_rgb = Geometry(self._stream, self._contents.crop), ToRgb()
        found, left = {}, set(wanted)
        for frame in decoded(self._file, self._stream):
            if frame.pts in left:
                if (frame.height, frame.width) != self._coded:
                    raise ValueError("a frame of another size")
                found[frame.pts] = geometry(frame, to_rgb(frame))
                left.discard(frame.pts)
            if not left:
                return torch.from_numpy(np.stack([found[time] for time in wanted]))
        raise ValueError("frames are missing")


@cache
def import_torchcodec() -> Any:
    import torchcodec.decoders  # pyright: ignore[reportMissingImports]

    return torchcodec.decoders


OPENERS: dict[str, Any] = {"torchcodec": TorchCodecReader, "pyav": PyAVReader}


@cache
def problem_of(reader: str) -> str:
    """Return why a reader can't be used here; "" if the reader decodes a small test clip like PyAV."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 72, 40, 3), dtype=np.uint8)
    try:
        {"torchcodec": import_torchcodec, "pyav": lambda: None}[reader]()
    except ImportError:
        return "not installed"
    except Exception:  # without FFmpeg's libraries, torchcodec raises a RuntimeError
        return "its libraries can't be loaded (torchcodec needs FFmpeg's: apt-get install ffmpeg)"
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/clip.mp4"
            write_mp4(path, frames, 24)
            contents = look_up(path)
            expected = PyAVReader(path, contents).read([1, 3])
            if torch.equal(OPENERS[reader](path, contents).read([1, 3]), expected):
                return ""
            return "other pixels than PyAV's"
    except Exception as error:
        return f"fails on a small clip ({str(error).splitlines()[0][:80] if str(error) else type(error).__name__})"


@cache
def choose_reader(asked: str = "auto") -> tuple[str, str]:
    """Return (reader for ``--video_reader asked`` on this machine, reason).

    Raises ValueError, naming the flag, if the reader doesn't work here."""
    if asked not in CHOICES:
        raise ValueError(f"--video_reader {asked}: no such reader; give one of {', '.join(CHOICES)}")
    if asked == "decord":
        return "pyav", "decord is no longer used, and PyAV gives the same pixels"
    if asked != "auto":
        if problem := problem_of(asked):
            raise ValueError(f"--video_reader {asked}: {problem}; install it, or give auto")
        return asked, "asked for"
    passed_over = []
    for reader in READERS:
        if not (problem := problem_of(reader)):
            return reader, "; ".join(passed_over) or "the fastest"
        passed_over.append(f"{reader}: {problem}")
    raise ValueError(f"--video_reader auto: none works here ({'; '.join(passed_over)}); install av")


_SHORTEST, _USUAL = 0.011, 0.1  # seconds; browsers show a frame for 100 ms if its duration is 10 ms or less


class AnimationReader:
    """Reader of an animation. It starts at the first frame, because each frame is drawn over the previous ones. All
    methods raise BadSample, naming the file and the reason."""

    def __init__(self, path: str, most_pixels: int):
        self._path, self._most_pixels = path, most_pixels
        with self._opened() as (file, image):
            self._first = int(bool(getattr(image, "default_image", False)))  # 1 skips a picture before the animation
            self.length, self.declared = getattr(image, "n_frames", 1) - self._first, image.width * image.height
            if self.length == 1 and image.format in ("PNG", "WEBP"):
                raise ValueError("a still picture, not a clip")
            if self.length > MAX_FRAMES:
                raise ValueError(f"more than {MAX_FRAMES:,} frames")
            self._check_pixels(image)
            self._canvas, self._size = image.size, upright_size(image)

    def _check_pixels(self, image: Image.Image) -> None:
        if image.width * image.height > self._most_pixels:
            raise ValueError(f"frames of {image.width:,} x {image.height:,} pixels, more than {self._most_pixels:,}")

    def size(self) -> tuple[int, int]:
        return self._size

    def timeline(self) -> Timeline:
        return Timeline(np.cumsum(self.durations) - self.durations)

    @cached_property
    def durations(self) -> np.ndarray:
        """Each frame's seconds, (frames,) float64. A duration of at most 10 ms counts as 100 ms."""
        with self._opened() as (file, image):
            found = [frame.info.get("duration", 0) / 1000 for frame in self._frames(file, image, self.length)]
            durations = np.array(found, np.float64)
            return np.where(durations < _SHORTEST, _USUAL, durations)

    def read(self, indices: Sequence[int]) -> Tensor:
        wanted, found = set(indices), {}
        with self._opened() as (file, image):
            conversion = conversion_of(image)
            for number, frame in enumerate(self._frames(file, image, max(wanted) + 1)):
                if number in wanted:
                    # Pillow enlarges the canvas for a larger GIF frame, but players crop the frame.
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


CRF = 18  # x264's quality setting; 18 is visually lossless
_BT601, _LIMITED_RANGE = 6, 1  # FFmpeg's AVCOL_SPC_SMPTE170M and AVCOL_RANGE_MPEG


def write_mp4(
    path: str | Path, frames: np.ndarray, fps: float | Fraction, comment: str | None = None, root: Path | None = None
) -> None:
    """Encode RGB ``frames``, (T, H, W, 3) uint8, as H.264, and replace ``path`` when the file is complete.

    If a side is odd, the last row or column is repeated, because 4:2:0 colours need even sides. Equal frames give equal
    bytes. comment: the file's ``comment`` tag. root: follow no link below this folder. Raises OSError, naming ``path``,
    and ValueError if ``frames`` or ``fps`` can't be a clip."""
    import av  # here, because importing av is slow

    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        raise ValueError(f"a clip is a uint8 array, not {getattr(frames, 'dtype', type(frames).__name__)}")
    if frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"a clip has the shape (frames, height, width, 3), not {frames.shape}")
    rate = Fraction(fps).limit_denominator(1001)  # recovers 30000/1001 from its float value
    if rate <= 0:
        raise ValueError(f"fps {fps} must be positive")
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")

    path = Path(path)
    with replacing(path, root=root, make=True, temporary=f"{path.name}.{os.getpid()}.partial") as new:
        # faststart puts the index first, so that browsers can play the clip while loading.
        with av.open(path_of(new), "w", format="mp4", options={"movflags": "+faststart"}) as file:
            if comment is not None:
                file.metadata["comment"] = comment
            # x264's fastest routines may encode equal frames differently, so cpu-independent=1.
            options = {"crf": str(CRF), "threads": "1", "x264-params": "cpu-independent=1"}
            stream = file.add_stream("libx264", rate=rate, options=options)
            stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
            # Without these fields, players would assume BT.709 for large clips and show wrong colours.
            stream.codec_context.colorspace, stream.codec_context.color_range = _BT601, _LIMITED_RANGE
            for picture in frames:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace=_BT601, dst_color_range=_LIMITED_RANGE)
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
