"""Compares a data set's files with their checksums beside the training, once a run."""

import contextlib
import hashlib
import os
import threading
import time
from functools import partial
from pathlib import Path

from opendit.common.utils import DataError
from opendit.data.retry import retried_disk

READ_AT_ONCE = 8 << 20

_REPAIR = "copy it again or run the preprocess.py command that made it"


class Verification:
    """A thread that reads files and compares their SHA-256, slowly enough to leave processor and disk to the training.

    files: the name in ``folder`` and the checksum of each. ``check()`` starts the thread when it is first called, so
    that nothing is held up at the start, and raises once a file was found to be damaged. ``close()`` ends it.
    """

    def __init__(self, folder: Path, files: dict[str, str], flag: str):
        self.folder, self.files, self.flag = folder, files, flag
        self.damage: str | None = None
        self.verified = 0  # files that were as they should be
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def check(self) -> None:
        """Raises DataError naming the damaged file, if one has been found by now; costs nothing.

        The first call only starts the thread: whatever it finds, and however soon, is raised by a later one.
        """
        if self._thread is None and self.files:
            self._thread = threading.Thread(target=self._verify, name="verification", daemon=True)
            self._thread.start()
            return
        if self.damage is not None:
            raise DataError(f"{self.flag}: {self.damage}")

    def wait(self) -> None:
        """Until the thread has read all files, or found one that is damaged."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Ends the thread, wherever it is; may be called twice."""
        self._stop.set()
        self.wait()

    def _verify(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where a thread has a priority of its own (Linux)
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
                return  # told to stop
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
                digest.update(block)  # releases the interpreter's lock
                if self._stop.wait(time.monotonic() - started):  # half of the time at most
                    return None
