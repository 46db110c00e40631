"""Reads that fail for a while are tried again; of those that go on failing, one error names what can't be read."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from opendit.common.utils import DataError
from opendit.data.files import printable

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before the second attempt, before the third, ...

# What a disk or a network file system answers while it is away. A file that is damaged or gone has other numbers.
_NAMES = """EIO ESTALE EREMOTEIO ENODEV ENXIO ENOLINK ECOMM ETIMEDOUT ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNABORTED ECONNREFUSED""".split()
DOWN = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))

Result = TypeVar("Result")


def retried(address: str, work: Callable[[], Result]) -> Result:
    """``work()`` of a store, up to five times with growing pauses. Raises DataError that names the address; what is
    not there, or not allowed, is not tried again."""
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
    """``work()``, which reads a file, likewise while its disk is down; then DataError. Anything else that it raises is
    raised at once. wait: called with each pause."""
    for last in _attempts(wait):
        try:
            return work()
        except DataError:
            raise
        except Exception as error:  # decoders have their own, and BadSample says what came of them
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
    """The system's number of an error that a disk gives while it is down; None of any other error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    # FFmpeg's errors, which have numbers as well, are of classes of its own: it gives EIO of damaged files, too.
    if isinstance(cause, OSError) and type(cause).__module__ == "builtins" and cause.errno in DOWN:
        return cause.errno
    try:
        os.stat(path)  # a decoder may not have told why it could not read
    except OSError as found:
        return found.errno if found.errno in DOWN else None
    except ValueError:  # a path with a NUL
        pass
    return None
