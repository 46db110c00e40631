"""Make the index of a tar: read the headers of its members, its captions and labels, and compute checksums.

This module has its own reader of tar headers (ustar, PAX and GNU long names), which limits their size and number.
Python's tarfile reads an extension header of any declared size into memory, follows a chain of such headers by
recursion, and treats the first unreadable header as the end of the tar. For valid tars both readers find the same
members. This reader refuses sparse members, members with two sizes or two names, and names and sizes in global headers.
"""

import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from opendit.common.json_file import open_regular
from opendit.common.utils import sha256_of
from opendit.data.animations import SUFFIXES as ANIMATIONS
from opendit.data.animations import is_animated
from opendit.data.files import printable
from opendit.data.folders import CLIPS
from opendit.data.picture_file import picture_suffixes
from opendit.data.shards.index import ANIMATED, MAX_TEXT, NO_LABEL, ROW, VERSION, Header, is_clip

FieldPath = tuple[str, ...]  # a member's extension, then keys and list positions inside its JSON

BLOCK = 512
MOST_EXTENSION = 1 << 20  # maximum bytes of one extension header
MOST_EXTENSIONS = 8  # maximum number of extension headers before one member
LONGEST = 4096  # maximum bytes of a name
_FITS = 8**11  # sizes below this fit into the main header

_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # types of links, devices, folders and pipes
_NUMBER = re.compile(rb"\d{1,19}")

# A member whose folder or whole name is enclosed in double underscores belongs to no sample.
_META = re.compile(r"__[^/]*__($|/)")

EXAMPLES, EXAMPLE_LETTERS = 5, 500
MOST_KEYS = 2**32  # limit on the total key bytes of a tar: ``key_end`` in a record is a uint32
_ARRAYS = (".npz", ".npy", ".safetensors")


# ------------------------------------------------------------------------------------------ headers of members


class TarError(ValueError):
    """Raised for a damaged or refused tar. The message lacks the tar's name; callers prepend it."""


class NoTar(TarError):
    """Raised for a file that does not begin like a tar, or that ends inside a block. The message is the reason."""


@dataclass(frozen=True)
class Member:
    """A member of a tar.

    Attributes:
        start: offset of the member's first header.
        at, size: offset and number of bytes of the content.
        end: offset of the next member's header.
        regular: True if the member is a regular file.
    """

    name: str
    start: int
    at: int
    size: int
    end: int
    regular: bool


def members(file: BinaryIO) -> Iterator[Member]:
    """Yield the members of a tar in order.

    Raises OSError; and TarError for a damaged tar, or one without an end-of-archive mark."""
    length = file.seek(0, os.SEEK_END)
    at, chain = 0, _Extensions()
    while True:
        file.seek(at)
        block = file.read(BLOCK)
        info = _header(block, at) if any(block) else None
        if not at and (len(block) < BLOCK or any(block) and info is None):
            raise NoTar("it begins with no header" if block else "it is empty")
        if at > length or 0 < len(block) < BLOCK:
            raise NoTar("it ends inside of a block; copy it again")
        if not block:
            raise TarError("is truncated: it has no end-of-archive mark; copy it again")
        if not any(block):
            if chain.start is not None:
                raise TarError(f"is damaged: no member follows the header at byte {chain.start:,}; copy it again")
            return
        if info is None:
            raise TarError(f"is damaged: no member's header at byte {at:,}; copy it again")
        kind, size = info.type, info.size
        if kind in b"xXgLK":
            chain.count += 1
            if chain.count > MOST_EXTENSIONS:
                raise TarError(f"has more than {MOST_EXTENSIONS} extension headers in a row at byte {at:,}; repack it")
            if size > MOST_EXTENSION:
                raise TarError(f"has an extension header of {size:,} bytes at byte {at:,}; repack it")
            content = file.read(size)
            if len(content) < size:
                raise TarError(f"is truncated inside of the header at byte {at:,}; copy it again")
            chain.add(kind, content, at)
            at += BLOCK + padded(size)
            continue
        member = _member(info, at, chain)
        if member.at + member.size > length or member.end - BLOCK >= length:
            raise TarError(f"is truncated inside of {printable(member.name)}; copy it again")
        yield member
        at, chain = member.end, _Extensions()


@dataclass
class _Extensions:
    """The extension headers before one member. start: offset of the first of them that is not global."""

    start: int | None = None
    count: int = 0
    name: bytes | None = None
    size: int | None = None
    sparse: bool = False

    def add(self, kind: bytes, content: bytes, at: int) -> None:
        if kind != b"g" and self.start is None:
            self.start = at
        if kind == b"L":
            self._set_name(content.partition(b"\0")[0], at)
        elif kind in b"xXg":
            for key, value in _records(content, at):
                if kind == b"g" and (key in (b"path", b"size") or key.startswith(b"GNU.sparse.")):
                    raise TarError(f"gives all members one {key.decode()} at byte {at:,}; repack it")
                if key == b"path":
                    self._set_name(value.rstrip(b"/"), at)
                elif key == b"size":
                    self._set_size(value, at)
                self.sparse |= key.startswith(b"GNU.sparse.")

    def _set_name(self, name: bytes, at: int) -> None:
        if not name or len(name) > LONGEST:
            raise TarError(f"has a name of {len(name):,} bytes at byte {at:,}; from 1 to {LONGEST:,} are read")
        if self.name not in (None, name):
            raise TarError(f"gives a member two names at byte {at:,}; repack it")
        self.name = name

    def _set_size(self, value: bytes, at: int) -> None:
        if _NUMBER.fullmatch(value) is None:
            raise TarError(f"is damaged: a size that is no number at byte {at:,}; copy it again")
        if self.size not in (None, int(value)):
            raise TarError(f"gives a member two sizes at byte {at:,}; repack it")
        self.size = int(value)


_LENGTH = re.compile(rb"(\d{1,7}) ")


def _records(content: bytes, at: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) for each record of a PAX header. A record is ``LENGTH KEY=VALUE`` and a line break."""
    begin = 0
    while begin < len(content) and content[begin] != 0:
        found = _LENGTH.match(content, begin)
        end = begin + int(found[1]) if found else 0
        key, is_there, value = content[found.end() : end - 1].partition(b"=") if found else (b"", b"", b"")
        if not key or not is_there or end > len(content) or content[end - 1 : end] != b"\n":
            raise TarError(f"is damaged: no PAX header at byte {at:,}; copy it again")
        yield key, value
        begin = end


def _member(info: tarfile.TarInfo, at: int, chain: _Extensions) -> Member:
    shown = info.name if chain.name is None else os.fsdecode(chain.name)
    if info.type == tarfile.GNUTYPE_SPARSE or chain.sparse:
        raise TarError(f"stores {printable(shown)} with holes; pack it without --sparse")
    size = info.size
    if chain.size is not None:
        if size not in (0, chain.size) and chain.size < _FITS:
            raise TarError(f"gives {printable(shown)} two sizes, {size:,} and {chain.size:,}; repack it")
        size = chain.size
    regular, begin = info.type in _REGULAR, at + BLOCK
    stored = 0 if info.type in _WITHOUT_CONTENT else size
    start = at if chain.start is None else chain.start
    return Member(shown, start, begin, size if regular else 0, begin + padded(stored), regular)


def _header(block: bytes, at: int) -> tarfile.TarInfo | None:
    """Return a member's header, parsed by tarfile, or None if the block is not a header."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    if info.size < 0:
        raise TarError(f"is damaged: a negative size in the header at byte {at:,}; copy it again")
    return info


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole blocks, which is the space that the content takes in a tar."""
    return -(-size // BLOCK) * BLOCK


def member_header(name: str, size: int) -> bytes:
    """Return a member's header. It stores no owner and no time, so that a tar depends only on its contents."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


# ------------------------------------------------------------------------------------------ parts of a sample


@dataclass(frozen=True)
class Fields:
    """Names of the members of a sample with the picture or clip, the caption and the label. If several candidates are
    listed, the first one that the sample has is used.

    Attributes:
        medium: extensions of the picture or clip; None accepts any known extension of pictures or clips.
        caption, label: candidates for the caption and the label, see ``FieldPath``.
        parts: the only extensions that are read; None means all.
        exact: True keeps the case of extensions, like Energon; False converts them to lower case, like webdataset.
        whole: True if the user's code reads all members of a sample; the index then has no medium, caption or label.
        empty: True if a caption may be empty.
    """

    medium: tuple[str, ...] | None = None
    caption: tuple[FieldPath, ...] = (("txt",), ("json", "caption"), ("json", "text"))
    label: tuple[FieldPath, ...] = (("cls",), ("json", "label"))
    parts: tuple[str, ...] | None = None
    exact: bool = False
    whole: bool = False
    empty: bool = field(default=False, repr=False)  # the repr is hashed

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
    """Return the key and the extension of a member's name, or None if the member belongs to no sample.

    The name is split at the first dot after the last slash. The extension is in lower case unless ``exact``. The result
    equals that of WebDataset's expression ``^((?:.*/|)[^.]+)[.]([^/]*)$``, which takes quadratic time for names with
    many slashes; this function takes linear time."""
    last = name.rfind("/")
    dot = name.find(".", last + 1)
    if dot < 0 or _META.match(name):
        return None
    # In WebDataset's expression, [^.]+ may begin after any slash before the first line break (``.`` matches no break).
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
    """Return the caption in a member's content, without surrounding whitespace.

    Raises ValueError if there is no caption, or if it is empty and ``empty`` is False."""
    text = _read(content, path)
    if not isinstance(text, str):
        raise ValueError(f"{_shown(path)} is {_kind(text)}, not a text")
    if not (text := text.strip()) and not empty:
        raise ValueError(f"{_shown(path)} is empty")
    return text


def read_label(content: bytes, path: FieldPath) -> int:
    """Return the class in a member's content. Raises ValueError if the content is not a class."""
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
    """The members of a tar that share one key.

    parts: extension -> (offset, number of bytes) of a member's content. start, end: byte range of all members."""

    key: str
    start: int
    end: int = 0
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)


def samples_of(path: Path, exact: bool = False) -> Iterator[Sample]:
    """Yield the samples of a tar in order. A sample is a run of members with the same key. exact: see ``Fields``.

    Raises ValueError, naming the tar, if the tar is truncated, damaged or compressed, or if a key or a member occurs
    twice."""
    name, seen, sample = printable(path), set(), None
    with open(open_regular(path), "rb") as file:
        try:
            for member in members(file):
                if not member.regular or (split := split_name(member.name, exact)) is None:
                    continue
                key, ending = split
                if sample is None or sample.key != key:
                    if sample is not None:
                        yield sample
                    if key in seen:
                        raise ValueError(
                            f"{name}: the key {printable(key)} stands in two places; members of a sample must follow "
                            "each other, and its key be its own"
                        )
                    seen.add(key)
                    sample = Sample(key, member.start)
                if ending in sample.parts:
                    raise ValueError(f"{name}: {printable(member.name)} is there twice")
                sample.parts[ending] = member.at, member.size
                sample.end = member.end
        except NoTar as error:
            file.seek(0)
            packed = file.read(4)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
            fix = "it is compressed; unpack it to a plain .tar" if packed else f"it can't be read as a tar ({error})"
            raise ValueError(f"{name}: {fix}") from error
        except TarError as error:
            raise ValueError(f"{name} {error}") from error
    if sample is not None:
        yield sample


@dataclass
class _Rows:
    """The records of an index, collected while the tar is scanned."""

    fields: Fields
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    captions: list[bool] = field(default_factory=list)
    suffixes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    why_not: list[str] = field(default_factory=list)  # for each record, why its caption or label is missing
    seen: int = 0
    latents: bool = False  # True if some sample without a picture or clip has a member that may hold latents

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
        if suffix in ANIMATIONS and is_animated(cast(BinaryIO, _Member(file, at, size))):
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
        """Return (index of the path at which the value was found, the value or None, the reason if there is no
        value)."""
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
    """File-like reader of one member of a tar."""

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
    """Return the three parts of a tar's index: the header, the records (an array of ``ROW``) and the keys.

    Samples without a picture or clip are left out. If any sample has a caption, samples without one are left out too.
    Otherwise, if any sample has a label, samples without a label are left out.

    Args:
        checksums: True reads the whole tar, and stores its SHA-256 and the CRC-32 of each picture or clip. False reads
            only headers, captions and labels.
        sha256: SHA-256 of the tar, if known.

    Raises:
        ValueError: see :func:`samples_of`; also raised for a tar without samples.
        OSError: the tar can't be read.
    """
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
    if sum(map(len, keys)) >= MOST_KEYS:
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
