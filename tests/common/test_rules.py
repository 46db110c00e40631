"""Strict JSON, and each rule at its edges."""

import json
import os
import resource
import time

import pytest

from opendit.common.json_file import CONTAINERS, parse_json, read_json
from opendit.common.rules import (
    Invalid,
    either,
    listed,
    mapping,
    number,
    one_of,
    optional,
    plain,
    record,
    string,
    truth,
    whole,
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
        file.truncate(1 << 40)  # a hole
    with pytest.raises(ValueError, match="at most"):
        read_json(tmp_path / "huge", 1 << 20)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


def test_each_rule_takes_its_edges_and_nothing_past_them():
    cases = {
        "whole": (whole(1, 5), [1, 5], [0, 6, 1.0, True, "1", None, [1]]),
        "number": (number(0, 2), [0, 2, 1.5, 0.0], [-1e-9, 2.1, False, "1", None]),
        "above": (number(0, 2, above=True), [1e-9, 2], [0, 0.0, -0.0]),
        "string": (string(3), ["", "abc", "é\n"], ["abcd", 1, None, ["a"]]),
        "pattern": (string(3, "[ab]+", "a or b"), ["a", "abb"], ["", "abc", "a\n"]),
        "one_of": (one_of(1, "x", None), [1, "x", None], [True, 1.0, "X", []]),
        "truth": (truth, [True, False], [1, 0, "true", None]),
        "optional": (optional(whole(0)), [None, 0], ["", False]),
        "either": (either(listed(whole(0)), whole(0)), [[1], 1, []], [[[1]], "1"]),
        "listed": (listed(whole(0), 1, 2), [[1], [1, 2]], [[], [1, 2, 3], ["1"], {"0": 1}, "1"]),
        "mapping": (mapping(string(1), truth, 1), [{}, {"a": True}], [{"ab": True}, {"a": 1}, {"a": True, "b": True}]),
        "record": (record({"a": truth}, {"b": whole(0)}), [{"a": True, "b": 1}, {"a": True}], [{}, {"b": 1}, []]),
        "unknown": (record({}, {"b": truth}), [{}, {"b": True}], [{"b": True, "c": 1}]),
        "others": (record({}, others=plain(1)), [{}, {"x": [1]}], [{"x": [[1]]}]),
        "plain": (plain(2, 3), [1, "abc", [[1]], {"a": {"b": None}}], ["abcd", [[[1]]], {"a": {"b": {}}}]),
    }  # fmt: skip
    for name, (rule, right, wrong) in cases.items():
        for value in right:
            rule(value, "here")
        for value in wrong:
            with pytest.raises(Invalid, match="here") as refusal:
                rule(value, "here")
            assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300, (name, value)


def test_the_place_is_named_down_to_the_value():
    rule = record({"a": listed(record({"b": whole(0, 9)}))})
    with pytest.raises(Invalid, match=r"^a\[1\]\.b is 10, not an integer from 0 to 9$"):
        rule({"a": [{"b": 1}, {"b": 10}]}, "")
    with pytest.raises(Invalid, match=r"a\[0\]\.'x\\ny' is not known"):
        rule({"a": [{"b": 1, "x\ny": 10}]}, "")
