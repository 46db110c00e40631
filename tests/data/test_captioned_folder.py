"""Folders of captioned pictures and clips: captions beside the files, metadata tables, and what is left out."""

import csv as csv_module
import importlib.util
import io
import json
import os
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.data import CaptionedDataset, SampleKey, build_dataset, captioned_media, look
from opendit.data.captioned_media import Columns, find_captions, read_table
from opendit.data.pictures_and_clips import FolderDataset
from tests.data.test_clips import encode, grey

QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), colour).save(path)
    return path


def opened(folder, **options):
    return build_dataset(str(folder), 8, seed=0, **options)


def captions(data):
    return {os.path.basename(data.source(row)): data.caption(row) for row in range(len(data))}


# ---------------------------------------------------------------- classes or captions


def test_captions_beside_pictures_and_clips_also_in_subfolders(tmp_path):
    for name in ("a.jpg", "b.png", "sub/deep/c.webp"):
        picture(tmp_path / name)
    encode(tmp_path / "clip.mp4", grey(6))
    (tmp_path / "a.txt").write_bytes("\ufeffa cat,\r\non a mat \r\n".encode())
    (tmp_path / "b.CAPTION").write_text("b by .caption")
    (tmp_path / "sub/deep/c.txt").write_text("  ")
    (tmp_path / "sub/deep/c.caption").write_text("c")
    (tmp_path / "clip.txt").write_text("moves")
    data = opened(tmp_path)
    assert isinstance(data, CaptionedDataset)
    assert captions(data) == {"a.jpg": "a cat, on a mat", "b.png": "b by .caption", "c.webp": "c"}
    about = data.describe()
    assert "3 pictures with captions (2 from .txt files, 2 from .caption files) (1 clips left out" in about.text
    clips = opened(tmp_path, use_video=True, num_frames=4)
    assert captions(clips) == {**captions(data), "clip.mp4": "moves"}
    assert clips[SampleKey(2, 0, 0)].x.shape == (3, 1 if clips.source(2).endswith("webp") else 4, 8, 8)


def test_a_folder_and_its_csv_are_the_same_data(tmp_path):
    for name in ("x.png", "y/z.png"):
        picture(tmp_path / name).with_suffix(".txt").write_text(f"{name}, twice")
    folder = opened(tmp_path)
    (tmp_path / "all.csv").write_text('path,text\nx.png,"x.png, twice"\ny/z.png,"y/z.png, twice"\n')
    assert folder.fingerprint().identity == opened(tmp_path / "all.csv").fingerprint().identity
    assert folder.fingerprint().contents == opened(tmp_path / "all.csv").fingerprint().contents


def test_classes_stay_classes_unless_captions_lie_there(tmp_path):
    for name in ("cat/a.png", "dog/b.png"):
        picture(tmp_path / name)
    (tmp_path / "README.txt").write_text("of nothing")
    (tmp_path / "metadata.csv").write_text("id,label\n1,2\n")  # an unrelated table
    (tmp_path / "cat" / "a.json").write_text('{"boxes": [1, 2]}')
    data = opened(tmp_path)
    assert isinstance(data, FolderDataset) and data.class_names == ["cat", "dog"]
    with pytest.raises(ValueError, match="is a folder without captions; --use_video needs clip.txt"):
        opened(tmp_path, use_video=True)
    bare = opened(tmp_path, caption_prefix="a photo of sks")
    assert captions(bare) == dict.fromkeys(("a.png", "b.png"), "a photo of sks")
    (tmp_path / "cat" / "a.txt").write_text("a cat")
    assert captions(opened(tmp_path)) == {"a.png": "a cat"}
    assert captions(opened(tmp_path, caption_prefix="oil,")) == {"a.png": "oil, a cat", "b.png": "oil,"}


# ---------------------------------------------------------------- what is left out


def test_what_is_missing_or_broken_is_counted_and_named_and_stops_nothing(tmp_path, tmp_path_factory, capsys):
    out = tmp_path_factory.mktemp("out")
    for name in "abcdef":
        picture(tmp_path / f"{name}.jpg")
    for name, content in {"a": b"A", "b": b"B", "c": b" \n", "d": b"caf\xe9", "gone": b"lost", "f": b"F"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:400])  # its header can be read
    data = opened(tmp_path)
    assert captions(data) == {"a.jpg": "A", "f.jpg": "F"}
    bare, unread, lonely, broken = data.describe().notes
    assert bare.startswith("left out 2 files without a caption: ") and "c.jpg" in bare and "e.jpg" in bare
    assert unread.startswith("left out 1 files whose caption can't be read: ") and "d.txt isn't UTF-8" in unread
    assert lonely == f"left out 1 captions without a picture or clip: {tmp_path}/gone.txt"
    assert broken.startswith("left out 1 files that can't be read: ") and "b.jpg" in broken
    assert all(line.isprintable() for line in data.describe().notes)
    look.run(str(tmp_path), str(out / "look"), num_workers=1)
    told = capsys.readouterr().out
    assert all(line in told for line in data.describe().notes)
    captioned_media.check(str(tmp_path), str(out / "checked.csv"), num_workers=1)
    assert bare in capsys.readouterr().out
    assert [row.text for row in read_table(out / "checked.csv")] == ["A", "F"]


def test_nothing_but_faults_is_an_error(tmp_path):
    for name in "ab":
        picture(tmp_path / f"{name}.jpg").with_suffix(".txt").write_text("\n")
    with pytest.raises(
        ValueError, match="no picture or clip has a caption .left out 2 files without a caption: .*a.jpg"
    ):
        opened(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
        (tmp_path / f"{name}.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="none of 2 files can be read .*a.jpg: not a picture"):
        opened(tmp_path)


def test_a_row_whose_file_is_missing(tmp_path):
    picture(tmp_path / "pics" / "a.png")
    picture(tmp_path / "pics" / "alone.png")
    picture(tmp_path / "outside.png")
    rows = [("a.png", "A"), ("gone.png", "B"), ("../outside.png", "C"), ("a.png", "A again"), ("a.png", None)]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    (tmp_path / "pics" / "metadata.jsonl").write_text("\n".join(lines))
    data = opened(tmp_path / "pics")
    assert [data.caption(row) for row in range(len(data))] == ["A", "C", "A again"]  # .. works, as in a CSV
    gone, bare = data.describe().notes
    assert gone.startswith("left out 1 captions of files that are missing: ") and "gone.png (No such file" in gone
    assert bare.startswith("left out 2 files without a caption: ") and "alone.png" in bare


# ---------------------------------------------------------------- tables


def test_columns_by_their_names(tmp_path):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    table = tmp_path / "metadata.csv"
    table.write_text("File_Name,text,prompt\na.png,short,long\nb.png,short,long b\n")
    assert captions(opened(tmp_path)) == {"a.png": "short", "b.png": "short"}
    assert captions(opened(tmp_path, caption_column="Prompt")) == {"a.png": "long", "b.png": "long b"}
    assert captions(opened(table, caption_column="prompt", file_column="file_name"))["b.png"] == "long b"
    with pytest.raises(ValueError, match="has no column words; .*--file_column and --caption_column"):
        opened(tmp_path, caption_column="words")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "A"}\n')
    with pytest.raises(ValueError, match="holds metadata.jsonl and metadata.csv; move all but one away"):
        opened(tmp_path)
    table.unlink()
    (tmp_path / "metadata.jsonl").write_text('{"image": "a.png", "blip": "A"}\n')
    assert captions(opened(tmp_path, file_column="image", caption_column="blip")) == {"a.png": "A"}
    with pytest.raises(ValueError, match="--data_path digits: is no table .*; leave --file_column"):
        opened("digits", caption_column="text")
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(ValueError, match="holds no metadata.jsonl, .csv or .parquet; leave"):
        opened(tmp_path, caption_column="text")


@pytest.mark.parametrize(
    "content, says",
    [
        (b'{"file_name": "a.png", "text": "A"}\n{"file_name": "a', r"metadata.jsonl, line 2: not JSON .*; correct"),
        (b'{"file_name": "a.png", "text": "A"} trailing', "line 1: not JSON .Extra data"),
        (b'{"file_name": "a.png", "text": "A"}\n["a.png"]', "line 2: not an object like"),
        (b'{"file_name": "a.png", "text": "caf\xe9"}', "line 1: isn't UTF-8"),
        (b'{"file_name": "a.png", "text": "\\ud800"}', "line 1: isn't UTF-8 .text: "),
        (b'{"file_name": "a.png", "text": ["A", "B"]}', "line 1: the caption is .* and no text"),
        (b'{"file_name": 7, "text": "A"}', "line 1: the path is 7; name a file"),
        (b'{"file_name": "s3://b/a.png", "text": "A"}', "line 1: s3://b/a.png is an address"),
        ('{"file_name": "a.png", "text": "A"}'.encode("utf-16"), "is UTF-16, not UTF-8"),
        (b"[" * 200_000, "line 1: not JSON"),
        (b"\n\n", "has no rows; add some"),
    ],
)
def test_a_damaged_table_is_one_line_that_names_the_fix(tmp_path, content, says):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        opened(tmp_path)
    assert str(caught.value).startswith("--data_path") and str(caught.value).isprintable()


# File names that a table can hold: without separators, not like a home folder or an address, and without blanks at the
# ends, which a CSV strips.
NAMES = st.text(
    st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp", "Zs"), blacklist_characters="/~\\:"), min_size=1
)
WORDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30)


def normal(name):
    return f"{unicodedata.normalize('NFC', name)[:20]}.png"


@QUICK
@given(
    rows=st.lists(st.tuples(NAMES.map(normal), WORDS), min_size=1, max_size=5),
    bom=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"]),
    ascii=st.booleans(),
)
def test_json_lines_and_csv_give_what_was_written(tmp_path_factory, rows, bom, newline, ascii):
    folder = tmp_path_factory.mktemp("tables")
    start = b"\xef\xbb\xbf" * bom
    lines = [json.dumps({"text": text, "file_name": name, "n": [1]}, ensure_ascii=ascii) for name, text in rows]
    (folder / "metadata.jsonl").write_bytes(start + newline.join(lines).encode())
    wanted = [(str(folder / name), text.strip()) for name, text in rows]
    got = [(str(row.path), row.text) for row in read_table(folder / "metadata.jsonl")]
    assert got == wanted
    file = io.StringIO(newline="")
    table = csv_module.writer(file, quoting=csv_module.QUOTE_ALL, lineterminator="\r\n" if "\r" in newline else "\n")
    table.writerows([("file_name", "n", "text"), *((name, 1, text) for name, text in rows)])
    (folder / "metadata.csv").write_bytes(start + file.getvalue().encode())
    assert [(str(row.path), row.text) for row in read_table(folder / "metadata.csv")] == wanted


@QUICK
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_break_the_readers(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("bytes")
    for name in ("metadata.jsonl", "metadata.csv"):
        (folder / name).write_bytes(content)
        try:
            read_table(folder / name)
        except ValueError as error:
            assert str(error).startswith("--data_path") and str(error).isprintable()
    (folder / "a.txt").write_bytes(content)
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").unlink()
    picture(folder / "a.png")
    found = find_captions(folder)
    try:
        text = " ".join(content.decode("utf-8-sig").split())
    except UnicodeDecodeError:
        assert not found.rows and list(found.left_out) == ["files whose caption can't be read"]
    else:
        assert [row.text for row in found.rows] == [text] * bool(text)


def imagefolder(folder):
    """Return {file: text} of metadata.jsonl or metadata.csv, as the imagefolder of Hugging Face datasets reads it."""
    if (folder / "metadata.jsonl").exists():
        lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    else:
        with open(folder / "metadata.csv", newline="", encoding="utf-8") as file:
            rows = list(csv_module.DictReader(file))
    return {os.path.normpath(folder / row["file_name"]): row["text"] for row in rows}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_metadata_is_read_as_the_imagefolder_of_datasets_reads_it(tmp_path, kind):
    rows = [
        ("a.png", 'says "hi", twice'),
        ("sub/b b.png", "ein Bär"),
        ("./c.png", "猫"),
        ("sub/é.png", "line\nbreak"),
    ]
    for name, _ in rows:
        picture(tmp_path / name)
    table = [{"file_name": name, "text": text, "label": 3} for name, text in rows]
    path = tmp_path / f"metadata.{kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(arrow.Table.from_pylist(table), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in table), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv_module.DictWriter(file, ["file_name", "text", "label"])
            writer.writeheader()
            writer.writerows(table)
    data = opened(tmp_path)
    got = {os.path.normpath(data.source(row)): data.caption(row) for row in range(len(data))}
    assert got == {os.path.normpath(tmp_path / name): text for name, text in rows} and not data.describe().notes
    if kind != "parquet":
        assert got == imagefolder(tmp_path)
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        theirs = datasets.load_dataset(
            "imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / ".c")
        )
        theirs = theirs.cast_column("image", datasets.Image(decode=False))
        assert got == {os.path.normpath(row["image"]["path"]): row["text"] for row in theirs}


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match="needs the package pyarrow to be read; pip install pyarrow, or save it as .jsonl"
    ):
        opened(tmp_path)


def test_parquet_that_is_damaged_or_has_other_columns(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    (tmp_path / "x.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(ValueError, match="x.parquet: can't be read .*; save it again"):
        read_table(tmp_path / "x.parquet")
    write_table(arrow.Table.from_pylist([{"image": "a.png", "text": None}]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet: has no column path;"):
        read_table(tmp_path / "x.parquet")
    [row] = read_table(tmp_path / "x.parquet", columns=Columns("image"))
    assert (row.path, row.text) == (tmp_path / "a.png", "")
