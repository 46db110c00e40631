"""Data set whose samples a user's function makes from members of a tar, like Energon's cookers and sample loaders."""

import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, BadSample, Description, Item, Medium, Shapes, Size, View, of_picture
from opendit.data.clips import as_file, clip_rate
from opendit.data.picture_file import as_rgb, reason
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import BLOCK, Fields, members, split_name, suffix_of

FLAG = "--energon_cooker"
RETURNS = "a mapping or an object with image or video, and caption or label"
TRIED = 100  # samples tried when the data set is opened; the first readable one determines the parts of all samples

Cooker = Callable[[dict[str, Any]], Any]


def load_cooker(name: str) -> Cooker:
    """Import ``module:function`` from Python's path or the working directory. Raises ValueError."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{FLAG} {name}: must be MODULE:FUNCTION, such as my_data:cook for cook() of my_data.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module raises any type
        raise ValueError(f"{FLAG} {name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{FLAG} {name}: {function} is no function")
    return found


def members_of(content: bytes, fields: Fields) -> tuple[str, dict[str, bytes]]:
    """Return the key of a sample, and a dictionary from the extensions of its members to their bytes.

    content: the bytes of the sample in a tar."""
    key, parts = "", {}
    for member in members(io.BytesIO(content + bytes(2 * BLOCK))):
        if member.isreg() and (split := split_name(member.name, fields.exact)) is not None:
            key, ending = split
            if fields.takes(ending):
                parts[ending] = content[member.offset_data : member.offset_data + member.size]
    return key, parts


def decoded(ending: str, content: bytes) -> Any:
    """Decode a member: JSON to its value, texts to strings, classes to integers. Other members stay bytes."""
    suffix = suffix_of(ending)
    if suffix in (".json", ".jsn"):
        return json.loads(content)
    if suffix in (".txt", ".text", ".transcript"):
        return content.decode()
    return int(content) if suffix in (".cls", ".cls2", ".index", ".inx", ".id") else content


class CookedDataset(ShardDataset):
    """Data set of tars whose samples are read by the user's function ``cooker``.

    The function gets a dictionary of a sample's members by extension (see ``decoded``), ``__key__`` and
    ``__subflavors__``. It returns a mapping or an object with

    - ``image``: the bytes of a picture's file, or a PIL image; or ``video``: the bytes of a clip's file;
    - ``caption``: a string; or ``label``: the number of a class, if the folder has a class_names.json.

    All samples must have the same parts as the first readable sample. A sample counts as unreadable if the function
    raises an error or returns None. name: name of the function, for messages and the data set's identity."""

    size_threads = 1  # a user's function may not be thread-safe
    counted_captions = 100  # check few captions, because reading one means reading the whole sample

    def __init__(
        self,
        shown: str,
        shards: Sequence[IndexedTar],
        image_size: int,
        *,
        cooker: Cooker,
        name: str,
        fields: Fields,
        subflavors: dict[str, Any],
        class_names: Sequence[str] = (),
        random_flip: bool | None = None,
        **options: Any,
    ):
        super().__init__(shown, shards, image_size, random_flip=random_flip, **options)
        self.cooker, self.name, self.fields, self.subflavors = cooker, name, fields, subflavors
        self._cooked: tuple[Any, ...] = (None, None)
        self.class_names = list(class_names)
        first = self._first()
        self._video = "video" in first
        if self._video and not self.use_video:
            raise ValueError(f"{shown}: {FLAG} {name} gives clips; add --use_video")
        self.conditioning = "text" if "caption" in first else "label"
        if "label" in first and not class_names:
            raise ValueError(f"{shown}: {FLAG} {name} gives labels; name the classes in class_names.json in the folder")
        self.class_names = list(class_names) if "label" in first else [] if "caption" in first else ["0"]
        self.random_flip = self.conditioning == "label" if random_flip is None else random_flip

    def _first(self) -> dict[str, Any]:
        """Return the parts of the first readable sample. Raises ValueError if the first ``TRIED`` samples are all
        unreadable."""
        reason: BadSample | None = None
        for row in range(min(TRIED, len(self))):
            try:
                return self._cook(row)
            except BadSample as bad:
                reason = reason or bad
        raise ValueError(f"{self.shown}: {FLAG} {self.name} reads none of the first samples ({reason}); correct it")

    def _cook(self, row: int) -> dict[str, Any]:
        """Return the cooker's image or video, and caption or label. Raises BadSample."""
        if self._cooked[0] == row:  # the last result is cached, because a picture and its caption both need it
            return self._cooked[1]
        content = self.read_medium(row)
        try:
            key, parts = members_of(content, self.fields)
            raw = {ending: decoded(ending, part) for ending, part in parts.items()}
            made = self.cooker({"__key__": key, "__subflavors__": dict(self.subflavors), **raw})
        except Exception as error:  # the user's code raises any type
            raise BadSample(self.source(row), f"{self.name}: {type(error).__name__}: {error}") from error
        found = {}
        for name in ("image", "video", "caption", "label"):
            value = made.get(name) if isinstance(made, Mapping) else getattr(made, name, None)
            if value is not None:
                found[name] = value
        if why := _problem(found, len(self.class_names)):
            raise BadSample(self.source(row), f"{self.name} gave {why}; it returns {RETURNS}")
        self._cooked = row, found
        return found

    def _medium(self, row: int) -> Any:
        """Return the bytes of a clip's or picture's file, or a PIL image. Raises BadSample."""
        made = self._cook(row)
        wanted = "video" if self._video else "image"
        if wanted not in made or ("caption" in made) != (self.conditioning == "text"):
            raise BadSample(self.source(row), f"{self.name} gave other parts than of the first sample")
        return made[wanted]

    def media_size(self, row: int) -> Size:
        content = self._medium(row)
        if not isinstance(content, bytes):
            return 1, content.height, content.width
        return self._size(not self._video, content)

    def rate_at(self, row: int) -> float:
        content = self._medium(row)
        with as_file([(0, content)], len(content)) as path:
            return clip_rate(path)

    def read(self, row: int, view: View = PLAIN) -> Item:
        content = self._medium(row)
        if self._video:
            item = self._clip(row, content, view)
        elif isinstance(content, bytes):
            item = self._picture(row, content, view)
        else:
            item = self.picture_sample(self._rgb(row, content), view)
        return self._labelled(row, item)

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        made = self._cook(row)
        content = made["video" if self._video else "image"]
        if isinstance(content, bytes):
            return self._look(not self._video, content)
        return of_picture(self._rgb(row, content))

    def _rgb(self, row: int, image: Image.Image) -> Image.Image:
        try:
            return as_rgb(image)
        except Exception as error:  # Pillow's decoders raise errors of nearly any type
            raise BadSample(self.source(row), reason(error)) from error

    def caption(self, row: int) -> str | None:
        return self._cook(row)["caption"].strip() if self.conditioning == "text" else None

    def label(self, row: int) -> int:
        return self._cook(row).get("label", 0)

    def shapes(self) -> Shapes:
        shapes = super().shapes()
        return shapes if shapes.array is not None else replace(shapes, keys=0)

    def _identity(self) -> str:
        return hash_parts(super()._identity(), "cooked", self.name, json.dumps(self.subflavors, sort_keys=True))

    def describe(self) -> Description:
        about = super().describe()
        return replace(about, text=f"{about.text}; read by {self.name}")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cooked": (None, None)}


def _problem(found: dict[str, Any], classes: int) -> str:
    """Return what is wrong with a cooker's result, or "" if it is valid."""
    image, video, caption, label = (found.get(name) for name in ("image", "video", "caption", "label"))
    if (image is None) == (video is None):
        return "no picture and no clip" if image is None else "a picture and a clip"
    if image is not None and not isinstance(image, (bytes, Image.Image)):
        return f"an image that is a {type(image).__name__}, not bytes or a PIL image"
    if video is not None and not isinstance(video, bytes):
        return f"a video that is a {type(video).__name__}, not bytes"
    if caption is not None and (not isinstance(caption, str) or not caption.strip()):
        return f"a caption that is {'empty' if isinstance(caption, str) else type(caption).__name__}"
    if caption is not None and label is not None:
        return "a caption and a label"
    if label is not None and (type(label) is not int or label < 0 or classes and label >= classes):
        return f"the label {label!r}"
    return ""
