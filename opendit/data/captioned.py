"""Pictures and clips with captions, from a table or a folder, and folders that no other source recognises."""

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from opendit.data.captioned_folder import CaptionedFiles, find_captions
from opendit.data.clips import clip_rate, open_clip
from opendit.data.contents import hash_files
from opendit.data.files import bytes_of, in_threads, printable, problem, retried_disk
from opendit.data.images import FolderDataset
from opendit.data.medium import Medium, of_picture
from opendit.data.picture_file import picture_suffixes, read_picture
from opendit.data.pictures_and_clips import CLIP, PICTURE, PicturesAndClips, column_size, file_size, sizes_of
from opendit.data.row_arrays import TextTable, spread
from opendit.data.sources import Request
from opendit.data.tables import SUFFIXES, USUAL, Columns, TableRow, read_table

CHECKED_FILES = 2000
CHECKED_CLIPS, DECODED_FILES = 200, 100  # numbers of files that ``_readable`` reads in a folder


class CaptionedDataset(PicturesAndClips):
    """Data set of the rows of a table ``path,text``, or of a folder of captioned files (``found``).

    columns: names of the table's columns. image_size, options: see ``PicturesAndClips``, which describes the samples.

    Raises ValueError or FileNotFoundError, naming the flag and the fix."""

    def __init__(
        self,
        path: str | Path,
        image_size: int,
        *,
        columns: Columns = USUAL,
        found: CaptionedFiles | None = None,
        **options: Any,
    ):
        super().__init__(image_size, **options)
        rows = _with_kinds(read_table(path, columns=columns) if found is None else found.rows, self.use_video)
        used = [(row, is_picture) for row, is_picture in rows if self.use_video or is_picture]
        if not used:
            raise ValueError(f"--data_path {printable(path)}: holds clips only; add --use_video")
        self.path, self.left_out, self.notes, self.captions_of = str(path), len(rows) - len(used), (), ""
        self.folder = str(path) if found else os.path.dirname(path) or "."
        if found is not None:
            used, unreadable = _readable(used, self.path)
            self.notes, self.captions_of = (*found.lines(), *unreadable), f" ({found.shown_sources()})"
        self.paths, self.texts = (
            TextTable.of([str(row.path) for row, _ in used]),
            TextTable.of([row.text for row, _ in used]),
        )
        self.keys = np.array([PICTURE if is_picture else CLIP for _, is_picture in used], dtype=np.uint8)
        sizes = [column_size(row.extra, is_picture) or (0, 0, 0) for row, is_picture in used]
        self.column_sizes = np.array(sizes, dtype=np.int32)  # from the table's columns height, width and num_frames
        if found is None:
            check_files(self.path, self.paths, self.max_bad)

    def __len__(self) -> int:
        return len(self.paths)

    def source(self, row: int) -> str:
        return self.paths[row]

    def read(self, row: int, view: View = PLAIN) -> Item:
        path = self.paths[row]
        size = bytes_of(path)
        if self.keys[row] == PICTURE:
            item = self.picture_sample(retried_disk(path, partial(read_picture, path)), view)
        else:
            item = retried_disk(path, partial(self.clip_sample, path, view))
        return item._replace(text=self.texts[row], bytes_read=size)

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return of_picture(read_picture(self.paths[row])) if self.keys[row] == PICTURE else open_clip(self.paths[row])

    def media_size(self, row: int) -> Size:
        picture, size = bool(self.keys[row] == PICTURE), tuple(self.column_sizes[row].tolist())
        # The table lacks a clip's duration, from which ``fps`` determines the number of frames.
        usable = min(size) > 0 and (picture or self.fps is None)
        return size if usable else file_size(self.paths[row], picture, self.frames_of)

    def rate_at(self, row: int) -> float:
        return clip_rate(self.paths[row])

    def caption(self, row: int) -> str:
        return self.texts[row]

    def shapes(self) -> Shapes:
        return self.media_shapes(self.keys, lambda: sizes_of(self, self.media_size))

    def _files(self) -> list[tuple[int, np.ndarray | None]]:
        numbers: dict[str, int] = {}
        return [(len(self), np.array([numbers.setdefault(path, len(numbers)) for path in self.paths]))]

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, lambda: hash_files(self.paths))

    def _identity(self) -> str:
        names = "\0".join(os.path.relpath(path, self.folder) for path in self.paths)
        return hash_parts("captioned", names, "\0".join(self.texts), self.keys.tobytes())

    def describe(self) -> Description:
        counted = ((len(self), 1_000_000),)  # check many captions, because they are in memory
        more: dict[str, Any] = {"counted_captions": counted, "files": self._files, "notes": self.notes}
        return self.description(self._text(), conditioning="text", **more)

    def _text(self) -> str:
        clips = int((self.keys == CLIP).sum())
        parts = [f"{count:,} {name}" for count, name in ((clips, "clips"), (len(self) - clips, "pictures")) if count]
        note = f" ({self.left_out:,} clips left out: no --use_video)" if self.left_out else ""
        shape = "x".join(map(str, self.sample_shape))
        window = self.window_note() if clips else ""
        what = f"{' and '.join(parts)} with captions{self.captions_of}{note}, {shape}{window}"
        return f"{printable(self.path)}: {what}, {flip_note(self.random_flip)}"


def _with_kinds(rows: list[TableRow], use_video: bool) -> list[tuple[TableRow, bool]]:
    """Return (row, True if it is a picture) for each row. Without ``use_video`` an animation counts as a picture."""
    if not use_video:
        return [(row, row.is_named_picture) for row in rows]
    picture_suffixes()  # register Pillow's formats once, because the threads below would race to do it
    return list(zip(rows, in_threads(lambda row: row.is_picture, rows), strict=True))


def _readable(rows: list[tuple[TableRow, bool]], path: str) -> tuple[list[tuple[TableRow, bool]], list[str]]:
    """Return the rows except those whose files turned out to be unreadable, and a line about the unreadable files.

    If there are at most 100 files, pictures are decoded. Otherwise the headers of evenly spaced files are read: up to
    2,000 files if all are pictures, up to 200 if there are clips.

    Raises ValueError if no file that was tried can be read."""

    def why_not(row: TableRow, is_picture: bool) -> str | None:
        name = str(row.path)
        whole = is_picture and len(rows) <= DECODED_FILES
        try:
            retried_disk(name, partial(read_picture, name) if whole else partial(file_size, name, is_picture))
        except BadSample as bad:
            return str(bad)
        return None

    picture_suffixes()  # register Pillow's formats once, because the threads below would race to do it
    tried = spread(len(rows), CHECKED_FILES if all(is_picture for _, is_picture in rows) else CHECKED_CLIPS)
    found = in_threads(lambda at: why_not(*rows[at]), tried)
    bad = {at: why for at, why in zip(tried, found, strict=True) if why}
    if len(bad) == len(tried):
        raise ValueError(
            f"--data_path {printable(path)}: none of {len(tried):,} files can be read ({name_few([*bad.values()])}); "
            "repair or remove them"
        )
    among = "" if len(tried) == len(rows) else f" among {len(tried):,} that were tried"
    lines = [f"left out {len(bad):,} files that can't be read{among}: {name_few([*bad.values()])}"] if bad else []
    return [row for at, row in enumerate(rows) if at not in bad], lines


def check_files(csv_path: str, paths: Sequence[str], max_bad: float) -> None:
    """Check that up to 2,000 evenly spaced files of ``paths`` exist and are regular files, without opening them.

    Raises FileNotFoundError if none exists, and ValueError if more than the fraction ``max_bad`` is missing."""
    rows = spread(len(paths), CHECKED_FILES)
    found = in_threads(problem, [paths[row] for row in rows])
    missing = [f"{printable(paths[row])} ({why})" for row, why in zip(rows, found, strict=True) if why is not None]
    name = f"--data_path {printable(csv_path)}"
    hints = "".join(
        hint
        for sign, hint in (("$", " Variables such as $HOME are not replaced."), ("\\", " Folders end with /, not \\."))
        if any(sign in paths[row] for row, why in zip(rows, found, strict=True) if why is not None)
    )
    if len(missing) == len(rows):
        raise FileNotFoundError(
            f"{name}: none of the {len(rows):,} files checked exists: {name_few(missing)}. Paths are absolute or "
            f"relative to the CSV's folder.{hints}"
        )
    if len(missing) > max_bad * len(rows):
        raise ValueError(
            f"{name}: of {len(rows):,} files checked {len(missing):,} are missing, more than {max_bad:.0%}: "
            f"{name_few(missing)}. Restore them or remove their rows.{hints}"
        )


def open_source(asked: Request) -> CaptionedDataset | FolderDataset | None:
    if asked.located.is_dir():
        return _open_folder(asked)
    if asked.located.suffix.lower() not in SUFFIXES:
        return None
    return CaptionedDataset(asked.located, asked.image_size, columns=asked.columns, **asked.of_clips())


def _open_folder(asked: Request) -> CaptionedDataset | FolderDataset:
    """Open a folder of pictures or clips: with captions if there are any, else with classes."""
    path = str(asked.located)
    found = find_captions(asked.located, columns=asked.columns, bare=bool(asked.caption_prefix))
    if any(asked.columns) and found.table is None:
        raise ValueError(
            f"{asked.shown}: holds no metadata.jsonl, .csv or .parquet; leave --file_column and --caption_column out"
        )
    if found.has_captions:
        if not found.rows:
            raise ValueError(f"{asked.shown}: no picture or clip has a caption ({'; '.join(found.lines())}); add some")
        return CaptionedDataset(path, asked.image_size, found=found, **asked.of_clips())
    if asked.use_video:
        raise ValueError(
            f"{asked.shown}: is a folder without captions; --use_video needs clip.txt beside clip.mp4, or "
            "metadata.jsonl with file_name and text; to take the folders' names run: python preprocess.py folder "
            f"{shlex.quote(printable(asked.data_path))} --output videos.csv"
        )
    asked.check_split()
    options = {name: getattr(asked, name) for name in ("seed", "random_flip", "random_crop", "max_bad")}
    return FolderDataset(path, asked.image_size, **options)
