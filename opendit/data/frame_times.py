"""Choose which frames of a clip to read: every n-th, or n a second by the times at which they are shown."""

from typing import NamedTuple

import numpy as np

# Seconds by which a time may be too late: Matroska rounds to milliseconds, and its streams are copied to other files.
ROUNDING = 1e-3 + 1e-6


class Timeline(NamedTuple):
    """seconds: (frames,) float64, ascending, when each frame of a clip is shown."""

    seconds: np.ndarray

    @property
    def end(self) -> float:
        """The time at which the last frame ends. It lasts as long as the median frame; a single frame takes no time."""
        if len(self.seconds) < 2:
            return float(self.seconds[-1])
        return float(self.seconds[-1] + np.median(np.diff(self.seconds)))

    @property
    def rate(self) -> float:
        """Frames a second: the mean rate if frames are equally far apart up to rounding, otherwise that of the median
        distance. 0 for a single frame."""
        if len(self.seconds) < 2:
            return 0.0
        gaps = np.diff(self.seconds)
        mean = (self.seconds[-1] - self.seconds[0]) / len(gaps)
        even = np.abs(gaps - mean).max() <= ROUNDING
        return round(float(1 / (mean if even else np.median(gaps))), 6)

    def count(self, fps: float) -> int:
        """Return the number of frames of the clip at ``fps`` frames a second."""
        return max(1, int(np.ceil((self.end - self.seconds[0] - ROUNDING) * fps)))

    def shown_at(self, times: np.ndarray) -> list[int]:
        """Return the frame that a player shows at each time: the last one that is due by then, within the rounding of
        files."""
        found = np.searchsorted(self.seconds, times + ROUNDING, side="right") - 1
        return found.clip(0, len(self.seconds) - 1).tolist()


def clip_window(length: int, num_frames: int, frame_interval: int, start: float | None) -> list[int] | None:
    """Return indices of ``num_frames`` frames ``frame_interval`` apart in a clip of ``length`` frames; None if they
    don't fit.

    start: a number in [0, 1) picks among all windows that fit, evenly; None takes the middle one.
    """
    last_start = length - 1 - (num_frames - 1) * frame_interval
    if last_start < 0:
        return None
    first = last_start // 2 if start is None else min(int(start * (last_start + 1)), last_start)
    return [first + i * frame_interval for i in range(num_frames)]


def timed_window(timeline: Timeline, num_frames: int, fps: float, start: float | None) -> list[int] | None:
    """Return indices of the frames shown at ``num_frames`` times 1 / ``fps`` s apart; None if the clip is shorter.

    A window begins when a frame is first shown. start: as in ``clip_window``; it picks among all frames from which a
    window fits.
    """
    span = (num_frames - 1) / fps
    fitting = len(timeline.seconds)
    if num_frames > 1:
        fitting = int(np.searchsorted(timeline.seconds, timeline.end - span - ROUNDING, side="left"))
    if not fitting:
        return None
    first = (fitting - 1) // 2 if start is None else min(int(start * fitting), fitting - 1)
    return timeline.shown_at(timeline.seconds[first] + np.arange(num_frames) / fps)


def whole_clip(timeline: Timeline, num_frames: int) -> list[int]:
    """Return indices of the frames shown at ``num_frames`` times spread evenly from the first frame to the last."""
    return timeline.shown_at(np.linspace(timeline.seconds[0], timeline.seconds[-1], num_frames))
