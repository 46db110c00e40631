"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, mark: str | None = None) -> Iterator[Path]:
    """Gives a name of this process's own, with the same suffix, to write to; what is there at the end takes ``path``'s
    place at once. After an exception (an OSError names ``path`` then) it is as it was, and nothing is left beside it.

    mark: stands in that name instead of the process's number, for whoever can find what a killed process has left; no
    two processes may write with one mark at once.
    """
    new = path.with_name(f".{path.stem[:100]}.{mark or os.getpid()}{path.suffix}")
    try:
        yield new
        os.replace(new, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a failed write does not say of which file
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
