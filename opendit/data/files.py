"""Helpers for users' files: determine their kind, print their names, and retry reads."""

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
from opendit.common.utils import printable as printable  # re-exported

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
    """Return the kind of file of a ``st_mode``, such as "a folder" or "a named pipe", or None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no ordinary file")


def problem(path: str | Path) -> str | None:
    """Return a short reason why a path can't be opened as a regular file, or None if it probably can.

    Nothing is opened, because opening a pipe may block and opening a device may have side effects. Links are followed.
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
    """Return a path with ~ replaced by the home folder. Raises ValueError if the home folder is not known."""
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as error:
        user = printable(path.partition("/")[0])
        raise ValueError(f"the home folder of {user} is not known; write the path out, or ./ before it") from error


def bytes_of(path: str | Path) -> int:
    """Return a file's size, or 0 if it can't be determined."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def allow_open_files(most: int = 2**14) -> None:
    """Allow this process and its child processes ``most`` open files, or as many as the system permits.

    The usual limit is 1,024, and a blend of many tars opens hundreds of files per source."""
    try:
        import resource
    except ImportError:  # this system has no such limit
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
    """Return ``work(item)`` for all items, in order. There are eight threads by default, because a network disk serves
    eight reads in the time of one."""
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


PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before the second attempt, before the third, ...

# Errors of a disk or network file system that is down. Damaged or missing files give other errors.
_NAMES = """EIO ESTALE EREMOTEIO ENODEV ENXIO ENOLINK ECOMM ETIMEDOUT ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNABORTED ECONNREFUSED""".split()
DOWN = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))


def retried(address: str, work: Callable[[], Result]) -> Result:
    """Return ``work()``, which reads ``address``, with up to five attempts and growing pauses.

    Raises DataError, naming the address. A missing or forbidden file is not retried."""
    for last in _attempts():
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            why = "doesn't exist" if isinstance(error, FileNotFoundError) else "may not be read"
            raise DataError(f"{printable(address)} {why}") from error
        except (ValueError, DataError):
            raise
        except Exception as error:  # every store raises other types
            if getattr(error, "status", None) in (401, 403):  # HTTP status
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
    """Yield, for each attempt, True if it is the last one. Wait between the attempts."""
    for pause in PAUSES:
        yield False
        wait(pause)
    yield True


def _failed(name: str | Path) -> str:
    return f"{printable(name)} can't be read, {len(PAUSES) + 1} attempts"


def _down(path: str | Path, error: Exception) -> int | None:
    """Return the errno of an error if it means that the disk is down; None for any other error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    # Exclude FFmpeg's error classes, which have an errno too: FFmpeg also reports EIO for damaged files.
    if isinstance(cause, OSError) and type(cause).__module__ == "builtins" and cause.errno in DOWN:
        return cause.errno
    try:
        os.stat(path)  # finds an error that a decoder has hidden
    except OSError as found:
        return found.errno if found.errno in DOWN else None
    except ValueError:  # a path with a NUL
        pass
    return None
