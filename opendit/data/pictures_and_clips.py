"""Base class of data sets of pictures and clips, and functions that find the sizes of their media.

Sizes are read from the files' headers once per machine and then cached.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.safe_files import replacing
from opendit.common.utils import hash_parts
from opendit.data.base import BadSample, ClipReading, Description, Item, MediaDataset, Shapes, Size, View
from opendit.data.clips import Crop, as_file, check_window, clip_size, read_clip
from opendit.data.container_header import table_parts
from opendit.data.enlarging import Small
from opendit.data.medium import Timeline
from opendit.data.picture_file import fill_crop, picture_size, picture_suffixes, to_tensor
from opendit.data.progress import Progress
from opendit.data.row_arrays import kept_file, spread
from opendit.data.video_readers import choose_reader

PICTURE, CLIP = 0, 1  # shape keys


class PicturesAndClips(MediaDataset):
    """Base class of data sets of pictures and clips.

    Samples are in [-1, 1]. Without ``use_video`` they are pictures (3, image_size, image_size), and clips are left out.
    With ``use_video`` they are clips (3, num_frames, image_size, image_size), and pictures are clips of one frame.

    Args:
        num_frames, frame_interval, fps, short_clips: see ``read_clip``.
        video_reader: one of ``video_readers.CHOICES``.
        random_flip: None means False, because captions may mention left and right.
        random_crop, seed, max_bad: see ``Description``.
        training: True draws a random window of each clip. False uses the middle window.

    Raises:
        ValueError: the settings of windows are invalid, or the reader is not installed. The message names the flag.
    """

    rated = 32  # number of clips whose frame rate is read

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
        # Choose the reader once, before worker processes are forked, so that the run's first log lines name it.
        self.video_reader, self.why_reader = choose_reader(video_reader) if use_video else ("", "")
        self.use_video, self.image_size = use_video, image_size
        self.sample_shape = (3, num_frames, image_size, image_size) if use_video else (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip, self.random_crop = bool(random_flip), random_crop
        self.random_window = training and use_video

    def description(self, text: str, **fields: Any) -> Description:
        """Return the description of the data set. fields: further fields of ``Description``."""
        clips = None
        if self.use_video:
            names = "num_frames frame_interval short_clips fps".split()
            clips = ClipReading(**{name: getattr(self, name) for name in names})
        names = "sample_shape random_flip random_crop random_window seed max_bad".split()
        return Description(text=text, clips=clips, **{name: getattr(self, name) for name in names} | fields)

    def picture_sample(self, picture: Image.Image, view: View) -> Item:
        """Return a picture, cropped, as an item. Called by ``read``."""
        height, width = view.shape[1:] if view.shape else (self.image_size, self.image_size)
        pixels = to_tensor(fill_crop(picture, height, width, view.place), view.flip, view.as_bytes)
        return Item(pixels[:, None] if self.use_video else pixels)

    def clip_sample(self, path: str, view: View, name: str | None = None) -> Item:
        """Return a window of a clip's file as an item. Called by ``read``. name: the file's name in messages. Raises
        BadSample."""
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
        small = Small(clip.shape[-2], clip.shape[-1], view.flip)  # the clip is mirrored after it is enlarged
        return Item(clip, shortened=shortened, small=small, whole=(height, width))

    @property
    def frames_of(self) -> Callable[[Timeline], int] | None:
        """Function that returns the number of frames that a clip has at ``fps``; None to count every frame of the file.

        With ``short_clips="interval"`` the number is never below the number of frames in the file, because a clip that
        is too short is read at a higher rate."""
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
        """Describe how clips are read, for the log."""
        interval = f", frame interval {self.frame_interval}" if self.frame_interval > 1 else ""
        if self.fps is not None:
            interval = f", {self.fps:g} frames a second"
        if interval and self.short_clips == "interval":
            interval += f" ({'smaller' if self.fps is None else 'more'} where a clip is too short)"
        return f"{interval}, read by {self.video_reader} ({self.why_reader})"


def _frames_at(timeline: Timeline, fps: float, at_least_all: bool) -> int:
    return max(timeline.count(fps), len(timeline.seconds) if at_least_all else 0)


SIZES = "sizes as shown, of animations as clips"  # part of the cache key; change it if the definition of sizes changes
HEAD = 1 << 16  # bytes that nearly always contain a picture's whole header
_WHOLE = 4 * HEAD  # bytes; smaller clips are read completely
_ROWS = 4096  # rows between two updates of the progress bar


def sizes_of(dataset: MediaDataset, look: Callable[[int], Size]) -> np.ndarray:
    """Return (rows, 3) int32, the size of every row's medium; see :func:`known_sizes`.

    look: returns the size of a row's medium or raises BadSample. Several threads call it."""
    known = dataset.fingerprint()
    name = hash_parts(SIZES, known.identity, known.contents or "", dataset.shapes().read_as)
    return known_sizes(name, len(dataset), look)


def known_sizes(identity: str, rows: int, look: Callable[[int], Size], threads: int = 8) -> np.ndarray:
    """Return (rows, 3) int32, the size of every row's medium, or zeros for an unreadable one.

    Each machine determines the sizes once and caches them, see ``kept_file``.

    identity: hash of the data set and its files, the cache key. look: returns the size of a row's medium or raises
    BadSample; ``threads`` threads call it."""
    read, make = partial(_read, rows=rows), partial(_look_at_all, rows, look, threads)
    return kept_file(identity, f"{identity}.npy", read, _write, make)


def _write(path: Path, found: np.ndarray) -> None:
    with replacing(path) as file:
        np.save(file, found)


def _read(path: Path, rows: int) -> np.ndarray | None:
    """Map cached sizes from a file, so that all processes of a machine share the memory.

    Return None if the file is missing or damaged."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return found if found.shape == (rows, 3) and found.dtype == np.int32 else None


def _look_at_all(rows: int, look: Callable[[int], Size], threads: int) -> np.ndarray:
    picture_suffixes()  # register Pillow's formats once, because the threads below would race to do it
    found = np.zeros((rows, 3), dtype=np.int32)

    def one(row: int) -> None:
        try:
            found[row] = look(row)
        except BadSample:
            pass

    few = rows <= _ROWS
    with ThreadPoolExecutor(threads) as pool, Progress(rows, "files", title="sizes", disable=few) as shown:
        for first in range(0, rows, _ROWS):
            part = range(first, min(rows, first + _ROWS))
            list(pool.map(one, part))
            shown.update(len(part))
    return found


def file_size(path: str, is_picture: bool, count: Callable[[Timeline], int] | None = None) -> Size:
    """Return the size of the picture or clip in a file. count: see ``clip_size``. Raises BadSample."""
    return (1, *picture_size(path)) if is_picture else clip_size(path, count=count)


def stored_picture_size(name: str, size: int, read: Callable[[int, int], bytes]) -> Size:
    """Return the size of a picture of ``size`` bytes inside another file. ``read(at, count)`` returns its bytes."""
    if size > HEAD:
        try:
            return (1, *picture_size(name, content=read(0, HEAD)))
        except BadSample:
            pass  # read all below: the header is longer, or the format needs the whole file
    return (1, *picture_size(name, content=read(0, size)))


def stored_clip_size(
    name: str, size: int, read: Callable[[int, int], bytes], count: Callable[[Timeline], int] | None = None
) -> Size:
    """Return the size of a clip of ``size`` bytes inside another file. ``read(at, count)`` returns its bytes.

    If possible, only an MP4's tables and the start of its first frame are read. count: see ``clip_size``."""
    if size > _WHOLE and (parts := table_parts(read, size, HEAD)) is not None:
        try:
            with as_file(parts, size) as path:
                return clip_size(path, whole=False, count=count)
        except BadSample:
            pass  # the decoder needs the complete first frame, or must count the frames by decoding
    with as_file([(0, read(0, size))], size) as path:
        return clip_size(path, count=count)


def column_size(extra: dict[str, str], is_picture: bool) -> Size | None:
    """Return the size in a CSV row's columns height, width and, for a clip, num_frames; None if one is missing or
    invalid."""
    try:
        frames = 1 if is_picture else int(extra["num_frames"])
        found = frames, int(extra["height"]), int(extra["width"])
    except (KeyError, ValueError):
        return None
    return found if min(found) > 0 and max(found) < 2**31 else None
