"""The CSV of captioned media."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendit.data.captioned_media import TableRow, read_table, write_csv


def write(folder, text, encoding="utf-8"):
    path = folder / "media.csv"
    path.write_bytes(text.encode(encoding))
    return path


def pairs(path):
    return [(str(row.path.relative_to(path.parent)), row.text) for row in read_table(path)]


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
    assert [row.path for row in read_table(path)] == [
        tmp_path / "clips/a.mp4",
        Path("/data/b.mp4"),
        Path("/home/someone/c.mp4"),
    ]
    monkeypatch.chdir(tmp_path)
    assert read_table("media.csv")[0].path == Path("clips/a.mp4")


def test_more_columns_are_kept(tmp_path):
    assert read_table(write(tmp_path, "fps,path,text,who\n24,a.mp4,x,me\n"))[0].extra == {"fps": "24", "who": "me"}
    assert read_table(write(tmp_path, "a.mp4,x,24\nb.mp4,y\n"))[0].extra == {"column3": "24"}


def test_pictures_are_told_from_clips_row_by_row(tmp_path):
    path = write(tmp_path, "a.JPG,x\nb.mp4,y\nc.webp,z\nd.unknown,w\n")
    assert [row.is_picture for row in read_table(path)] == [True, False, True, False]


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
        read_table(path)


def test_other_encodings_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="--data_path .*: isn't UTF-8 .*save it as UTF-8"):
        read_table(write(tmp_path, "a.mp4,Möwe\n", "latin-1"))
    with pytest.raises(FileNotFoundError, match="--data_path .*none.csv: doesn't exist"):
        read_table(tmp_path / "none.csv")


def test_written_paths_are_relative_below_the_csv_only(tmp_path):
    path = tmp_path / "out" / "media.csv"
    write_csv(path, [TableRow(tmp_path / "out/clips/a.mp4", "x"), TableRow(tmp_path / "b.mp4", "y", {"fps": "24"})])
    assert path.read_text() == f"path,text,fps\nclips/a.mp4,x,\n{tmp_path}/b.mp4,y,24\n"
    assert sorted(p.name for p in path.parent.iterdir()) == ["media.csv"]


printable = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
lines = st.text(st.sampled_from("ab,\"'; \n"), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 999), printable | lines, printable | lines), min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path, values):
    rows = [TableRow(tmp_path / f"clip, {n} é.mp4", text.strip(), {"note": note}) for n, text, note in values]
    write_csv(tmp_path / "round.csv", rows)
    assert read_table(tmp_path / "round.csv") == rows


# ---------------------------------------------------------------- untrusted tables


@pytest.fixture
def media(tmp_path):
    """Create empty files: a clip, pictures and one file without a suffix."""
    for name in ("a.mp4", "b.png", "c.png", "plain"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("path,text,text\na.mp4,x,y\n", "line 1: the header path,text,text names text twice; rename one"),
        ("path,text,note,note\na.mp4,x,1,2\n", "line 1: .* names note twice"),
        ("file,words\na.mp4,x\n", "line 1: the header file,words has no column path and text; name the columns"),
        ("path,words\na.mp4,x\n", "line 1: the header path,words has no column text"),
        ("filename,text\nplain,x\n", "line 1: the header filename,text has no column path"),
        ("caption,file\na cat,a.mp4\n", "line 1: the header caption,file has no column path; .*--file_column"),
        ("a cat,a.mp4\na dog,b.png\n", r"line 1: the column text holds the path a\.mp4; swap the columns"),
        ("text,path\na.mp4,a cat\n", r"line 2: the column text holds the path a\.mp4; swap .* in the header"),
        ("path;text\na.mp4;x\n", "line 1: the columns are separated by semicolons; write commas"),
        ("path\ttext\na.mp4\tx\n", "line 1: the columns are separated by tabs"),
        ("path|text\na.mp4|x\n", "line 1: the columns are separated by bars"),
        ("path;text;a,b\na.mp4;x;1\n", "line 1: the columns are separated by semicolons"),
        ("a.mp4;a cat\n", "line 1: the columns are separated by semicolons"),
        ("a.mp4\ta cat, sitting\nb.png\ta dog\n", "line 1: the columns are separated by tabs"),
        ("path,text\na.mp4,x\nb.png;a dog, too\n", "line 3: the columns are separated by semicolons"),
        ("sep=;\na.mp4;x\n", "line 1: the columns are separated by semicolons"),
        ("path,text\na.mp4,x\nPath,Text\nb.png,y\n", "line 3: a header in the middle of the file; remove"),
        ("path,text\na.mp4,x\n,y\n", "line 3: the path is empty; name a file or remove the line"),
        (
            "path,text\n~nobody-at-all/a.mp4,x\n",
            "line 2: the home folder of ~nobody-at-all is not known; write the path",
        ),
        ("path,text\nhttps://example.org/a.mp4,x\n", "line 2: https://example.org/a.mp4 is an address; download"),
        ("path,text\ns3://bucket/a.mp4,x\n", "line 2: s3://bucket/a.mp4 is an address"),
        ("path,text\na.mp4,x\nb.png,y\0z\n", "line 3: holds a NUL character"),
        ("path,text\na.mp4,x\n\0,y\n", "line 3: holds a NUL character"),
        (
            'path,text\na.mp4,x\nb.png,"y\nc.png,z\n',
            r"line 3: not a CSV \(a quote that opens in this row is never closed",
        ),
        ('path,text\na.mp4,"x\n' + "b.png,y\n" * 20000, "line 2: not a CSV .a column of more than 131,072 characters"),
        ('path,text\na.mp4,"say "hi""\n', "line 2: not a CSV .*a quote inside of quotes is written twice"),
        ("path,text\na.mp4," + "x" * 2**20, "line 2 has more than 1,048,576 characters"),
        ("path,text\na.mp4,x,y,z\n", "line 2: 4 columns where path,text are expected"),
        ("path,text,fps\na.mp4\n", "line 2: 1 columns where path,text,fps"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_the_fix(media, content, says):
    path = write(media, content)
    with pytest.raises(ValueError, match=f"^--data_path {path}.*{says}") as caught:
        read_table(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffpath,text\r\na.mp4,x\r\nb.png,y\r\n",
        "path,text\ra.mp4,x\rb.png,y\r",
        "path,text\na.mp4,x\rb.png,y\r\n\n",
        '"path","text"\n"a.mp4","x"\n"b.png","y"',
        "PATH , Text,,\na.mp4,x,,\nb.png,y,,\n",
        "a.mp4,x\nb.png,y",
        "text,path\nx,a.mp4\ny,b.png\n",
    ],
)
def test_what_is_clearly_meant_is_taken(media, content):
    assert pairs(write(media, content)) == [("a.mp4", "x"), ("b.png", "y")]


def test_rows_that_only_look_odd_are_taken(media):
    """Captions and names of existing files may look like mistakes."""
    names = ["a;b.mp4", "x.mp4;y.mp4", "path", "a cat"]
    for name in names:
        (media / name).touch()
    content = "".join(
        f"{name},{text}\n" for name, text in zip(names, ("path,a|b.png", "q", "text", "a.mp4"), strict=True)
    )
    content = content.replace("path,a|b.png", '"path,a|b.png"')
    assert pairs(write(media, content)) == [
        ("a;b.mp4", "path,a|b.png"), ("x.mp4;y.mp4", "q"), ("path", "text"), ("a cat", "a.mp4"),
    ]  # fmt: skip
    assert pairs(write(media, "plain,a caption\na.mp4,text\n")) == [("plain", "a caption"), ("a.mp4", "text")]
    assert pairs(write(media, "a.mp4,\nb.png,\x1b[31m\x07\n")) == [("a.mp4", ""), ("b.png", "\x1b[31m\x07")]


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "media.csv"
    for content, says in (
        ("path,text\na.mp4,x\n".encode("utf-16"), "is UTF-16, not UTF-8; save it as UTF-8"),
        ("path,text\na.mp4,x\n".encode("utf-16-be"), "line 1: holds a NUL character"),
        (b"PK\x03\x04" + bytes(50), "is no text but an Excel file"),
        (b"\x1f\x8b\x08" + bytes(50), "is compressed"),
        (bytes(3_000_000), "line 1: holds a NUL character"),
        (b"x" * 3_000_000, "line 1 has more than 1,048,576 characters"),
        (b"path,text\na.mp4,x\nb.mp4,M\xf6we\n", r"line 3: isn't UTF-8 \(text: M\\xf6we\); save it as UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^--data_path {path}[ ,:].*{says}"):
            read_table(path)


def test_tables_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "loose.csv").symlink_to(tmp_path / "nowhere.csv")
    for name, says in (
        ("pipe", "a named pipe"),
        ("folder", "a folder"),
        ("loose", "a link to a file that doesn't exist"),
    ):
        with pytest.raises(ValueError, match=f"^--data_path {tmp_path}/{name}.csv: can't be read .{says}"):
            read_table(tmp_path / f"{name}.csv")
    with pytest.raises(FileNotFoundError, match="^CSV: doesn't exist"):
        read_table(tmp_path / "none.csv", name="CSV")


def test_names_that_are_not_utf8_survive(tmp_path):
    row = TableRow(tmp_path / os.fsdecode(b"caf\xe9.png"), "un caf\u00e9")
    write_csv(tmp_path / "odd.csv", [row])
    assert b"caf\xe9.png,un caf\xc3\xa9" in (tmp_path / "odd.csv").read_bytes()
    assert read_table(tmp_path / "odd.csv") == [row]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.text(st.sampled_from('path,text;|\t\n\r"~a.mp4\0\ufeff/'), max_size=60).map(str.encode)
)
def test_any_bytes_are_rows_or_one_line(tmp_path, content):
    path = tmp_path / "any.csv"
    path.write_bytes(content)
    try:
        assert read_table(path)
    except ValueError as error:
        assert str(error).startswith(f"--data_path {path}") and str(error).isprintable()
