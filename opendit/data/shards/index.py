"""The index of a tar: a file that records where each sample's picture or clip, caption and label are in the tar.

The index of ``NAME.tar`` is ``NAME.tar.index``. It consists of 8 bytes ``ODSHARD1``, the length of the header (uint32),
the header (JSON: see ``HEADER``), zeros up to a multiple of 64 bytes, one record ``ROW`` per sample, and the
concatenated keys of the samples. All numbers are little-endian. Processes do not load all records and keys into memory.
They read single records from the file, so all processes of a machine share the page cache.
"""

import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
from annotated_types import Len, MaxLen
from pydantic import FailFast, Field

from opendit.common.json_file import MIB, open_regular
from opendit.common.json_models import Count, FileKind, JsonObject, Text, Word, parse_text, read_file
from opendit.common.safe_files import refuse_links, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import DataError
from opendit.data.base import name_few
from opendit.data.files import printable, retried_disk
from opendit.data.folders import CLIPS
from opendit.data.row_arrays import Complement

_AGAIN = "make it again: python preprocess.py index FOLDER"
SUFFIX = ".index"  # appended to the tar's full name
MAGIC = b"ODSHARD1"
VERSION = 1
ALIGNMENT = 64
NO_LABEL = -1
MAX_TEXT = 2**20  # maximum bytes of a member that holds a caption or label
_CHUNK = 1 << 16  # records checked per read
ANIMATED = "animated"  # prefix of an animation's suffix in a header's ``suffixes``
ROW = np.dtype(
    [
        ("medium_at", "<u8"),  # offset of the picture's or clip's first byte in the tar
        ("medium_bytes", "<u8"),
        ("text_at", "<u8"),  # offset of the member that holds the caption
        ("text_bytes", "<u4"),
        ("label", "<i4"),
        ("key_end", "<u4"),  # end of the sample's key in the concatenated keys
        ("crc32", "<u4"),  # checksum of the picture or clip, if ``checked`` is true in the header
        ("suffix", "u1"),  # index of the medium's suffix in the header's ``suffixes``
        ("caption", "u1"),  # index of the caption's path in the header's ``captions``
        ("number", "<u4"),  # index of the sample in the tar, counting left-out samples; 0 in old indexes
        ("padding", "u1", 2),
    ]
)

_RECORD = struct.Struct("<QQQIiIIBBI2x")  # same layout as ROW; numpy takes five times as long to read a single record

_Names = Annotated[list[Text], MaxLen(256)]


class Header(JsonObject):
    """The header of an index, which describes the tar.

    Attributes:
        tar_bytes: size of the tar.
        sha256: checksum of the tar; "" if the tar was not read completely.
        checked: True if the records contain the CRC-32 of their picture or clip.
        pictures: number of samples that are pictures; all other samples are clips.
        conditioning: "text" if samples have captions, "label" if they have classes, "none" if they have neither.
        num_classes: the largest label + 1.
        suffixes: distinct suffixes of the pictures and clips, with dots; an animation's begins with ``ANIMATED``.
        captions: paths of captions (see ``scan.FieldPath``): a member's extension, then keys inside its JSON.
        left_out: number of samples in the tar that have no record.
        examples: "key: reason" for a few samples without a record.
        plan: hash of the inputs that the tar was written from; "" if another program wrote the tar.
    """

    rows: Count
    key_bytes: Count
    tar_bytes: Count
    sha256: Word
    checked: bool
    pictures: Count
    conditioning: Literal["text", "label", "none"]
    num_classes: int = Field(ge=0, le=1 << 31)
    suffixes: _Names
    captions: Annotated[list[_Names], FailFast(), MaxLen(256)]
    left_out: Count
    examples: _Names
    plan: Word
    version: Count


HEADER = FileKind(Header, 16 * MIB)
CLASS_NAMES = "class_names.json"  # file beside the tars: class names, in the order of the labels
MOST_CLASSES = 1_000_000
NAMES_OF_CLASSES = FileKind(Annotated[list[Text], FailFast(), Len(1, MOST_CLASSES)], 64 * MIB)


def read_class_names(folder: Path) -> list[str]:
    """Return the class names of a folder, or an empty list if it has no file ``CLASS_NAMES``. Raises ValueError or
    OSError."""
    path = folder / CLASS_NAMES
    return read_file(path, NAMES_OF_CLASSES) if path.exists() else []


class Record(NamedTuple):
    """One record, with the fields of ``ROW``."""

    medium_at: int
    medium_bytes: int
    text_at: int
    text_bytes: int
    label: int
    key_end: int
    crc32: int
    suffix: int
    caption: int
    number: int


def empty_header(tar_bytes: int, sha256: str, plan: str) -> Header:
    """Return the header of a tar without samples."""
    counts = dict(rows=0, key_bytes=0, pictures=0, num_classes=0, left_out=0)
    lists: dict[str, Any] = dict(suffixes=[], captions=[], examples=[])
    about: dict[str, Any] = dict(tar_bytes=tar_bytes, sha256=sha256, checked=True, conditioning="none", plan=plan)
    return Header(**counts, **lists, **about, version=VERSION)


def is_clip(suffix: str, use_video: bool = True) -> bool:
    """Return True if media with this suffix, as in ``Header.suffixes``, are clips.

    Without ``use_video`` an animation counts as a picture, namely its first frame."""
    return suffix in CLIPS or (use_video and suffix.startswith(ANIMATED))


def index_of(tar: str | Path) -> Path:
    return Path(f"{tar}{SUFFIX}")


def write_index(path: Path, header: Header, rows: np.ndarray, keys: bytes, root: Path | None = None) -> None:
    """Write an index under a temporary name and rename it, so that an existing index is always complete.

    root: the folder below which no symbolic link is followed (opendit/common/safe_files.py). Raises OSError."""
    text = json.dumps(header.model_dump(), sort_keys=True).encode()
    start = MAGIC + struct.pack("<I", len(text)) + text
    start += bytes(-len(start) % ALIGNMENT)
    with replacing(path, root=root, temporary=f"{path.name}.{os.getpid()}.partial") as new:
        write_file(new, iter([start, rows.tobytes(), keys]))


class TarIndex:
    """An open index. The constructor reads the header and checks the file's size against it. Records and keys are read
    on demand.

    Raises OSError; and ValueError, naming the file, if the file is not an index, is damaged or has another version."""

    def __init__(self, path: Path):
        self.path = path
        with open(open_regular(path), "rb") as file:
            state = os.fstat(file.fileno())
            self.header, self._start = _read_start(path, file, state.st_size)
        self.written = state.st_mtime_ns
        self._file: int | None = None  # opened when a record is first read

    @property
    def rows(self) -> np.ndarray:
        """All records as a memory-mapped array (rows,) of ``ROW``. Each access creates a new mapping."""
        return np.memmap(self.path, ROW, "r", self._start, (self.header.rows,))

    def record(self, row: int) -> Record:
        """Read one record from the file. A memory mapping would add 64 KiB around the record to the process's memory.

        Raises DataError, naming the sample, for an invalid record."""
        found = self._record(row)
        for bad, why in self._faults(found):
            if bad:
                raise DataError(f"{self.path} is damaged: the record of {self._shown(row)} {why()}; {_AGAIN}")
        return found

    def _record(self, row: int) -> Record:
        return Record(*_RECORD.unpack(self._read(self._start + row * ROW.itemsize, ROW.itemsize)))

    def _faults(self, found: Any) -> Iterator[tuple[Any, Callable[[], str]]]:
        """Yield (is the fault present, function that returns the message) for each possible fault.

        found: one record, or the columns of many records. For columns, the first item of each pair is a bool array with
        one
            entry per record.
        """
        header, size = self.header, self.header.tar_bytes
        bad = (found.medium_at > size) | (found.medium_bytes > size - found.medium_at)
        yield bad, lambda: f"has a medium that ends at byte {found.medium_at + found.medium_bytes:,} of {size:,}"
        bad = (found.text_at > size) | (found.text_bytes > size - found.text_at) | (found.text_bytes > MAX_TEXT)
        yield bad, lambda: f"has a caption of {found.text_bytes:,} bytes at byte {found.text_at:,} of {size:,}"
        suffixes, captions, classes = len(header.suffixes), len(header.captions), header.num_classes
        yield found.suffix >= suffixes, lambda: f"names suffix {found.suffix} of {suffixes}"
        if header.conditioning == "text":
            yield found.caption >= captions, lambda: f"names place {found.caption} for captions of {captions}"
        if header.conditioning == "label":
            bad = (found.label < 0) | (found.label >= classes)
            yield bad, lambda: f"has the class {found.label:,} of {classes:,}, numbered from 0"
        bad, end = found.key_end > header.key_bytes, header.key_bytes
        yield bad, lambda: f"has a key that ends at byte {found.key_end:,} of {end:,}"

    def check(self) -> None:
        """Check all records like :meth:`record`, and the counts in the header. Raises DataError, naming the sample."""
        header, last, pictures = self.header, 0, 0
        clips = np.array([is_clip(suffix) for suffix in header.suffixes] or [False])
        for start in range(0, header.rows, _CHUNK):
            count = min(_CHUNK, header.rows - start)
            content = self._read(self._start + start * ROW.itemsize, count * ROW.itemsize)
            part: Any = np.frombuffer(content, ROW).view(np.recarray)
            for bad, _ in self._faults(part):
                if np.any(bad):
                    self.record(start + int(np.argmax(bad)))  # raises
            ends = np.concatenate([[last], part["key_end"].astype(np.int64)])
            if (np.diff(ends) < 0).any():
                row = start + int((np.diff(ends) < 0).argmax())
                raise DataError(f"{self.path} is damaged: the key of sample {row:,} ends before it begins; {_AGAIN}")
            last, pictures = int(ends[-1]), pictures + int((~clips[part["suffix"]]).sum())
        self.close()  # a process can't keep the indexes of thousands of tars open
        if (pictures, last) != (header.pictures, header.key_bytes):
            what = f"{header.pictures:,} pictures and {header.key_bytes:,} bytes of keys"
            raise DataError(
                f"{self.path} is damaged: its header counts {what}, its records {pictures:,} and {last:,}; {_AGAIN}"
            )

    def largest_label(self) -> tuple[int, int]:
        """Return the largest label and the first row that has it."""
        labels = self.rows["label"]
        row = int(labels.argmax())
        return int(labels[row]), row

    def key(self, row: int) -> str:
        """Return a sample's key, the part of the name that all members of the sample share. Raises DataError."""
        first, end = self._record(row - 1).key_end if row else 0, self._record(row).key_end
        if not first <= end <= self.header.key_bytes:
            raise DataError(
                f"{self.path} is damaged: the key of sample {row:,} is at bytes {first:,} to {end:,}; {_AGAIN}"
            )
        keys = self._start + self.header.rows * ROW.itemsize
        return os.fsdecode(self._read(keys + first, end - first))

    def _shown(self, row: int) -> str:
        try:
            return f"{printable(self.key(row)[:200])} (sample {row:,})"
        except DataError:
            return f"sample {row:,}"

    def _read(self, at: int, size: int) -> bytes:
        content = retried_disk(self.path, partial(self._read_once, at, size))
        if len(content) < size:
            raise DataError(f"{self.path} is damaged: it ends before byte {at + size:,}; {_AGAIN}")
        return content

    def _read_once(self, at: int, size: int) -> bytes:
        if self._file is None:
            try:
                self._file = open_regular(self.path)
            except ValueError as error:
                raise DataError(str(error)) from error
        try:
            return os.pread(self._file, size, at)
        except OSError:
            with suppress(OSError):
                self.close()  # the descriptor stays invalid after the disk was down
            raise

    def close(self) -> None:
        """Close the file. The next read opens it again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # descriptors can't be pickled for a spawned process


def _read_start(path: str | Path, file: BinaryIO, size: int) -> tuple[Header, int]:
    """Return the header of an index of ``size`` bytes, and the offset of its first record. Raises ValueError."""
    start = file.read(len(MAGIC) + 4)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + 4:
        raise ValueError(f"{path} is no index of a tar; {_AGAIN}")
    length = struct.unpack("<I", start[len(MAGIC) :])[0]
    if length > HEADER.most_bytes:
        raise ValueError(f"{path} is damaged (a header of {length:,} bytes); {_AGAIN}")
    fields = parse_text(file.read(length).decode("utf-8", "replace"), HEADER, path)
    if fields["version"] != VERSION:
        raise ValueError(f"{path} has format version {fields['version']}, this program reads {VERSION}; {_AGAIN}")
    header, begin = Header(**fields), -(-(len(start) + length) // ALIGNMENT) * ALIGNMENT
    expected = begin + header.rows * ROW.itemsize + header.key_bytes
    if size != expected:
        raise ValueError(f"{path} is damaged: {size:,} bytes where its header asks for {expected:,}; {_AGAIN}")
    return header, begin


def check_whole(content: bytes) -> None:
    """Raise OSError if ``content`` is an incomplete index, and ValueError if it is not an index at all."""
    try:
        _read_start("what came", io.BytesIO(content), len(content))
    except ValueError as error:
        if content.startswith(MAGIC):
            raise OSError(f"{len(content):,} bytes came, which are not a whole index") from error
        raise


def is_index(path: Path) -> bool:
    """Return True if a file exists and is a complete index."""
    try:
        TarIndex(path)
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class KeptRows:
    """The rows of an index that a data set uses, if not all: the rows [first, last) except ``without``.

    ``without`` is ascending and within that range. The data set numbers the used rows 0, 1, ..."""

    first: int
    last: int
    without: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _places(self) -> Complement:
        return Complement(self.last - self.first, self.without - self.first)

    def row(self, place: int) -> int:
        """Return the index row of the ``place``-th used row."""
        return self.first + self._places[place]

    def rows(self) -> np.ndarray:
        """Return all used rows, ascending."""
        return self.first + self._places[:]

    def identity(self) -> str:
        return f"{self.first}-{self.last} without {self.without.tolist()}"


def claim_output(output: Path, tars: list[str], beside: list[str]) -> None:
    """Raise ValueError if the output folder holds tars other than ``tars``, or links where files will be written."""
    refuse_links(output, [*beside, *tars], "--output")
    if others := sorted({tar.name for tar in output.glob("*.tar")} - set(tars)):
        raise ValueError(f"--output {printable(output)}: holds other tars: {name_few(others)}; name another folder")
