"""Makes the index of a tar: reads its members' headers, captions and labels, and the checksums of everything."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from opendit.common.json_file import open_regular
from opendit.common.utils import sha256_of
from opendit.data.animation_header import SUFFIXES as ANIMATIONS
from opendit.data.animation_header import is_animated
from opendit.data.files import printable
from opendit.data.shards.fields import Fields, read_caption, read_label, split_name, suffix_of
from opendit.data.shards.index import ANIMATED, MAX_TEXT, NO_LABEL, ROW, Header, is_clip
from opendit.data.shards.tar_headers import NoTar, TarError, members

EXAMPLES, EXAMPLE_LETTERS = 5, 500
MOST_KEYS = 2**32  # bytes of all keys of a tar: records count them by four bytes
_ARRAYS = (".npz", ".npy", ".safetensors")


@dataclass
class Sample:
    """The members of one key: ending -> (offset of the content, bytes). start, end: of all of them in the tar."""

    key: str
    start: int
    end: int = 0
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)


def samples_of(path: Path, exact: bool = False) -> Iterator[Sample]:
    """The samples of a tar in its order: members that follow each other and share a key. exact: see ``Fields``.

    Raises ValueError, which names the tar and what is wrong with it: truncated, damaged, compressed, a key or a member
    twice.
    """
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
    """The rows of an index while its tar is scanned."""

    fields: Fields
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    captions: list[bool] = field(default_factory=list)
    suffixes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    why_not: list[str] = field(default_factory=list)  # of every row: why it has no caption or label
    seen: int = 0
    latents: bool = False  # a sample without a medium has a file that may hold latents

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
        """(number of the path that gave the value, the value or None, why there is none)."""
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
    """A member of a tar, as a file that is read."""

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
    """The index of a tar: its header, records of ``ROW`` and keys.

    If any sample has a caption, those without are left out; if none has and any has a label, those without one; and
    always those without a picture or clip.

    Args:
        checksums: read all of the tar, and keep its SHA-256 and every medium's CRC-32; else only what is needed.
        sha256: of the tar, where it is known.

    Raises ValueError as :func:`samples_of`, and for a tar without samples; OSError.
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
    )
    return header, rows, b"".join(keys)
