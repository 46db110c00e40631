"""Read byte ranges of tars, from local disks or from addresses that fsspec opens (https, s3, ...).

Ranges from an address are cached on the local disk, and ranges that are needed next are prefetched.
"""

import asyncio
import atexit
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urljoin, urlsplit

from opendit.common.json_file import MIB, open_regular
from opendit.common.safe_files import make_folder, remove, replacing, touch, write_whole
from opendit.common.stages import Background
from opendit.common.utils import DataError, read_size
from opendit.common.utils import shown as short
from opendit.data.files import DOWN, printable, read_at, retried, retried_disk
from opendit.data.shards.index import SUFFIX, check_whole, is_index


class LocalTars:
    """Tars on a local disk. sizes: each tar's bytes from its index, compared when the tar is opened."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]):
        self.paths, self.sizes = list(paths), list(sizes)
        self._me = object()  # distinguishes the open files of different objects

    def read(self, tar: int, at: int, size: int) -> bytes:
        """Return ``size`` bytes from offset ``at``. Raises DataError, naming the tar, if the tar is missing, truncated
        or changed, or if the disk stays unavailable. Raises OSError for other disk errors."""
        path = self.paths[tar]
        content = retried_disk(path, partial(read_at, (self._me, tar), partial(self._open, tar), at, size))
        if len(content) < size:
            raise DataError(f"{printable(path)} is truncated: it ends before byte {at + size:,}")
        return content

    def forget(self, tar: int, at: int, size: int) -> bool:
        """Return False, because a second read would not help."""
        return False

    def _open(self, tar: int) -> int:
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
        return file


def size_problem(name: str, found: int, expected: int) -> str:
    what = "is truncated" if found < expected else "is not the tar that its index was made of"
    return (
        f"{printable(name)} {what}: it has {found:,} bytes, its index says {expected:,}; copy it again, or index it "
        "again: python preprocess.py index FOLDER"
    )


TIME_LIMIT = 30.0  # seconds for one attempt, plus the transfer time at ``SLOWEST``
SLOWEST = 1 << 20  # lowest transfer rate in bytes per second
CHUNK = 1 << 18  # bytes per read
AT_ONCE = 16  # indexes to fetch concurrently
MOST_TARS = 1_000_000  # maximum names from all patterns
MOST_LETTERS = 1 << 27  # maximum characters in these names
MOST_BRACES = 200  # maximum pairs of braces per pattern
_DIGITS = 18  # maximum digits per number in braces
_SPAN = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", re.ASCII)
MOST_PAGE = 16 * MIB  # maximum bytes of a web page that lists a folder
MOST_INDEX = 1024 * MIB  # maximum bytes of a tar's index
NO_RANGES = "its server does not answer requests of ranges; take another one"
FOLDER, SIZE = "OPENDIT_SHARD_CACHE", "OPENDIT_SHARD_CACHE_SIZE"  # environment variables
DEFAULT_FOLDER, DEFAULT_SIZE = "~/.cache/opendit/shards", "10GB"
GROUPS = 16  # maximum prefetched groups of ranges that wait for use
BYTES = 2**28  # maximum bytes in these groups, except for a single large group
GAP = 2**14  # maximum bytes between ranges that share a request


# ------------------------------------------------------------------------------------------ cache


class FileCache:
    """Cache of byte strings by name, as files in ``folder``. Several processes may share the folder. A file appears
    when it is complete. Above ``limit`` bytes, the least recently used files are deleted until nine tenths remain."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._written, self._off = 0, False

    @classmethod
    def of_environment(cls) -> "FileCache":
        """Return the cache according to OPENDIT_SHARD_CACHE and OPENDIT_SHARD_CACHE_SIZE. Raises ValueError."""
        folder = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER).expanduser()
        return cls(folder, read_size(os.environ.get(SIZE) or DEFAULT_SIZE, SIZE))

    def path(self, name: str) -> Path:
        """Return the path for a name. The file need not exist."""
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
        """Store an entry of up to ``limit`` bytes. If writing fails, print a note and store nothing more."""
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
                    # Another process may be writing this file.
                    if file.name.endswith(".partial"):
                        continue
                    with suppress(OSError):  # another process may delete it
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


# ------------------------------------------------------------------------------------------ fetching ahead


class ByteRange(NamedTuple):
    """``size`` bytes at offset ``at`` of the tar with index ``tar``."""

    tar: int
    at: int
    size: int


Ranges = Sequence[ByteRange]  # ranges for one request


def grouped(ranges: Iterable[ByteRange]) -> list[list[ByteRange]]:
    """Group ranges in one tar that are at most ``GAP`` bytes apart. Groups are ordered by their first ranges."""
    groups: list[list[ByteRange]] = []
    for part in ranges:
        near = (group for group in groups if max(part.at, group[0].at) - min(_end(part), _end(group[0])) <= GAP)
        if (group := next(near, None)) is None:
            groups.append([part])
        else:
            group.append(part)
    return groups


def _end(part: ByteRange) -> int:
    return part.at + part.size


class _Begun(NamedTuple):
    ranges: set[ByteRange]  # ranges still to be used
    size: int
    work: Background[dict[ByteRange, bytes]]


class FetchAhead:
    """Fetches groups of byte ranges in threads while the process decodes earlier ranges. The threads end with the
    process. fetch: returns the bytes of each range in a group. :meth:`take` raises errors of ``fetch``."""

    def __init__(self, fetch: Callable[[Ranges], dict[ByteRange, bytes]]):
        self._fetch, self._process = fetch, 0
        self._waiting: deque[Ranges] = deque()
        self.begun: deque[_Begun] = deque()

    def begin(self, groups: Iterable[Ranges]) -> None:
        """Start fetching ``groups``, and drop earlier groups. Call :meth:`take` in the order of ``groups``."""
        self._process = os.getpid()  # to detect a fork: a child process lacks these threads
        self._waiting, self.begun = deque(groups), deque()
        self._begin_more()

    def take(self, part: ByteRange) -> bytes | None:
        """Wait for a range, forget it, and return its bytes. Return None if the range is not being fetched."""
        if self._process != os.getpid() or not any(part in begun.ranges for begun in self.begun):
            return None
        while part not in self.begun[0].ranges:  # drop groups of skipped samples
            self.begun.popleft()
        found = self.begun[0]
        found.ranges.discard(part)
        if not found.ranges:
            self.begun.popleft()
        self._begin_more()
        return found.work.result().pop(part)

    def _begin_more(self) -> None:
        size = sum(begun.size for begun in self.begun)
        while self._waiting and len(self.begun) < GROUPS:
            group = self._waiting[0]
            size += sum(part.size for part in group)
            if self.begun and size > BYTES:
                return
            self._waiting.popleft()
            work = Background(partial(self._fetch, group), "fetch ahead")
            self.begun.append(_Begun(set(group), sum(part.size for part in group), work))

    def __reduce__(self) -> tuple[Any, ...]:
        return FetchAhead, (self._fetch,)  # threads can't be pickled


# ------------------------------------------------------------------------------------------ stores


def expand(patterns: Iterable[str]) -> list[str]:
    """Expand the braces in patterns like ``part-{000..127}.tar`` and ``{left,right}.tar``, as shells do.

    Raises ValueError for unmatched braces, or if the patterns give too many names or characters."""
    names, size = [], 0
    for pattern in patterns:
        if pattern.count("{") > MOST_BRACES:
            raise ValueError(f"{short(pattern)} has more than {MOST_BRACES} pairs of braces")
        names += (found := _expand(pattern, pattern))
        size += sum(map(len, found))
        _check_names(pattern, len(names), size)
    return names


def _check_names(pattern: str, names: int, size: int) -> None:
    if names > MOST_TARS or size > MOST_LETTERS:
        raise ValueError(
            f"{short(pattern)} names more than {MOST_TARS:,} tars, or names of {MOST_LETTERS:,} characters"
        )


def _expand(text: str, pattern: str) -> list[str]:
    """Return all expansions of ``text``. pattern: the complete pattern, for messages."""
    if re.search(r"[{}]", text) is None:
        return [text]
    depth, cuts = 0, []  # cuts: the outer braces and the commas between them
    for found in re.finditer(r"[{},]", text):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth < 0:
            raise ValueError(f"{short(pattern)} has a }} without its {{")
        if depth == 0 and found[0] == "}" or depth == 1 and found[0] == "," or not cuts and found[0] == "{":
            cuts.append(found.start())
        if cuts and depth == 0:
            break
    else:
        raise ValueError(f"{short(pattern)} has a {{ without its }}")
    choices = [text[first + 1 : end] for first, end in pairwise(cuts)]
    if len(choices) > 1:
        middles = [name for choice in choices for name in _expand(choice, pattern)]
    elif span := _SPAN.fullmatch(choices[0]):
        middles = _numbers(pattern, *span.groups("1"))
    else:  # {x} stays unchanged
        middles = [f"{{{name}}}" for name in _expand(choices[0], pattern)]
    before, ends = text[: cuts[0]], _expand(text[cuts[-1] + 1 :], pattern)
    count, letters = len(middles) * len(ends), sum(map(len, middles)) * len(ends) + sum(map(len, ends)) * len(middles)
    _check_names(pattern, count, letters + count * len(before))
    return [before + middle + end for middle in middles for end in ends]


def _numbers(pattern: str, first: str, last: str, step: str) -> list[str]:
    if max(map(len, (first, last, step))) > _DIGITS:
        raise ValueError(f"{short(pattern)} has a number of more than {_DIGITS} digits")
    padded = any(re.match(r"-?0\d", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    low, high, by = int(first), int(last), abs(int(step)) or 1
    _check_names(pattern, abs(high - low) // by + 1, 0)
    numbers = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    return [f"{number:0{width}d}" for number in numbers]


class _RefusedAnswer(DataError):
    """Raised for a server's invalid answer, if a retry would not help."""


async def _take(read: Callable[[int], Awaitable[bytes]], most: int) -> bytes:
    """Return all bytes from ``read``. Raises _RefusedAnswer for more than ``most`` bytes. Raises asyncio.TimeoutError
    if n bytes take more than ``TIME_LIMIT`` + n / ``SLOWEST`` seconds."""
    parts, size, begin = [], 0, time.monotonic()
    while True:
        left = TIME_LIMIT + size / SLOWEST - (time.monotonic() - begin)
        part = await asyncio.wait_for(read(CHUNK), max(left, 0.0))
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > most:
            raise _RefusedAnswer(f"it sent more than {most:,} bytes")


def _check_range(content_range: str | None, start: int, size: int, whole: int | None) -> None:
    """Raise an error if the answer's Content-Range is not the requested range. whole: file size or None."""
    found = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", (content_range or "").strip(), re.ASCII)
    if found is None or (int(found[1]), int(found[2])) != (start, start + size - 1):
        came = printable(str(content_range))[:60]
        raise OSError(f"bytes {start:,} to {start + size - 1:,} were asked for, and {came} came")
    if whole is not None and found[3] not in ("*", str(whole)):
        raise _RefusedAnswer(f"it has {int(found[3]):,} bytes, its index says {whole:,}; index it again")


async def _get_http(system: Any, address: str, start: int | None, most: int, whole: int | None) -> bytes:
    """Return a file of at most ``most`` bytes from a web server, or with ``start``, ``most`` bytes from there."""
    import aiohttp

    headers = {"Accept-Encoding": "identity"}  # a small compressed answer could unpack to any size
    if start is not None:
        headers["Range"] = f"bytes={start}-{start + most - 1}"
    session = await system.set_session()
    no_limit = aiohttp.ClientTimeout(total=None)  # wait_for and _take limit the time instead
    asked = session.get(system.encode_url(address), headers=headers, auto_decompress=False, timeout=no_limit)
    try:
        answer = await asyncio.wait_for(asked, TIME_LIMIT)
    except aiohttp.TooManyRedirects as error:
        raise _RefusedAnswer("it leads from one address to another without end") from error
    except aiohttp.InvalidURL as error:
        raise _RefusedAnswer(f"it leads to {printable(str(error))[:100]}, which is no address") from error
    async with answer:
        if answer.status == 404:
            raise FileNotFoundError(address)
        answer.raise_for_status()
        if (packed := answer.headers.get("Content-Encoding", "identity").strip().lower()) not in ("", "identity"):
            raise _RefusedAnswer(f"it comes packed ({printable(packed)[:20]}), which its server was asked not to do")
        if start is not None:
            if answer.status == 200:
                raise _RefusedAnswer(NO_RANGES)
            _check_range(answer.headers.get("Content-Range"), start, most, whole)
        elif answer.status != 200:
            raise OSError(f"status {answer.status}")
        if (answer.content_length or 0) > most:
            raise _RefusedAnswer(f"it has {answer.content_length:,} bytes; at most {most:,} are read")
        return await _take(answer.content.read, most)


class Remote:
    """File system for addresses of one kind (https, s3, ...). A forked process opens new connections."""

    def __init__(self, address: str):
        self.kind = address.partition("://")[0].lower()
        self._system: Any = None
        self._process: int | None = None

    @property
    def system(self) -> Any:
        """The fsspec file system. Raises ValueError without fsspec, or without the package for this kind of address."""
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

    def read(self, address: str, start: int, size: int, whole: int | None = None) -> bytes:
        """Return ``size`` bytes from ``start`` on, with retries. whole: the file's size, if known. Raises DataError,
        naming the address, if the range can't be read or the server sends another range."""

        def once() -> bytes:
            content = self.call("cat_file", address, start=start, end=start + size, whole=whole) if size else b""
            if len(content) > size:
                raise _RefusedAnswer(NO_RANGES)
            if len(content) < size:
                raise OSError(f"{len(content):,} bytes came of the {size:,} from {start:,} on")
            return content

        return self._retried(address, once)

    def _retried(self, address: str, once: Callable[[], bytes]) -> bytes:
        try:
            return retried(address, once)
        except _RefusedAnswer as error:
            raise DataError(f"{printable(address)}: {error}") from error

    def read_all(self, address: str, most: int, check: Callable[[bytes], None] = lambda content: None) -> bytes:
        """Return a file of at most ``most`` bytes, with retries. check: raises an error if the content is invalid.
        Raises DataError, naming the address."""

        def once() -> bytes:
            content = self.call("cat_file", address, most=most)
            check(content)
            return content

        return self._retried(address, once)

    def read_if_there(self, address: str, most: int) -> bytes | None:
        try:
            return self.read_all(address, most)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def version(self, address: str) -> str:
        """Return a string from the server's metadata that changes with the file; "" without metadata."""

        def once() -> dict[str, Any]:
            try:
                return self.call("info", address)
            except FileNotFoundError:  # fsspec's error for any HTTP failure; a later read raises the cause
                return {}

        if not (found := retried(address, once)):
            return ""
        version = {name: found.get(name) for name in ("size", "ETag", "etag", "LastModified", "mtime")}
        # Some web servers send one of these instead of an ETag.
        version |= {name: found[name] for name in ("Last-Modified", "Content-MD5", "Digest") if name in found}
        return " ".join(f"{name}={value}" for name, value in version.items())

    def list_tars(self, address: str) -> list[str]:
        if self.kind in ("http", "https"):
            return self._linked_tars(f"{address.rstrip('/')}/")
        names = retried(address, lambda: self.call("ls", address, detail=False))
        full = [name if "://" in name else f"{self.kind}://{name}" for name in names]
        return sorted(name for name in full if name.lower().endswith(".tar"))

    def _linked_tars(self, folder: str) -> list[str]:
        """Return the tars on the folder's server to which the folder's web page links."""
        page, found = self.read_all(folder, MOST_PAGE).decode("utf-8", "replace"), set()
        for link in re.finditer(r"""href\s{0,9}=\s{0,9}["']([^"'<>]{1,4096})["']""", page, re.IGNORECASE):
            with suppress(ValueError):
                tar = urljoin(folder, unescape(link[1]).strip())
                same = urlsplit(tar).netloc == urlsplit(folder).netloc and tar.startswith(("http://", "https://"))
                if same and tar.lower().endswith(".tar"):
                    found.add(tar)
        return sorted(found)

    def _cat(
        self, address: str, start: int | None = None, end: int = 0, most: int = 0, whole: int | None = None
    ) -> bytes:
        """Return a file of at most ``most`` bytes, or only its bytes [start, end)."""
        system, most = self.system, most if start is None else end - start
        if self.kind in ("http", "https"):
            return cast(bytes, self._sync(None, _get_http, system, address, start, most, whole))
        if start is None and ((size := self.call("info", address).get("size")) is None or size > most):
            raise _RefusedAnswer(f"it has {size or 'an unknown number of'} bytes; at most {most:,} are read")
        options = {} if start is None else {"start": start, "end": end}
        return self._limited(TIME_LIMIT + most / SLOWEST, "cat_file", address, **options)

    def _limited(self, seconds: float, name: str, *args: Any, **options: Any) -> Any:
        """Call the fsspec method ``name`` with a time limit. A synchronous method runs in a separate thread."""
        system = self.system
        if system.async_impl:
            return self._sync(seconds, getattr(system, f"_{name}"), *args, **options)
        return Background(partial(getattr(system, name), *args, **options), "fsspec").result(seconds)

    def _sync(self, timeout: float | None, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.system.loop, function, *args, timeout=timeout, **options)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call the fsspec method ``name`` with a time limit. ``cat_file`` also has a size limit."""
        if name == "cat_file":
            return self._cat(*args, **options)
        return self._limited(TIME_LIMIT, name, *args, **options)


class RemoteTars:
    """Tars behind addresses, with a cache of ranges and the methods of ``LocalTars``. contents: each tar's checksum; ""
    if unknown. sizes: each tar's bytes from its index."""

    def __init__(
        self, addresses: Sequence[str], contents: Sequence[str], sizes: Sequence[int], remote: Remote, cache: FileCache
    ):
        self.addresses, self.contents, self.sizes = list(addresses), list(contents), list(sizes)
        self.remote, self.cache = remote, cache
        self._ahead = FetchAhead(self._fetch)

    def prefetch(self, groups: Iterable[Ranges]) -> None:
        """Start fetching the ranges that the next calls of ``read`` need, in this order."""
        _ = self.remote.system  # before threads share the file system, create it
        self._ahead.begin(group for group in groups if not all(self.cache.has(self._name(*part)) for part in group))

    def _fetch(self, group: Ranges) -> dict[ByteRange, bytes]:
        first, end = min(part.at for part in group), max(part.at + part.size for part in group)
        tar = group[0].tar
        content = self.remote.read(self.addresses[tar], first, end - first, self.sizes[tar])
        return {part: content[part.at - first : part.at - first + part.size] for part in group}

    def _name(self, tar: int, at: int, size: int) -> str:
        return f"{self.addresses[tar]} {self.contents[tar]} {at} {size}"

    def read(self, tar: int, at: int, size: int) -> bytes:
        """Return ``size`` bytes starting at offset ``at``. Raises DataError, naming the address."""
        name = self._name(tar, at, size)
        fetched = self._ahead.take(ByteRange(tar, at, size))
        content = self.cache.get(name) if fetched is None else None
        if content is None or len(content) != size:
            content = fetched
            if content is None:
                content = self.remote.read(self.addresses[tar], at, size, self.sizes[tar])
            self.cache.put(name, content)
        return content

    def forget(self, tar: int, at: int, size: int) -> bool:
        """Remove a range from the cache. Return True, because the range can be read again from its address."""
        self.cache.forget(self._name(tar, at, size))
        return True


def fetch_indexes(addresses: Sequence[str], remote: Remote, cache: FileCache) -> list[Path]:
    """Fetch missing indexes into the cache's folder, and return the paths of all tars' current indexes. If the folder's
    disk is full, use a temporary folder that is deleted at exit. Raises DataError, naming the address, if an index
    can't be fetched, and ValueError if neither folder has space."""
    kept = cache.folder / "indexes"

    def fetch(address: str, folder: Path) -> Path:
        name = f"{address}{SUFFIX}"
        try:
            version = remote.version(name)
            file = cache.path(f"{name} {version}").name
            if version and (is_index(path := kept / file) or is_index(path := folder / file)):
                return path
            content = remote.read_all(name, MOST_INDEX, check_whole)
        except ValueError as error:  # the content is another file, such as a web page
            raise DataError(f"{printable(name)}: {error}") from error
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
