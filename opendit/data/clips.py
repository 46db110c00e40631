"""Choose frames of a clip, and read them upright, resized and cropped.

A reader of ``video_files`` decodes only the chosen frames and the frames that they depend on. If the reader
fails or might return wrong frames, PyAV reads the file."""

import functools
import math
import operator
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from opendit.data.base import ROUNDING, BadSample, Medium, Small, to_pixels
from opendit.data.container_header import MAX_FRAMES, problem_of_tables
from opendit.data.files import TIME_LIMIT, kind_of, printable
from opendit.data.picture_file import has_animation_format, start_of_crop
from opendit.data.video_files import (
    OPENERS,
    AnimationReader,
    Contents,
    Geometry,
    NoVideo,
    PyAVReader,
    Reader,
    Timeline,
    ToRgb,
    UnknownColours,
    choose_reader,
    colours_of,
    crop_of,
    decoded,
    look_up,
    open_container,
    rising_times,
    video_stream,
)

MAX_FRAME_PIXELS = 2**26  # about twice the largest frame in H.264 and H.265
WINDOW = 2**28  # maximum bytes of decoded frames in memory before resizing
SHORT_CLIPS = ("skip", "interval")
REMEMBERED = 4096  # maximum files in a ``FileMemory``
Result = TypeVar("Result")


class Clip(NamedTuple):
    """Result of ``read_clip``. shortened: True if the frame interval is smaller than requested."""

    pixels: Tensor
    shortened: bool


class Crop(NamedTuple):
    """Size of a crop in pixels, and its position ``place`` (see ``start_of_crop``)."""

    height: int
    width: int
    place: tuple[float, float] | None = None


FrameSize = int | tuple[int, int] | Crop  # side of a square; (height, width); or a crop with a position


class FileMemory(OrderedDict[str, tuple[Any, ...]]):
    """Dictionary from path to value for the last ``REMEMBERED`` files."""

    def __setitem__(self, path: str, what: tuple[Any, ...]) -> None:
        super().__setitem__(path, what)
        self.move_to_end(path)
        while len(self) > REMEMBERED:
            self.popitem(last=False)


# Files that took too long, files that could not be opened, and frame counts found by decoding.
_hung, _unopened, _counts = FileMemory(), FileMemory(), FileMemory()


def resize_and_crop(frames: Tensor, size: FrameSize, as_bytes: bool = False, enlarge: bool = True) -> Tensor:
    """Crop frames (T, H, W, 3) uint8 to the aspect ratio of ``size``, and resize them with an antialiased bicubic
    filter. Return (3, T, height, width) float32 in [-1, 1]. enlarge: False keeps a crop smaller than ``size``.
    as_bytes: return uint8 with the channels last in memory."""
    # Crop before resizing, so that the resize of a long thin frame takes no extra time.
    height, width = frames.shape[1:3]
    place = size.place if isinstance(size, Crop) else None
    down, across = (size, size) if isinstance(size, int) else size[:2]
    scale = min(height / down, width / across)
    high, wide = min(height, round(down * scale)), min(width, round(across * scale))
    top, left = start_of_crop(height - high, width - wide, place)
    pixels = frames[:, top : top + high, left : left + wide].permute(0, 3, 1, 2)
    if (high, wide) != (down, across) and (enlarge or scale > 1):
        # Resizing uint8 is 3x as fast as float32. Other memory formats would be copied to channels-last memory.
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        pixels = interpolate(pixels, (down, across), mode="bicubic", antialias=True)
    pixels = pixels.transpose(0, 1)
    return pixels if as_bytes else to_pixels(pixels)


def check_window(num_frames: int, frame_interval: int, short_clips: str, fps: float | None = None) -> None:
    """Raise ValueError, naming the flag, if these settings are invalid."""
    for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval)):
        if value < 1:
            raise ValueError(f"--{flag} {value}: not positive; give 1 or more")
    if fps is not None and not 0 < fps < float("inf"):
        raise ValueError(f"--fps {fps}: no rate; give the frames of a second")
    if fps is not None and frame_interval != 1:
        raise ValueError(f"--fps {fps:g}: does not go with --frame_interval {frame_interval}; leave one of them out")
    if short_clips not in SHORT_CLIPS:
        raise ValueError(f"--short_clips {short_clips}: no such way; give one of {', '.join(SHORT_CLIPS)}")


def read_clip(
    path: str,
    num_frames: int,
    frame_interval: int,
    size: FrameSize,
    *,
    start: float | None,
    fps: float | None = None,
    short_clips: str = "skip",
    time_limit: float = TIME_LIMIT,
    as_bytes: bool = False,
    enlarge: bool = True,
    name: str | None = None,
    reader: str = "auto",
) -> Clip:
    """Read ``num_frames`` frames of a clip, upright, cropped and resized as in :func:`resize_and_crop`.

    Frames are chosen by number (``clip_window``), or with ``fps`` by their times (``timed_window``).

    start: see ``clip_window``. short_clips: "skip" raises BadSample if a clip is too short; "interval" then tries a
    smaller frame interval. name: the clip's name in messages. reader: one of ``video_files.CHOICES``; the pixels do not
    depend on it.

    Raises BadSample if the clip is too short or can't be decoded, or if a call for this clip took more than
    ``time_limit`` s."""
    check_window(num_frames, frame_interval, short_clips, fps)
    name = path if name is None else name
    shortened = False

    def choose(timeline: Timeline) -> list[int]:
        nonlocal shortened
        length, shorter = len(timeline.seconds), short_clips == "interval"
        if fps is None:
            interval = fitting_interval(length, num_frames, frame_interval) if shorter else frame_interval
            indices, shortened = clip_window(length, num_frames, interval, start), interval < frame_interval
        else:
            indices = timed_window(timeline, num_frames, fps, start)
            if indices is None and shorter and length >= num_frames:
                indices, shortened = whole_clip(timeline, num_frames), True
        if indices is None:
            too_short = _too_short(length, num_frames, frame_interval)
            raise BadSample(path, too_short if fps is None else _too_short_at(timeline, num_frames, fps))
        return indices

    def decode(stop: threading.Event) -> np.ndarray:
        try:
            return decode_frames(path, choose, stop, size, reader)
        except BadSample as bad:
            if name == path:
                raise
            raise BadSample(name, str(bad).removeprefix(f"{printable(path)}: ")) from None

    frames = _within(name, time_limit, decode)
    return Clip(resize_and_crop(torch.from_numpy(frames), size, as_bytes, enlarge), shortened)


def _too_short(length: int, num_frames: int, interval: int) -> str:
    found = f"too short: {length} frame{'s' * (length != 1)}"
    if length < num_frames:
        return f"{found}, --num_frames {num_frames} needs at least as many"
    needed = 1 + (num_frames - 1) * interval
    return (
        f"{found}, {num_frames} frames at interval {interval} need {needed}; --short_clips interval reads it at a "
        "smaller interval"
    )


def _too_short_at(timeline: Timeline, num_frames: int, fps: float) -> str:
    length, seconds = len(timeline.seconds), timeline.end - timeline.seconds[0]
    needed = (num_frames - 1) / fps
    found = f"too short: {seconds:.2f} s, {num_frames} frames at --fps {fps:g} need more than {needed:.2f}"
    if length < num_frames:
        return f"{found}, and it has {length} frame{'s' * (length != 1)} in all"
    return f"{found}; --short_clips interval reads it at a higher rate"


def clip_size(path: str, *, whole: bool = True, count: Callable[[Timeline], int] | None = None) -> tuple[int, int, int]:
    """Return (frames, height, width) of a clip, upright. Raises BadSample.

    whole: False if ``path`` is an MP4 that contains only ``container_header.table_parts``. count: returns the number of
    frames to report for a timeline; None reports all frames."""

    def look(stop: threading.Event) -> tuple[int, int, int]:
        reader = _open(path, "auto", stop, whole)[0]
        try:
            return (reader.length if count is None else count(reader.timeline()), *reader.size())
        except Exception as error:
            raise BadSample(path, "not a video that can be decoded") from error
        finally:
            del reader

    return _within(path, TIME_LIMIT, look)


def colours_in(path: str) -> str:
    """Return a name such as "HDR (PQ)" if a clip's colours are converted, else "". May raise any exception."""
    if has_animation_format(path):
        return ""
    with name_for_ffmpeg(path) as name, open_container(name) as file:
        return colours_of(video_stream(file))


def clip_rate(path: str) -> float:
    """Return a clip's frames per second, by its frames' times; 0 for a single frame. Raises BadSample."""
    return _within(path, TIME_LIMIT, lambda stop: _open(path, "auto", stop)[0].timeline().rate)


def open_clip(path: str, *, middle: bool = True) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a clip. The frames are the first, middle and last, (3, H, W, 3) uint8. middle: False
    omits the middle frame. May raise any exception."""
    found: list[Timeline] = []

    def choose(timeline: Timeline) -> list[int]:
        length = len(timeline.seconds)
        if not length:
            raise ValueError("no frames")
        found.append(timeline)
        return [0, length // 2, length - 1] if middle else [0, length - 1]

    frames = decode_frames(path, choose, threading.Event())
    height, width = frames.shape[1:3]
    [times] = found
    length, duration = len(times.seconds), times.end - float(times.seconds[0])
    if times.rate and abs(length / times.rate - duration) <= ROUNDING:
        duration = 0.0  # the default: frames / rate
    return Medium(length, height, width, times.rate, duration, colours_in(path)), frames


def _within(name: str, seconds: float, work: Callable[[threading.Event], Result]) -> Result:
    """Return ``work(stop)``, computed in a separate thread, because decoders and stalled disks hang inside C code.

    After ``seconds`` seconds, sets ``stop`` to end ``work``, and raises BadSample. A hanging thread
    remains until the process ends. Also raises BadSample if the file ``name`` took too long before."""
    if (limit := _hung.get(name)) is not None:  # repeat the message, so that it is logged only once
        raise BadSample(name, f"not read within {limit[0]:g} seconds; not tried again")
    stop, outcome = threading.Event(), SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(stop), None))
        except BaseException as error:  # raised again below
            outcome.put((None, error))

    threading.Thread(target=run, name="clip", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except Empty:
        stop.set()
        _hung[name] = (seconds,)
        raise BadSample(name, f"not read within {seconds:g} seconds; not tried again") from None
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # break a reference cycle that would keep the traceback's stack frames alive


def decode_frames(
    path: str,
    choose: Callable[[Timeline], list[int]],
    stop: threading.Event,
    size: FrameSize | None = None,
    reader: str = "auto",
) -> np.ndarray:
    """Return frames of a clip, (T, H, W, 3) uint8. choose: returns the frames' indices for a timeline. size: new frame
    size if the frames have more than ``WINDOW`` bytes; None keeps the size. Raises BadSample."""
    file, by_number = _open(path, reader, stop)
    try:
        indices = choose(file.timeline())
        if by_number and file.declared <= MAX_FRAME_PIXELS:
            try:
                together = max(1, WINDOW // max(1, file.declared * 3))
                if size is None or together >= len(indices):
                    return file.read(indices).numpy()
                parts = [indices[first : first + together] for first in range(0, len(indices), together)]
                return np.concatenate([_shrink(file.read(part), size) for part in parts])
            except Exception as error:
                if _is_final(error):
                    raise  # other errors: decode from the start below
    finally:
        # The error's traceback would keep the reader's frames alive. In a forked process, freeing them later would wait
        # for threads that do not exist.
        del file
    return _decode_in_order(path, indices, stop, size)


def _is_final(error: Exception) -> bool:
    """Return True if ``error`` is BadSample or MemoryError, so that no other reader is tried. libav's memory errors do
    not count, because damaged files declare absurd sizes."""
    return isinstance(error, BadSample) or (isinstance(error, MemoryError) and type(error).__module__ != "av.error")


def _shrink(frames: Tensor, size: FrameSize) -> np.ndarray:
    return resize_and_crop(frames, size, as_bytes=True).permute(1, 2, 3, 0).numpy()


def _open(path: str, reader: str, stop: threading.Event, whole: bool = True) -> tuple[Reader, bool]:
    """Return (reader, True if the reader finds frames by number). Raises BadSample. whole: see :func:`clip_size`."""
    reader, _ = choose_reader(reader)
    try:
        state = os.stat(path)
        version = state.st_mtime_ns, state.st_size  # changes when the file is repaired
        if (known := _unopened.get(path)) is not None and known[0] == version:
            raise BadSample(path, known[1])
        if (kind := kind_of(state.st_mode)) is not None:  # opening a pipe may block
            raise BadSample(path, f"{kind}, not a file")
        if state.st_size == 0:
            raise BadSample(path, "the file is empty")
        animation = has_animation_format(path)
        if not animation and (problem := problem_of_tables(path)) is not None:
            raise BadSample(path, problem)
    except OSError as error:
        raise BadSample(path, error.strerror or error) from error
    if animation:
        return AnimationReader(path, MAX_FRAME_PIXELS), True

    try:
        with name_for_ffmpeg(path) as name:
            file, by_number = _open_with(reader, path, name, version, stop, whole)
        if not file.length:
            raise ValueError("no frames")
    except Exception as error:  # decoders raise many types of errors
        if _is_final(error):
            raise
        if not os.path.exists(path):  # the file has just been deleted
            raise BadSample(path, os.strerror(2)) from error
        reason = "holds no video stream" if isinstance(error, NoVideo) else "not a video that can be decoded"
        reason = str(error) if isinstance(error, UnknownColours) else reason
        if whole:
            _unopened[path] = version, reason
        raise BadSample(path, reason) from error
    if file.length > MAX_FRAMES:
        raise BadSample(path, f"{file.length:,} frames, more than {MAX_FRAMES:,}")
    return file, by_number


def _open_with(
    reader: str, path: str, name: str, version: tuple[int, int], stop: threading.Event, whole: bool
) -> tuple[Reader, bool]:
    """Open a file with ``reader``, or with PyAV if ``reader`` fails. name: the file's name for FFmpeg. version: the
    file's modification time and size."""
    contents = look_up(name, whole=whole)
    if contents.seekable:
        try:
            return OPENERS["pyav" if contents.converted else reader](name, contents), True
        except Exception as error:
            if _is_final(error):
                raise
    if not contents.counted:
        if not whole:
            raise BadSample(path, "its frames can't be counted without all of it")
        if (known := _counts.get(path)) is None or known[0] != version:
            known = _counts[path] = version, count_frames(name, contents, stop)
        contents = known[1]
    return PyAVReader(name, contents), False


def count_frames(name: str, contents: Contents, stop: threading.Event) -> Contents:
    """Return ``contents`` with the number and times of the frames before the first error, if there are any."""
    times: list[int | None] = []
    try:
        with open_container(name) as container:
            stream = video_stream(container)
            stream.codec_context.thread_count = 1
            for frame in decoded(container, stream):
                times.append(frame.pts)
                if stop.is_set() or len(times) > MAX_FRAMES:
                    break
    except Exception as error:
        if _is_final(error):
            raise
        if not times:
            return contents  # reading the frames will raise the error again
    return replace(contents, length=len(times), times=rising_times(times))


@contextmanager
def name_for_ffmpeg(path: str) -> Iterator[str]:
    """Yield a file's absolute name for FFmpeg, in UTF-8. FFmpeg would take "concat:a|b" for a protocol."""
    path = os.path.abspath(path)
    if path == path.encode("utf-8", "replace").decode():
        yield path
        return
    with open(path, "rb") as file:
        yield f"/dev/fd/{file.fileno()}"


def _decode_in_order(path: str, indices: list[int], stop: threading.Event, size: FrameSize | None) -> np.ndarray:
    kept: dict[int, np.ndarray] = {}
    wanted, count = set(indices), 0
    try:
        with name_for_ffmpeg(path) as name, open_container(name) as container:
            stream = video_stream(container)
            geometry, to_rgb = Geometry(stream, crop_of(name, container, stream)), ToRgb()
            stream.codec_context.thread_count = 1
            for count, frame in enumerate(decoded(container, stream), 1):
                if count - 1 in wanted:
                    for height, width in ((frame.height, frame.width), geometry.size(frame)):
                        if height * width > MAX_FRAME_PIXELS:
                            what = f"frames of {width:,} x {height:,} pixels"
                            raise BadSample(path, f"{what}, more than {MAX_FRAME_PIXELS:,}")
                    pixels = geometry(frame, to_rgb(frame))
                    if size is not None and pixels.size * len(wanted) > WINDOW:
                        pixels = _shrink(torch.from_numpy(pixels.copy())[None], size)[0]
                    kept[count - 1] = pixels
                if len(kept) == len(wanted) or stop.is_set():
                    break
        if len(kept) < len(wanted):
            raise BadSample(path, f"damaged: frame {max(wanted)} is needed, {count} frames can be decoded")
        return np.stack([kept[index] for index in indices])
    except Exception as error:  # libav's errors, or np.stack's if the frames differ in size
        if _is_final(error):
            raise
        raise BadSample(path, f"damaged: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def as_file(parts: Iterable[tuple[int, bytes]], size: int) -> Iterator[str]:
    """Yield a temporary file's path, in memory if possible. parts: (offset, bytes); all other bytes up to ``size`` are
    0."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("clip"), "wb", buffering=0) as file:
            _write(file, parts, size)
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        _write(file, parts, size)
        yield file.name


def _write(file, parts: Iterable[tuple[int, bytes]], size: int) -> None:
    file.truncate(size)
    for at, content in parts:
        file.seek(at)
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]


def clip_window(length: int, num_frames: int, frame_interval: int, start: float | None) -> list[int] | None:
    """Return the indices of ``num_frames`` frames that are ``frame_interval`` apart, or None if the clip is too short.

    length: the clip's number of frames. start: number in [0, 1) that selects a window, all with equal probability; None
    selects the middle window."""
    last_start = length - 1 - (num_frames - 1) * frame_interval
    if last_start < 0:
        return None
    first = last_start // 2 if start is None else min(int(start * (last_start + 1)), last_start)
    return [first + i * frame_interval for i in range(num_frames)]


def fitting_interval(length: int, num_frames: int, frame_interval: int) -> int:
    """Return the largest interval up to ``frame_interval`` at which ``num_frames`` of ``length`` frames fit;
    ``frame_interval`` if none fits."""
    too_short = num_frames <= length < 1 + (num_frames - 1) * frame_interval
    return (length - 1) // (num_frames - 1) if too_short else frame_interval


def timed_window(timeline: Timeline, num_frames: int, fps: float, start: float | None) -> list[int] | None:
    """Return the indices of frames shown at ``num_frames`` times, 1 / ``fps`` seconds apart. Return None if the clip is
    too short. start: selects the first frame, as in ``clip_window``."""
    span = (num_frames - 1) / fps
    fitting = len(timeline.seconds)
    if num_frames > 1:
        fitting = int(np.searchsorted(timeline.seconds, timeline.end - span - ROUNDING, side="left"))
    if not fitting:
        return None
    first = (fitting - 1) // 2 if start is None else min(int(start * fitting), fitting - 1)
    return timeline.shown_at(timeline.seconds[first] + np.arange(num_frames) / fps)


def whole_clip(timeline: Timeline, num_frames: int) -> list[int]:
    """Return the indices of the frames at ``num_frames`` evenly spaced times, from the first frame to the last."""
    return timeline.shown_at(np.linspace(timeline.seconds[0], timeline.seconds[-1], num_frames))


AT_ONCE = 2**25  # maximum values to resize at once, with eight temporary bytes each
_SHARPNESS = -0.5  # parameter a of Keys' cubic convolution
_MOST_BITS = 22  # maximum fractional bits of a fixed-point weight


def enlarge(x: Tensor, small: Sequence[Small | None] | None, at_once: int = AT_ONCE) -> Tensor:
    """Return a batch with every :class:`Small` sample enlarged to H x W, and mirrored if requested, on ``x``'s device.

    The pixels are bit-identical to ``torch.nn.functional.interpolate(..., mode="bicubic", antialias=True)`` for uint8
    on a CPU.

    x: (B, C, [T,] H, W) uint8, in any memory order. small: B entries, None for a sample of full size; or None if all
    have full size. at_once: maximum values to resize at once; a single sample may have more."""
    if small is None:
        return x
    x = x.clone()
    frames = x.movedim(1, -1)  # view (B, [T,] H, W, C), the memory order of decoders
    each = max(1, at_once // max(1, x[0].numel()))
    for first, last, (height, width) in _runs(small, each):
        corner = frames[first:last, ..., :height, :width, :]
        frames[first:last] = resize(corner, (x.shape[-2], x.shape[-1]))
    for number, sample in enumerate(small):
        if sample is not None and sample.mirrored:
            x[number] = x[number].flip(-1)
    return x


def _runs(small: Sequence[Small | None], most: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    first = 0
    for size, same in groupby(small, lambda sample: None if sample is None else sample[:2]):
        end = first + len(list(same))
        if size is not None:
            for start in range(first, end, most):
                yield start, min(start + most, end), size
        first = end


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize frames (..., H, W, C) uint8 to size = (height, width), bicubic with antialiasing, on their device.

    Sums are in fixed point and rounded to bytes after each axis, width first, as in PIL."""
    for axis, length in ((-2, size[1]), (-3, size[0])):
        if frames.shape[axis] != length:
            frames = _along(frames, axis, length)
    return frames


def _along(frames: Tensor, axis: int, length: int) -> Tensor:
    places, weights, bits = _taps(frames.shape[axis], length, frames.device)
    shape = [1] * frames.ndim
    shape[axis] = length
    total = frames.new_full((), 1 << (bits - 1), dtype=torch.int32)  # half of 1 << bits, so that >> rounds
    for place, weight in zip(places, weights, strict=True):
        part = frames.index_select(frames.ndim + axis, place) * weight.view(shape)
        total = part.add_(total)
    return (total >> bits).clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=256)
def _taps(source: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return (positions, weights, fractional bits) of the filter that resizes an axis from ``source`` to ``length``.
    Positions and weights are int32 (taps, length). Output pixel i is the sum over k of weights[k, i] times input pixel
    positions[k, i]. The order of operations is torch's, so that results are bit-identical."""
    scale = source / length
    reach, shrink = 2.0 * max(scale, 1.0), 1.0 / max(scale, 1.0)
    most = math.ceil(reach) * 2 + 1
    places, weights = [], []
    for number in range(length):
        center = scale * (number + 0.5)
        first = max(int(center - reach + 0.5), 0)
        count = min(max(min(int(center + reach + 0.5), source) - first, 0), most)
        row = [_cubic((tap + first - center + 0.5) * shrink) for tap in range(count)]
        total = functools.reduce(operator.add, row, 0.0)  # sum() rounds differently since Python 3.12
        weights.append([weight / total for weight in row] + [0.0] * (most - count))
        places.append([first + tap for tap in range(count)] + [first] * (most - count))
    largest, bits = max(map(max, weights)), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:  # keep the largest weight below 2^15
        bits += 1
    fixed = [[int(math.copysign(0.5, weight) + weight * (1 << bits)) for weight in row] for row in weights]
    places, fixed = (torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device) for rows in (places, fixed))
    return places, fixed, bits


def _cubic(x: float) -> float:
    """Return Keys' cubic kernel at distance ``x`` ("Cubic convolution interpolation", 1981, equation 15)."""
    a, x = _SHARPNESS, abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    if x < 2:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return 0.0
