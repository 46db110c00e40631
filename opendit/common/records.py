"""Files that grow record by record beside a run's checkpoints, and the count of writes that failed."""

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from opendit.common.safe_files import LinkRefused, open_to_append

MOST_WAITING = 64 << 20  # bytes of records that wait for room on the disk: a week of log lines


class RecordFile:
    """A file that grows by whole records. What could not be written waits and is tried again with the next one.

    Nothing is opened before the first record. After an error there is no part of a record in the file, unless the file
    system refuses even to shorten it; then that is done before anything more is written.

    Args:
        root: the folder below which no link is followed, as of opendit/common/safe_files.py.

    Attributes:
        lost: records that were given up, since too many waited.
    """

    def __init__(self, path: Path, root: Path | None = None):
        self.path, self.lost, self._root = path, 0, root
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._size, self._torn = 0, False

    def append(self, record: bytes) -> None:
        """Writes all that waits and this record. Raises OSError if some of it has to go on waiting."""
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
            self._close()  # a network's file may be good again only when it is opened anew
            if isinstance(error, LinkRefused):
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def waiting(self) -> int:
        """Return the number of records that are not in the file yet."""
        return len(self._waiting)

    def close(self) -> None:
        """The last attempt to write what waits; raises OSError."""
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
        assert self._file is not None  # opened by flush
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
    """Count writes beside the checkpoints that failed. Training continues without them: each kind of
    failure is reported once, all are counted, and the exit code shows that there were some.

    Args:
        say: shows a line to people.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._told, self._counts = say, set(), Counter()

    @property
    def count(self) -> int:
        return self._counts.total()

    @contextlib.contextmanager
    def survive(self, what: str, step: int | None = None) -> Iterator[None]:
        """Count an OSError that ends the block, and continue after it. what: names the file that was being written."""
        try:
            yield
        except OSError as error:
            self._counts[what] += 1
            kind = (what, error.errno)
            if kind not in self._told:
                self._told.add(kind)
                at = "" if step is None else f"step {step}: "
                self._say(f"{at}{what} NOT WRITTEN, {error}; training goes on, the run's exit code will be 1")

    def describe(self) -> str:
        """describe() -> "log.jsonl 3 times, samples once"."""
        return ", ".join(f"{what} {'once' if n == 1 else f'{n} times'}" for what, n in self._counts.items())
