"""Read bytes of tars on this machine's disks by offset."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from opendit.common.json_file import open_regular
from opendit.common.utils import DataError
from opendit.data.files import DOWN, printable, retried_disk

MOST_OPEN = 256  # tars at once, and indexes: a process may have 1,024 files on most systems


class LocalTars:
    """Tars on a disk of this machine. Each is opened when it is first read, and its size compared with its index.

    sizes: the bytes of the tars, by their indexes.
    """

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]):
        self.paths, self.sizes = list(paths), list(sizes)
        self._files: OrderedDict[int, int] = OrderedDict()  # tar -> file descriptor, the least recently used first

    def read(self, tar: int, at: int, size: int) -> bytes:
        """Return ``size`` bytes from ``at``.

        Raises DataError, which names the tar, if it is missing, truncated or a different one, or if its disk stays
        down; otherwise the disk's OSError."""
        return retried_disk(self.paths[tar], partial(self._read, tar, at, size))

    def _read(self, tar: int, at: int, size: int) -> bytes:
        file = self._open(tar)
        parts, left = [], size
        try:
            while left and (part := os.pread(file, left, at + size - left)):  # one call gives 2 GiB at most
                parts.append(part)
                left -= len(part)
        except OSError:
            del self._files[tar]  # after a disk was down the descriptor stays stale
            with suppress(OSError):
                os.close(file)
            raise
        if left:
            raise DataError(f"{printable(self.paths[tar])} is truncated: it ends before byte {at + size:,}")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self, tar: int, at: int, size: int) -> bool:
        """Return whether damaged bytes can be read again from elsewhere: here they can't."""
        return False

    def _open(self, tar: int) -> int:
        if tar in self._files:
            self._files.move_to_end(tar)
            return self._files[tar]
        try:
            file = open_regular(self.paths[tar])
        except ValueError as error:
            raise DataError(printable(str(error))) from error
        except OSError as error:
            if error.errno in DOWN:
                raise
            raise DataError(f"{printable(self.paths[tar])} can't be opened: {error.strerror}") from error
        if (found := os.fstat(file).st_size) != self.sizes[tar]:
            os.close(file)
            raise DataError(size_problem(self.paths[tar], found, self.sizes[tar]))
        self._files[tar] = file
        while len(self._files) > MOST_OPEN:
            os.close(self._files.popitem(last=False)[1])
        return file

    def close(self) -> None:
        while self._files:
            with suppress(OSError):
                os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}  # descriptors can't be pickled for a spawned process


def size_problem(name: str, found: int, expected: int) -> str:
    """Return an error text for a tar whose size differs from its index's."""
    what = "is truncated" if found < expected else "is not the tar that its index was made of"
    return (
        f"{printable(name)} {what}: it has {found:,} bytes, its index says {expected:,}; copy it again, or index it "
        "again: python preprocess.py index FOLDER"
    )
