"""The base class of data sets of pictures and clips, wherever their files lie."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from opendit.data.base import BadSample, ClipReading, Description, Item, MediaDataset, Shapes, View
from opendit.data.clips import Crop, check_window, read_clip
from opendit.data.enlarging import Small
from opendit.data.medium import Timeline
from opendit.data.picture_file import fill_crop, to_tensor
from opendit.data.row_arrays import spread
from opendit.data.video_readers import choose_reader

PICTURE, CLIP = 0, 1  # shape keys


class PicturesAndClips(MediaDataset):
    """Pictures as (3, image_size, image_size) in [-1, 1]; with ``use_video`` clips as (3, num_frames, image_size,
    image_size), and pictures among them as clips of one frame. A picture run leaves the clips out.

    num_frames, frame_interval, fps, short_clips: see ``read_clip``. video_reader: one of ``video_readers.CHOICES``.
    training: read each clip from a place drawn for the sample instead of its middle. random_flip: None means no, since
    captions may speak of left and right. random_crop, seed, max_bad: see ``Description``.

    Raises ValueError, naming the flag, for windows that can't be read and for a reader that is not installed.
    """

    rated = 32  # clips whose frame rate is looked up

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
        random_crop: bool = False,
        max_bad: float = 0.05,
        training: bool = True,
    ):
        check_window(num_frames, frame_interval, short_clips, fps)
        self.num_frames, self.frame_interval, self.short_clips = num_frames, frame_interval, short_clips
        self.fps = fps
        # Chosen once, here: worker processes are forked from this one, and the run's first lines name the reader.
        self.video_reader, self.why_reader = choose_reader(video_reader) if use_video else ("", "")
        self.use_video, self.image_size = use_video, image_size
        self.sample_shape = (3, num_frames, image_size, image_size) if use_video else (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip, self.random_crop = bool(random_flip), random_crop
        self.random_window = training and use_video

    def description(self, text: str, **fields: Any) -> Description:
        """Return the description of the data set, with these further fields."""
        clips = None
        if self.use_video:
            names = "num_frames frame_interval short_clips fps".split()
            clips = ClipReading(**{name: getattr(self, name) for name in names})
        names = "sample_shape random_flip random_crop random_window seed max_bad".split()
        return Description(text=text, clips=clips, **{name: getattr(self, name) for name in names} | fields)

    def picture_sample(self, picture: Image.Image, view: View) -> Item:
        """Crop a picture for ``read``."""
        height, width = view.shape[1:] if view.shape else (self.image_size, self.image_size)
        pixels = to_tensor(fill_crop(picture, height, width, view.place), view.flip, view.as_bytes)
        return Item(pixels[:, None] if self.use_video else pixels)

    def clip_sample(self, path: str, view: View, name: str | None = None) -> Item:
        """Read a clip's file for ``read``. name: of the file in messages, see ``read_clip``. Raises BadSample."""
        frames, height, width = view.shape or (self.num_frames, self.image_size, self.image_size)
        clip, shortened = read_clip(
            path,
            frames,
            self.frame_interval,
            Crop(height, width, view.place),
            start=view.start,
            fps=self.fps,
            short_clips=self.short_clips,
            as_bytes=view.as_bytes,
            enlarge=view.enlarge,
            name=name,
            reader=self.video_reader,
        )
        if clip.shape[-2:] == (height, width):
            return Item(clip.flip(-1) if view.flip else clip, shortened=shortened)
        small = Small(clip.shape[-2], clip.shape[-1], view.flip)  # mirrored once it is enlarged
        return Item(clip, shortened=shortened, small=small, whole=(height, width))

    @property
    def frames_of(self) -> Callable[[Timeline], int] | None:
        """The function that counts a clip's frames, or None to take those it has: it counts them at ``fps``, but all of
        a clip that is too short and is read at a higher rate."""
        if self.fps is None:
            return None
        return partial(_frames_at, fps=self.fps, at_least_all=self.short_clips == "interval")

    def media_shapes(self, keys: np.ndarray | int, media: Callable[[], np.ndarray]) -> Shapes:
        """Return the shapes of the data set. keys, media: see ``Shapes``."""
        read_as = "" if self.fps is None else f"{self.fps!r} {self.short_clips}"
        return Shapes(keys=keys, media=media, read_as=read_as, frame_rates=partial(self._frame_rates, keys))

    def _frame_rates(self, keys: np.ndarray | int) -> list[float]:
        if not self.use_video:
            return []
        rows: Sequence[int] = np.flatnonzero(keys != PICTURE) if isinstance(keys, np.ndarray) else range(len(self))  # pyright: ignore[reportAssignmentType]
        found = []
        for place in spread(len(rows), self.rated):
            with suppress(BadSample):
                found.append(self.rate_at(int(rows[place])))
        return [rate for rate in found if rate > 0]

    def rate_at(self, row: int) -> float:
        """Return the frames per second of a row's clip; see ``clip_rate``."""
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
