"""Tars elsewhere: whatever fsspec opens (http, https, s3, gs, ...), read by ranges of bytes."""

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from opendit.common.errors import DataError
from opendit.common.safe_files import make_folder, write_whole
from opendit.data.files import printable
from opendit.data.retry import retried
from opendit.data.shards.ahead import ByteRange, FetchAhead, Ranges
from opendit.data.shards.cache import FOLDER, FileCache
from opendit.data.shards.index import SUFFIX, check_whole, is_index

TIME_LIMIT = 30.0  # seconds of one attempt
AT_ONCE = 16  # indexes that are fetched
MOST_TARS = 1_000_000


def expand(address: str) -> list[str]:
    """``s3://b/train-{0000..0003}.tar`` -> four addresses; any other is itself. Raises ValueError."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", address)
    if found is None:
        return [address]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + MOST_TARS:
        raise ValueError(
            f"--data_path {printable(address)}: {found[0]} is no range; let it go upwards, over at most {MOST_TARS:,}"
        )
    width = len(found[1]) if found[1].startswith("0") else 0
    ends = [f"{number:0{width}d}" for number in range(first, last + 1)]
    return [tar for end in ends for tar in expand(address[: found.start()] + end + address[found.end() :])]


class Remote:
    """A store behind addresses of one kind; made anew in a forked process, as fsspec's connections must be."""

    def __init__(self, address: str):
        self.kind = address.partition("://")[0]
        self._system: Any = None
        self._process: int | None = None

    @property
    def system(self) -> Any:
        """fsspec's file system. Raises ValueError if fsspec, or what it needs for this kind, is not installed."""
        if self._process != os.getpid():
            try:
                import fsspec

                self._system = fsspec.filesystem(self.kind, skip_instance_cache=True)
            except (ImportError, ValueError) as error:
                raise ValueError(f"addresses of {self.kind}:// need fsspec and its part for them: {error}") from error
            self._process = os.getpid()
        return self._system

    def __getstate__(self) -> dict[str, Any]:
        return {"kind": self.kind, "_system": None, "_process": None}

    def read(self, address: str, start: int, size: int) -> bytes:
        """``size`` bytes from ``start``; tried again when it fails. Raises DataError, which names the address."""

        def once() -> bytes:
            content = self.call("cat_file", address, start=start, end=start + size)
            if len(content) > size:
                raise DataError(
                    f"{printable(address)}: its server does not answer requests of ranges; take another one"
                )
            if len(content) < size:
                raise OSError(f"{len(content):,} bytes came of the {size:,} from {start:,} on")
            return content

        return retried(address, once)

    def read_all(self, address: str, check: Callable[[bytes], None] = lambda content: None) -> bytes:
        """The whole file; tried again where it fails, or ``check`` raises an error of what came."""

        def once() -> bytes:
            content = self.call("cat_file", address)
            check(content)
            return content

        return retried(address, once)

    def read_if_there(self, address: str) -> bytes | None:
        try:
            return self.read_all(address)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def version(self, address: str) -> str:
        """Changes with the file, as far as its server tells; empty if that can't be asked for."""

        def once() -> dict[str, Any]:
            try:
                return self.call("info", address)
            except FileNotFoundError:  # fsspec takes any failure of HTTP for this; who reads the file hears the truth
                return {}

        if not (found := retried(address, once)):
            return ""
        told = {name: found.get(name) for name in ("size", "ETag", "etag", "LastModified", "mtime")}
        # Of web servers, some of which give no ETag.
        told |= {name: found[name] for name in ("Last-Modified", "Content-MD5", "Digest") if name in found}
        return " ".join(f"{name}={value}" for name, value in told.items())

    def list_tars(self, address: str) -> list[str]:
        """The addresses of a folder's tars, sorted."""
        names = retried(address, lambda: self.call("ls", address, detail=False))
        full = [name if "://" in name else f"{self.kind}://{name}" for name in names]
        return sorted(name for name in full if name.lower().endswith(".tar"))

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """What fsspec's method of this name gives, within ``TIME_LIMIT`` where the store's part of it allows that."""
        system = self.system
        if system.async_impl:
            from fsspec.asyn import sync

            return sync(system.loop, getattr(system, f"_{name}"), *args, timeout=TIME_LIMIT, **options)
        return getattr(system, name)(*args, **options)


class RemoteTars:
    """Tars behind addresses; what is read of them is kept in a cache. As ``LocalTars``."""

    def __init__(self, addresses: Sequence[str], contents: Sequence[str], remote: Remote, cache: FileCache):
        self.addresses, self.contents, self.remote, self.cache = list(addresses), list(contents), remote, cache
        self._ahead = FetchAhead(self._fetch)

    def prefetch(self, groups: Iterable[Ranges]) -> None:
        """Begins to fetch what ``read`` will be asked for, in this order; a group lies side by side in its tar."""
        _ = self.remote.system  # made once, by this thread: those that fetch share it
        self._ahead.begin(group for group in groups if not all(self.cache.has(self._name(*part)) for part in group))

    def _fetch(self, group: Ranges) -> dict[ByteRange, bytes]:
        first, end = min(part.at for part in group), max(part.at + part.size for part in group)
        content = self.remote.read(self.addresses[group[0].tar], first, end - first)
        return {part: content[part.at - first : part.at - first + part.size] for part in group}

    def _name(self, tar: int, at: int, size: int) -> str:
        return f"{self.addresses[tar]} {self.contents[tar]} {at} {size}"

    def read(self, tar: int, at: int, size: int) -> bytes:
        """``size`` bytes from ``at``. Raises DataError, which names the address."""
        name = self._name(tar, at, size)
        fetched = self._ahead.take(ByteRange(tar, at, size))
        content = self.cache.get(name) if fetched is None else None
        if content is None or len(content) != size:
            content = self.remote.read(self.addresses[tar], at, size) if fetched is None else fetched
            self.cache.put(name, content)
        return content

    def forget(self, tar: int, at: int, size: int) -> bool:
        """Drops what the cache has of it; whether it can be read anew."""
        self.cache.forget(self._name(tar, at, size))
        return True


def fetch_indexes(addresses: Sequence[str], remote: Remote, cache: FileCache) -> list[Path]:
    """The index of every tar in a file of the cache's folder, fetched unless this version of it is there; in a folder
    of this process's where that takes no more.

    Raises DataError, which names the tar; ValueError if there is no place for the indexes."""
    kept = cache.folder / "indexes"

    def fetch(address: str, folder: Path) -> Path:
        name = f"{address}{SUFFIX}"
        try:
            version = remote.version(name)
            file = cache.path(f"{name} {version}").name
            if version and (is_index(path := kept / file) or is_index(path := folder / file)):
                return path
            content = remote.read_all(name, check_whole)
        except DataError as error:
            fix = "python preprocess.py index FOLDER makes it, where the tars are"
            raise DataError(f"{error}; every tar needs its index beside it: {fix}") from error
        write_whole(folder / file, content, root=folder.parent)
        return folder / file

    def fetch_all(folder: Path) -> list[Path]:
        make_folder(folder, root=folder.parent)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(partial(fetch, folder=folder), addresses))

    try:
        return fetch_all(kept)
    except OSError as full:
        place = f"{kept} ({FOLDER}): {full.strerror}"
    try:
        own = Path(tempfile.mkdtemp(prefix="opendit-indexes-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        print(f"note: {place}; the tars' indexes are in {own} meanwhile", file=sys.stderr, flush=True)
        return fetch_all(own)
    except OSError as error:
        raise ValueError(
            f"--data_path: no room for the tars' indexes in {place}, nor in {tempfile.gettempdir()}: {error.strerror}; "
            f"set {FOLDER} to a folder on another disk"
        ) from error
