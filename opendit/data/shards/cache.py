"""Copies of what was read from elsewhere, in a folder of this machine, the least recently used deleted first."""

import hashlib
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from opendit.common.safe_files import remove, replacing, touch
from opendit.common.utils import read_size

FOLDER, SIZE = "OPENDIT_SHARD_CACHE", "OPENDIT_SHARD_CACHE_SIZE"  # of the environment
DEFAULT_FOLDER, DEFAULT_SIZE = "~/.cache/opendit/shards", "10GB"


class FileCache:
    """Contents by name, in files of ``folder``; several processes may use it at once.

    A content is written under another name and renamed, so one that is there is whole, whenever its writer was killed.
    After every hundredth of ``limit`` that a process has written it looks at the folder, and deletes the oldest in use
    until nine tenths of ``limit`` are left.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._written, self._off = 0, False

    @classmethod
    def of_environment(cls) -> "FileCache":
        """Make the cache that OPENDIT_SHARD_CACHE and OPENDIT_SHARD_CACHE_SIZE ask for. Raises ValueError."""
        folder = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER).expanduser()
        return cls(folder, read_size(os.environ.get(SIZE) or DEFAULT_SIZE, SIZE))

    def path(self, name: str) -> Path:
        """Return the path of the content with this name, whether or not it exists."""
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
        return self.folder / digest[:2] / digest[2:40]

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def get(self, name: str) -> bytes | None:
        path = self.path(name)
        try:
            content = path.read_bytes()
            touch(path)
        except OSError:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Keeps a content. A disk that is full, or can't be written to, is told of once, and nothing is kept then."""
        if self._off or len(content) > self.limit:
            return
        path = self.path(name)
        partial = f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial"
        try:
            with replacing(path, root=self.folder, make=True, temporary=partial) as file:
                file.write(content)
        except OSError as error:
            self._off = True
            why = error.strerror or error
            print(f"note: {self.folder}: {why}; what is read is not kept there", file=sys.stderr, flush=True)
            return
        self._written += len(content)
        if self._written >= self.limit // 100:
            self._written = 0
            self._evict()

    def forget(self, name: str) -> None:
        remove(self.path(name), root=self.folder)

    def _evict(self) -> None:
        found = []
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith(".partial"):  # which another process writes; of a killed one few are left
                        continue
                    with suppress(OSError):  # another process deletes, too
                        state = file.stat()
                        found.append((state.st_mtime_ns, state.st_size, file.path))
        used = sum(size for _, size, _ in found)
        if used <= self.limit:
            return
        for _, size, path in sorted(found):
            if used <= self.limit * 9 // 10:
                return
            with suppress(OSError):
                remove(Path(path), root=self.folder)
            used -= size
