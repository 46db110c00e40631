"""Describe pictures and clips before cropping and resizing, and choose the frames of a clip to read.

The description of a medium has its size, the times of its frames, and preview frames. Frames are chosen at a fixed
interval or at a frame rate.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_FRAMES = 2**22  # maximum frames of a clip: 19 hours at 60 frames per second
# Seconds by which a display time may be late. Matroska rounds times to milliseconds, and files of other formats that
# were copied from a Matroska stream keep the rounded times.
ROUNDING = 1e-3 + 1e-6


class Timeline(NamedTuple):
    """Display times of a clip's frames. seconds: (frames,) float64, ascending."""

    seconds: np.ndarray

    @property
    def end(self) -> float:
        """End time of the last frame, which is assumed to last as long as the median frame. A single frame has no
        duration."""
        if len(self.seconds) < 2:
            return float(self.seconds[-1])
        return float(self.seconds[-1] + np.median(np.diff(self.seconds)))

    @property
    def rate(self) -> float:
        """Frames per second; 0 for a single frame.

        If the frames are equally spaced up to rounding, this is the mean rate, else the rate of the median distance."""
        if len(self.seconds) < 2:
            return 0.0
        gaps = np.diff(self.seconds)
        mean = (self.seconds[-1] - self.seconds[0]) / len(gaps)
        even = np.abs(gaps - mean).max() <= ROUNDING
        return round(float(1 / (mean if even else np.median(gaps))), 6)

    def count(self, fps: float) -> int:
        """Return the number of frames of the clip at ``fps`` frames per second."""
        return max(1, int(np.ceil((self.end - self.seconds[0] - ROUNDING) * fps)))

    def shown_at(self, times: np.ndarray) -> list[int]:
        """Return the index of the frame that a player shows at each time: the last frame whose display time, within
        ``ROUNDING``, is not later."""
        found = np.searchsorted(self.seconds, times + ROUNDING, side="right") - 1
        return found.clip(0, len(self.seconds) - 1).tolist()


def clip_window(length: int, num_frames: int, frame_interval: int, start: float | None) -> list[int] | None:
    """Return indices of ``num_frames`` frames that are ``frame_interval`` apart, or None if they don't fit.

    length: number of frames of the clip. start: number in [0, 1) that selects one of all windows that fit; every window
    has an equal part of this range. None selects the middle window."""
    last_start = length - 1 - (num_frames - 1) * frame_interval
    if last_start < 0:
        return None
    first = last_start // 2 if start is None else min(int(start * (last_start + 1)), last_start)
    return [first + i * frame_interval for i in range(num_frames)]


def fitting_interval(length: int, num_frames: int, frame_interval: int) -> int:
    """Return the largest interval, at most ``frame_interval``, at which ``num_frames`` frames fit into ``length``.

    Return ``frame_interval`` if no interval fits."""
    too_short = num_frames <= length < 1 + (num_frames - 1) * frame_interval
    return (length - 1) // (num_frames - 1) if too_short else frame_interval


def timed_window(timeline: Timeline, num_frames: int, fps: float, start: float | None) -> list[int] | None:
    """Return indices of the frames shown at ``num_frames`` times 1 / ``fps`` s apart, or None if the clip is shorter.

    A window begins at the display time of a frame. start: as in ``clip_window``; it selects one of the frames at which
    a window that fits can begin."""
    span = (num_frames - 1) / fps
    fitting = len(timeline.seconds)
    if num_frames > 1:
        fitting = int(np.searchsorted(timeline.seconds, timeline.end - span - ROUNDING, side="left"))
    if not fitting:
        return None
    first = (fitting - 1) // 2 if start is None else min(int(start * fitting), fitting - 1)
    return timeline.shown_at(timeline.seconds[first] + np.arange(num_frames) / fps)


def whole_clip(timeline: Timeline, num_frames: int) -> list[int]:
    """Return indices of the frames shown at ``num_frames`` evenly spaced times from the first frame to the last."""
    return timeline.shown_at(np.linspace(timeline.seconds[0], timeline.seconds[-1], num_frames))


COLOURS = "colours"  # key in the Image.info of a decoded picture, see ``Medium.colours``
# Quantiles of latent values that are shown as black and white, so that outliers don't reduce the contrast.
_DARKEST, _BRIGHTEST = 0.02, 0.98


@dataclass(frozen=True)
class Medium:
    """A picture or clip as stored in its file. A picture has one frame and no rate.

    duration: display time of a clip in seconds; 0 means frames / fps. colours: kind of colours if they need conversion,
    such as "HDR (PQ)", else ""."""

    frames: int
    height: int
    width: int
    fps: float = 0.0
    duration: float = 0.0
    colours: str = ""

    @property
    def seconds(self) -> float:
        return self.duration or (self.frames / self.fps if self.fps else 0.0)

    def frames_at(self, fps: float | None) -> int:
        """Return the number of frames at the rate ``fps``; None means all frames."""
        return self.frames if fps is None or not self.fps else max(1, math.ceil((self.seconds - ROUNDING) * fps))


def of_picture(picture: Image.Image) -> tuple[Medium, np.ndarray]:
    """Return (medium, pixels) of a decoded picture. The pixels are (1, H, W) or (1, H, W, 3) uint8."""
    return Medium(1, picture.height, picture.width, colours=picture.info.get(COLOURS, "")), np.asarray(picture)[None]


def of_pixels(x: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a sample in [-1, 1] of shape (1 or 3, H, W) or (1 or 3, T, H, W).

    The frames are the first, middle and last one as uint8, (n, H, W) or (n, H, W, 3)."""
    x = x[:, None] if x.ndim == 3 else x
    length = x.shape[1]
    shown = x[:, sorted({0, length // 2, length - 1})].add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    frames = shown[0] if len(shown) == 1 else shown.permute(1, 2, 3, 0)
    height, width = x.shape[2:]
    return Medium(length, height, width), frames.numpy()


def of_moments(moments: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a VAE's means and standard deviations (2C, [T,] h, w), like :func:`of_pixels` for
    pixels.

    The first three channels of the means are shown as red, green and blue, or the first as grey."""
    channels = len(moments) // 2
    means = moments[: 3 if channels >= 3 else 1].float()
    low, high = torch.quantile(means.flatten()[: 2**20], torch.tensor([_DARKEST, _BRIGHTEST])).tolist()
    return of_pixels((means - low) / max(high - low, 1e-6) * 2 - 1)


def count_colours(media: Iterable[Medium]) -> list[str]:
    """Return a line such as "2 clips are HDR (PQ), tone-mapped to SDR" for each kind of converted colours."""
    counts = Counter((medium.colours, medium.frames > 1) for medium in media if medium.colours)
    lines = []
    for (colours, clips), count in sorted(counts.items()):
        what = ("clip" if clips else "picture") + ("s are" if count > 1 else " is")
        done = "tone-mapped to SDR" if colours.startswith("HDR") else "converted to BT.709"
        lines.append(f"{count:,} {what} {colours}, {done}")
    return lines
