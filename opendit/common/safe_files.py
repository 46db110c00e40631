"""Write files without following symbolic links. All other modules write through this module.

A data set or an output folder may come from a stranger, and its links can lead anywhere. Most functions take ``root``,
the folder that the user named (by default the file's folder). Links in the path of ``root`` itself are followed. Below
``root``, each entry is opened relative to its parent folder (``dir_fd``, ``O_NOFOLLOW``). So a link is refused even if
it appears at the last moment. tests/common/test_writers.py fails if another module of the package writes a file.
"""

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from opendit.common.utils import printable

_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH needs no permission to list the folder
_MOST_SHOWN = 200  # maximum number of characters of a link's target in a message


class LinkRefused(OSError):
    """Error for a symbolic link at a path that should be written. The message names the link."""


# ------------------------------------------------------------------------------------------ files that are replaced


@contextlib.contextmanager
def replacing(
    path: Path, mark: str | None = None, *, root: Path | None = None, make: bool = False, temporary: str | None = None
) -> Iterator[BinaryIO]:
    """Yield a new, empty file ("w+b"). At the end of the block, the file atomically replaces ``path``.

    After an exception, ``path`` is unchanged and the temporary file (``file.name``) is deleted.

    Args:
        mark: MARK in the temporary file's name, by default the process number. Concurrent processes need different
            marks. After a crash, the mark identifies the leftover file.
        make: create missing folders above ``path``.
        temporary: name of the temporary file. The default is ``.STEM.MARK.SUFFIX``.

    Raises:
        LinkRefused: ``path``, the temporary file or a folder between ``root`` and ``path`` is a link.
        OSError: the file can't be written; the error's file name is ``path``.
    """
    new = path.with_name(temporary or f".{path.stem[:100]}.{mark or os.getpid()}{path.suffix}")
    with _folder(path.parent, root, make) as here:
        made = False
        try:
            _refuse_link(path, here)
            with _create(new, here) as file:
                made = True
                yield file
            _replace(new.name, path, here)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(path)  # the error of a failed write does not name the file
            if made:
                with contextlib.suppress(OSError):
                    os.unlink(new.name, dir_fd=here)
            raise


def write_whole(path: Path, content: bytes, *, root: Path | None = None, make: bool = False) -> None:
    """Write ``content`` to a file that atomically replaces ``path``; see :func:`replacing`."""
    with replacing(path, root=root, make=make) as file:
        file.write(content)


def path_of(file: BinaryIO) -> str:
    """Return a path at which a library can open the file of :func:`replacing`."""
    number = f"/proc/self/fd/{file.fileno()}"  # valid even if another file now has the path
    return number if os.path.exists(number) else str(file.name)


# -------------------------------------------------------------------------------------- files that are written in place


@contextlib.contextmanager
def creating(path: Path, *, root: Path | None = None) -> Iterator[BinaryIO]:
    """Delete the file at ``path``, if any, and yield a new, empty one ("w+b"). Raises as :func:`replacing`."""
    with _folder(path.parent, root, False) as here, _create(path, here) as file:
        yield file


def open_to_write(path: Path, flags: int, *, root: Path | None = None, make: bool = False, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file, opened with ``flags`` of ``os.open``. Raises LinkRefused, or OSError that
    names ``path``."""
    with _folder(path.parent, root, make) as here:
        return _open_regular(path, flags, here, mode)


def open_to_append(path: Path, *, root: Path | None = None, make: bool = False) -> int:
    """Return a descriptor for reading a file and appending to it. A missing file is created.

    A file with several hard links is first replaced by a copy, because a link may be outside ``root``.
    """
    with _folder(path.parent, root, make) as here:
        file = _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, here)
        if os.fstat(file).st_nlink <= 1:
            return file
        with open(file, "rb") as old, replacing(path, root=root) as new:
            shutil.copyfileobj(old, new)
        return _open_regular(path, os.O_RDWR | os.O_APPEND, here)


def touch(path: Path) -> None:
    """Set a file's modification time to now. A link is not followed. Raises OSError."""
    os.utime(path, follow_symlinks=False)


def link_or_copy(source: Path, path: Path, *, root: Path | None = None, make: bool = False) -> None:
    """Make a hard link at ``path`` to a regular file, or a copy if a link is impossible (another disk).

    Symbolic links in ``source`` are followed. ``path`` must not exist. Raises as :func:`replacing`.
    """
    real = os.path.realpath(source)
    with _folder(path.parent, root, make) as here:
        _refuse_link(path, here)
        try:
            return os.link(real, path.name, dst_dir_fd=here, follow_symlinks=False)
        except FileExistsError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        except OSError:  # another disk, or a file system without hard links
            pass
    with open(real, "rb") as old, replacing(path, root=root) as new:
        shutil.copyfileobj(old, new, 16 << 20)


# ------------------------------------------------------------------------------------------ folders and names


def make_folder(folder: Path, *, root: Path | None = None) -> None:
    with _folder(folder, root, True):
        pass


def sync_folder(folder: Path, *, root: Path | None = None) -> None:
    """Sync a folder, so that created and renamed entries survive a power cut."""
    with _folder(folder, root, False) as here:
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(path: Path, to: Path, *, root: Path | None = None, over_link: bool = False) -> None:
    """Rename a file or folder within its parent folder. An existing file or empty folder ``to`` is replaced, and with
    ``over_link`` also a link."""
    with _folder(path.parent, root, False) as here:
        _replace(path.name, to, here, over_link)


def link_to(path: Path, target: str, *, root: Path | None = None) -> None:
    with _folder(path.parent, root, False) as here:
        os.symlink(target, path.name, dir_fd=here)


def remove(path: Path, *, root: Path | None = None) -> None:
    """Delete a file if it exists. A link is deleted, not its target. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _folder(path.parent, root, False) as here:
        os.unlink(path.name, dir_fd=here)


def remove_tree(path: Path, *, root: Path | None = None) -> None:
    """Delete a file, a link, or a folder with its contents. Entries that can't be deleted stay."""
    with contextlib.suppress(OSError), _folder(path.parent, root, False) as here:
        if not stat.S_ISDIR(os.lstat(path.name, dir_fd=here).st_mode):
            return os.unlink(path.name, dir_fd=here)
        # Only Python 3.11 and later have shutil.rmtree with dir_fd.
        for _, folders, files, at in os.fwalk(path.name, topdown=False, follow_symlinks=False, dir_fd=here):
            for name in (*files, *folders):
                _delete(name, at)
        _delete(path.name, here)


def remove_folder(path: Path, *, root: Path | None = None) -> None:
    with _folder(path.parent, root, False) as here:
        os.rmdir(path.name, dir_fd=here)


def move_into(source: Path, folder: Path, *, root: Path | None = None) -> None:
    """Move all files below ``source`` to ``folder``, with their relative paths. Existing files are replaced. Both
    folders must be on one disk."""
    source = Path(os.path.abspath(source))
    for parent, _, names in os.walk(source):
        to = folder / Path(parent).relative_to(source)
        with _folder(to, root or folder, True) as here:
            for name in names:
                _replace(os.path.join(parent, name), to / name, here)


def refuse_links(folder: Path, names: Iterable[str], flag: str = "") -> None:
    """Raise LinkRefused if a name in a folder is a link. Call this before long work that writes the files.

    flag: the flag that names the folder, for the message.
    """
    try:
        with _folder(folder, None, False) as here:
            for name in names:
                _refuse_link(folder / name, here)
    except FileNotFoundError:  # the folder will be created later
        return
    except LinkRefused as error:
        raise LinkRefused(f"{flag}: {error}" if flag else str(error)) from None


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder at the end if it was created inside the context and is empty."""
    is_new = not folder.exists()
    try:
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # the folder does not exist, or is not empty
                folder.rmdir()


# ------------------------------------------------------------------------------------------ by descriptors


@contextlib.contextmanager
def _folder(folder: Path, root: Path | None, make: bool) -> Iterator[int]:
    """Yield a descriptor of a folder, reached from ``root`` without a link. make: create missing folders."""
    root = folder if root is None else root
    try:
        at, here = root, os.open(root, _FOLDER | os.O_CLOEXEC)
    except FileNotFoundError:
        if not make:
            raise
        root.mkdir(parents=True, exist_ok=True)
        at, here = root, os.open(root, _FOLDER | os.O_CLOEXEC)
    try:
        for name in folder.relative_to(root).parts:
            if name == "..":
                raise ValueError(f"{folder} leads out of {root}")
            at /= name
            try:
                deeper = _open(at, _FOLDER, here)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another process has just created the folder
                    os.mkdir(name, dir_fd=here)
                deeper = _open(at, _FOLDER, here)
            os.close(here)
            here = deeper
        yield here
    finally:
        os.close(here)


def _open(path: Path, flags: int, here: int, mode: int = 0o666) -> int:
    """Open ``path.name`` in the folder of descriptor ``here``. ``path`` is used in messages."""
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
    except OSError as error:
        _refuse_link(path, here)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _delete(name: str, here: int) -> None:
    for delete in (os.unlink, os.rmdir):
        with contextlib.suppress(OSError):
            delete(name, dir_fd=here)
            return


def _open_regular(path: Path, flags: int, here: int, mode: int = 0o666) -> int:
    file = _open(path, flags | os.O_NONBLOCK, here, mode)  # opening a FIFO would block forever
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def _replace(name: str, path: Path, here: int, over_link: bool = False) -> None:
    """Rename ``name`` to ``path.name`` in the folder of descriptor ``here``."""
    if not over_link:
        _refuse_link(path, here)
    try:
        os.replace(name, path.name, src_dir_fd=here, dst_dir_fd=here)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _create(path: Path, here: int) -> BinaryIO:
    """Create ``path.name`` in the folder of descriptor ``here``. A file of that name is removed first."""
    _refuse_link(path, here)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=here)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    return cast(BinaryIO, open(path, "w+b", opener=lambda *_: _open(path, flags, here)))


def _refuse_link(path: Path, here: int) -> None:
    try:
        target = os.readlink(path.name, dir_fd=here)
    except OSError:  # the name is not a link
        return
    target = printable(target)
    target = target if len(target) <= _MOST_SHOWN else target[:_MOST_SHOWN] + "..."
    raise LinkRefused(
        f"{printable(path)} is a symbolic link (to {target}), and nothing is written through one; remove it"
    )


logger = logging.getLogger(__name__)

MOST_WAITING = 64 << 20  # maximum bytes of records in memory while the disk is full; a week of log lines fits


class RecordFile:
    """An append-only file of records. A record that can't be written waits for the next attempt.

    The file is opened at the first record. After an error, the file is cut back to its complete records before the next
    write. ``lost`` counts records that were dropped because too many were waiting.
    """

    def __init__(self, path: Path, root: Path | None = None):
        self.path, self.lost, self._root = path, 0, root
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._size, self._torn = 0, False

    def append(self, record: bytes) -> None:
        """Write the waiting records and then this record. Raises OSError if a record still waits."""
        self._waiting.append(record)
        while sum(map(len, self._waiting)) > MOST_WAITING and len(self._waiting) > 1:
            self._waiting.popleft()
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        try:
            if self._file is None:
                self._open()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._close()  # after a network failure, a file may need to be reopened
            if isinstance(error, LinkRefused):
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Close the file after a last attempt to write the waiting records. Raises OSError."""
        try:
            self.flush()
        finally:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def _open(self) -> None:
        self._file = open_to_append(self.path, root=self._root, make=True)
        size = os.fstat(self._file).st_size
        if self._torn and size > self._size:
            os.ftruncate(self._file, self._size)
            size = self._size
        self._size, self._torn = size, False

    def _write(self, record: bytes) -> None:
        assert self._file is not None  # flush() has opened the file
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self._torn = True
            raise
        self._size += len(record)


class WriteFailures:
    """Count failed writes of files other than checkpoints. After such a failure, training continues, but its exit code
    becomes 1. Each pair (file, errno) is logged once."""

    def __init__(self):
        self._logged: set[tuple[str, int | None]] = set()
        self._counts: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self._counts.total()

    @contextlib.contextmanager
    def survive(self, what: str, step: int | None = None) -> Iterator[None]:
        """Suppress and count an OSError of the block. what: name of the file that the block writes."""
        try:
            yield
        except OSError as error:
            self._counts[what] += 1
            kind = (what, error.errno)
            if kind not in self._logged:
                self._logged.add(kind)
                at = "" if step is None else f"step {step}: "
                logger.warning("%s%s NOT WRITTEN, %s; training continues, the exit code will be 1", at, what, error)

    def describe(self) -> str:
        """Return a summary such as "log.jsonl 3 times, samples once"."""
        return ", ".join(f"{what} {'once' if n == 1 else f'{n} times'}" for what, n in self._counts.items())
