"""Clips: which frames of a file are read, and reading them upright, resized and cropped.

decord decodes only what the frames asked for need. Files that decord 3.4 opens and then fails on (frames 16, 24, 32, 48
or 96 pixels wide) or gives wrong frames of, without a word (MPEG streams, H.264 in AVI), PyAV decodes from the start.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from opendit.data.base import BadSample, to_pixels

TIME_LIMIT = 30.0  # seconds that one file may take
SHORT_CLIPS = ("skip", "interval")

# decord's own 10,240 attempts to get a frame out of a damaged end take minutes; sound files need a handful.
os.environ.setdefault("DECORD_EOF_RETRY_MAX", "128")

# Transport streams, of which decord 3.4 misses the first frames: frame 0 is shown as the second key frame.
STREAMS = (".ts", ".mts", ".m2ts")

Result = TypeVar("Result")


def clip_window(length: int, num_frames: int, frame_interval: int, start: float | None) -> list[int] | None:
    """Indices of ``num_frames`` frames ``frame_interval`` apart in a clip of ``length`` frames; None if they don't fit.

    start: a number in [0, 1) picks among all windows that fit, evenly; None takes the middle one.
    """
    last_start = length - 1 - (num_frames - 1) * frame_interval
    if last_start < 0:
        return None
    first = last_start // 2 if start is None else min(int(start * (last_start + 1)), last_start)
    return [first + i * frame_interval for i in range(num_frames)]


def resize_and_crop(frames: Tensor, size: int, as_bytes: bool = False) -> Tensor:
    """The middle square of every frame at size x size pixels, bicubic with antialiasing.

    frames: (T, H, W, 3) uint8. Returns (3, T, size, size) float32 in [-1, 1], or uint8 in whatever order of memory.
    """
    # Cut first, so that both axes have the one exact scale and a long thin frame costs no more than a square one.
    height, width = frames.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    pixels = frames[:, top : top + side, left : left + side].permute(0, 3, 1, 2)
    if side != size:
        pixels = interpolate(pixels, (size, size), mode="bicubic", antialias=True)  # in uint8: 3x as fast as in float32
    pixels = pixels.transpose(0, 1)
    return pixels if as_bytes else to_pixels(pixels.contiguous())


def read_clip(
    path: str,
    num_frames: int,
    frame_interval: int,
    size: int,
    *,
    start: float | None,
    short_clips: str = "skip",
    time_limit: float = TIME_LIMIT,
    as_bytes: bool = False,
) -> Tensor:
    """A window of a clip as (3, num_frames, size, size) float32 in [-1, 1], or uint8, turned as the camera was held.

    Frames are taken by number, whatever their times. start: see ``clip_window``. short_clips: what becomes of a clip
    too short for the window: "skip", or "interval": the largest interval that fits.

    Raises BadSample, naming the file and the reason, if the file can't be read within ``time_limit`` seconds or is
    too short.
    """
    if short_clips not in SHORT_CLIPS:
        raise ValueError(f"--short_clips {short_clips} must be one of {', '.join(SHORT_CLIPS)}")

    def choose(length: int) -> list[int]:
        indices = clip_window(length, num_frames, frame_interval, start)
        if indices is None and short_clips == "interval" and length >= num_frames:
            indices = clip_window(length, num_frames, (length - 1) // max(1, num_frames - 1), start)
        if indices is None:
            raise BadSample(path, _too_short(length, num_frames, frame_interval))
        return indices

    frames = _within(time_limit, path, lambda stop: decode_frames(path, choose, stop))
    return resize_and_crop(torch.from_numpy(frames), size, as_bytes)


def _too_short(length: int, num_frames: int, interval: int) -> str:
    found = f"too short: {length} frame{'s' * (length != 1)}"
    if length < num_frames:
        return f"{found}, --num_frames {num_frames} needs at least as many"
    needed = 1 + (num_frames - 1) * interval
    return (
        f"{found}, {num_frames} frames at interval {interval} need {needed}; --short_clips interval reads it at a "
        "smaller interval"
    )


def _within(seconds: float, path: str, work: Callable[[threading.Event], Result]) -> Result:
    """``work(stop)``'s result; BadSample if it takes longer.

    It runs in a thread, because decoders and a stalled disk hang inside C code, where no Python signal handler gets to
    run. Such a thread can't be ended: it stays behind, idle, until the process ends; ``stop`` tells one that isn't
    stuck that nobody waits for it any more.
    """
    outcome: list[tuple[Result | None, BaseException | None]] = []
    stop = threading.Event()

    def run() -> None:
        try:
            outcome.append((work(stop), None))
        except BaseException as error:  # handed to the caller, below
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="clip", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        stop.set()
        raise BadSample(path, f"not read within {seconds:g} seconds")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@cache
def _decord():
    """decord, imported by the process that reads: a run on pictures works without it."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)  # what is wrong with a file is reported once, by its name
    return decord


def decode_frames(path: str, choose: Callable[[int], list[int]], stop: threading.Event) -> np.ndarray:
    """The frames ``choose(number of frames)`` of a file, (T, H, W, 3) uint8; raises BadSample."""
    decord = _decord()
    try:
        if os.stat(path).st_size == 0 and os.path.isfile(path):  # a pipe has no size either
            raise BadSample(path, "the file is empty")
        reader = decord.VideoReader(path, num_threads=1)
        times = reader.get_frame_timestamp(list(range(len(reader))))[:, 0]
    except (BadSample, MemoryError):
        raise
    except OSError as error:
        raise BadSample(path, error.strerror or error) from error
    except Exception as error:  # RuntimeError, AssertionError and decord's own types
        audio = "cannot find video stream" in str(error)
        raise BadSample(path, "holds no video stream" if audio else "not a video that can be decoded") from error
    indices = choose(len(reader))
    # decord finds frames by their times: those of a file without (H.264 in AVI, MPEG programme streams) get mixed up.
    if not path.lower().endswith(STREAMS) and bool((np.diff(times) > 0).all()):
        try:
            # As numpy, but without a copy: asnumpy() makes one of the full-size frames.
            return decord.bridge.to_torch(reader.get_batch(indices)).numpy()
        except MemoryError:
            raise
        except Exception:
            pass  # the other decoder finds out what is wrong, if anything is
    del reader  # it would hold its frames while the other decoder works
    return _decode_in_order(path, indices, stop)


def _decode_in_order(path: str, indices: list[int], stop: threading.Event) -> np.ndarray:
    """What ``decode_frames`` returns, by PyAV, from the first frame on."""
    import av

    kept: dict[int, np.ndarray] = {}
    wanted, count = set(indices), 0
    try:
        with av.open(path) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for count, frame in enumerate(container.decode(stream), 1):
                if count - 1 in wanted:
                    # decord turns the frames itself, PyAV says by how much: degrees counter-clockwise.
                    kept[count - 1] = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                if len(kept) == len(wanted) or stop.is_set():
                    break
        if len(kept) < len(wanted):
            raise BadSample(path, f"damaged: frame {max(wanted)} is needed, {count} frames can be decoded")
        return np.stack([kept[index] for index in indices])
    except (BadSample, MemoryError):
        raise
    except Exception as error:  # libav's errors, and frames that change their size
        raise BadSample(path, f"damaged: {getattr(error, 'strerror', None) or error}") from error
