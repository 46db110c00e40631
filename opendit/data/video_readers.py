"""What decodes clips: torchcodec, decord or PyAV, behind one interface; all give the same pixels.

Each has files that it gets wrong without a word: decord mixes up the frames of HEVC and of MPEG-2 and MPEG-4 with B
frames, torchcodec those without times. So what a file holds is looked up first, and only what a reader is known to get
right is read by jumping to key frames; the rest is decoded from the start by PyAV (``opendit.data.clips``).
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.data.colours import UNSPECIFIED, is_high_definition, kind_of_colours, of_clip, unknown_matrix
from opendit.data.container_header import IN_ORDER
from opendit.data.picture_file import on_white

READERS = ("torchcodec", "decord", "pyav")  # as auto prefers them: the fastest first
CHOICES = ("auto", *READERS)
# Containers that hold a clip itself. Playlists, descriptions and devices are none: they name other files.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif,mpegvideo,h264,hevc,m4v,ivf,obu,av1,rm,mxf,nut,dv,wtv,apng"
_BT709, _BT2020 = 1, 9  # matrices of H.273
_SEEKABLE = ("mov", "matroska", "avi")  # files of these have an index that leads to the frames it says
# Of decord: codecs whose frames it finds. HEVC's leading pictures, and B frames of MPEG-2 and MPEG-4, shift the others.
_OF_DECORD = ("h264", "vp8", "vp9", "av1", "mjpeg")


@dataclass(frozen=True)
class Contents:
    """What a file holds. times: of its frames in the order they are shown, or None if one of them has none or two have
    the same. keys: (time shown, time decoded) of the frames that decoding can begin at. converted: the frames are HDR,
    of a wide gamut or transparent, or of high definition without a matrix, which :class:`ToRgb` alone shows as players
    do."""

    container: str
    codec: str
    b_frames: bool
    time_base: Fraction
    length: int
    times: np.ndarray | None
    keys: list[tuple[int, int]]
    converted: bool = False

    @property
    def seekable(self) -> bool:
        return self.times is not None and self.container.split(",")[0] in _SEEKABLE and not self.guessed

    @property
    def guessed(self) -> bool:
        """Whether the times are guesses: AVI has none, which matters where frames are shown in another order."""
        return self.container == "avi" and (self.b_frames or self.codec not in ("mpeg4", "mjpeg"))


class NoVideo(ValueError):
    """A file of sound or of subtitles alone."""


class UnknownColours(ValueError):
    """Colours that nothing here converts."""


class Reader(Protocol):
    """A clip that was opened. length: its frames."""

    length: int
    declared: int  # pixels of a frame, as the file's header has it

    def size(self) -> tuple[int, int]:
        """(height, width) of the frames, upright."""
        ...

    def read(self, indices: Sequence[int]) -> Tensor:
        """These frames, ascending, as (T, H, W, 3) uint8. Raises an exception of any kind if they can't be had."""
        ...


def open_container(name: str) -> Any:
    """PyAV's container of a file that ``name_for_ffmpeg`` named, of a kind that opens no other file."""
    import av

    return av.open(name, options={"format_whitelist": _CONTAINERS, "protocol_whitelist": "file,fd,pipe"})


def look_up(name: str, *, packets: bool) -> Contents:
    """A file's contents by PyAV, with nothing decoded; with ``packets`` the frames' times as well.

    Raises NoVideo, UnknownColours, or libav's errors."""
    with open_container(name) as file:
        if not file.streams.video:
            raise NoVideo("no video stream")
        stream = file.streams.video[0]
        context = stream.codec_context
        found = [p for p in file.demux(stream) if p.size] if packets else []
        shown = [p.pts for p in found]
        times = None
        if found and None not in shown and not any(p.is_discard for p in found):
            ordered = np.sort(np.array(shown, dtype=np.int64))
            times = ordered if bool((np.diff(ordered) > 0).all()) else None
        keys = sorted((p.pts, p.pts if p.dts is None else p.dts) for p in found if p.is_keyframe and p.pts is not None)
        base = Fraction(stream.time_base or 1)
        if unknown := unknown_matrix(int(context.colorspace)):
            raise UnknownColours(f"its colours are coded as {unknown}, which can't be converted; make it BT.2020 or SDR")
        converted = bool(colours_of(stream)) or _shows_alpha(stream) or _needs_matrix(context)
        order = bool(context.has_b_frames)
        return Contents(file.format.name, context.name, order, base, len(found), times, keys, converted)


def colours_of(stream: Any) -> str:
    """What a stream's colours are, if they are converted, as of ``kind_of_colours``."""
    context = stream.codec_context
    return kind_of_colours(int(context.color_primaries), int(context.color_trc))


def _needs_matrix(pictures: Any) -> bool:
    """Whether a codec context or frame is large and of YUV, and does not name its matrix."""
    if int(pictures.colorspace) != UNSPECIFIED or not is_high_definition(pictures.width, pictures.height):
        return False
    return pictures.format is not None and not pictures.format.is_rgb


def _shows_alpha(stream: Any) -> bool:
    pixels = stream.codec_context.format
    return _alpha_aside(stream) or (pixels is not None and any(part.is_alpha for part in pixels.components))


def _alpha_aside(stream: Any) -> bool:
    """Whether a stream of VP8 or VP9 has its alpha as a second stream, which FFmpeg's own decoders pass over."""
    told = {name.lower(): value for name, value in stream.metadata.items()}
    return told.get("alpha_mode") == "1" and stream.codec_context.name in _OF_LIBVPX


_OF_LIBVPX = {"vp8": "libvpx", "vp9": "libvpx-vp9", "libvpx": "libvpx", "libvpx-vp9": "libvpx-vp9"}


def decoded(file: Any, stream: Any) -> Iterator[Any]:
    """Decode the frames of a stream of PyAV's container from where it was opened or sought to, with their alpha.

    Raises libav's errors, among them one of a PyAV that was built without libvpx and a clip that needs it."""
    if not _alpha_aside(stream):
        yield from file.decode(stream)
        return
    import av

    decoder = av.CodecContext.create(_OF_LIBVPX[stream.codec_context.name], "r")
    decoder.thread_count = 1
    for packet in file.demux(stream):
        yield from decoder.decode(packet if packet.size else None)


class ToRgb:
    """Frames of PyAV to RGB with the pixels that decord and torchcodec give; HDR and wide gamuts by the rule of
    ``opendit.data.colours``, transparent ones on white."""

    def __init__(self):
        self._of: tuple[Any, ...] | None = None
        self._graph: Any = None

    def __call__(self, frame: Any) -> np.ndarray:
        """(H, W, 3) uint8, turned as the camera was held."""
        # The other readers turn the frames themselves, PyAV says by how much: degrees counter-clockwise.
        turns = round(frame.rotation / 90)
        deep = max(part.bits for part in frame.format.components) > 8
        alpha = any(part.is_alpha for part in frame.format.components)
        conversion = of_clip(int(frame.color_primaries), int(frame.color_trc))
        if conversion is not None and int(frame.colorspace) == UNSPECIFIED:
            frame.colorspace = _BT2020
        elif _needs_matrix(frame):
            frame.colorspace = _BT709
        if conversion is not None:
            pixels = self._scaled(frame, "rgba64le" if alpha else "rgb48le").to_ndarray()
            colours, mask = conversion(pixels[..., :3]), (pixels[..., 3] >> 8).astype(np.uint8) if alpha else None
        elif not alpha:
            # PyAV's own conversion of more bits has other colours.
            frame = self._scaled(frame, "rgb24") if deep else frame
            return np.rot90(frame.to_ndarray(format="rgb24"), turns)
        else:
            pixels = (self._scaled(frame, "rgba") if deep else frame).to_ndarray(format="rgba")
            colours, mask = np.ascontiguousarray(pixels[..., :3]), pixels[..., 3]
        if mask is not None:
            colours = np.asarray(on_white(Image.fromarray(colours), Image.fromarray(mask)))
        return np.rot90(colours, turns)

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


class TorchCodecReader:
    """By torchcodec, which needs FFmpeg's shared libraries."""

    def __init__(self, name: str, contents: Contents):
        decoders = import_torchcodec()
        self._contents = contents
        self._decoder = decoders.VideoDecoder(name, num_ffmpeg_threads=1, dimension_order="NHWC")
        self.length, told = contents.length, self._decoder.metadata
        self.declared: int = (told.width or 0) * (told.height or 0)
        if len(self._decoder) != self.length:
            raise ValueError(f"{len(self._decoder)} frames, {self.length} packets")

    def size(self) -> tuple[int, int]:
        height, width = self._decoder[0].shape[:2]
        return height, width

    def read(self, indices: Sequence[int]) -> Tensor:
        times = self._contents.times
        if times is None:
            raise ValueError("no times")
        batch = self._decoder.get_frames_at(list(indices))
        # What it returns says when it is shown: another frame would be told by that.
        wanted = torch.from_numpy(times[list(indices)] * float(self._contents.time_base))
        if not torch.allclose(batch.pts_seconds.double(), wanted, rtol=0, atol=1e-4):
            raise ValueError("other frames than asked for")
        return batch.data


class PyAVReader:
    """By PyAV, from the key frame before the first frame that is wanted."""

    def __init__(self, name: str, contents: Contents):
        self._file, self._contents = open_container(name), contents
        self._stream = self._file.streams.video[0]
        context = self._stream.codec_context
        context.thread_count = 1
        self.length, self.declared = contents.length, context.width * context.height

    def size(self) -> tuple[int, int]:
        height, width = ToRgb()(next(decoded(self._file, self._stream))).shape[:2]
        return height, width

    def read(self, indices: Sequence[int]) -> Tensor:
        if self._contents.times is None or not self._contents.keys:
            raise ValueError("no times")
        wanted = self._contents.times[list(indices)].tolist()
        start = max((key for key in self._contents.keys if key[0] <= wanted[0]), default=self._contents.keys[0])
        self._file.seek(start[1], stream=self._stream)
        convert, found, left = ToRgb(), {}, set(wanted)
        for frame in decoded(self._file, self._stream):
            if frame.pts in left:
                if frame.width * frame.height != self.declared:
                    raise ValueError("a frame of another size")
                found[frame.pts] = convert(frame)
                left.discard(frame.pts)
            if not left:
                return torch.from_numpy(np.stack([found[time] for time in wanted]))
        raise ValueError("frames are missing")


class DecordReader:
    """By decord, which takes frames for wider pixels where the bytes of a row, padded for the processor, are a whole
    number of frame widths but not three: with rows of 32 pixels those 8, 12, 16, 24, 48 or 72 wide, with rows of 64
    those 32, 96 or 144 wide as well. It says so, and they are decoded from the start.

    KNOWN: codecs by whose names in a file's header :meth:`finds` is known to be true. Those of AV1 and of H.264 that
    keeps its parameters with its frames ("avc3") do not tell the colours."""

    KNOWN = ("avc1", "vp08", "vp09", IN_ORDER)

    def __init__(self, name: str, contents: Contents | None = None):  # as the others; it looks for itself
        self._reader = import_decord().VideoReader(name, num_threads=1)
        self.length = len(self._reader)
        height, width = self.size()
        self.declared = height * width

    def times(self) -> np.ndarray:
        return self._reader.get_frame_timestamp(np.arange(self.length))[:, 0]

    def size(self) -> tuple[int, int]:
        height, width = self._reader.get_batch([]).shape[1:3]
        return height, width

    def read(self, indices: Sequence[int]) -> Tensor:
        # As a tensor, but without a copy: asnumpy() makes one of the full-size frames.
        return import_decord().bridge.to_torch(self._reader.get_batch(list(indices)))

    @staticmethod
    def finds(contents: Contents) -> bool:
        """Whether it is known to find the frames of such files by their numbers."""
        # It misses a transport stream's first frames and mixes up those of programme streams.
        if contents.container.split(",")[0] not in _SEEKABLE or contents.guessed or contents.converted:
            return False
        return contents.codec in _OF_DECORD or (contents.codec == "mpeg4" and not contents.b_frames)


@cache
def import_decord():
    """decord, imported by the process that reads: a run on pictures works without it."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)  # what is wrong with a file is reported once, by its name
    return decord


@cache
def import_torchcodec() -> Any:
    """torchcodec's decoders, likewise."""
    import torchcodec.decoders  # pyright: ignore[reportMissingImports]

    return torchcodec.decoders


OPENERS = {"torchcodec": TorchCodecReader, "decord": DecordReader, "pyav": PyAVReader}


@cache
def problem_of(reader: str) -> str:
    """Why a reader can't be used here, in a few words; empty if it gives the frames of a small clip as PyAV does."""
    from opendit.data.video_file import write_mp4

    # Of a width that decord reads on any processor, see DecordReader.
    frames = np.random.default_rng(0).integers(0, 256, (4, 72, 40, 3), dtype=np.uint8)
    try:
        {"torchcodec": import_torchcodec, "decord": import_decord, "pyav": lambda: None}[reader]()
    except ImportError:
        return "not installed"
    except Exception:  # torchcodec without FFmpeg's libraries: a RuntimeError of a page
        return "its libraries can't be loaded (torchcodec needs FFmpeg's: apt-get install ffmpeg)"
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/clip.mp4"
            write_mp4(path, frames, 24)
            contents = look_up(path, packets=True)
            expected = PyAVReader(path, contents).read([1, 3])
            if torch.equal(OPENERS[reader](path, contents).read([1, 3]), expected):
                return ""
            return "other pixels than PyAV's"
    except Exception as error:
        return f"fails on a small clip ({str(error).splitlines()[0][:80] if str(error) else type(error).__name__})"


@cache
def choose_reader(asked: str = "auto") -> tuple[str, str]:
    """(the reader that ``--video_reader asked`` means here, why).

    Raises ValueError, naming the flag, for one that doesn't work here."""
    if asked not in CHOICES:
        raise ValueError(f"--video_reader {asked}: no such reader; give one of {', '.join(CHOICES)}")
    if asked != "auto":
        if problem := problem_of(asked):
            raise ValueError(f"--video_reader {asked}: {problem}; install it, or give auto")
        return asked, "asked for"
    passed_over = []
    for reader in READERS:
        if not (problem := problem_of(reader)):
            return reader, "; ".join(passed_over) or "the fastest"
        passed_over.append(f"{reader}: {problem}")
    raise ValueError(f"--video_reader auto: none works here ({'; '.join(passed_over)}); install decord2 and av")
