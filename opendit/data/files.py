"""Users' files and folders: kinds, names, retried reads, listings, and hashes of contents."""

import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from opendit.common.safe_files import open_to_write
from opendit.common.utils import DataError, hash_parts
from opendit.common.utils import printable as printable

Given = TypeVar("Given")
Result = TypeVar("Result")
TIME_LIMIT = 30.0  # seconds until a picture or clip counts as unreadable
MOST_FILES_OPEN = 2**14  # limit on open files that ``allow_open_files`` asks for
MOST_OPEN = 256  # maximum open files in ``read_at``; many systems allow a process 1,024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str | None:
    """Return a name such as "a folder" for this ``st_mode``; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no ordinary file")


def problem(path: str | Path) -> str | None:
    """Return why a path can't be opened as a regular file, or None. The path is not opened, because a pipe may block
    and a device may have side effects."""
    try:
        kind = kind_of(os.stat(path).st_mode)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            return "a link to a file that doesn't exist"
        return error.strerror or type(error).__name__
    except ValueError as error:  # a path with a NUL
        return str(error)
    return kind and f"{kind}, not a file"


def expanded(path: str) -> Path:
    """Return a path with its leading ~ or ~user replaced. Raises ValueError if the home folder is unknown."""
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as error:
        user = printable(path.partition("/")[0])
        raise ValueError(f"the home folder of {user} is not known; write the path out, or ./ before it") from error


def bytes_of(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def allow_open_files() -> None:
    """Raise this process's limit on open files, usually 1,024, to ``MOST_FILES_OPEN`` or the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES_OPEN if hard == resource.RLIM_INFINITY else min(MOST_FILES_OPEN, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def file_locked(path: Path, root: Path | None = None, make: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``. Waits while another process on this machine holds the lock.

    The lock ends with the process. root: follow no link below this folder. make: create missing folders above ``path``.
    Raises OSError if the file can't be opened."""
    with open(open_to_write(path, os.O_WRONLY | os.O_CREAT, root=root, make=make), "w") as lock:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_threads(work: Callable[[Given], Result], items: Iterable[Given], threads: int = 8) -> list[Result]:
    """Return ``work(item)`` for all items, in order. Threads speed up reads from a network disk."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def first_bytes(path: str | Path, count: int) -> bytes:
    """Return the first ``count`` bytes of a file, or b"" if it can't be read or is not a regular file."""
    try:
        if problem(path) is not None:
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before the second, third, fourth and fifth attempt
# Errors of a disk or network file system that is down.
_NAMES = """EIO ESTALE EREMOTEIO ENODEV ENXIO ENOLINK ECOMM ETIMEDOUT ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNABORTED ECONNREFUSED""".split()
DOWN = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))


def retried(address: str, work: Callable[[], Result]) -> Result:
    """Return ``work()``, tried up to five times with growing pauses. address: what ``work`` reads.

    Raises DataError after the last attempt, or at once if the file is missing or forbidden. DataError and ValueError
    from ``work`` are raised at once."""
    for last in _attempts():
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            why = "doesn't exist" if isinstance(error, FileNotFoundError) else "may not be read"
            raise DataError(f"{printable(address)} {why}") from error
        except (ValueError, DataError):
            raise
        except Exception as error:  # object stores raise different types
            if getattr(error, "status", None) in (401, 403):  # HTTP status
                raise DataError(f"{printable(address)} may not be read") from error
            if last:
                text = printable(" ".join(str(error).split())[:200] or type(error).__name__)
                raise DataError(f"{_failed(address)}: {text}") from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def retried_disk(path: str | Path, work: Callable[[], Result], wait: Callable[[float], object] = time.sleep) -> Result:
    """Return ``work()``, tried up to five times while the disk of ``path`` is down. Raises DataError after the last
    attempt. Other errors are raised at once. wait: called with the seconds of each pause."""
    for last in _attempts(wait):
        try:
            return work()
        except DataError:
            raise
        except Exception as error:  # a decoder's error, or BadSample caused by an OSError
            if (number := _down(path, error)) is None:
                raise
            if last:
                why = "its disk or network is down; run it again when that is back"
                raise DataError(f"{_failed(path)}: {os.strerror(number)}: {why}") from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _attempts(wait: Callable[[float], object] = time.sleep) -> Iterator[bool]:
    """Yield False for every attempt except the last, then True. Pause between attempts."""
    for pause in PAUSES:
        yield False
        wait(pause)
    yield True


def _failed(name: str | Path) -> str:
    return f"{printable(name)} can't be read, {len(PAUSES) + 1} attempts"


def _down(path: str | Path, error: Exception) -> int | None:
    """Return the errno if ``error`` or ``os.stat`` shows that the path's disk is down, else None."""
    cause = error if isinstance(error, OSError) else error.__cause__
    # Exclude PyAV's subclasses of OSError, because FFmpeg also reports EIO for damaged files.
    if isinstance(cause, OSError) and type(cause).__module__ == "builtins" and cause.errno in DOWN:
        return cause.errno
    try:
        os.stat(path)  # a decoder may have hidden the disk's error; if the disk is down, this call raises it
    except OSError as found:
        return found.errno if found.errno in DOWN else None
    except ValueError:  # a path with a NUL
        pass
    return None


class _OpenFile:
    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self):
        with suppress(OSError):
            os.close(self.descriptor)


_open_files = threading.local()


def read_at(name: Hashable, open_file: Callable[[], int], at: int, size: int) -> bytes:
    """Return ``size`` bytes from offset ``at`` of a file, or fewer at the file's end. Files stay open for the next
    call.

    name: identifies the open file. open_file: opens the file and returns its descriptor. Raises OSError."""
    files: OrderedDict[Hashable, _OpenFile] = vars(_open_files).setdefault("files", OrderedDict())  # of this thread
    if name not in files:
        files[name] = _OpenFile(open_file())
        while len(files) > MOST_OPEN:
            files.popitem(last=False)
    files.move_to_end(name)
    parts, left = [], size
    try:
        while left and (part := os.pread(files[name].descriptor, left, at + size - left)):  # reads at most 2 GiB
            parts.append(part)
            left -= len(part)
    except OSError:
        del files[name]  # the descriptor stays invalid even if the disk returns
        raise
    return parts[0] if len(parts) == 1 else b"".join(parts)


def spread(size: int, most: int) -> list[int]:
    """Return up to ``most`` evenly spaced integers in [0, ``size``), ascending."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64)).tolist()


def name_few(messages: list[str]) -> str:
    """Return one line with the first five messages and the number of other messages."""
    return "; ".join(messages[:5]) + (f"; and {len(messages) - 5:,} more" if len(messages) > 5 else "")


CLIPS = frozenset(".mp4 .avi .mov .mkv .webm .m4v .mpg .mpeg .wmv .flv .ts .3gp .ogv".split())
VISITS = 100  # maximum listings of one folder in a search, because links can form cycles
Identity = tuple[int, int]  # (device, inode) of a folder


@dataclass
class Ignored:
    """The files and folders that a search ignored."""

    suffixes: Counter[str] = field(default_factory=Counter)  # suffix -> number of ignored files
    hidden: int = 0  # hidden files and folders
    outside: int = 0  # pictures outside the class folders
    # "path (kind)": pipes, devices, sockets, links to a parent folder, and folders visited too often
    named: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # "path (reason)" for folders that can't be read

    def add(self, other: "Ignored") -> None:
        vars(self).update({name: value + getattr(other, name) for name, value in vars(self).items()})

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        """Return one line such as "ignored 12 files of suffixes that are not read (10 .txt, 2 .gz), ..."."""
        kinds: dict[str, Counter[str]] = {}
        for suffix, count in self.suffixes.items():
            kind = _KINDS_OF_SUFFIXES.get(suffix, "of suffixes that are not read")
            kinds.setdefault(kind, Counter())[suffix] = count
        parts = [
            f"{counts.total():,} file{'s' * (counts.total() != 1)} {kind} ({_by_suffix(counts)})"
            for kind, counts in sorted(kinds.items())
        ]
        if self.outside:
            parts.append(f"{self.outside:,} picture{'s' * (self.outside != 1)} outside the class folders")
        if self.hidden:
            parts.append(f"{self.hidden:,} hidden")
        if self.named:
            parts.append(name_few(self.named))
        if self.unreadable:
            parts.append(f"folders that can't be read: {name_few(self.unreadable)}")
        return f"ignored {', '.join(parts)}"


_KINDS_OF_SUFFIXES: dict[str, str] = dict.fromkeys(CLIPS, "of clips, which need a CSV (python preprocess.py folder)")
_KINDS_OF_SUFFIXES |= dict.fromkeys((".eps", ".ps"), "of PostScript, which is a program and no picture")


def _by_suffix(counts: Counter[str]) -> str:
    common = counts.most_common(6)
    shown = [f"{count:,} {printable(suffix[:12]) or 'without one'}" for suffix, count in common]
    others = counts.total() - sum(count for _, count in common)
    return ", ".join(shown) + (f", {others:,} of others" if others else "")


def suffix_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def identity_of(folder: str) -> Identity:
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def folders_above(folder: str) -> frozenset[Identity]:
    """Return the identities of a folder and all its parents."""
    path = Path(os.path.realpath(folder))
    return frozenset(identity_of(str(each)) for each in (path, *path.parents))


def list_folder(folder: str, suffixes: frozenset[str], ignored: Ignored) -> tuple[list[str], list[str]]:
    """Return (files with one of ``suffixes``, subfolders), as sorted names.

    Other entries are added to ``ignored``. A broken link counts as a file, so that the reader reports it. Raises
    OSError."""
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    files, folders = [], []
    for entry in entries:
        name = entry.name
        if name.startswith(".") or name == "__MACOSX":
            ignored.hidden += 1
        elif _is_folder(entry):
            folders.append(name)
        elif (kind := _unusual(entry)) is not None:
            ignored.named.append(f"{printable(entry.path)} ({kind})")
        elif (suffix := suffix_of(name)) in suffixes:
            files.append(name)
        else:
            ignored.suffixes[suffix] += 1
    return files, folders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _unusual(entry: os.DirEntry[str]) -> str | None:
    try:  # this rarely accesses the disk, because a listing usually has the file types
        return None if entry.is_file(follow_symlinks=False) else kind_of(entry.stat().st_mode)
    except OSError:
        return None  # a broken link


def files_below(
    folder: str,
    suffixes: frozenset[str],
    ignored: Ignored,
    *,
    above: frozenset[Identity] = frozenset(),
    visits: int = VISITS,
) -> Iterator[str]:
    """Yield the paths of all files with one of ``suffixes`` below a folder: sorted files, then each sorted subfolder.

    Links are followed, except to a parent folder or a folder in ``above``. A folder is listed at most ``visits`` times.
    Other entries are added to ``ignored``."""
    todo, seen = [(folder, above)], Counter()
    while todo:
        path, above = todo.pop()
        try:
            here = identity_of(path)
            if here in above:
                ignored.named.append(f"{printable(path)} (a link that leads back up)")
                continue
            seen[here] += 1
            if seen[here] > visits:
                ignored.named.append(f"{printable(path)} (a folder that links led to before)")
                continue
            files, folders = list_folder(path, suffixes, ignored)
        except OSError as error:
            ignored.unreadable.append(f"{printable(path)} ({error.strerror or error})")
            continue
        for name in files:
            yield os.path.join(path, name)
        todo += [(os.path.join(path, name), above | {here}) for name in reversed(folders)]


MOST_FILES = 10_000
MOST_BYTES = 64 << 20  # approximate maximum bytes to read from all files
_BLOCK = 4096


def hash_files(paths: Sequence[str]) -> str:
    """Return a hash of the files' number, sizes and contents, in order, without their names.

    At most 10,000 evenly spaced files are read, and only evenly spaced blocks of long files. So hashing takes about a
    second for any data. An unreadable file counts as b""."""
    rows = spread(len(paths), MOST_FILES)
    share = max(2 * _BLOCK, MOST_BYTES // max(1, len(rows)))
    return hash_parts(str(len(paths)), *in_threads(partial(_contents, share=share), [paths[row] for row in rows]))


def _contents(path: str, share: int) -> bytes:
    """Return a file's size and contents; for a long file, a hash of the size and about ``share`` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
        with open(handle, "rb", buffering=0) as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                return b""
            parts = [found.st_size.to_bytes(8, "little")]
            if found.st_size <= share:
                return b"".join([*parts, file.read()])
            for block in spread(-(-found.st_size // _BLOCK), share // _BLOCK):
                file.seek(min(block * _BLOCK, found.st_size - _BLOCK))
                parts.append(file.read(_BLOCK))
            return hash_parts(*parts).encode()
    except OSError:
        return b""


READ_AT_ONCE = 8 << 20  # bytes to read at a time for verifying a file
_REPAIR = "copy it again or run the preprocess.py command that made it"


class Verification:
    """Compares files with checksums in a background thread, slowly enough not to slow down training.

    files: path relative to ``folder`` -> SHA-256. flag: beginning of messages about damage."""

    def __init__(self, folder: Path, files: dict[str, str], flag: str):
        self.folder, self.files, self.flag = folder, files, flag
        self.damage: str | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def share(self, number: int, shares: int) -> "Verification":
        """Return the verification of every ``shares``-th file, from file ``number`` on."""
        return Verification(self.folder, dict(sorted(self.files.items())[number::shares]), self.flag)

    def check(self) -> None:
        """Start the thread at the first call. Later, raise DataError for a bad file that it has found. Never waits."""
        if self._thread is None and self.files:
            self._thread = threading.Thread(target=self._verify, name="verification", daemon=True)
            self._thread.start()
            return
        if self.damage is not None:
            raise DataError(f"{self.flag}: {self.damage}")

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop the thread after the current read, and wait for the end. May be called twice."""
        self._stop.set()
        self.wait()

    def _verify(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux, this lowers the priority of one thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for name, expected in self.files.items():
            path = self.folder / name
            try:
                found = retried_disk(path, partial(self._sha256, path), self._stop.wait)
            except OSError as error:
                self.damage = f"{path} can't be read ({error.strerror}); {_REPAIR}"
                return
            except DataError as error:
                self.damage = str(error)
                return
            if found is None:
                return  # close() was called
            if found != expected:
                self.damage = f"{path} is damaged: its checksum is not the index's; {_REPAIR}"
                return

    def _sha256(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while True:
                started = time.monotonic()
                block = file.read(READ_AT_ONCE)
                if not block:
                    return digest.hexdigest()
                digest.update(block)  # releases the GIL
                if self._stop.wait(time.monotonic() - started):  # pause as long as the read took
                    return None
