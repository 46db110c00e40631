"""Ranges of bytes that are fetched before they are asked for."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from opendit.common.stages import Background

GROUPS = 16  # that are on their way, or there and not yet taken
BYTES = 2**28  # of them, beyond the first: clips are large
GAP = 2**14  # bytes between two ranges that cost less to read along than a request of their own does


class ByteRange(NamedTuple):
    """A range of bytes of a tar, by its number."""

    tar: int
    at: int
    size: int


Ranges = Sequence[ByteRange]  # what one request fetches


def grouped(ranges: Iterable[ByteRange]) -> list[list[ByteRange]]:
    """Ranges of one tar in their order, but those together that lie next to each other; headers may be in between."""
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
    ranges: set[ByteRange]  # not yet taken
    size: int
    work: Background[dict[ByteRange, bytes]]


class FetchAhead:
    """Fetches groups in threads while the process that reads decodes what came before them. A thread that is stuck
    holds up nothing but who asks for its group: none is waited for when the process ends.

    fetch: gives a group's contents; its errors are raised when one of its ranges is taken.
    """

    def __init__(self, fetch: Callable[[Ranges], dict[ByteRange, bytes]]):
        self._fetch, self._process = fetch, 0
        self._waiting: deque[Ranges] = deque()
        self.begun: deque[_Begun] = deque()

    def begin(self, groups: Iterable[Ranges]) -> None:
        """Begin to read the ranges that will be taken next, in order. Ranges of earlier calls are forgotten."""
        self._process = os.getpid()  # threads stay behind where a process is forked
        self._waiting, self.begun = deque(groups), deque()
        self._begin_more()

    def take(self, part: ByteRange) -> bytes | None:
        """A content, once; waits for it. None of what isn't fetched ahead: the caller fetches that itself."""
        if self._process != os.getpid() or not any(part in begun.ranges for begun in self.begun):
            return None
        while part not in self.begun[0].ranges:  # passed over: of samples that are done with
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
        return FetchAhead, (self._fetch,)  # what has begun stays in its process
