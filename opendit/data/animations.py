"""Reads animations as clips: GIF, WebP, APNG, AVIF and FLIC. Pillow composes their frames as they are shown."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.data.animation_header import count_frames, durations_of
from opendit.data.base import BadSample
from opendit.data.files import TIME_LIMIT
from opendit.data.frame_times import Timeline
from opendit.data.mp4 import MAX_FRAMES
from opendit.data.picture_colours import conversion_of, note_codes
from opendit.data.picture_file import PictureFile, on_white, open_picture_file, reason, upright, upright_size

_SHORTEST, _USUAL = 0.011, 0.1  # seconds: browsers show frames of 10 ms and less for 100 ms


class AnimationReader:
    """Reads an animation as the readers of ``opendit.data.video_readers`` read clips: always from its first frame on,
    for each is composed of those before it.

    most_pixels: of a frame. Raises BadSample, naming the file and the reason, here and in every method.
    """

    def __init__(self, path: str, most_pixels: int, time_limit: float = TIME_LIMIT):
        self._path, self._most_pixels, self._time_limit = path, most_pixels, time_limit
        with self._opened() as (file, image):
            self._first = int(bool(getattr(image, "default_image", False)))  # a PNG's picture for old browsers
            self.length, self.declared = count_frames(file, MAX_FRAMES + 1), image.width * image.height
            if self.length == 0:
                raise ValueError("a still picture, not a clip")
            if self.length > MAX_FRAMES:
                raise ValueError(f"more than {MAX_FRAMES:,} frames")
            self._check_pixels(image)
            self._canvas, self._size = image.size, upright_size(image)

    def _check_pixels(self, image: Image.Image) -> None:
        if image.width * image.height > self._most_pixels:
            raise ValueError(f"frames of {image.width:,} x {image.height:,} pixels, more than {self._most_pixels:,}")

    def size(self) -> tuple[int, int]:
        """Return (height, width) of the frames as they are shown."""
        return self._size

    def timeline(self) -> Timeline:
        """Return when the frames are shown, by the time that the file gives each."""
        seconds = np.cumsum(self.durations) - self.durations
        return Timeline(seconds)

    @cached_property
    def durations(self) -> np.ndarray:
        """(frames,) float64: how many seconds each frame is shown. What is 10 ms or shorter counts as 100 ms."""
        with self._opened() as (file, image):
            found = durations_of(file)
            if found is None:
                found = [frame.info.get("duration", 0) / 1000 for frame in self._frames(file, image, self.length)]
            durations = np.array(found[: self.length], np.float64)
            return np.where(durations < _SHORTEST, _USUAL, durations)

    def read(self, indices: Sequence[int]) -> Tensor:
        """Return these frames, ascending, as (T, H, W, 3) uint8."""
        wanted, found = set(indices), {}
        with self._opened() as (file, image):
            conversion = conversion_of(image)
            for number, frame in enumerate(self._frames(file, image, max(wanted) + 1)):
                if number in wanted:
                    # Pillow makes room for a frame of a GIF that goes beyond the canvas; players cut it off.
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

    def _opened(self) -> "_Opened":
        return _Opened(self._path, self._time_limit)


class _Opened:
    """An open file and Pillow's picture of it; every error inside becomes a BadSample."""

    def __init__(self, path: str, time_limit: float):
        self._path, self._time_limit = path, time_limit

    def __enter__(self) -> tuple[PictureFile, Image.Image]:
        try:
            self._file = PictureFile(self._path, self._time_limit, None)
        except OSError as error:
            raise BadSample(self._path, error.strerror or error) from error
        try:
            self._image = open_picture_file(self._file)
            note_codes(self._image, self._file)
        except Exception as error:
            self._file.close()
            raise BadSample(self._path, reason(error)) from error
        return self._file, self._image

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._image.close()
        self._file.close()
        if isinstance(error, Exception) and not isinstance(error, BadSample):
            raise BadSample(self._path, reason(error)) from error
