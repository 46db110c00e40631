"""The index of a tar: a file with the place of each sample's picture or clip, caption and label in the tar.

The index of ``NAME.tar`` is ``NAME.tar.index``. It consists of 8 bytes ``ODSHARD1``, the header's length (uint32), the
header (JSON: see ``HEADER``), zeros up to a multiple of 64 bytes, one record ``ROW`` per sample, and the samples'
concatenated keys. All numbers are little-endian. ``scan`` makes an index."""

import io
import json
import os
import re
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
from annotated_types import Len, MaxLen
from pydantic import FailFast, Field

from opendit.common.json_file import MIB, open_regular
from opendit.common.json_models import Count, FileKind, JsonObject, Text, Word, parse_text, read_file
from opendit.common.safe_files import refuse_links, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import DataError, sha256_of
from opendit.data.files import CLIPS, name_few, printable, read_at, retried_disk
from opendit.data.picture_file import ANIMATION_SUFFIXES, MAX_WHOLE_FILE, is_animated, picture_suffixes

_AGAIN = "make it again: python preprocess.py index FOLDER"
SUFFIX = ".index"  # appended to the tar's name
MAGIC = b"ODSHARD1"
VERSION = 1
ALIGNMENT = 64
NO_LABEL = -1
MAX_TEXT = 2**20  # maximum bytes of a member with a caption or label
_CHUNK = 1 << 16  # records to check per read
ANIMATED = "animated"  # prefix of animations' suffixes in a header's ``suffixes``
ROW = np.dtype(
    [
        ("medium_at", "<u8"),  # offset of the picture or clip in the tar
        ("medium_bytes", "<u8"),
        ("text_at", "<u8"),  # offset of the member with the caption
        ("text_bytes", "<u4"),
        ("label", "<i4"),
        ("key_end", "<u4"),  # end of the sample's key in the index's keys
        ("crc32", "<u4"),  # checksum of the picture or clip; 0 unless the header's ``checked``
        ("suffix", "u1"),  # index in the header's ``suffixes``
        ("caption", "u1"),  # index in the header's ``captions``
        ("number", "<u4"),  # sample's index in the tar, including left-out samples; 0 in old indexes
        ("padding", "u1", 2),
    ]
)

_RECORD = struct.Struct("<QQQIiIIBBI2x")  # the layout of ROW; reads a single record five times as fast

_Names = Annotated[list[Text], MaxLen(256)]
FieldPath = tuple[str, ...]  # place of a field: a tar member's extension, then keys and list positions in its JSON

BLOCK = 512  # bytes of a tar header; contents are padded to a multiple
MOST_EXTENSION = 1 << 20  # maximum bytes of an extension header
LONGEST = 4096  # maximum characters in a member's name
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")  # types of headers that extend the next header
# Members that belong to no sample: their top folder or name is enclosed in double underscores.
_META = re.compile(r"__[^/]*__($|/)")
EXAMPLES, EXAMPLE_LETTERS = 5, 500  # maximum left-out samples in a header, and characters for each
_ARRAYS = (".npz", ".npy", ".safetensors")


class Header(JsonObject):
    """The header of an index."""

    rows: Count
    key_bytes: Count
    tar_bytes: Count  # the tar's size
    sha256: Word  # the tar's SHA-256; "" if the tar was not read completely
    checked: bool  # True if the records have the CRC-32 of each picture or clip
    pictures: Count  # number of pictures; all other samples are clips
    # "text": samples have captions; "label": samples have classes; "none": neither
    conditioning: Literal["text", "label", "none"]
    num_classes: int = Field(ge=0, le=1 << 31)  # the largest label + 1
    suffixes: _Names  # distinct suffixes of the media, with dots; ``ANIMATED`` precedes an animation's
    # the captions' paths, see ``FieldPath``
    captions: Annotated[list[_Names], FailFast(), MaxLen(256)]
    left_out: Count  # number of samples in the tar without a record
    examples: _Names  # "key: reason" for a few samples without a record
    plan: Word  # hash of the tar's inputs; "" for another program's tar
    version: Count


HEADER = FileKind(Header, 16 * MIB)
CLASS_NAMES = "class_names.json"  # file next to the tars with the class names, in the order of the labels
MOST_CLASSES = 1_000_000
NAMES_OF_CLASSES = FileKind(Annotated[list[Text], FailFast(), Len(1, MOST_CLASSES)], 64 * MIB)


def read_class_names(folder: Path) -> list[str]:
    """Return the class names in a folder; [] if ``CLASS_NAMES`` is missing. Raises ValueError or OSError."""
    path = folder / CLASS_NAMES
    return read_file(path, NAMES_OF_CLASSES) if path.exists() else []


class Record(NamedTuple):
    """One record, with the fields of ``ROW`` except the padding."""

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
    counts = dict(rows=0, key_bytes=0, pictures=0, num_classes=0, left_out=0)
    lists: dict[str, Any] = dict(suffixes=[], captions=[], examples=[])
    about: dict[str, Any] = dict(tar_bytes=tar_bytes, sha256=sha256, checked=True, conditioning="none", plan=plan)
    return Header(**counts, **lists, **about, version=VERSION)


def is_clip(suffix: str, use_video: bool = True) -> bool:
    """Return True if media with this suffix from ``Header.suffixes`` are clips. Animations are clips with
    ``use_video``, else pictures."""
    return suffix in CLIPS or (use_video and suffix.startswith(ANIMATED))


def index_of(tar: str | Path) -> Path:
    return Path(f"{tar}{SUFFIX}")


def write_index(path: Path, header: Header, rows: np.ndarray, keys: bytes, root: Path | None = None) -> None:
    """Write an index atomically. root: follow no symbolic link below this folder. Raises OSError."""
    text = json.dumps(header.model_dump(), sort_keys=True).encode()
    start = MAGIC + struct.pack("<I", len(text)) + text
    start += bytes(-len(start) % ALIGNMENT)
    with replacing(path, root=root, temporary=f"{path.name}.{os.getpid()}.partial") as new:
        write_file(new, iter([start, rows.tobytes(), keys]))


class TarIndex:
    """An index. Only the header is read at once. Raises OSError if the file can't be read. Raises ValueError, naming
    the file, if the file is no index, is damaged or has another version."""

    def __init__(self, path: Path):
        self.path = path
        with open(open_regular(path), "rb") as file:
            state = os.fstat(file.fileno())
            self.header, self._start = _read_start(path, file, state.st_size)
        self.written = state.st_mtime_ns
        self._file = str(path), state.st_dev, state.st_ino, state.st_mtime_ns  # identifies the open file

    @property
    def rows(self) -> np.ndarray:
        """All records as a memory-mapped array (rows,) of ``ROW``. Each access creates a new mapping."""
        return np.memmap(self.path, ROW, "r", self._start, (self.header.rows,))

    def record(self, row: int) -> Record:
        """Read one record, not by a memory mapping, which would take 64 KiB. Raises DataError for an invalid record."""
        found = self._record(row)
        if not self._is_valid(found):
            raise DataError(f"{self.path} is damaged: the record of sample {row:,} is out of range; {_AGAIN}")
        return found

    def _record(self, row: int) -> Record:
        return Record(*_RECORD.unpack(self._read(self._start + row * ROW.itemsize, ROW.itemsize)))

    def _is_valid(self, found: Any) -> Any:
        """Return True if all fields of a record are in range. For an array of records, return an array of bool."""
        header, size = self.header, self.header.tar_bytes
        valid = (found.medium_at <= size) & (found.medium_bytes <= size - found.medium_at)
        valid &= (found.text_at <= size) & (found.text_bytes <= size - found.text_at) & (found.text_bytes <= MAX_TEXT)
        valid &= (found.suffix < len(header.suffixes)) & (found.key_end <= header.key_bytes)
        if header.conditioning == "text":
            valid &= found.caption < len(header.captions)
        if header.conditioning == "label":
            valid &= (found.label >= 0) & (found.label < header.num_classes)
        return valid

    def check(self) -> None:
        """Check all records as :meth:`record` does, and the counts in the header. Raises DataError."""
        header, last, pictures = self.header, 0, 0
        clips = np.array([is_clip(suffix) for suffix in header.suffixes] or [False])
        for start in range(0, header.rows, _CHUNK):
            count = min(_CHUNK, header.rows - start)
            content = self._read(self._start + start * ROW.itemsize, count * ROW.itemsize)
            part: Any = np.frombuffer(content, ROW).view(np.recarray)
            ends = np.concatenate([[last], part["key_end"].astype(np.int64)])
            valid = self._is_valid(part) & (np.diff(ends) >= 0)
            if not valid.all():
                row = start + int(valid.argmin())
                raise DataError(f"{self.path} is damaged: the record of sample {row:,} is out of range; {_AGAIN}")
            last, pictures = int(ends[-1]), pictures + int((~clips[part["suffix"]]).sum())
        if (pictures, last) != (header.pictures, header.key_bytes):
            what = f"{header.pictures:,} pictures and {header.key_bytes:,} bytes of keys"
            raise DataError(
                f"{self.path} is damaged: its header counts {what}, its records {pictures:,} and {last:,}; {_AGAIN}"
            )

    def largest_label(self) -> tuple[int, int]:
        labels = self.rows["label"]
        row = int(labels.argmax())
        return int(labels[row]), row

    def key(self, row: int) -> str:
        """Return a sample's key, the common start of its members' names. Raises DataError."""
        first, end = self._record(row - 1).key_end if row else 0, self._record(row).key_end
        if not first <= end <= self.header.key_bytes:
            raise DataError(f"{self.path} is damaged: the record of sample {row:,} is out of range; {_AGAIN}")
        keys = self._start + self.header.rows * ROW.itemsize
        return os.fsdecode(self._read(keys + first, end - first))

    def _read(self, at: int, size: int) -> bytes:
        content = retried_disk(self.path, partial(read_at, self._file, self._open, at, size))
        if len(content) < size:
            raise DataError(f"{self.path} is damaged: it ends before byte {at + size:,}; {_AGAIN}")
        return content

    def _open(self) -> int:
        try:
            return open_regular(self.path)
        except ValueError as error:
            raise DataError(str(error)) from error


def _read_start(path: str | Path, file: BinaryIO, size: int) -> tuple[Header, int]:
    """Return (header, offset of the first record) of an index with ``size`` bytes. Raises ValueError."""
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
    """Raise OSError if ``content`` is an incomplete or invalid index, and ValueError if ``content`` is no index."""
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
    """The rows of an index that a data set uses, renumbered from 0."""

    rows: np.ndarray  # (n,) int64, ascending
    identity: str  # text that identifies the rows


def claim_output(output: Path, tars: list[str], beside: list[str]) -> None:
    """Raise ValueError if the output folder holds tars other than ``tars``, or links."""
    refuse_links(output, [*beside, *tars], "--output")
    if others := sorted({tar.name for tar in output.glob("*.tar")} - set(tars)):
        raise ValueError(f"--output {printable(output)}: holds other tars: {name_few(others)}; name another folder")


# ------------------------------------------------------------------------------------------ members of a tar


class TarError(ValueError):
    """Raised for a damaged or refused tar. The message lacks the tar's name; callers prepend it."""


class _Header(tarfile.TarInfo):
    """A tar header for tarfile, with a size limit for extension headers, because tarfile reads them into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENSIONS and info.size > MOST_EXTENSION:
            raise tarfile.ReadError(f"an extension header of {info.size:,} bytes")
        if info.size < 0:
            raise tarfile.ReadError("a negative size")
        return info


def members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield a tar's members in order. Raises OSError, or TarError for a damaged tar, a missing end-of-archive mark, or
    a sparse member."""
    length, start = file.seek(0, os.SEEK_END), file.seek(0)
    try:
        tar: Any = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8", errors="surrogateescape")
        while (info := tar.next()) is not None:
            tar.members.clear()  # tarfile would remember all members
            start = tar.offset
            if info.issparse():
                raise TarError(f"stores {printable(info.name)} with holes; pack it without --sparse")
            if info.size < 0 or len(info.name) > LONGEST:
                raise TarError(f"is damaged: {printable(info.name[:100])} has no valid size or name; repack it")
            if tar.offset >= length + BLOCK or info.isreg() and info.offset_data + info.size > length:
                raise TarError(f"is truncated inside of {printable(info.name)}; copy it again")
            yield info
    except (tarfile.TarError, OverflowError, RecursionError) as error:
        what = str(error) if isinstance(error, tarfile.TarError) else type(error).__name__
        where = f"is truncated or damaged after byte {start:,}" if start else "can't be read as a tar"
        raise TarError(f"{where} ({what}); copy it again") from error
    # tarfile ends silently at the first block that is no header.
    file.seek(tar.offset)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise TarError("is truncated: it has no end-of-archive mark; copy it again")
    if any(block):
        raise TarError(f"is damaged: no member's header at byte {tar.offset:,}; copy it again")


def padded(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``BLOCK``, as in a tar."""
    return -(-size // BLOCK) * BLOCK


def tar_blocks(contents: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield the bytes of a tar with these members. contents: (name, size, chunks of the content) for each member.
    Headers have no owner and no time, so equal members give equal bytes."""
    total = 0
    for name, size, parts in contents:
        info = tarfile.TarInfo(name)
        info.size = size
        header = info.tobuf(tarfile.PAX_FORMAT)
        yield header
        yield from parts
        yield bytes(-size % BLOCK)
        total += len(header) + padded(size)
    yield bytes(2 * BLOCK + -(total + 2 * BLOCK) % tarfile.RECORDSIZE)


# ------------------------------------------------------------------------------------------ contents of a sample


@dataclass(frozen=True)
class Fields:
    """Names of the members with a sample's picture or clip, caption and label. Each field lists alternatives. The first
    one that a sample has is used."""

    # extensions of the picture or clip; None accepts all known ones
    medium: tuple[str, ...] | None = None
    # see ``FieldPath``
    caption: tuple[FieldPath, ...] = (("txt",), ("json", "caption"), ("json", "text"))
    label: tuple[FieldPath, ...] = (("cls",), ("json", "label"))
    parts: tuple[str, ...] | None = None  # the only extensions to read; None means all
    # True keeps the case of extensions, like Energon. False converts to lower case, like webdataset.
    exact: bool = False
    # True if the user's code reads all members. The index then has no medium, caption or label.
    whole: bool = False
    # True if a caption may be empty
    empty: bool = field(default=False, repr=False)  # excluded, because the repr is hashed

    def find_medium(self, parts: Mapping[str, object]) -> str | None:
        """Return the extension of the picture or clip. ``jpg`` is preferred to ``mask.jpg``."""
        if self.parts is not None:
            parts = {ending: part for ending, part in parts.items() if self.takes(ending)}
        if self.medium is not None:
            return next((ending for ending in self.medium if ending in parts), None)
        media = [ending for ending in parts if suffix_of(ending) in picture_suffixes() | CLIPS]
        return min(media, key=lambda ending: "." in ending, default=None)

    def takes(self, ending: str) -> bool:
        return self.parts is None or ending in self.parts


def split_name(name: str, exact: bool = False) -> tuple[str, str] | None:
    """Split a member's name into key and extension, at the first dot after the last slash. Return None if the member
    belongs to no sample. The extension is in lower case unless ``exact``. The result equals WebDataset's expression
    ``^((?:.*/|)[^.]+)[.]([^/]*)$``, but takes linear time."""
    last = name.rfind("/")
    dot = name.find(".", last + 1)
    if dot < 0 or _META.match(name):
        return None
    # In WebDataset's expression, [^.]+ may begin after any slash before the first line break.
    line = name.find("\n", 0, dot)
    before = name.rfind("/", 0, dot if line < 0 else line)
    if before + 1 == dot:  # [^.]+ would be empty here, so it begins after an earlier slash
        before = name.rfind("/", 0, max(0, before))
    if before + 1 == dot or "." in name[before + 1 : dot]:
        return None
    ending = name[dot + 1 :]
    return name[:dot], ending if exact else ending.lower()


def suffix_of(ending: str) -> str:
    """Return the last suffix in lower case: ``.png`` for ``seg.PNG``."""
    return "." + ending.rpartition(".")[2].lower()


def read_caption(content: bytes, path: FieldPath, empty: bool = False) -> str:
    """Return a member's caption, without white space around it. empty: allow an empty caption. Raises ValueError for a
    missing or empty caption."""
    text = _read(content, path)
    if not isinstance(text, str):
        raise ValueError(f"{_shown(path)} is {_kind(text)}, not a text")
    if not (text := text.strip()) and not empty:
        raise ValueError(f"{_shown(path)} is empty")
    return text


def read_label(content: bytes, path: FieldPath) -> int:
    """Return the class in a member's content. Raises ValueError if there is no class."""
    label = _read(content, path)
    try:
        number = int(label) if isinstance(label, str) else label
    except ValueError:
        number = None
    if type(number) is not int or not 0 <= number < 2**31:
        raise ValueError(f"{_shown(path)} is {str(label)[:40]!r}, not the number of a class")
    return number


def _read(content: bytes, path: FieldPath) -> object:
    try:
        text = content.decode("utf-8-sig")
        value: Any = json.loads(text) if suffix_of(path[0]) in (".json", ".jsn") else text
        for key in path[1:]:
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"the .{path[0]} isn't UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the .{path[0]} isn't JSON ({error})") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"it has no {_shown(path)}") from error


def _shown(path: FieldPath) -> str:
    return "." + path[0] + "".join(f"[{key}]" for key in path[1:])


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(value), str(value)[:40])


# ------------------------------------------------------------------------------------------ samples


@dataclass
class Sample:
    """The members of a tar that share a key."""

    key: str
    start: int  # byte range of all members
    end: int = 0
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # extension -> (offset, bytes) of the content


def samples_of(path: Path, exact: bool = False) -> Iterator[Sample]:
    """Yield a tar's samples in order. Consecutive members with one key form a sample. exact: see ``Fields``. Raises
    ValueError, naming the tar, if the tar is damaged or compressed, or if a key or member occurs twice."""
    name, seen, sample = printable(path), set(), None
    with open(open_regular(path), "rb") as file:
        try:
            for member in members(file):
                if not member.isreg() or (split := split_name(member.name, exact)) is None:
                    continue
                key, ending = split
                if sample is None or sample.key != key:
                    if sample is not None:
                        yield sample
                    if key in seen:
                        raise ValueError(
                            f"{name}: the key {printable(key)} is in two places; members of a sample must follow "
                            "each other, and each sample needs another key"
                        )
                    seen.add(key)
                    sample = Sample(key, member.offset)
                if ending in sample.parts:
                    raise ValueError(f"{name}: {printable(member.name)} is there twice")
                sample.parts[ending] = member.offset_data, member.size
                sample.end = member.offset_data + padded(member.size)
        except TarError as error:
            file.seek(0)
            packed = file.read(4)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
            fix = ": it is compressed; unpack it to a plain .tar" if packed else f" {error}"
            raise ValueError(f"{name}{fix}") from error
    if sample is not None:
        yield sample


@dataclass
class _Rows:
    """The records of an index, collected during the scan of a tar."""

    fields: Fields
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    captions: list[bool] = field(default_factory=list)
    suffixes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    why_not: list[str] = field(default_factory=list)  # for each record, why its caption or label is missing
    seen: int = 0
    latents: bool = False  # True if a sample without a picture or clip may hold latents

    def add(self, sample: Sample, file, checked: bool) -> None:
        number, self.seen = self.seen, self.seen + 1
        if self.fields.whole:
            self._add_whole(sample, file, checked, number)
            return
        ending = self.fields.find_medium(sample.parts)
        if ending is None:
            self.latents |= self.fields.medium is None and any(suffix_of(part) in _ARRAYS for part in sample.parts)
            self.left_out.append(f"{printable(sample.key)}: no picture or clip beside .{', .'.join(sample.parts)}")
            return
        at, size = sample.parts[ending]
        text, caption, why = self._find(
            sample, file, self.fields.caption, partial(read_caption, empty=self.fields.empty)
        )
        place, label, why_label = self._find(sample, file, self.fields.label, read_label)
        text_at, text_bytes = sample.parts[self.fields.caption[text][0]] if caption is not None else (0, 0)
        crc = _crc32(file, at, size) if checked else 0
        suffix = suffix_of(ending)
        may_be_animated = suffix in ANIMATION_SUFFIXES and size <= MAX_WHOLE_FILE
        if may_be_animated and is_animated(cast(BinaryIO, _Member(file, at, size))):
            suffix = ANIMATED + suffix
        suffix = self.suffixes.setdefault(suffix, len(self.suffixes))
        self.keys.append(sample.key.encode("utf-8", "surrogateescape"))
        self.captions.append(caption is not None)
        self.why_not.append(why if why or label is not None else why_label)
        label = NO_LABEL if label is None else label
        self.rows.append((at, size, text_at, text_bytes, label, 0, crc, suffix, text, number, [0] * 2))

    def _add_whole(self, sample: Sample, file, checked: bool, number: int) -> None:
        at, size = sample.start, sample.end - sample.start
        crc = _crc32(file, at, size) if checked else 0
        self.keys.append(sample.key.encode("utf-8", "surrogateescape"))
        self.captions.append(False)
        self.why_not.append("")
        self.rows.append((at, size, 0, 0, NO_LABEL, 0, crc, self.suffixes.setdefault("", 0), 0, number, [0] * 2))

    def _find(self, sample: Sample, file, paths, read) -> tuple[int, object, str]:
        """Return (index of the path, value or None, reason for None)."""
        why = ""
        for number, path in enumerate(paths):
            if (part := sample.parts.get(path[0])) is None or not self.fields.takes(path[0]):
                continue
            if part[1] > MAX_TEXT:
                why = f"the .{path[0]} has {part[1]:,} bytes"
                continue
            file.seek(part[0])
            try:
                return number, read(file.read(part[1]), path), ""
            except ValueError as error:
                why = why or str(error)
        return 0, None, why


class _Member:
    """File-like reader for a member of a tar."""

    def __init__(self, file: BinaryIO, at: int, size: int):
        self._file, self._start, self._size, self._at = file, at, size, 0

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data


def _crc32(file, at: int, size: int) -> int:
    crc = 0
    file.seek(at)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        crc = zlib.crc32(block, crc)
        size -= len(block)
    return crc


def scan(
    path: Path, fields: Fields | None = None, *, checksums: bool = True, plan: str = "", sha256: str = ""
) -> tuple[Header, np.ndarray, bytes]:
    """Return a tar's index: the header, the records (an array of ``ROW``) and the keys. Samples without a picture or
    clip are left out. If some samples have captions, samples without a caption are left out. Otherwise, if some have
    labels, samples without a label are left out.

    checksums: True reads the complete tar, and stores its SHA-256 and each medium's CRC-32. False reads only headers,
    captions and labels. sha256: the tar's SHA-256, if known. Raises OSError, and ValueError as :func:`samples_of` or
    for a tar without samples."""
    path, fields = Path(path), fields or Fields()
    found = _Rows(fields)
    with open(open_regular(path), "rb") as file:
        for sample in samples_of(path, fields.exact):
            found.add(sample, file, checksums)
    rows = np.array(found.rows, ROW)
    captions, labels = np.array(found.captions, bool), rows["label"] != NO_LABEL
    conditioning = "text" if captions.any() else "label" if labels.any() else "none"
    kept = captions if conditioning == "text" else labels if conditioning == "label" else np.ones(len(rows), bool)
    missing = "caption" if conditioning == "text" else "label"
    for row in np.flatnonzero(~kept).tolist():
        why = found.why_not[row] or f"no {missing}"
        found.left_out.append(f"{printable(found.keys[row].decode('utf-8', 'replace'))}: {why}")
    if not kept.any():
        why = f" ({'; '.join(each[:EXAMPLE_LETTERS] for each in found.left_out[:EXAMPLES])})" if found.left_out else ""
        fix = "; if these are latents, say what they hold: --latents" if found.latents else ""
        raise ValueError(f"{printable(path)} holds no samples{why}{fix}")
    keys = [found.keys[row] for row in np.flatnonzero(kept)]
    if sum(map(len, keys)) >= 2**32:  # ``key_end`` in a record is a uint32
        raise ValueError(f"{printable(path)}: its keys have 4 GiB or more together; pack it into several tars")
    rows = rows[kept]
    rows["key_end"] = np.cumsum([len(key) for key in keys])
    clips = np.array([is_clip(suffix) for suffix in found.suffixes])[rows["suffix"]]
    header = Header(
        rows=len(rows),
        key_bytes=sum(map(len, keys)),
        tar_bytes=path.stat().st_size,
        sha256=sha256 or (sha256_of(path) if checksums else ""),
        checked=checksums,
        pictures=int((~clips).sum()),
        conditioning=conditioning,
        num_classes=int(rows["label"].max()) + 1 if conditioning == "label" else 0,
        suffixes=list(found.suffixes),
        captions=[list(place) for place in fields.caption],
        left_out=len(found.left_out),
        examples=[example[:EXAMPLE_LETTERS] for example in found.left_out[:EXAMPLES]],
        plan=plan,
        version=VERSION,
    )
    return header, rows, b"".join(keys)
