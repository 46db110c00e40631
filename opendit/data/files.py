"""Helpers for user's files: find out their kind, print their names, and retry reads."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from opendit.common.safe_files import open_to_write
from opendit.common.utils import DataError
from opendit.common.utils import printable as printable  # as its callers know it

Given = TypeVar("Given")
Result = TypeVar("Result")
TIME_LIMIT = 30.0  # seconds that one file may take

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str | None:
    """Name the kind of file of a ``st_mode``: "a folder", "a named pipe" and so on; None for an ordinary file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no ordinary file")


def problem(path: str | Path) -> str | None:
    """Return why a path can't be opened as an ordinary file, in a few words, or None if it can be tried.

    Nothing is opened, since opening a pipe may block and a device may do anything. Links are followed.
    """
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
    """Return a path with ~ replaced by the home folder. Raises ValueError if that is not known."""
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as error:
        user = printable(path.partition("/")[0])
        raise ValueError(f"the home folder of {user} is not known; write the path out, or ./ before it") from error


def bytes_of(path: str | Path) -> int:
    """Return a file's size; 0 if it can't be found out."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def allow_open_files(most: int = 2**14) -> None:
    """Allow this process, and those that it starts, ``most`` open files, as far as the system permits: the usual limit
    is 1,024, and a blend of many tars opens hundreds for each source."""
    try:
        import resource
    except ImportError:  # no such limit, or none that can be asked for
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def file_locked(path: Path, root: Path | None = None, make: bool = False) -> Iterator[None]:
    """Hold a file lock among the processes of this machine. The system releases the lock when the process ends.

    root, make: see ``open_to_write``. Raises OSError."""
    with open(open_to_write(path, os.O_WRONLY | os.O_CREAT, root=root, make=make), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_threads(work: Callable[[Given], Result], items: Iterable[Given], threads: int = 8) -> list[Result]:
    """Return ``work(item)`` of all items, in order. A network disk answers eight threads as fast as one."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def first_bytes(path: str | Path, count: int) -> bytes:
    """Return the start of a file; nothing if it can't be read or is not an ordinary file."""
    try:
        if problem(path) is not None:
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before the second attempt, before the third, ...

# Errors of a disk or network file system that is down. A file that is damaged or gone has other numbers.
_NAMES = """EIO ESTALE EREMOTEIO ENODEV ENXIO ENOLINK ECOMM ETIMEDOUT ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNABORTED ECONNREFUSED""".split()
DOWN = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))


def retried(address: str, work: Callable[[], Result]) -> Result:
    """Return ``work()``, which reads ``address``, with up to five attempts and growing pauses.

    Raises DataError, naming the address. A missing or forbidden file is not tried again."""
    for last in _attempts():
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            why = "doesn't exist" if isinstance(error, FileNotFoundError) else "may not be read"
            raise DataError(f"{printable(address)} {why}") from error
        except (ValueError, DataError):
            raise
        except Exception as error:  # every store has its own
            if getattr(error, "status", None) in (401, 403):  # of HTTP
                raise DataError(f"{printable(address)} may not be read") from error
            if last:
                text = printable(" ".join(str(error).split())[:200] or type(error).__name__)
                raise DataError(f"{_failed(address)}: {text}") from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def retried_disk(path: str | Path, work: Callable[[], Result], wait: Callable[[float], object] = time.sleep) -> Result:
    """Return ``work()``, which reads a file, with up to five attempts while the file's disk is down.

    Raises DataError after the last attempt. All other errors of ``work`` are raised at once. wait: called with the
    seconds of each pause."""
    for last in _attempts(wait):
        try:
            return work()
        except DataError:
            raise
        except Exception as error:  # decoders raise their own types, which BadSample may have as its cause
            if (number := _down(path, error)) is None:
                raise
            if last:
                why = "its disk or network is down; run it again when that is back"
                raise DataError(f"{_failed(path)}: {os.strerror(number)}: {why}") from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _attempts(wait: Callable[[float], object] = time.sleep) -> Iterator[bool]:
    """Yield, for each attempt, True if it is the last; wait in between."""
    for pause in PAUSES:
        yield False
        wait(pause)
    yield True


def _failed(name: str | Path) -> str:
    return f"{printable(name)} can't be read, {len(PAUSES) + 1} attempts"


def _down(path: str | Path, error: Exception) -> int | None:
    """Return the errno of an error that means the disk is down; None for any other error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    # Not FFmpeg's own classes of errors, which have numbers as well: it reports EIO for damaged files, too.
    if isinstance(cause, OSError) and type(cause).__module__ == "builtins" and cause.errno in DOWN:
        return cause.errno
    try:
        os.stat(path)  # a decoder may have hidden why it could not read
    except OSError as found:
        return found.errno if found.errno in DOWN else None
    except ValueError:  # a path with a NUL
        pass
    return None
