"""Strict JSON and the models that check it: the edges of each type, and one-line errors."""

import json
import os
import resource
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval, Len, MaxLen
from pydantic import FailFast, Field

from opendit.common.json_file import CONTAINERS, DEPTH, LARGEST, parse_json, read_json
from opendit.common.json_models import (
    Count,
    FileKind,
    FileName,
    JsonObject,
    Name,
    OpenJsonObject,
    Sha256,
    Texts,
    checked,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "line 1"),
        (b'{"a": 1} x', "Extra data"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"[1e999]", "out of range"),
        (b"[" + b"9" * 5000 + b"]", "out of range"),
        (b'{"a": 1, "b": {"c": 2, "c": 3}}', "the key 'c' is there twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[" + b"[]," * CONTAINERS + b"[]]", "lists and objects"),
        (b'{"a\nb": 1}', "control character"),
    ],
)
def test_what_is_no_strict_json_is_refused_in_one_line(text, why):
    with pytest.raises(ValueError, match=why) as refusal:
        parse_json(text, "F.json")
    assert "F.json" in str(refusal.value) and "\n" not in str(refusal.value)


def test_strict_json_is_what_json_reads():
    for value in ({"a": [1, -2.5, "é", None, True, {}], "b\n": 1e300}, [], "x", 10**300):
        assert parse_json(json.dumps(value), "F") == value == parse_json(json.dumps(value).encode(), "F")


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    (tmp_path / "f").write_text("[1]")
    (tmp_path / "link").symlink_to("f")
    assert read_json(tmp_path / "f", 3) == read_json(tmp_path / "link", 3) == [1]
    with pytest.raises(ValueError, match=f"{tmp_path}/f has 3 bytes; such a file has at most 2"):
        read_json(tmp_path / "f", 2)
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    for place in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{place} is no regular file"):
            read_json(place, 100)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "no", 100)
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(ValueError, match="at most"):
        read_json(tmp_path / "huge", 1 << 20)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


class Inner(JsonObject):
    b: int = Field(ge=0, le=9)


class Outer(JsonObject):
    a: Annotated[list[Inner], FailFast()]
    c: bool = False
    f: FileName = ""


class Loose(OpenJsonObject):
    b: bool = False


CASES = {
    "count": (Count, [0, LARGEST], [-1, LARGEST + 1, 10**400, 1.0, True, "1", None, [1]]),
    "interval": (Annotated[float, Interval(gt=0, le=2)], [1e-9, 2, 2.0], [0, 0.0, -0.0, 2.1, True, "1", None]),
    "text": (Name, ["", "a" * 4096, "é\n", "\udcff"], ["a" * 4097, 1, None, ["a"]]),
    "file": (FileName, ["a", "a.b-c_d"], ["", "a/b", "..", ".a", "a\n", "\ud800", "a" * 256]),
    "sha256": (Sha256, ["0" * 64], ["0" * 63, "0" * 64 + "\n", "G" * 64]),
    "literal": (Literal["x", "y"], ["x"], ["X", 1, None, []]),
    "null": (Count | None, [None, 0], ["", False]),
    "either": (Annotated[list[Count], Len(1)] | Count, [[1], 1], [[], [[1]], "1"]),
    "list": (Annotated[list[Count], Len(1, 2)], [[1], [1, 2]], [[], [1, 2, 3], ["1"], {"0": 1}, "1"]),
    "mapping": (Annotated[dict[str, bool], MaxLen(1)], [{}, {"a": True}], [{"a": 1}, {"a": True, "b": True}, []]),
    "record": (Inner, [{"b": 0}, {"b": 9}], [{}, {"b": 10}, {"b": 1, "c": 1}, [], None]),
    "open": (Loose, [{}, {"b": True, "c": [[1]]}], [{"b": 1}, []]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_type_takes_its_edges_and_nothing_past_them(name):
    kind, right, wrong = CASES[name]
    for value in right:
        assert checked(value, FileKind(kind, 1), "F") is value
    for value in wrong:
        with pytest.raises(ValueError, match="^F: ") as refusal:
            checked(value, FileKind(kind, 1), "F")
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300, value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [{"b": 1}, {"b": 10}]}, "F: a[1].b is 10: it should be less than or equal to 9"),
        ({"a": [{"b": 1, "x\ny": 10}]}, "F: a[0].'x\\ny' is not known to this version of OpenDiT"),
        ({"a": [{"b": 1, "\ud800{": 10}]}, "F: a[0].'\\ud800{' is not known to this version of OpenDiT"),
        ({"a": [{}]}, "F: a[0].b is missing"),
        ({"a": [3]}, "F: a[0] is 3: it should be an object"),
        ({"a": [], "c": None}, "F: c is null: it should be a valid boolean"),
        ({"a": [], "f": "../x"}, "F: f is '../x': it should be the plain name of a file in the same folder"),
        ([], "F: the content is a list of 0: it should be an object"),
    ],
)
def test_the_place_is_named_down_to_the_value(value, says):
    with pytest.raises(ValueError) as refusal:
        checked(value, FileKind(Outer, 1), "F")
    assert str(refusal.value) == says


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Texts, lambda: [1] * 3_000_000),
        (Outer, lambda: {"a": [{}] * 900_000}),
        (Outer, lambda: dict.fromkeys(map(str, range(1_000_000)), 0)),
        (Annotated[dict[str, Count], FailFast()], lambda: dict.fromkeys(map(str, range(1_000_000)), "")),
    ],
)
def test_a_million_wrong_values_are_told_of_at_once(kind: Any, make: Callable[[], Any]):
    value = make()  # made here, because every process that collects the tests would hold it
    started = time.process_time()
    with pytest.raises(ValueError, match="^F: "):
        checked(value, FileKind(kind, 1), "F")
    assert time.process_time() - started < 1


def test_depth_is_bounded():
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth > 1 else []

    assert parse_json(json.dumps(nested(DEPTH)), "F") == nested(DEPTH)
    with pytest.raises(ValueError, match="F is not strict JSON: it is nested more than"):
        parse_json(json.dumps({"a": nested(DEPTH)}), "F")
