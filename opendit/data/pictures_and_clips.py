"""The base of data sets of pictures and clips, for files in any place."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
from PIL import Image
from torch import Tensor

from opendit.data.base import BadSample, MediaDataset
from opendit.data.clips import check_window, read_clip
from opendit.data.frame_times import Timeline
from opendit.data.images import to_tensor
from opendit.data.media_size import Size
from opendit.data.picture_file import fill_crop
from opendit.data.video_readers import choose_reader

PICTURE, CLIP = 0, 1  # shape keys


class PicturesAndClips(MediaDataset):
    """Pictures as (3, image_size, image_size) in [-1, 1]; with ``use_video`` clips as (3, num_frames, image_size,
    image_size), and pictures among them as clips of one frame. A picture run leaves the clips out.

    num_frames, frame_interval, fps, short_clips: see ``read_clip``. video_reader: of ``video_readers.CHOICES``.
    training: read each clip from a place drawn for the sample; else its middle. random_flip: None means no, for
    captions may speak of left and right. seed, max_bad: see ``MediaDataset``.

    shortened: how many reads so far took a clip at a smaller interval than asked for (short_clips "interval").

    Raises ValueError, naming the flag, for windows that can't be read and for a reader that is not there.
    """

    def __init__(
        self,
        image_size: int,
        *,
        seed: int = 0,
        num_frames: int = 16,
        frame_interval: int = 1,
        fps: float | None = None,
        use_video: bool = False,
        short_clips: str = "skip",
        video_reader: str = "auto",
        random_flip: bool | None = None,
        max_bad: float = 0.05,
        training: bool = True,
    ):
        check_window(num_frames, frame_interval, short_clips, fps)
        self.num_frames, self.frame_interval, self.short_clips = num_frames, frame_interval, short_clips
        self.fps = fps
        # Settled here, once: what reads is forked from this process, and is told of in the run's first lines.
        self.video_reader, self.why_reader = choose_reader(video_reader) if use_video else ("", "")
        self.use_video, self.image_size = use_video, image_size
        self.sample_shape = (3, num_frames, image_size, image_size) if use_video else (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip = bool(random_flip)
        self.random_window = training and use_video

    rated = 32  # clips whose frame rate is looked up

    def load(self, row: int, flip: bool) -> Tensor:
        """A picture, or the middle of a clip."""
        return self.load_at(row, flip, None)

    def load_at(self, row: int, flip: bool, start: float | None) -> Tensor:
        return self.load_sized(row, flip, start, (self.num_frames, self.image_size, self.image_size))

    def picture_sample(self, picture: Image.Image, flip: bool, shape: Size) -> Tensor:
        """A picture as ``load_sized`` returns it. shape: (frames, height, width), of which the frames don't count."""
        pixels = to_tensor(fill_crop(picture, *shape[1:]), flip, self.as_bytes)
        return pixels[:, None] if self.use_video else pixels

    def clip_sample(self, path: str, flip: bool, start: float | None, shape: Size, name: str | None = None) -> Tensor:
        """A clip's file as ``load_sized`` returns it; unless ``self.enlarges``, one that is smaller comes as small as
        it is, and not mirrored. name: what the file is known by, as of ``read_clip``. Raises BadSample."""
        frames, height, width = shape
        clip, _, shortened = read_clip(
            path,
            frames,
            self.frame_interval,
            (height, width),
            start=start,
            fps=self.fps,
            short_clips=self.short_clips,
            as_bytes=self.as_bytes,
            enlarge=self.enlarges,
            name=name,
            reader=self.video_reader,
        )
        self.shortened += shortened
        return clip.flip(-1) if flip and clip.shape[-2:] == (height, width) else clip

    @property
    def frames_of(self) -> Callable[[Timeline], int] | None:
        """The function that counts a clip's frames, or None to take those it has: it counts them at ``fps``, but all of
        a clip that is too short and is read at a higher rate."""
        if self.fps is None:
            return None
        return partial(_frames_at, fps=self.fps, at_least_all=self.short_clips == "interval")

    def sizes_key(self) -> str:
        return "" if self.fps is None else f"{self.fps!r} {self.short_clips}"

    def frame_rates(self) -> list[float]:
        keys = self.shape_keys() if self.use_video else None
        rows = np.flatnonzero(keys != PICTURE) if keys is not None else np.zeros(0, np.int64)
        if keys is None and self.use_video:
            rows = np.arange(len(self))
        found = []
        for row in rows[np.unique(np.linspace(0, len(rows) - 1, self.rated).round().astype(int))] if len(rows) else ():
            with suppress(BadSample):
                found.append(self.rate_at(int(row)))
        return [rate for rate in found if rate > 0]

    def rate_at(self, row: int) -> float:
        """Frames a second of a row's clip, as of ``clip_rate``."""
        raise NotImplementedError

    def window_note(self) -> str:
        """Describe for the log how clips are read."""
        interval = f", frame interval {self.frame_interval}" if self.frame_interval > 1 else ""
        if self.fps is not None:
            interval = f", {self.fps:g} frames a second"
        if interval and self.short_clips == "interval":
            interval += f" ({'smaller' if self.fps is None else 'more'} where a clip is too short)"
        return f"{interval}, read by {self.video_reader} ({self.why_reader})"


def _frames_at(timeline: Timeline, fps: float, at_least_all: bool) -> int:
    return max(timeline.count(fps), len(timeline.seconds) if at_least_all else 0)
