"""The YAML reader: plain content is read like ``yaml.safe_load`` does, and everything else is refused in one line."""

import os
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.common import yaml_file
from opendit.common.yaml_file import parse_yaml, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused(text, says, most_s=30.0):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=says) as caught:
        parse_yaml(text if isinstance(text, bytes) else text.encode(), "--data_path x.yaml")
    assert str(caught.value).startswith("--data_path x.yaml") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 and time.monotonic() - begin < most_s
    return str(caught.value)


@pytest.mark.parametrize("levels", [65, 50_000, 1_000_000])
@pytest.mark.parametrize("mark", ["[", "{", "- ", "? ", "{a: ", "[{a: ", "!!seq [", "&a ["])
def test_deep_nesting_is_one_line_and_no_crash(mark, levels):
    refused(mark * levels, "line 1: nested more than 64 levels")


def test_deep_blocks_and_closed_ones():
    refused("".join(" " * i + "a:\n" for i in range(1000)), "line 65: nested more than 64 levels")
    refused("[" * 50_000 + "]" * 50_000, "nested more than 64 levels")
    assert parse_yaml(b"[" * 64 + b"]" * 64, "x") == yaml.safe_load("[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, "line 4: aliases repeat more text than the file has"),
        (MERGES, "line 5: aliases repeat more text"),
        ("a: &a [*a]", "line 1: .a is inside of what it repeats"),
        ("a: &a {<<: *a}", "line 1: .a is inside of what it repeats"),
        ("a: 1\nb: *b", "line 2: .*alias"),
        ("- &a " + "x" * 10_000 + "\n- [" + "*a, " * 9_000 + "]", "repeat more text than the file has"),
        ("- &a x\n- [" + "*a, " * 10_001 + "]", "more than 10,000 aliases"),
        ("- &a [[[[[[[[]]]]]]]]\n- " + "[" * 60 + "*a" + "]" * 60, "line 2: nested more than 64 levels .*aliases"),
        ("".join(f"%TAG !a{i}! x\n" for i in range(60_000)) + "--- a", "line 17: too many lines that begin with %"),
        ("a: !!bool maybe", "line 1: the tag tag:yaml.org,2002:bool is not read"),
        ("a: !!int ''", "the tag tag:yaml.org,2002:int"),
        ("a: !!float x", "the tag"),
        ("a: !!timestamp 2001-99-99", "the tag"),
        ("a: !!binary aGk=", "the tag"),
        ("a: !!set {b}", "the tag"),
        ("a: !!omap [b: 1]", "the tag"),
        ("- 1\n- !!python/object/apply:os.system [id]", "line 2: the tag tag:yaml.org,2002:python/object/apply:os"),
        ("a: !mine 1", "line 1: the tag !mine is not read"),
        ("!!map [a]", "the tag"),
        ("a: " + "9" * 5000, "line 1: the number 99999999999999999999... is out of range"),
        ("a: 010", "octal to some programs"),
        ("a: 0_", "octal"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice"),
        ("{[a]: 1}", "line 1: the key a list of 1 is no text"),
        ("? {a: 1}\n: 2", "the key an object is no text"),
        ("- &a [x]\n- {*a : 1}", "line 1: the key a list of 1 is no text"),
        ("no: 1", "the key false is no text; put quotes around it"),
        ("1: 1", "the key 1 is no text"),
        ("<<: 1", "line 1: .*expected a mapping or list of mappings for merging"),
        ("<<: [{a: 1}, b]", "line 1: .*expected a mapping for merging"),
        ("{<<: {a: 1}, <<: {b: 1}}", "the key '<<' is there twice"),
        ("a: 1\n---\nb: 2", "line 2: a second document"),
        ("a: [1", "line 2: not YAML that can be read"),
        ("a: b: c", "line 1: not YAML"),
        ("a:\n\tb: c", "line 2: not YAML"),
        ("a: 1\nb: \x07", "line 2: a control character"),
        (b"a: 1\nb: \xff", "line 2: not UTF-8"),
        (b"\xff\xfea\0", "line 1: not UTF-8"),
    ],
)
def test_what_is_refused(text, says):
    refused(text, says)


def test_what_is_a_text_and_what_a_merge_gives():
    assert parse_yaml(b"[2024-01-01, 2024-99-99, 1:30, 0x_, 0b_, =, ._, -.5, 1e3, <<]", "x") == (
        "2024-01-01 2024-99-99 1:30 0x_ 0b_ = ._ -.5 1e3 <<".split()
    )
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], z: 5}\nd: {w: 0, <<: *b}\ne: {'<<': 1}"
    assert parse_yaml(text.encode(), "x") == yaml.safe_load(text.replace("e: {'<<': 1}", "e: {'<<': 1}"))
    assert list(parse_yaml(text.encode(), "x")["d"]) == list(yaml.safe_load(text)["d"])
    assert parse_yaml(b"!!str 010", "x") == "010" and parse_yaml(b"\xef\xbb\xbfa: 1", "x") == {"a": 1}
    assert parse_yaml(b"", "x") is None
    assert str(parse_yaml(b"[.nan, -.inf, +.INF, 1.0e+999]", "x")) == "[nan, -inf, inf, inf]"


def test_time_is_bounded(monkeypatch):
    monkeypatch.setattr(yaml_file, "TIME_LIMIT", 0.0)
    refused("a:\n" + "- b\n" * 5000, "line [0-9]+: reading took more than")


def test_values_are_bounded(monkeypatch):
    monkeypatch.setattr(yaml_file, "MOST_VALUES", 100)
    assert len(parse_yaml(b"[" + b"a, " * 99 + b"]", "x")) == 99
    refused("[" + "a, " * 100 + "]", "more than 100 values")


def test_pipes_and_large_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path):
        with pytest.raises(ValueError, match="^--data_path x: .* is no regular file"):
            read_yaml(path, "--data_path x")
    (tmp_path / "large.yaml").write_bytes(b"#" * 2000)
    with pytest.raises(ValueError, match="^--data_path x: .* has 2,000 bytes; such a file has at most 1,000"):
        read_yaml(tmp_path / "large.yaml", "--data_path x", 1000)


# PyYAML's two parsers handle these line breaks differently.
TEXTS = st.text(st.characters(exclude_characters="\x85\u2028\u2029", exclude_categories=("Cs",)), max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
    st.sampled_from(
        "yes no On 010 0o7 1:30 1_000 0x1F 0b1 2024-01-01 << = ~ .5 -.5 1. 1e3 1.0e+3 null * & ! %".split()
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(VALUES, st.sampled_from([None, True, False]), st.booleans())
def test_what_was_dumped_is_what_is_read(value, flow, wide):
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=wide)
    assert parse_yaml(text.encode(), "x") == yaml.safe_load(text) == value


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "b",
                ": ",
                "- ",
                "? ",
                "\n",
                "  ",
                "[",
                "]",
                "{",
                "}",
                ", ",
                "&x ",
                "*x",
                "<<",
                "'",
                '"',
                "!!str ",
                "|\n",
            ]
            + ["!!int ", "1", "010", "1.5", ".inf", "no", "2024-01-01", "#", "%", "---\n", "!t ", "\t", "é", "\0", "~"]
        ),
        max_size=25,
    ).map("".join)
)
def test_any_text_reads_as_safe_load_or_is_refused_in_a_line(text):
    """The only difference is that dates are read as text."""
    try:
        found = parse_yaml(text.encode(), "x.yaml")
    except ValueError as error:
        assert str(error).startswith("x.yaml, line ") and "\n" not in str(error)
        return
    loader = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if not tag.endswith((":timestamp", ":value"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader.add_constructor("tag:yaml.org,2002:merge", lambda self, node: node.value)  # << that is not a key
    assert repr(found) == repr(yaml.load(text, loader))  # .nan equals itself in a repr


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes(content):
    try:
        parse_yaml(content, "x.yaml")
    except ValueError as error:
        assert str(error).startswith("x.yaml, line ") and "\n" not in str(error)
