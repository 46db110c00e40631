"""The CSV of captioned media."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendit.data.csv_table import Row, read_csv, write_csv


def write(folder, text, encoding="utf-8"):
    path = folder / "media.csv"
    path.write_bytes(text.encode(encoding))
    return path


def pairs(path):
    return [(str(row.path.relative_to(path.parent)), row.text) for row in read_csv(path)]


def test_with_and_without_a_header(tmp_path):
    expected = [("a.mp4", "a cat"), ("b/c.png", "a dog")]
    assert pairs(write(tmp_path, "path,text\na.mp4,a cat\nb/c.png,a dog\n")) == expected
    assert pairs(write(tmp_path, "a.mp4,a cat\nb/c.png,a dog")) == expected
    assert pairs(write(tmp_path, "Text , PATH\na cat,a.mp4\na dog,b/c.png\n")) == expected


def test_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path):
    path = write(tmp_path, "path,text\r\n\r\na.mp4,eine Möwe\r\n , \r\nb.mp4,猫\r\n", "utf-8-sig")
    assert pairs(path) == [("a.mp4", "eine Möwe"), ("b.mp4", "猫")]


def test_quotes_commas_and_newlines_in_captions(tmp_path):
    path = write(tmp_path, 'path,text\na.mp4,"a cat, a dog"\nb.mp4,"says ""hi"""\nc.mp4,"two\nlines"\n')
    assert [text for _, text in pairs(path)] == ["a cat, a dog", 'says "hi"', "two\nlines"]


def test_paths_are_relative_to_the_csv(tmp_path, monkeypatch):
    path = write(tmp_path, "path,text\nclips/a.mp4,x\n/data/b.mp4,y\n~/c.mp4,z\n")
    monkeypatch.setenv("HOME", "/home/someone")
    assert [row.path for row in read_csv(path)] == [
        tmp_path / "clips/a.mp4",
        Path("/data/b.mp4"),
        Path("/home/someone/c.mp4"),
    ]
    monkeypatch.chdir(tmp_path)
    assert read_csv("media.csv")[0].path == Path("clips/a.mp4")


def test_more_columns_are_kept(tmp_path):
    assert read_csv(write(tmp_path, "fps,path,text,who\n24,a.mp4,x,me\n"))[0].extra == {"fps": "24", "who": "me"}
    assert read_csv(write(tmp_path, "a.mp4,x,24\nb.mp4,y\n"))[0].extra == {"column3": "24"}


def test_pictures_are_told_from_clips_row_by_row(tmp_path):
    path = write(tmp_path, "a.JPG,x\nb.mp4,y\nc.webp,z\nd.unknown,w\n")
    assert [row.is_picture for row in read_csv(path)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty; it needs lines of path,text"),
        ("\n \n", "is empty"),
        ("path,text\n", "has a header and no rows"),
        ("path,text\na.mp4,x\nb.mp4,a cat, a dog\n", r"line 3: 3 columns where path,text are expected.*quotes"),
        ("path,text\na.mp4\n", "line 2: 1 columns"),
        ("path,text\n ,caption\n", "line 2"),
        ('path,text\na.mp4,x\nb.mp4,"unclosed\n', r"line 3: not a CSV"),
    ],
)
def test_errors_name_the_flag_and_the_line(tmp_path, content, says):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"(?s)--data_path {path}.*{says}"):
        read_csv(path)


def test_other_encodings_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="--data_path .* isn't UTF-8 .*save it as UTF-8"):
        read_csv(write(tmp_path, "a.mp4,Möwe\n", "latin-1"))
    with pytest.raises(FileNotFoundError, match="--data_path .*none.csv doesn't exist"):
        read_csv(tmp_path / "none.csv")


def test_written_paths_are_relative_below_the_csv_only(tmp_path):
    path = tmp_path / "out" / "media.csv"
    write_csv(path, [Row(tmp_path / "out/clips/a.mp4", "x"), Row(tmp_path / "b.mp4", "y", {"fps": "24"})])
    assert path.read_text() == f"path,text,fps\nclips/a.mp4,x,\n{tmp_path}/b.mp4,y,24\n"
    assert sorted(p.name for p in path.parent.iterdir()) == ["media.csv"]


printable = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
lines = st.text(st.sampled_from("ab,\"'; \n"), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 999), printable | lines, printable | lines), min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path, values):
    rows = [Row(tmp_path / f"clip, {n} é.mp4", text.strip(), {"note": note}) for n, text, note in values]
    write_csv(tmp_path / "round.csv", rows)
    assert read_csv(tmp_path / "round.csv") == rows
