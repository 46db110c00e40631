"""Where samples go: their files' names, what an earlier run left in the folder, rows for the sheet and the .npz."""

import contextlib
import errno
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from opendit.common.replace import replacing

INDEX = ".samples.json"  # the files in a folder that sample.py wrote, and will take away when it draws there again
_CANT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)  # of file systems that know no such call
LONGEST = 100  # bytes of a label in a file name; a name may have 255 (143 on an encrypted disk)


def file_name(number: int, label: str) -> str:
    """file_name(7, "a cat, asleep") -> "000007-a_cat__asleep": any label as a name that every file system takes."""
    name = ""
    for character in label[:40]:
        name += character if (character.isalnum() or character in "-_") and _encodes(character) else "_"
    while len(os.fsencode(name)) > LONGEST:
        name = name[:-1]
    return f"{number:06d}-{name}" if name.strip("_") else f"{number:06d}"


def _encodes(character: str) -> bool:
    try:
        return bool(os.fsencode(character))
    except UnicodeEncodeError:  # the file system's names are in another encoding
        return False


class OutputFolder:
    """The files of one run in its folder; rank 0 alone calls :meth:`begin`.

    Args:
        names: of the files that the run will write.
    """

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder, self.names = folder, list(names)

    def begin(self) -> list[str]:
        """Takes away what an earlier run wrote here, and nothing else; returns notes for the user. Raises OSError."""
        earlier = self._earlier()
        with replacing(self.folder / INDEX) as new:  # before the first file: a run that is killed is known, too
            new.write_text(json.dumps({"files": sorted({*earlier, *self.names})}))
        for name in os.listdir(self.folder):
            path = self.folder / name
            if (name in earlier or _unfinished(name) in earlier) and path.is_file() and not path.is_symlink():
                path.unlink()
        with replacing(self.folder / INDEX) as new:
            new.write_text(json.dumps({"files": sorted(self.names)}))
        strange = sum(bool(re.fullmatch(r"\d{6,}(-.*)?\.(png|mp4)", name)) for name in os.listdir(self.folder))
        if strange:
            return [f"{self.folder} holds {strange:,} other files that look like samples; they are left alone"]
        return []

    def there(self) -> int:
        """How many samples have a file of their own."""
        return sum((self.folder / name).is_file() for name in self.names if re.match(r"\d{6}", name))

    def _earlier(self) -> set[str]:
        try:
            names = json.loads((self.folder / INDEX).read_text())["files"]
            plain = {name for name in names if isinstance(name, str) and Path(name).name == name != ".."}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return set()
        return plain | {name for name in os.listdir(self.folder) if re.fullmatch(r"\.rows-\d{4,}\.npy", name)}


def _unfinished(name: str) -> str | None:
    """The file that a killed process was about to put in its place."""
    found = re.fullmatch(r"\.(.+)\.\d+(\.\w+)", name) or re.fullmatch(r"(.+\.mp4)()\.\d+\.partial", name)
    return found and found[1] + found[2]


class ArrayFile:
    """A .npy file of uint8 rows, written one after the other, for what does not fit in memory.

    Its whole length is reserved at first, where the file system can: a disk that is too small is an error then, and not
    after hours; and not a SIGBUS, as writing into a mapped file would be.

    Raises:
        OSError: naming the file, as :meth:`append` does.
    """

    def __init__(self, path: Path, count: int, shape: tuple[int, ...]):
        self.path, self.shape, self.written, self._count = path, tuple(shape), 0, count
        header = _npy_header((count, *self.shape))
        self._file = open(path, "wb", buffering=0)
        try:
            size = len(header) + count * int(np.prod(self.shape))
            try:
                os.posix_fallocate(self._file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in _CANT_RESERVE:
                    raise
            self._write(header)
        except OSError as error:
            error.filename = str(path)
            self.remove()
            raise

    def append(self, rows: np.ndarray) -> None:
        """Appends rows (n, *shape) uint8."""
        try:
            self._write(np.ascontiguousarray(rows).data.cast("B"))
        except OSError as error:
            error.filename = str(self.path)
            raise
        self.written += len(rows)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def keep(self, path: Path) -> None:
        """Makes a file of its own, which np.load reads, of the rows that there are, under another name."""
        header = _npy_header((self.written, *self.shape))
        with open(self.path, "r+b") as file:  # numpy leaves room in a header for any number of rows
            file.truncate(len(header) + self.written * int(np.prod(self.shape)))
            file.write(header)
        self.path.rename(path)

    def _write(self, data) -> None:
        data = memoryview(data)
        while len(data):  # an unbuffered write may take a part
            data = data[self._file.write(data) :]


def _npy_header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_2_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def write_npz(path: Path, arrays: dict[str, tuple[str, tuple[int, ...], Iterable[np.ndarray]]]) -> None:
    """An .npz, as np.savez writes it, of arrays that come in parts and need not fit in memory.

    Args:
        arrays: name -> type as numpy writes it ("|u1"), shape, and the rows, some at a time.
    """
    with replacing(path) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, (descr, shape, parts) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(_npy_header(shape, descr))
                for part in parts:
                    file.write(np.ascontiguousarray(part, dtype=descr).tobytes())


def in_parts(rows: np.ndarray, size: int = 64 << 20) -> Iterator[np.ndarray]:
    """An array (a mapped file) some rows at a time, at most ``size`` bytes or one row."""
    step = max(1, size // max(1, rows[:1].nbytes))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def texts(captions: list[str]) -> tuple[str, tuple[int, ...], Iterator[np.ndarray]]:
    """Captions as an array of :func:`write_npz`."""
    descr = f"<U{max([1, *map(len, captions)])}"
    parts = (np.array(captions[first : first + 256], dtype=descr) for first in range(0, len(captions), 256))
    return descr, (len(captions),), parts


@contextlib.contextmanager
def removed_at_the_end(rows: list[ArrayFile]) -> Iterator[None]:
    """Deletes these files at the end of the block, however it ends, but for those that were kept."""
    try:
        yield
    finally:
        for file in rows:
            with contextlib.suppress(OSError):
                file.remove()
