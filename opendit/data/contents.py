"""Detect changed or damaged files by hashes of parts of their contents, and by checksums verified in the background."""

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opendit.common.utils import DataError, hash_parts
from opendit.data.files import in_threads, retried_disk
from opendit.data.row_arrays import spread

MOST_FILES = 10_000
MOST_BYTES = 64 << 20  # maximum number of bytes read from all files together
_BLOCK = 4096


def hash_files(paths: Sequence[str]) -> str:
    """Return a hash of the files' sizes and contents, independent of their names and folders.

    If there are more than 10,000 files, only 10,000 evenly spaced files are read. If they have more than 64 MiB
    together, only evenly spaced blocks of each file are read, including its beginning and end. The function thus takes
    about a second, even for a million pictures or 100 GB of weights. An unreadable file counts as an empty one."""
    rows = spread(len(paths), MOST_FILES)
    share = max(2 * _BLOCK, MOST_BYTES // max(1, len(rows)))
    return hash_parts(str(len(paths)), *in_threads(partial(_contents, share=share), [paths[row] for row in rows]))


def _contents(path: str, share: int) -> bytes:
    """Return the size of a file and about ``share`` bytes of it."""
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


READ_AT_ONCE = 8 << 20

_REPAIR = "copy it again or run the preprocess.py command that made it"


@dataclass(frozen=True)
class Checksums:
    """The SHA-256 of files: name in ``folder`` -> checksum. flag: beginning of messages about damage."""

    folder: Path
    files: dict[str, str]
    flag: str

    def verification(self, share: int, shares: int) -> "Verification":
        """Return the background verifier for part ``share`` of ``shares`` equal parts of the files, one part per
        process."""
        return Verification(self.folder, dict(sorted(self.files.items())[share::shares]), self.flag)


class Verification:
    """Background thread that reads files and compares their SHA-256, slowly enough not to slow training down.

    folder, files, flag: see :class:`Checksums`. The first call of ``check()`` starts the thread. Later calls raise if
    the thread has found a damaged file. ``close()`` ends the thread."""

    def __init__(self, folder: Path, files: dict[str, str], flag: str):
        self.folder, self.files, self.flag = folder, files, flag
        self.damage: str | None = None
        self.verified = 0  # number of files found intact
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise DataError, naming the file, if the thread has found a damaged one. The call returns at once.

        The first call only starts the thread and never raises."""
        if self._thread is None and self.files:
            self._thread = threading.Thread(target=self._verify, name="verification", daemon=True)
            self._thread.start()
            return
        if self.damage is not None:
            raise DataError(f"{self.flag}: {self.damage}")

    def wait(self) -> None:
        """Wait until the thread has read all files or found a damaged one."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the thread at once. May be called twice."""
        self._stop.set()
        self.wait()

    def _verify(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux this lowers only this thread's priority
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
                return  # stopped by close()
            if found != expected:
                self.damage = f"{path} is damaged: its checksum is not the index's; {_REPAIR}"
                return
            self.verified += 1

    def _sha256(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while True:
                started = time.monotonic()
                block = file.read(READ_AT_ONCE)
                if not block:
                    return digest.hexdigest()
                digest.update(block)  # releases the interpreter's lock, so training is not blocked
                if self._stop.wait(time.monotonic() - started):  # pause as long as the read took
                    return None
