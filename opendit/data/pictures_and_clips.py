"""Data sets of picture and clip files, in folders or listed by a table.

The sizes of media are read from files' headers once per machine and then cached."""

import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from opendit.common.progress import Progress
from opendit.common.utils import hash_parts
from opendit.data.base import (
    PLAIN,
    BadSample,
    ClipReading,
    Description,
    Fingerprint,
    Item,
    MediaDataset,
    Medium,
    Shapes,
    Size,
    Small,
    View,
    count_media,
    flip_note,
    of_picture,
)
from opendit.data.captioned_media import SUFFIXES, USUAL, CaptionedFiles, Columns, TableRow, find_captions, read_table
from opendit.data.clips import Crop, as_file, check_window, clip_rate, clip_size, open_clip, read_clip
from opendit.data.container_header import table_parts
from opendit.data.files import (
    Ignored,
    bytes_of,
    files_below,
    folders_above,
    hash_files,
    identity_of,
    in_threads,
    list_folder,
    name_few,
    printable,
    problem,
    retried_disk,
    spread,
)
from opendit.data.picture_file import fill_crop, opened_picture, picture_size, picture_suffixes, read_picture, to_tensor
from opendit.data.row_arrays import TextTable, kept_array
from opendit.data.sources import Request
from opendit.data.video_files import Timeline, choose_reader

PICTURE, CLIP = 0, 1  # shape keys
CHECKED_FILES = 2000  # maximum files to check when a data set is opened
CHECKED_CLIPS, DECODED_FILES = 200, 100  # see ``_readable``


class PicturesAndClips(MediaDataset):
    """Base class of data sets of pictures and clips.

    Samples are in [-1, 1]. Without ``use_video`` they are pictures (3, image_size, image_size), and clips are left out.
    With ``use_video`` they are clips (3, num_frames, image_size, image_size), and pictures are clips of one frame.

    Args:
        num_frames, frame_interval, fps, short_clips, video_reader: see ``read_clip``.
        random_flip: None means False, because captions may mention left and right.
        training: True draws a random window of each clip, False uses the middle one.

    Raises ValueError, naming the flag, for invalid settings of clips and for a reader that does not work."""

    rated = 32  # clips to read for estimating frame rates
    size_threads = 8  # threads that read sizes of media

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
        # Choose the reader before forking workers, so that the run's first log lines name the reader.
        self.video_reader, self.why_reader = choose_reader(video_reader) if use_video else ("", "")
        self.use_video, self.image_size = use_video, image_size
        self.sample_shape = (3, num_frames, image_size, image_size) if use_video else (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip, self.random_crop = bool(random_flip), random_crop
        self.random_window = training and use_video

    def description(self, text: str, **fields: Any) -> Description:
        clips = None
        if self.use_video:
            names = "num_frames frame_interval short_clips fps".split()
            clips = ClipReading(**{name: getattr(self, name) for name in names})
        names = "sample_shape random_flip random_crop random_window seed max_bad".split()
        return Description(text=text, clips=clips, **{name: getattr(self, name) for name in names} | fields)

    def picture_sample(self, picture: Image.Image, view: View) -> Item:
        height, width = view.shape[1:] if view.shape else (self.image_size, self.image_size)
        pixels = to_tensor(fill_crop(picture, height, width, view.place), view.flip, view.as_bytes)
        return Item(pixels[:, None] if self.use_video else pixels)

    def clip_sample(self, path: str, view: View, name: str | None = None) -> Item:
        """Read a window of the clip in a file. name: the file's name in messages. Raises BadSample."""
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
        small = Small(clip.shape[-2], clip.shape[-1], view.flip)  # mirrored after enlarging
        return Item(clip, shortened=shortened, small=small, whole=(height, width))

    @property
    def frames_of(self) -> Callable[[Timeline], int] | None:
        """Function that counts a clip's frames at ``fps``; None to count all frames in the file. With
        ``short_clips="interval"``, all frames of a short clip count."""
        if self.fps is None:
            return None
        fps, all_count = self.fps, self.short_clips == "interval"
        return lambda timeline: max(timeline.count(fps), len(timeline.seconds) if all_count else 0)

    def media_size(self, row: int) -> Size:
        """Return the size of a row's file. May be called in several threads. Raises BadSample."""
        raise NotImplementedError

    def media_sizes(self) -> np.ndarray:
        """Return (rows, 3) int32, every row's media size, cached on the machine. Unreadable media have zeros."""

        def name() -> str:
            known = self.fingerprint()
            return hash_parts(SIZES, known.identity, known.contents or "", self.shapes().read_as)

        return kept_array(len(self), name, self._find_sizes, least=0)

    def _find_sizes(self) -> np.ndarray:
        picture_suffixes()  # register Pillow's formats now, because the threads below would race
        rows = len(self)
        found = np.zeros((rows, 3), dtype=np.int32)

        def find(row: int) -> None:
            with suppress(BadSample):
                found[row] = self.media_size(row)

        few = rows <= _ROWS
        with ThreadPoolExecutor(self.size_threads) as pool, Progress(rows, "files", title="sizes", disable=few) as bar:
            for first in range(0, rows, _ROWS):
                part = range(first, min(rows, first + _ROWS))
                list(pool.map(find, part))
                bar.update(len(part))
        return found

    def media_shapes(self, keys: np.ndarray | int) -> Shapes:
        read_as = "" if self.fps is None else f"{self.fps!r} {self.short_clips}"
        return Shapes(keys=keys, media=self.media_sizes, read_as=read_as, frame_rates=partial(self._frame_rates, keys))

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
        interval = f", frame interval {self.frame_interval}" if self.frame_interval > 1 else ""
        if self.fps is not None:
            interval = f", {self.fps:g} frames a second"
        if interval and self.short_clips == "interval":
            interval += f" ({'smaller' if self.fps is None else 'more'} where a clip is too short)"
        return f"{interval}, read by {self.video_reader} ({self.why_reader})"


SIZES = "sizes as shown, of animations as clips"  # part of the cache key; change it with the definition of sizes
HEAD = 1 << 16  # bytes that nearly always contain a picture's header
_WHOLE = 4 * HEAD  # clips with fewer bytes are read completely
_ROWS = 4096  # rows between two updates of the progress bar


def file_size(path: str, is_picture: bool, count: Callable[[Timeline], int] | None = None) -> Size:
    """Return the :data:`Size` of the picture or clip in a file. count: see ``clip_size``. Raises BadSample."""
    return (1, *picture_size(path)) if is_picture else clip_size(path, count=count)


def stored_size(
    name: str,
    size: int,
    read: Callable[[int, int], bytes],
    is_picture: bool,
    count: Callable[[Timeline], int] | None = None,
) -> Size:
    """Return the :data:`Size` of a picture or clip inside another file. If possible, only a picture's header or an
    MP4's tables and first frame are read.

    size: the medium's bytes. read: function (offset, count) -> bytes. count: see ``clip_size``. Raises BadSample."""
    with suppress(BadSample):  # the header is longer, or the decoder needs all bytes
        if is_picture and size > HEAD:
            return (1, *picture_size(name, content=read(0, HEAD)))
        if not is_picture and size > _WHOLE and (parts := table_parts(read, size, HEAD)) is not None:
            with as_file(parts, size) as path:
                return clip_size(path, whole=False, count=count)
    if is_picture:
        return (1, *picture_size(name, content=read(0, size)))
    with as_file([(0, read(0, size))], size) as path:
        return clip_size(path, count=count)


def column_size(extra: dict[str, str], is_picture: bool) -> Size | None:
    """Return the size from a table row's columns height, width and, for a clip, num_frames; None if invalid."""
    try:
        frames = 1 if is_picture else int(extra["num_frames"])
        found = frames, int(extra["height"]), int(extra["width"])
    except (KeyError, ValueError):
        return None
    return found if min(found) > 0 and max(found) < 2**31 else None


class PictureFolder(NamedTuple):
    """A folder's pictures, sorted by path."""

    class_names: list[str]
    paths: list[str]
    labels: list[int]
    ignored: Ignored


def find_pictures(folder: str) -> PictureFolder:
    """Find the pictures in a folder. Every subfolder is a class and is searched to any depth. If no subfolder has
    pictures, the folder itself is a single class.

    Raises FileNotFoundError if there are no pictures. Raises ValueError for an unreadable folder, a class without
    pictures, or subfolders that are splits."""
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
        with suppress(OSError):
            if identity_of(path) in above:  # already listed in ``ignored``
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


def _class_name(name: str) -> str:
    """Return a folder's name as valid UTF-8, with invalid bytes escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _unreadable(folder: str, folders: list[str]) -> ValueError:
    return ValueError(
        f"--data_path {printable(folder)}: folders can't be read: {name_few(folders)}; allow it (chmod -R u+rX) or "
        "move them away"
    )


def _check_classes(folder: str, pictures: dict[str, list[str]], others: dict[str, Ignored]) -> None:
    """Raise ValueError if subfolders are splits, or if one has no pictures. others: ignored files per subfolder."""
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


def _try_some(count: int, most: int, read: Callable[[int], object]) -> tuple[int, dict[int, str]]:
    """Call ``read`` for up to ``most`` evenly spaced rows. Return (number of rows, row -> BadSample's message)."""
    picture_suffixes()  # register Pillow's formats now, because the threads below would race
    rows, bad = spread(count, most), {}

    def try_one(row: int) -> None:
        try:
            read(row)
        except BadSample as error:
            bad[row] = str(error)

    in_threads(try_one, rows)
    return len(rows), dict(sorted(bad.items()))


def _open_header(path: str) -> None:
    with opened_picture(path):
        pass


def _check_presence(path: str) -> None:
    if (why := problem(path)) is not None:
        raise BadSample(path, why)


def check_files(data_path: str, paths: Sequence[str], max_bad: float, read: Callable[[str], object], fix: str) -> None:
    """Check up to ``CHECKED_FILES`` evenly spaced files. read: raises BadSample for a bad file.

    Raises ValueError, naming a few bad files and the ``fix``, if more than the fraction ``max_bad`` is bad."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large and odd files even if they are usable
        tried, bad = _try_some(len(paths), CHECKED_FILES, lambda row: read(paths[row]))
    if len(bad) > max_bad * tried:
        share = "none can be read" if len(bad) == tried else f"{len(bad):,} can't be read, more than {max_bad:.0%}"
        shown = f"--data_path {printable(data_path)}"
        raise ValueError(f"{shown}: of {tried:,} files checked {share} ({name_few([*bad.values()])}); {fix}")


class MediaFiles(PicturesAndClips):
    """Data set with one file per row. ``keys`` is PICTURE or CLIP for each row."""

    paths: TextTable
    keys: np.ndarray | int = PICTURE

    def _is_picture(self, row: int) -> bool:
        return bool((self.keys if isinstance(self.keys, int) else self.keys[row]) == PICTURE)

    def __len__(self) -> int:
        return len(self.paths)

    def source(self, row: int) -> str:
        return self.paths[row]

    def read(self, row: int, view: View = PLAIN) -> Item:
        path = self.paths[row]
        size = bytes_of(path)
        if self._is_picture(row):
            item = self.picture_sample(retried_disk(path, partial(read_picture, path)), view)
        else:
            item = retried_disk(path, partial(self.clip_sample, path, view))
        return item._replace(bytes_read=size)

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        path = self.paths[row]
        return of_picture(read_picture(path)) if self._is_picture(row) else open_clip(path)

    def media_size(self, row: int) -> Size:
        return file_size(self.paths[row], self._is_picture(row), self.frames_of)

    def rate_at(self, row: int) -> float:
        return clip_rate(self.paths[row])

    def shapes(self) -> Shapes:
        return self.media_shapes(self.keys)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, lambda: hash_files(self.paths))

    def _identity(self) -> str:
        raise NotImplementedError


class FolderDataset(MediaFiles):
    """Pictures in one folder per class, or in a single folder. By default they are mirrored at random."""

    def __init__(self, folder: str, image_size: int, *, random_flip: bool | None = None, **options: Any):
        super().__init__(image_size, random_flip=random_flip is None or random_flip, **options)
        self.class_names, paths, labels, self.ignored = find_pictures(folder)
        check_files(folder, paths, self.max_bad, _open_header, "remove or repair them")
        self.folder, self.paths, self.labels = folder, TextTable.of(paths), np.array(labels, dtype=np.int64)

    def read(self, row: int, view: View = PLAIN) -> Item:
        return super().read(row, view)._replace(y=self.label(row))

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def _largest_label(self) -> tuple[int, str]:
        row = int(self.labels.argmax())
        return self.label(row), self.source(row)

    def _identity(self) -> str:
        # Hash paths relative to the folder. Removing the prefix as text takes a second for a million paths.
        before = os.path.join(self.folder, "").encode("utf-8", "surrogateescape")
        names = b"\0".join(name.removeprefix(before) for name in self.paths.encoded())
        return hash_parts("folder", "\0".join(self.class_names), names, self.labels.tobytes())

    def describe(self) -> Description:
        count, note = len(self.class_names), f"; {self.ignored}" if self.ignored else ""
        classes, shape = f"{count:,} class{'es' if count > 1 else ''}", "x".join(map(str, self.sample_shape))
        what = f"{len(self):,} pictures of {classes}, {shape}, {flip_note(self.random_flip)}{note}"
        text = f"{printable(self.folder)}: {what}"
        return self.description(text, class_names=self.class_names, largest_label=self._largest_label)


class CaptionedDataset(MediaFiles):
    """Data set from a table ``path,text``, or from a folder's captioned files ``found``. columns: names of the table's
    columns. Raises ValueError or FileNotFoundError, naming the flag and the fix."""

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
        self.paths = TextTable.of([str(row.path) for row, _ in used])
        self.texts = TextTable.of([row.text for row, _ in used])
        self.keys = np.array([PICTURE if is_picture else CLIP for _, is_picture in used], dtype=np.uint8)
        sizes = [column_size(row.extra, is_picture) or (0, 0, 0) for row, is_picture in used]
        self.column_sizes = np.array(sizes, dtype=np.int32)  # from the table's columns height, width and num_frames
        if found is None:
            fix = "remove or restore them; paths are relative to the table's folder, $HOME and \\ are not replaced"
            check_files(self.path, self.paths, self.max_bad, _check_presence, fix)

    def read(self, row: int, view: View = PLAIN) -> Item:
        return super().read(row, view)._replace(text=self.texts[row])

    def media_size(self, row: int) -> Size:
        size = tuple(self.column_sizes[row].tolist())
        # With ``fps``, the number of frames depends on the clip's duration, which the table lacks.
        usable = min(size) > 0 and (self._is_picture(row) or self.fps is None)
        return size if usable else super().media_size(row)

    def caption(self, row: int) -> str:
        return self.texts[row]

    def _files(self) -> list[tuple[int, np.ndarray | None]]:
        numbers: dict[str, int] = {}
        return [(len(self), np.array([numbers.setdefault(path, len(numbers)) for path in self.paths]))]

    def _identity(self) -> str:
        names = "\0".join(os.path.relpath(path, self.folder) for path in self.paths)
        return hash_parts("captioned", names, "\0".join(self.texts), np.asarray(self.keys).tobytes())

    def describe(self) -> Description:
        counted = ((len(self), 1_000_000),)  # many captions can be checked, because they are in memory
        more: dict[str, Any] = {"counted_captions": counted, "files": self._files, "notes": self.notes}
        return self.description(self._text(), conditioning="text", **more)

    def _text(self) -> str:
        clips = int(np.sum(np.equal(self.keys, CLIP)))
        note = f" ({self.left_out:,} clips left out: no --use_video)" if self.left_out else ""
        shape = "x".join(map(str, self.sample_shape))
        window = self.window_note() if clips else ""
        what = f"{count_media(clips, len(self) - clips)} with captions{self.captions_of}{note}, {shape}{window}"
        return f"{printable(self.path)}: {what}, {flip_note(self.random_flip)}"


def _with_kinds(rows: list[TableRow], use_video: bool) -> list[tuple[TableRow, bool]]:
    if not use_video:
        return [(row, row.is_named_picture) for row in rows]
    picture_suffixes()  # register Pillow's formats now, because the threads below would race
    return list(zip(rows, in_threads(lambda row: row.is_picture, rows), strict=True))


def _readable(rows: list[tuple[TableRow, bool]], path: str) -> tuple[list[tuple[TableRow, bool]], list[str]]:
    """Return (rows with readable files, lines for the log about unreadable files).

    Up to 2,000 evenly spaced files are tried, or 200 if there are clips. If there are at most 100 rows, pictures are
    decoded; otherwise only sizes are read. Raises ValueError if all tried files are unreadable."""

    def read(at: int) -> None:
        row, is_picture = rows[at]
        name = str(row.path)
        whole = is_picture and len(rows) <= DECODED_FILES
        retried_disk(name, partial(read_picture, name) if whole else partial(file_size, name, is_picture))

    most = CHECKED_FILES if all(is_picture for _, is_picture in rows) else CHECKED_CLIPS
    tried, bad = _try_some(len(rows), most, read)
    if len(bad) == tried:
        raise ValueError(
            f"--data_path {printable(path)}: none of {tried:,} files can be read ({name_few([*bad.values()])}); "
            "repair or remove them"
        )
    among = "" if tried == len(rows) else f" among {tried:,} that were tried"
    lines = [f"left out {len(bad):,} files that can't be read{among}: {name_few([*bad.values()])}"] if bad else []
    return [row for at, row in enumerate(rows) if at not in bad], lines


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
