"""Test fetching ahead of the reader."""

import threading

import pytest

from opendit.data.shards import ahead
from opendit.data.shards.ahead import ByteRange, FetchAhead, grouped


def test_neighbours_are_one_request():
    picture, caption, far = ByteRange(0, 10_000, 900), ByteRange(0, 9_000, 20), ByteRange(0, 40_000, 5)
    assert grouped([picture, caption]) == [[picture, caption]]
    assert grouped([picture, far]) == [[picture], [far]]
    assert grouped([far, picture]) == [[far], [picture]]  # in the order of reading


def test_only_so_much_is_fetched_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(ahead, "BYTES", 100)
    begun, go = [], threading.Event()

    def fetch(group):
        begun.append(group[0].at)
        assert go.wait(10)
        return {part: bytes(part.size) for part in group}

    fetched = FetchAhead(fetch)
    ranges = [ByteRange(0, at, 40) for at in range(6)]
    fetched.begin([[part] for part in ranges])
    assert len(fetched.begun) == 2
    go.set()
    assert fetched.take(ranges[0]) == bytes(40) and fetched.take(ranges[0]) is None  # once
    assert fetched.take(ranges[2]) == bytes(40)  # 1 was passed over: its sample could not be read
    assert fetched.take(ranges[1]) is None
    assert [fetched.take(part) for part in ranges[3:]] == [bytes(40)] * 3
    assert sorted(begun) == list(range(6))
    fetched.begin([[ByteRange(0, 0, 500)], [ByteRange(0, 1, 1)]])  # one that is too large comes alone
    assert fetched.take(ByteRange(0, 0, 500)) == bytes(500) and fetched.take(ByteRange(0, 1, 1)) == bytes(1)


def test_an_error_comes_with_its_own_place():
    def fetch(group):
        if group[0].at == 1:
            raise ValueError("broken")
        return {part: b"" for part in group}

    fetched = FetchAhead(fetch)
    fetched.begin([[ByteRange(0, at, 0)] for at in range(3)])
    assert fetched.take(ByteRange(0, 0, 0)) == b""
    with pytest.raises(ValueError, match="broken"):
        fetched.take(ByteRange(0, 1, 0))
    assert fetched.take(ByteRange(0, 2, 0)) == b""
