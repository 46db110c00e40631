"""Find, check and read pictures in folders."""

import os
import shlex
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from opendit.common.utils import hash_parts
from opendit.data.base import (
    PLAIN,
    BadSample,
    Description,
    Fingerprint,
    Item,
    Shapes,
    Size,
    View,
    flip_note,
    name_few,
)
from opendit.data.contents import hash_files
from opendit.data.files import bytes_of, in_threads, printable, retried_disk
from opendit.data.folders import Ignored, files_below, folders_above, identity_of, list_folder
from opendit.data.medium import Medium, of_picture
from opendit.data.picture_file import opened_picture, picture_size, picture_suffixes, read_picture
from opendit.data.pictures_and_clips import PicturesAndClips, sizes_of
from opendit.data.row_arrays import TextTable, spread

CHECKED_HEADERS = 2000


class PictureFolder(NamedTuple):
    """Contents of a folder of pictures: class names, sorted paths, labels, and ignored files."""

    class_names: list[str]
    paths: list[str]
    labels: list[int]
    ignored: Ignored


def find_pictures(folder: str) -> PictureFolder:
    """Find the pictures of a folder.

    Every subfolder is a class with the subfolder's name, and is searched to any depth. A folder with pictures and no
    subfolder is a single class. Raises FileNotFoundError if there are no pictures, and ValueError for a folder that
    can't be read, a class without pictures, or subfolders that are splits (train, val). Errors name the flag and the
    fix."""
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
        if _leads_up(path, above):  # already listed in ``ignored``
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
    """Return a folder's name as valid UTF-8 for checkpoints and logs. Invalid bytes are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _unreadable(folder: str, folders: list[str]) -> ValueError:
    return ValueError(
        f"--data_path {printable(folder)}: folders can't be read: {name_few(folders)}; allow it (chmod -R u+rX) or "
        "move them away"
    )


def _check_classes(folder: str, pictures: dict[str, list[str]], others: dict[str, Ignored]) -> None:
    """Raise ValueError if the subfolders are splits, or if a subfolder has no pictures.

    others: ignored files of each subfolder."""
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
    """Read the headers of up to 2,000 evenly spaced pictures of ``paths``.

    Raises ValueError, naming a few bad files, if more than the fraction ``max_bad`` can't be opened."""
    picture_suffixes()  # register Pillow's formats once, because the threads below would race to do it
    rows = spread(len(paths), CHECKED_HEADERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large and odd files even if they are usable
        bad = [why for why in in_threads(_why_not, [paths[row] for row in rows]) if why is not None]
    if len(bad) > max_bad * len(rows):
        share = "none can be read" if len(bad) == len(rows) else f"{len(bad):,} can't be read, more than {max_bad:.0%}"
        raise ValueError(
            f"--data_path {printable(folder)}: of {len(rows):,} pictures checked {share} ({name_few(bad)}); remove or "
            "repair them"
        )


def _why_not(path: str) -> str | None:
    try:
        with opened_picture(path):
            return None
    except BadSample as bad:
        return str(bad)


class FolderDataset(PicturesAndClips):
    """Pictures in one folder per class, or in a single folder. By default they are mirrored at random.

    options: see ``PicturesAndClips``, which also describes the samples."""

    def __init__(self, folder: str, image_size: int, *, random_flip: bool | None = None, **options: Any):
        super().__init__(image_size, random_flip=random_flip is None or random_flip, **options)
        self.class_names, paths, labels, self.ignored = find_pictures(folder)
        check_headers(folder, paths, self.max_bad)
        self.folder, self.paths, self.labels = folder, TextTable.of(paths), np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def source(self, row: int) -> str:
        return self.paths[row]

    def read(self, row: int, view: View = PLAIN) -> Item:
        path = self.paths[row]
        item = self.picture_sample(retried_disk(path, partial(read_picture, path)), view)
        return item._replace(y=self.label(row), bytes_read=bytes_of(path))

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
        return self.label(row), self.source(row)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, lambda: hash_files(self.paths))

    def _identity(self) -> str:
        # Hash paths relative to the folder. Removing the folder's prefix as text takes only a second for a million
        # paths.
        before = os.path.join(self.folder, "").encode("utf-8", "surrogateescape")
        names = b"\0".join(name.removeprefix(before) for name in self.paths.encoded())
        return hash_parts("folder", "\0".join(self.class_names), names, self.labels.tobytes())

    def describe(self) -> Description:
        count = len(self.class_names)
        classes = f"{count:,} class{'es' if count > 1 else ''}"
        note = f"; {self.ignored}" if self.ignored else ""
        shape = "x".join(map(str, self.sample_shape))
        folder, mirrored = printable(self.folder), flip_note(self.random_flip)
        text = f"{folder}: {len(self):,} pictures of {classes}, {shape}, {mirrored}{note}"
        return self.description(text, class_names=self.class_names, largest_label=self._largest_label)
