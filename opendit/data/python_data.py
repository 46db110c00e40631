"""Data sets that a program passes to ``opendit.train``: a ``MediaDataset``, or any map-style data set of dicts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import (
    PLAIN,
    BadSample,
    Description,
    Fingerprint,
    Item,
    MediaDataset,
    Medium,
    Shapes,
    Size,
    View,
    flip_note,
    of_picture,
)
from opendit.data.clips import Crop, clip_window, fitting_interval, resize_and_crop
from opendit.data.files import spread
from opendit.data.picture_file import as_rgb
from opendit.data.pictures_and_clips import CLIP, PICTURE, PicturesAndClips
from opendit.data.sources import Request

HASHED = 32  # number of samples to hash if a data set has no fingerprint
_offered: ContextVar[Any] = ContextVar("the data set of opendit.train", default=None)


@contextmanager
def offer(data: Any) -> Iterator[None]:
    """Make ``--data_path python`` refer to ``data`` in the block."""
    token = _offered.set(data)
    try:
        yield
    finally:
        _offered.reset(token)


def open_source(asked: Request) -> MediaDataset:
    data = _offered.get()
    if data is None:
        raise ValueError(
            f"{asked.shown}: is what a program hands to opendit.train(config, data=...); name a folder or CSV"
        )
    if isinstance(data, MediaDataset):
        return data
    if asked.fps is not None:
        raise ValueError(f"--fps {asked.fps:g}: {asked.shown} has frames without times; leave it out")
    return PythonDataset(data, asked.image_size, num_classes=asked.num_classes, **asked.of_clips())


class PythonDataset(PicturesAndClips):
    """Data set of samples ``data[i]``: dicts with "image" or "video", and with "text" (str) or "label" (int).

    An image is a PIL picture, a tensor (1 or 3, H, W) of uint8 or of floats in [0, 1], or an array (H, W, 3) uint8. A
    video is a tensor (T, 1 or 3, H, W), an array (T, H, W, 3) or a list of pictures. All samples must have the first
    sample's keys. "text" takes precedence over "label". Class names are ``data.classes``, or the numbers below
    ``num_classes``.

    A run resumes exactly if ``data[i]`` never changes. The str ``data.fingerprint`` or ``data._fingerprint`` should
    change with the data. Without this attribute, 32 evenly spaced samples are hashed.

    Raises ValueError, naming the fix, if ``data`` is no such data set."""

    def __init__(self, data: Any, image_size: int, *, num_classes: int | None = None, **options: Any):
        super().__init__(image_size, **options)
        name = f"opendit.train: data={type(data).__name__}"
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or not len(data):
            raise ValueError(f"{name}: no map-style data set with samples; give it __len__ and __getitem__")
        first = data[0]
        keys = first.keys() if isinstance(first, dict) else ()
        found = [next((key for key in pair if key in keys), "") for pair in (("image", "video"), ("text", "label"))]
        if not all(found):
            raise ValueError(
                f"{name}: a sample is a dict of image or video, and text or label, not {_kind(first)}; wrap it so"
            )
        self.data, self.name, (self.medium, self.condition) = data, name, found
        if self.medium == "video" and not self.use_video:
            raise ValueError(f"{name}: holds videos; set use_video=True")
        self.class_names: list[str] = []
        if self.condition == "label":
            self.class_names = [str(each) for each in getattr(data, "classes", None) or range(num_classes or 0)]
            if not self.class_names:
                raise ValueError(
                    f"{name}: has labels and no names for them; give it a list classes, or set num_classes"
                )

    def __len__(self) -> int:
        return len(self.data)

    def source(self, row: int) -> str:
        return f"data[{row}]"

    def _sample(self, row: int) -> tuple[Any, int, str | None]:
        """Return (PIL picture or tensor (T, H, W, 3) uint8, class, caption). Raises BadSample."""
        try:
            found = self.data[row]
            medium, condition = found[self.medium], found[self.condition]
            medium = _picture(medium) if self.medium == "image" else torch.stack([*map(_frame, medium)])
        except Exception as error:  # user code may raise any error
            raise BadSample(self.source(row), f"{type(error).__name__}: {error}") from error
        if self.condition == "text":
            return medium, 0, str(condition)
        if not 0 <= int(condition) < len(self.class_names):
            raise BadSample(self.source(row), f"label {condition} of {len(self.class_names)} classes")
        return medium, int(condition), None

    def read(self, row: int, view: View = PLAIN) -> Item:
        medium, label, text = self._sample(row)
        if self.medium == "image":
            return self.picture_sample(medium, view)._replace(y=label, text=text)
        frames, height, width = view.shape or (self.num_frames, self.image_size, self.image_size)
        interval = self.frame_interval
        if self.short_clips == "interval":
            interval = fitting_interval(len(medium), frames, interval)
        window = clip_window(len(medium), frames, interval, view.start)
        if window is None:
            raise BadSample(self.source(row), f"too short: {len(medium)} frames")
        x = resize_and_crop(medium[window], Crop(height, width, view.place), view.as_bytes)
        return Item(x.flip(-1) if view.flip else x, label, text, shortened=interval < self.frame_interval)

    def caption(self, row: int) -> str | None:
        return self._sample(row)[2]

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        medium = self._sample(row)[0]
        if self.medium == "image":
            return of_picture(medium)
        places = sorted({0, len(medium) // 2, len(medium) - 1})
        return Medium(*medium.shape[:3]), medium[places].numpy()

    def media_size(self, row: int) -> Size:
        medium = self._sample(row)[0]
        return (1, medium.height, medium.width) if self.medium == "image" else tuple(medium.shape[:3])

    def shapes(self) -> Shapes:
        kind = PICTURE if self.medium == "image" else CLIP
        return Shapes(keys=kind, media=self.media_sizes)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity)

    def _identity(self) -> str:
        known = getattr(self.data, "fingerprint", None) or getattr(self.data, "_fingerprint", None)
        parts = ["python", str(len(self)), *self.class_names]
        if isinstance(known, str):
            return hash_parts(*parts, known)
        for row in spread(len(self), HASHED):
            try:
                medium, label, text = self._sample(row)
            except BadSample as bad:
                parts.append(str(bad))
            else:
                pixels = np.asarray(medium)
                parts += [str(pixels.shape), hash_parts(pixels.tobytes()), str(label), text or ""]
        return hash_parts(*parts)

    def describe(self) -> Description:
        what = f"{len(self):,} {self.medium}s with {self.condition}s"
        text = f"{self.name}: {what}, {'x'.join(map(str, self.sample_shape))}, {flip_note(self.random_flip)}"
        counted = ((len(self), 100),)  # only few captions are checked, because reading one also reads the picture
        of = {"conditioning": self.condition, "class_names": self.class_names, "counted_captions": counted}
        return self.description(text, **of)


def _kind(value: Any) -> str:
    return f"a dict of {', '.join(map(str, value))}"[:200] if isinstance(value, dict) else type(value).__name__


def _picture(value: Any) -> Image.Image:
    """Convert one picture to RGB. Raises ValueError or TypeError."""
    if isinstance(value, Image.Image):
        return as_rgb(value)
    return Image.fromarray(_frame(value).numpy())


def _frame(value: Any) -> Tensor:
    """Convert one picture to (H, W, 3) uint8. Raises ValueError or TypeError."""
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(as_rgb(value)))
    x = value.permute(1, 2, 0) if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    if x.ndim != 3 or x.shape[-1] not in (1, 3):
        raise ValueError(f"pixels of shape {tuple(value.shape)}; tensors are (1 or 3, H, W), arrays (H, W, 3)")
    if x.is_floating_point():
        if not (0 <= float(x.min()) and float(x.max()) <= 1):
            raise ValueError(f"floats from {float(x.min()):g} to {float(x.max()):g}; they must lie in [0, 1]")
        x = x.mul(255).round().to(torch.uint8)
    if x.dtype != torch.uint8:
        raise ValueError(f"pixels of {x.dtype}; give uint8 or floats in [0, 1]")
    return x.expand(*x.shape[:2], 3).contiguous()
