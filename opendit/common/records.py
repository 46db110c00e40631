"""Append-only files of a run, such as its log, and a count of failed writes."""

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from opendit.common.safe_files import LinkRefused, open_to_append

logger = logging.getLogger(__name__)

MOST_WAITING = 64 << 20  # maximum bytes of records that wait in memory while the disk is full; a week of log lines fits


class RecordFile:
    """An append-only file of records. A record that can't be written waits for the next attempt.

    The file is opened at the first record. After an error the file is truncated to its last complete record. If the
    truncation fails too, it is repeated before the next write.

    Args:
        root: folder below which no link is followed, see opendit/common/safe_files.py.

    Attributes:
        lost: number of records that were dropped because too many were waiting.
    """

    def __init__(self, path: Path, root: Path | None = None):
        self.path, self.lost, self._root = path, 0, root
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._size, self._torn = 0, False

    def append(self, record: bytes) -> None:
        """Write all waiting records and then this one. Raises OSError if a record could not be written and still
        waits."""
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
            self._close()  # after a network failure, a file may have to be reopened
            if isinstance(error, LinkRefused):
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def waiting(self) -> int:
        """Number of records that are not in the file yet."""
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
    """Counter of failed writes of files other than checkpoints.

    Training continues after such a failure. Each kind of failure is logged once, and the run's exit code becomes 1."""

    def __init__(self):
        self._logged: set[tuple[str, int | None]] = set()
        self._counts: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self._counts.total()

    @contextlib.contextmanager
    def survive(self, what: str, step: int | None = None) -> Iterator[None]:
        """Count an OSError from the block and suppress it. what: name of the file that the block writes."""
        try:
            yield
        except OSError as error:
            self._counts[what] += 1
            kind = (what, error.errno)
            if kind not in self._logged:
                self._logged.add(kind)
                at = "" if step is None else f"step {step}: "
                logger.warning("%s%s NOT WRITTEN, %s; training goes on, the run's exit code will be 1", at, what, error)

    def describe(self) -> str:
        """Return a summary such as "log.jsonl 3 times, samples once"."""
        return ", ".join(f"{what} {'once' if n == 1 else f'{n} times'}" for what, n in self._counts.items())
