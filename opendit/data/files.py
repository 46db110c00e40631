"""Files that others made: what stands at a path, and how its name is shown."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from opendit.common.utils import printable as printable  # as its callers know it

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
    """Why a path can't be opened as an ordinary file, in a few words, or None if it can be tried.

    Nothing is opened: to open a pipe may take for ever, and a device does what it likes. Links are followed.
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
    """Return a path with the home folder that its ~ means. Raises ValueError if that is not known."""
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as error:
        user = printable(path.partition("/")[0])
        raise ValueError(f"the home folder of {user} is not known; write the path out, or ./ before it") from error


def bytes_of(path: str | Path) -> int:
    """A file's size; 0 of what can't be looked at."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def allow_open_files(most: int = 2**14) -> None:
    """Lets this process, and those that it starts, have ``most`` files open, as far as the system allows it: the usual
    limit is 1,024, and a blend of many tars has hundreds of each source."""
    try:
        import resource
    except ImportError:  # no such limit, or none that can be asked for
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_bytes(path: str | Path, count: int) -> bytes:
    """The start of a file; nothing of what can't be read or is no ordinary file."""
    try:
        if problem(path) is not None:
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""
