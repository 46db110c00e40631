"""Open pictures and clips as their files have them: decoded as in training, neither cropped nor resized."""

import threading

import numpy as np

from opendit.data.clips import colours_in, decode_chosen
from opendit.data.frame_times import ROUNDING, Timeline
from opendit.data.medium import Medium, of_picture
from opendit.data.picture_file import read_picture


def open_picture(path: str, content: bytes | None = None) -> tuple[Medium, np.ndarray]:
    """Return a picture as (1, H, W, 3) uint8. content: see ``read_picture``. Raises BadSample."""
    return of_picture(read_picture(path, content=content))


def open_clip(path: str, *, middle: bool = True) -> tuple[Medium, np.ndarray]:
    """Return a clip's first, ``middle`` (if asked for) and last frame, (2 or 3, H, W, 3) uint8.

    Raises an exception of any kind."""
    found: list[Timeline] = []

    def choose(timeline: Timeline) -> list[int]:
        length = len(timeline.seconds)
        if not length:
            raise ValueError("no frames")
        found.append(timeline)
        return [0, length // 2, length - 1] if middle else [0, length - 1]

    frames = decode_chosen(path, choose, threading.Event())
    height, width = frames.shape[1:3]
    [times] = found
    length, duration = len(times.seconds), times.end - float(times.seconds[0])
    if times.rate and abs(length / times.rate - duration) <= ROUNDING:
        duration = 0.0  # as the frames and their rate imply
    return Medium(length, height, width, times.rate, duration, colours_in(path)), frames
