"""Bytes in memory under a path, for decoders that only read files."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def as_file(parts: Iterable[tuple[int, bytes]], size: int) -> Iterator[str]:
    """Yield the path of a file of ``size`` bytes: ``parts``, (where they begin, bytes), and zeros elsewhere.

    It is in memory where the system supports that."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("clip"), "wb", buffering=0) as file:
            _write(file, parts, size)
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        _write(file, parts, size)
        yield file.name


def _write(file, parts: Iterable[tuple[int, bytes]], size: int) -> None:
    file.truncate(size)
    for at, content in parts:
        file.seek(at)
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
