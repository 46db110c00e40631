"""Pictures in folders: finding, checking and reading them."""

import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import (
    PLAIN,
    Description,
    Fingerprint,
    Item,
    MediaDataset,
    Shapes,
    Size,
    View,
    flip_note,
    name_few,
    to_pixels,
)
from opendit.data.contents import hash_files
from opendit.data.files import bytes_of, printable, retried_disk
from opendit.data.folders import Ignored, files_below, folders_above, identity_of, list_folder
from opendit.data.media_size import sizes_of
from opendit.data.medium import Medium, of_picture
from opendit.data.picture_file import check_header, fill_crop, picture_size, picture_suffixes, read_picture
from opendit.data.row_arrays import spread

CHECKED_HEADERS = 2000


def to_tensor(image: Image.Image, flip: bool, as_bytes: bool = False) -> Tensor:
    """Convert an 8-bit picture to float32 (C, H, W) in [-1, 1], or to uint8, mirrored if ``flip``. C is 1 for a grey
    picture."""
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    pixels = pixels.flip(-1) if flip else pixels
    return pixels if as_bytes else to_pixels(pixels)


class PathTable(Sequence[Any]):
    """An immutable list of paths in two arrays.

    A million Python strings, shared with forked workers, get copied page by page as their reference counts
    change: gigabytes over an epoch. Two numpy arrays stay shared.
    """

    def __init__(self, paths: Sequence[str]):
        encoded = [os.fsencode(path) for path in paths]
        self.ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self.text = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        row = range(len(self))[row]
        return os.fsdecode(self.text[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes())

    def encoded(self) -> Iterator[bytes]:
        """Yield all paths as the file system has them."""
        text, start = self.text.tobytes(), 0
        for end in self.ends.tolist():
            yield text[start:end]
            start = end


class PictureFolder(NamedTuple):
    """Class names, picture paths and their labels, sorted, of a folder of pictures, and what else is in it."""

    class_names: list[str]
    paths: list[str]
    labels: list[int]
    ignored: Ignored


def find_pictures(folder: str) -> PictureFolder:
    """Find the pictures of a folder.

    Every subfolder is a class, searched to any depth, and gives it its name; a folder with pictures and no subfolder is
    one class. Raises FileNotFoundError (no pictures) or ValueError (a folder that can't be read, a class without
    pictures, a folder of splits), naming the flag and what to do.
    """
    ignored, suffixes = Ignored(), picture_suffixes()
    try:
        loose, folders = list_folder(folder, suffixes, ignored)
        above = folders_above(folder)
    except OSError as error:
        raise _unreadable(folder, [f"{printable(folder)} ({error.strerror or error})"]) from error
    pictures: dict[str, list[str]] = {}
    others: dict[str, Ignored] = {}
    for name in folders:
        path, others[name] = os.path.join(folder, name), Ignored()
        pictures[name] = list(files_below(path, suffixes, others[name], above=above))
        ignored.add(others[name])
        if _leads_up(path, above):  # named already
            del pictures[name]
    if any(pictures.values()):
        _check_classes(folder, pictures, others)
        ignored.outside = len(loose)
        labels = [label for label, name in enumerate(pictures) for _ in pictures[name]]
        paths = [path for name in pictures for path in pictures[name]]
        return PictureFolder([_class_name(name) for name in pictures], paths, labels, ignored)
    if not loose:
        if ignored.unreadable:
            raise _unreadable(folder, ignored.unreadable)
        found = f"holds no pictures ({ignored})" if ignored else "holds no pictures" if folders else "is empty"
        raise FileNotFoundError(
            f"--data_path {printable(folder)}: {found}; give a folder with one subfolder of pictures a class, or with "
            "pictures directly inside (.jpg, .png, .webp or any other suffix that Pillow knows)"
        )
    paths = [os.path.join(folder, name) for name in loose]
    return PictureFolder([_class_name(os.path.basename(os.path.abspath(folder)))], paths, [0] * len(paths), ignored)


def _leads_up(path: str, above: frozenset[Any]) -> bool:
    try:
        return identity_of(path) in above
    except OSError:
        return False


def _class_name(name: str) -> str:
    """Return a folder's name as text: bytes that are not UTF-8 are escaped, because checkpoints and logs hold text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _unreadable(folder: str, folders: list[str]) -> ValueError:
    return ValueError(
        f"--data_path {printable(folder)}: folders can't be read: {name_few(folders)}; allow it (chmod -R u+rX) or "
        "move them away"
    )


def _check_classes(folder: str, pictures: dict[str, list[str]], others: dict[str, Ignored]) -> None:
    """Raise ValueError if the folders in ``folder`` are splits, or one has no pictures. others: what else each one
    holds."""
    splits = [name for name in pictures if name.lower() in ("train", "val", "valid", "validation", "test")]
    if "train" in splits and len(splits) == len(pictures):
        train = os.path.join(folder, "train")
        if all(os.path.dirname(path) != train for path in pictures["train"]):
            raise ValueError(
                f"--data_path {printable(folder)}: holds splits, not classes; pass --data_path "
                + shlex.quote(printable(train))
            )
    empty = [name for name, paths in pictures.items() if not paths]
    unreadable = [line for name in empty for line in others[name].unreadable]
    if unreadable:
        raise _unreadable(folder, unreadable)
    if empty:
        found = [printable(name) + (f" ({others[name]})" if others[name] else "") for name in empty]
        raise ValueError(
            f"--data_path {printable(folder)}: no pictures in the class folders {name_few(found)}; remove these "
            "folders or fill them"
        )


def check_headers(folder: str, paths: Sequence[str], max_bad: float) -> None:
    """Open up to 2,000 pictures spread evenly over ``paths``, headers only.

    Raises ValueError naming the first few if all of them, or more than the share ``max_bad``, can't be opened.
    """
    picture_suffixes()  # Pillow's formats are not left to the threads, which would race to register them
    rows = spread(len(paths), CHECKED_HEADERS)
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:  # a network disk answers eight as fast as one
        warnings.simplefilter("ignore")  # Pillow warns of large and odd files; whether one is usable shows anyway
        found = list(pool.map(check_header, [paths[row] for row in rows]))
    bad = [f"{printable(paths[row])}: {why}" for row, why in zip(rows, found, strict=True) if why is not None]
    if len(bad) > max_bad * len(rows):
        share = "none can be read" if len(bad) == len(rows) else f"{len(bad):,} can't be read, more than {max_bad:.0%}"
        raise ValueError(
            f"--data_path {printable(folder)}: of {len(rows):,} pictures checked {share} ({name_few(bad)}); remove or "
            "repair them"
        )


class FolderDataset(MediaDataset):
    """Pictures in folders as (3, image_size, image_size) in [-1, 1]; mirrored at random by default. Pillow decodes
    them in the worker process."""

    def __init__(
        self,
        folder: str,
        image_size: int,
        *,
        seed: int = 0,
        random_flip: bool | None = None,
        random_crop: bool = False,
        max_bad: float = 0.05,
    ):
        self.class_names, paths, labels, self.ignored = find_pictures(folder)
        check_headers(folder, paths, max_bad)
        self.folder, self.paths, self.labels = folder, PathTable(paths), np.array(labels, dtype=np.int64)
        self.sample_shape = (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip, self.random_crop = True if random_flip is None else random_flip, random_crop

    def __len__(self) -> int:
        return len(self.paths)

    def source(self, row: int) -> str:
        return self.paths[row]

    def read(self, row: int, view: View = PLAIN) -> Item:
        path = self.paths[row]
        size = bytes_of(path)
        picture = retried_disk(path, partial(read_picture, path))
        _, height, width = view.shape or self.sample_shape
        x = to_tensor(fill_crop(picture, height, width, view.place), view.flip, view.as_bytes)
        return Item(x, int(self.labels[row]), bytes_read=size)

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return of_picture(read_picture(self.paths[row]))

    def shapes(self) -> Shapes:
        return Shapes(media=lambda: sizes_of(self, self._media_size))

    def _media_size(self, row: int) -> Size:
        return 1, *picture_size(self.paths[row])

    def _largest_label(self) -> tuple[int, str]:
        row = int(self.labels.argmax())
        return int(self.labels[row]), self.source(row)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, lambda: hash_files(self.paths))

    def _identity(self) -> str:
        # Paths are joined to the folder: what is before them is cut off, which takes a second for a million.
        before = os.fsencode(os.path.join(self.folder, ""))
        names = b"\0".join(name.removeprefix(before) for name in self.paths.encoded())
        return hash_parts("folder", "\0".join(self.class_names), names, self.labels.tobytes())

    def describe(self) -> Description:
        c, h, w = self.sample_shape
        count = len(self.class_names)
        classes = f"{count:,} class{'es' if count > 1 else ''}"
        note = f"; {self.ignored}" if self.ignored else ""
        folder, mirrored = printable(self.folder), flip_note(self.random_flip)
        return Description(
            text=f"{folder}: {len(self):,} pictures of {classes}, {c}x{h}x{w}, {mirrored}{note}",
            class_names=self.class_names,
            sample_shape=self.sample_shape,
            random_flip=self.random_flip,
            random_crop=self.random_crop,
            seed=self.seed,
            max_bad=self.max_bad,
            largest_label=self._largest_label,
        )
