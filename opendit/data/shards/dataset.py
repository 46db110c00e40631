"""The data set of indexed tars."""

import io
import shlex
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.json_file import parse_json
from opendit.common.json_models import checked
from opendit.common.utils import DataError, hash_parts
from opendit.data.base import (
    PLAIN,
    USUALLY_COUNTED,
    BadSample,
    Description,
    Fingerprint,
    Item,
    Medium,
    Shapes,
    Size,
    View,
    count_media,
    flip_note,
    of_picture,
)
from opendit.data.clips import as_file, clip_rate, open_clip
from opendit.data.files import Ignored, Verification, allow_open_files, list_folder, name_few, printable
from opendit.data.order import RowsByKey
from opendit.data.picture_file import MAX_WHOLE_FILE, is_animated, picture_suffixes, read_picture
from opendit.data.pictures_and_clips import (
    CLIP,
    PICTURE,
    PicturesAndClips,
    stored_size,
)
from opendit.data.row_arrays import kept_array
from opendit.data.shards.index import (
    ANIMATED,
    CLASS_NAMES,
    MOST_CLASSES,
    NAMES_OF_CLASSES,
    KeptRows,
    Record,
    TarIndex,
    index_of,
    is_clip,
    read_caption,
    read_class_names,
)
from opendit.data.shards.store import (
    ByteRange,
    FileCache,
    LocalTars,
    Remote,
    RemoteTars,
    expand,
    fetch_indexes,
    grouped,
    size_problem,
)
from opendit.data.sources import Request

CHECKED = 1 << 22  # maximum records to check at opening
REMOTE_CAPTIONS = 64  # captions to check before training, for tars at an address
WORDS = {"text": "captions", "label": "classes", "none": "neither captions nor classes"}  # conditioning -> words


@dataclass(frozen=True)
class IndexedTar:
    """A tar and its index."""

    path: str  # or its address
    index: TarIndex
    kept: KeptRows | None = None  # the samples to use; None means all

    def __len__(self) -> int:
        return self.index.header.rows if self.kept is None else len(self.kept.rows)

    def _counted_in_header(self, use_video: bool) -> bool:
        """Return True if ``header.pictures`` is valid for ``use_video``. The header counts animations as clips, but
        they are pictures without ``use_video``."""
        return use_video or not any(suffix.startswith(ANIMATED) for suffix in self.index.header.suffixes)

    def count_pictures(self, use_video: bool) -> int:
        """Return the number of pictures among the samples. use_video: see ``is_clip``."""
        header = self.index.header
        if self._counted_in_header(use_video) and (self.kept is None or header.pictures in (0, header.rows)):
            return min(len(self), header.pictures)
        return int((self.shapes(use_video) == PICTURE).sum())

    def shapes(self, use_video: bool) -> np.ndarray:
        """Return ``PICTURE`` or ``CLIP`` for each sample, uint8. Records are read only if the tar has both kinds."""
        header = self.index.header
        if self._counted_in_header(use_video) and header.pictures in (0, header.rows):
            return np.full(len(self), PICTURE if header.pictures else CLIP, np.uint8)
        kinds = [CLIP if is_clip(suffix, use_video) else PICTURE for suffix in header.suffixes]
        of_suffix = np.array(kinds, np.uint8)
        shapes = of_suffix[self.index.rows["suffix"]]
        return shapes if self.kept is None else shapes[self.kept.rows]


class ShardDataset(PicturesAndClips):
    """Data set of indexed tars, with samples in the order of the tars. The conditioning is by captions or classes.
    Samples with neither have a single class.

    options: see ``PicturesAndClips``, also for the samples' format. random_flip: None mirrors samples with classes
    only, because captions may mention left and right. Raises ValueError, naming the flag and the fix, if the tars can't
    be used."""

    names_file = CLASS_NAMES  # file of the class names, for messages
    empty_captions = False  # True if a caption may be empty
    counted_captions = USUALLY_COUNTED
    note = ""  # appended to the description in the log

    def __init__(
        self,
        shown: str,
        shards: Sequence[IndexedTar],
        image_size: int,
        *,
        store: LocalTars | RemoteTars | None = None,
        class_names: Sequence[str] = (),
        random_flip: bool | None = None,
        **options: Any,
    ):
        super().__init__(image_size, **options)
        if len(shards) > 1:
            allow_open_files()
        self.shown, self.shards = shown, list(shards)
        headers = [shard.index.header for shard in self.shards]
        self.conditioning = conditioning_of(shown, self.shards)
        _check_records(shown, self.shards)
        self.class_names = (
            classes_of(shown, self.shards, class_names, self.names_file) if self.conditioning == "label" else []
        )
        self.store = store or LocalTars([shard.path for shard in shards], [header.tar_bytes for header in headers])
        if isinstance(self.store, RemoteTars):
            self.counted_captions = REMOTE_CAPTIONS
        self.starts = np.cumsum([0, *map(len, self.shards)])
        self._starts = self.starts.tolist()
        self._found: tuple[Any, ...] = (None, None)  # last row of find_record, and its result
        self.pictures = sum(shard.count_pictures(self.use_video) for shard in self.shards)
        self.clips = int(self.starts[-1]) - self.pictures
        if self.clips and not self.pictures and not self.use_video:
            raise ValueError(f"{self.shown}: holds clips only; add --use_video")
        self._kinds: np.ndarray | None = None
        # Maps rows to samples in the tars; None if all samples are used.
        self.used = RowsByKey(self._shapes()) if self.clips and not self.use_video else None
        self.random_flip = self.conditioning == "label" if random_flip is None else random_flip

    def _shapes(self) -> np.ndarray:
        """Return ``PICTURE`` or ``CLIP`` for each sample, uint8. A large array is mapped from a file."""
        if self._kinds is None:
            # An index may be rewritten with other samples, so the name includes modification times.
            written = (str(shard.index.written) for shard in self.shards)
            kinds = "pictures and clips" if self.use_video else "pictures, animations and clips"
            name = partial(hash_parts, kinds, *self._contents(), *written)
            self._kinds = kept_array(int(self.starts[-1]), name, self._find_shapes)
        return self._kinds

    def _find_shapes(self) -> np.ndarray:
        found = np.empty(int(self.starts[-1]), np.uint8)
        for start, shard in zip(self._starts, self.shards, strict=False):
            found[start : start + len(shard)] = shard.shapes(self.use_video)
        return found

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.used is None else self.used.totals[PICTURE]

    def find_record(self, row: int) -> tuple[int, int, Record]:
        """Return (number of the tar, number of the sample in the tar, the sample's record)."""
        last, found = self._found  # used again, for the caption after the picture
        if last != row:
            place = int(row if self.used is None else self.used.select(PICTURE, np.array([row]))[0])
            number = bisect_right(self._starts, place) - 1
            place -= self._starts[number]
            if (kept := self.shards[number].kept) is not None:
                place = int(kept.rows[place])
            found = number, place, self.shards[number].index.record(place)
            self._found = row, found
        return found

    def source(self, row: int) -> str:
        number, place, record = self.find_record(row)
        index = self.shards[number].index
        suffix = index.header.suffixes[record.suffix].removeprefix(ANIMATED)
        return f"{self.shards[number].path}: {index.key(place)}{suffix}"

    def read(self, row: int, view: View = PLAIN) -> Item:
        is_picture, content = self._medium(row)
        return self._labelled(row, (self._picture if is_picture else self._clip)(row, content, view))

    def _medium(self, row: int) -> tuple[bool, Any]:
        """Return (True for a picture, the bytes of its file). Raises BadSample."""
        number, _, record = self.find_record(row)
        return self._is_picture(number, record), self.read_medium(row)

    def _labelled(self, row: int, item: Item) -> Item:
        text, record = self.caption(row), self.find_record(row)[2]
        size = record.medium_bytes + (0 if text is None else record.text_bytes)
        return item._replace(y=self.label(row), text=text, bytes_read=size)

    def prefetch(self, rows: Sequence[int]) -> None:
        if isinstance(self.store, RemoteTars):  # local disks need no prefetching
            self.store.prefetch(group for row in rows for group in grouped(self._ranges(row)))

    def _ranges(self, row: int) -> Iterator[ByteRange]:
        number, _, record = self.find_record(row)
        if not self._is_too_large(number, record):
            yield ByteRange(number, record.medium_at, record.medium_bytes)
        if self.conditioning == "text" and record.text_bytes:
            yield ByteRange(number, record.text_at, record.text_bytes)

    def _is_too_large(self, number: int, record: Record) -> bool:
        return record.medium_bytes > MAX_WHOLE_FILE and self._is_picture(number, record)

    def read_medium(self, row: int) -> bytes:
        """Read and verify the bytes of a sample's picture or clip. Raises BadSample."""
        number, _, record = self.find_record(row)
        if self._is_too_large(number, record):
            raise BadSample(self.source(row), f"a picture of {record.medium_bytes:,} bytes")
        place = number, record.medium_at, record.medium_bytes
        content = self._read(row, *place)
        if self._is_damaged(number, record, content) and self.store.forget(*place):
            content = self._read(row, *place)
        if self._is_damaged(number, record, content):
            raise BadSample(self.source(row), "damaged: its checksum is not the index's")
        return content

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        is_picture, content = self._medium(row)
        if is_picture:
            return of_picture(self._decoded(row, content))
        with as_file([(0, content)], len(content)) as path:
            return open_clip(path)

    def media_size(self, row: int) -> Size:
        number, _, record = self.find_record(row)
        return stored_size(
            self.source(row),
            record.medium_bytes,
            lambda at, size: self._read(row, number, record.medium_at + at, size),
            self._is_picture(number, record),
            self.frames_of,
        )

    rated = 8  # clips for estimating frame rates; few, because they may be at an address

    def rate_at(self, row: int) -> float:
        content = self._medium(row)[1]
        with as_file([(0, content)], len(content)) as path:
            return clip_rate(path)

    def _picture(self, row: int, content: Any, view: View) -> Item:
        return self.picture_sample(self._decoded(row, content), view)

    def _decoded(self, row: int, content: Any) -> Image.Image:
        """Decode a picture. content: from :meth:`_medium`. Raises BadSample."""
        if self.use_video and is_animated(io.BytesIO(content)):
            reason = "an animation that is taken for a picture; run preprocess.py index --force, or cook it as a video"
            raise BadSample(self.source(row), reason)
        try:  # the sample's name is looked up only after an error
            return read_picture("", content=content)
        except BadSample as bad:
            raise BadSample(self.source(row), str(bad).removeprefix(": ")) from bad

    def _clip(self, row: int, content: bytes, view: View) -> Item:
        with as_file([(0, content)], len(content)) as path:
            return self.clip_sample(path, view, self.source(row))

    def _is_damaged(self, number: int, record: Record, content: bytes) -> bool:
        return self.shards[number].index.header.checked and zlib.crc32(content) != record.crc32

    def _read(self, row: int, number: int, at: int, size: int) -> bytes:
        try:
            return self.store.read(number, at, size)
        except OSError as error:
            raise BadSample(self.source(row), error.strerror or error) from error

    def _is_picture(self, number: int, record: Record) -> bool:
        return not is_clip(self.shards[number].index.header.suffixes[record.suffix], self.use_video)

    def label(self, row: int) -> int:
        return max(0, self.find_record(row)[2].label) if self.conditioning == "label" else 0

    def _find_largest_label(self) -> tuple[int, str]:
        label, tar, key = _largest_label(self.shards)
        return label, f"{tar}: {key}"

    def caption(self, row: int) -> str | None:
        if self.conditioning != "text":
            return None
        number, _, record = self.find_record(row)
        path = self.shards[number].index.header.captions[record.caption]
        try:
            content = self._read(row, number, record.text_at, record.text_bytes) if record.text_bytes else b""
            return read_caption(content, tuple(path), self.empty_captions)
        except ValueError as error:
            raise BadSample(self.source(row), error) from error

    def shapes(self) -> Shapes:
        if not self.clips or not self.use_video:
            keys: np.ndarray | int = PICTURE
        else:
            keys = self._shapes() if self.pictures else CLIP
        return self.media_shapes(keys)

    def _contents(self) -> list[str]:
        """Return strings that identify the tars and the used samples."""
        headers = [shard.index.header for shard in self.shards]
        contents = [
            header.sha256 or f"{shard.path} {header.tar_bytes}"
            for shard, header in zip(self.shards, headers, strict=True)
        ]
        rows = ",".join(
            str(len(shard)) if shard.kept is None else f"{len(shard)} ({shard.kept.identity})" for shard in self.shards
        )
        return [*contents, rows]

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._identity, checksums=self._checksums())

    def _checksums(self) -> Verification | None:
        if not isinstance(self.store, LocalTars):
            return None
        known = {shard.path: shard.index.header.sha256 for shard in self.shards if shard.index.header.sha256}
        return Verification(Path(), known, self.shown)

    def _identity(self) -> str:
        animated = any(name.startswith(ANIMATED) for shard in self.shards for name in shard.index.header.suffixes)
        kinds = [f"{self.pictures} pictures beside animations"] if animated else []
        names = "\0".join(self.class_names)
        return hash_parts("shards", *self._contents(), names, str(self.used is not None), *kinds)

    def describe(self) -> Description:
        more = {"counted_captions": ((len(self), self.counted_captions),), "largest_label": self._find_largest_label}
        of: dict[str, Any] = {"conditioning": self.conditioning, "class_names": self.class_names}
        return self.description(self._text(), **of, **more)

    def _text(self) -> str:
        clips = self.clips if self.use_video else 0
        notes = [f"; {self.clips:,} clips left out: no --use_video"] if self.clips and not self.use_video else []
        headers = [shard.index.header for shard in self.shards]
        if left_out := sum(header.left_out for header in headers):
            example = next(header.examples[0] for header in headers if header.examples)
            notes.append(f"; {left_out:,} samples left out ({printable(example)})")
        count = len(self.class_names)
        words = f"of {count:,} class{'es' if count > 1 else ''}"
        words = "with captions" if self.conditioning == "text" else words
        shape = "x".join(map(str, self.sample_shape))
        window = self.window_note() if clips else ""
        tars = f"{len(self.shards):,} tar{'s' if len(self.shards) > 1 else ''}"
        what = f"{tars} of {count_media(clips, self.pictures)} {words}, {shape}{window}"
        name, mirrored = self.shown.removeprefix("--data_path "), flip_note(self.random_flip)
        return f"{name}: {what}, {mirrored}{''.join(notes)}{self.note}"


def conditioning_of(shown: str, shards: Sequence[IndexedTar]) -> str:
    """Return the conditioning of all tars. Tars with neither captions nor classes count as "label", with a single
    class. Raises ValueError if the tars differ, and DataError if there are none."""
    kinds = {}
    for shard in shards:
        kinds.setdefault(shard.index.header.conditioning, shard)
    if len(kinds) > 1:
        (one, first), (other, second), *_ = kinds.items()
        raise ValueError(
            f"{shown}: {first.path} has {WORDS[one]} and {second.path} {WORDS[other]}; keep them in folders of their "
            "own"
        )
    if not kinds:
        raise DataError(f"{shown}: holds no tars; give a folder of tars with their indexes")
    return "text" if "text" in kinds else "label"


def _check_records(shown: str, shards: Sequence[IndexedTar]) -> None:
    """Check the first tars' records, up to ``CHECKED`` samples. Other records are checked when they are read. Raises
    ValueError for an invalid record."""
    left = CHECKED
    for shard in shards:
        left -= shard.index.header.rows
        if left < 0:
            return
        try:
            shard.index.check()
        except DataError as error:
            raise ValueError(f"{shown}: {printable(str(error))}") from error


def _largest_label(shards: Sequence[IndexedTar]) -> tuple[int, str, str]:
    shard = max(shards, key=lambda shard: shard.index.header.num_classes)
    label, row = shard.index.largest_label()
    return label, printable(shard.path), printable(shard.index.key(row)[:200])


def classes_of(
    shown: str, shards: Sequence[IndexedTar], names: Sequence[str], names_file: str = CLASS_NAMES
) -> list[str]:
    """Return the tars' class names: ``names`` from ``names_file``, or the class numbers. Raises ValueError, naming the
    tar and the sample, for a label without a name or a label that is too large."""
    headers = [shard.index.header for shard in shards]
    count = max(1, *(header.num_classes for header in headers)) if headers else 1
    if names and len(names) < count:
        label, tar, key = _largest_label(shards)
        raise ValueError(
            f"{shown}: {names_file} names {len(names):,} classes, the labels go to {label:,} ({tar}: {key}); name all"
        )
    if not names and count > MOST_CLASSES:
        label, tar, key = _largest_label(shards)
        raise ValueError(
            f"{shown}: a sample of {tar} has the class {label:,}; at most {MOST_CLASSES:,} classes, numbered from 0, "
            f"are trained on ({key} has it)"
        )
    return list(names) or [str(label) for label in range(count)]


# ------------------------------------------------------------------------------------------ opening


def open_source(asked: Request) -> ShardDataset | None:
    folder, ignored = asked.located, Ignored()
    if folder.is_dir():
        names, folders = list_folder(str(folder), picture_suffixes() | {".tar"}, ignored)
        tars = [folder / name for name in names if name.lower().endswith(".tar")]
        # A folder of pictures may also hold unrelated tars.
        if not tars or len(tars) < len(names) + len(folders) and not any(index_of(tar).exists() for tar in tars):
            return None
    elif folder.suffix.lower() == ".tar":
        tars, folder = [folder], folder.parent
    else:
        return None
    if missing := [printable(tar.name) for tar in tars if not index_of(tar).exists()]:
        raise ValueError(
            f"{asked.shown}: no index beside {name_few(missing)}; make it: python preprocess.py index "
            f"{shlex.quote(printable(folder))}"
        )
    shards = []
    for tar in tars:
        try:
            index = TarIndex(index_of(tar))
            if (size := tar.stat().st_size) != index.header.tar_bytes:
                raise ValueError(size_problem(str(tar), size, index.header.tar_bytes))
        except (ValueError, OSError) as error:
            raise ValueError(f"{asked.shown}: {error}") from error
        shards.append(IndexedTar(str(tar), index))
    return _dataset(asked, shards, read_class_names(folder))


def open_remote(asked: Request, remote: Remote, cache: FileCache) -> ShardDataset:
    """Open the tars behind an address. Raises DataError, ValueError or OSError."""
    found = expand([asked.data_path])
    tars = remote.list_tars(asked.data_path) if not found[0].lower().endswith(".tar") else found
    if not tars:
        raise ValueError("holds no .tar files; give s3://BUCKET/FOLDER, or http://HOST/train-{0000..0099}.tar")
    shards, store = remote_shards(tars, remote, cache)
    path = f"{tars[0].rpartition('/')[0]}/{CLASS_NAMES}"
    content = remote.read_if_there(path, NAMES_OF_CLASSES.most_bytes)
    names = () if content is None else checked(parse_json(content, path), NAMES_OF_CLASSES, path)
    return _dataset(asked, shards, names, store)


def remote_shards(addresses: Sequence[str], remote: Remote, cache: FileCache) -> tuple[list[IndexedTar], RemoteTars]:
    """Return (indexed tars, store) for these addresses."""
    indexes = [TarIndex(path) for path in fetch_indexes(addresses, remote, cache)]
    shards = [IndexedTar(address, index) for address, index in zip(addresses, indexes, strict=True)]
    checksums = [index.header.sha256 for index in indexes]
    return shards, RemoteTars(addresses, checksums, [index.header.tar_bytes for index in indexes], remote, cache)


def _dataset(
    asked: Request, shards: list[IndexedTar], names: Sequence[str], store: RemoteTars | None = None
) -> ShardDataset:
    return ShardDataset(asked.shown, shards, asked.image_size, store=store, class_names=names, **asked.of_clips())
