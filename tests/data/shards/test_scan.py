"""Tar indexes agree with webdataset and tarfile, and errors in tars are named."""

import gzip
import io
import json
import tarfile
import zlib

import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opendit.data.shards.index import Fields, TarIndex, index_of, samples_of, scan, write_index
from tests.data.shards.tars import captioned, picture, write_tar

NAMES = st.text(st.sampled_from("ab.A/_-é\n 0"), min_size=1, max_size=12).filter(
    lambda name: not name.startswith("/") and not name.endswith("/") and "//" not in name
)

OF_ITS_OWN = ("__key__", "__url__", "__local_path__")  # what webdataset adds to every sample


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(NAMES, st.binary(max_size=700)), min_size=1, max_size=6, unique_by=lambda m: m[0].lower()))
@example([("x" * 150 + ".jpg", b"1"), ("x" * 150 + ".Seg.PNG", b"2")])
@example([("a.jpg", b""), ("__meta__/b.txt", b"no"), ("dir.v1/c.png", b"3")])
def test_keys_endings_and_bytes_are_webdatasets(tmp_path_factory, members):
    path = write_tar(tmp_path_factory.mktemp("tar") / "x.tar", members, format=tarfile.PAX_FORMAT)
    expected = {}
    stream = [{"url": "x.tar", "stream": io.BytesIO(path.read_bytes())}]
    groups = webdataset.tariterators.group_by_keys(webdataset.tariterators.tar_file_expander(stream))
    try:
        for sample in groups:
            key = sample.pop("__key__")
            parts = {name: content for name, content in sample.items() if name not in OF_ITS_OWN}
            if any(key == other for other in expected):
                raise ValueError("a key in two places")
            expected[key] = parts
    except ValueError:
        with pytest.raises(ValueError, match="two places|twice"):
            list(samples_of(path))
        return
    content = path.read_bytes()
    found = {
        sample.key: {ending: content[at : at + size] for ending, (at, size) in sample.parts.items()}
        for sample in samples_of(path)
    }
    # webdataset keeps names that end in a dot, and its own metadata. Samples here have neither.
    clean = {key: {end: part for end, part in parts.items() if end} for key, parts in expected.items()}
    mine = {key: {end: part for end, part in parts.items() if end} for key, parts in found.items()}
    assert {k: v for k, v in mine.items() if v} == {
        k: v for k, v in clean.items() if v and not k.startswith("__meta__/")
    }


def test_records_point_at_the_members_and_survive_the_disk(tmp_path):
    path = write_tar(tmp_path / "x.tar", captioned(5))
    write_index(index_of(path), *scan(path))
    index, content = TarIndex(index_of(path)), path.read_bytes()
    assert (index.header.rows, index.header.pictures, index.header.conditioning) == (5, 5, "text")
    with tarfile.open(path) as tar:
        for row in range(5):
            record = index.rows[row]
            png = tar.extractfile(f"{row:04d}.png").read()
            at, size = int(record["medium_at"]), int(record["medium_bytes"])
            assert content[at : at + size] == png and record["crc32"] == zlib.crc32(png)
            at = int(record["text_at"])
            assert content[at : at + int(record["text_bytes"])] == b"a %d" % row
            assert index.key(row) == f"{row:04d}" and index.header.suffixes[record["suffix"]] == ".png"


def test_what_has_no_pair_is_left_out_and_named(tmp_path):
    members = [*captioned(2), ("lonely.txt", b"words"), ("bare.png", picture(9)), ("blank.png", picture(8))]
    members += [("blank.txt", b" \n"), ("odd.png", picture(7)), ("odd.json", b"{")]
    header, rows, keys = scan(write_tar(tmp_path / "x.tar", members))
    assert len(rows) == 2 and keys == b"00000001" and header.left_out == 4
    assert header.examples[0] == "lonely: no picture or clip beside .txt"
    assert [line.split(":")[0] for line in header.examples] == ["lonely", "bare", "blank", "odd"]
    assert "isn't JSON" in header.examples[3]


def test_captions_and_labels_of_json(tmp_path):
    values = [{"caption": "one"}, {"text": "two", "label": 3}]
    members = [m for i, v in enumerate(values) for m in ((f"{i}.jpg", b"x"), (f"{i}.json", json.dumps(v).encode()))]
    header, rows, _ = scan(write_tar(tmp_path / "x.tar", members))
    assert header.conditioning == "text" and [header.captions[i] for i in rows["caption"]] == [
        ["json", "caption"],
        ["json", "text"],
    ]
    labels = [("0.jpg", b"x"), ("0.cls", b"7\n"), ("1.webp", b"x"), ("1.json", b'{"label": 2}')]
    header, rows, _ = scan(write_tar(tmp_path / "y.tar", labels))
    assert header.conditioning == "label" and rows["label"].tolist() == [7, 2] and header.num_classes == 8
    nested = [("0.seg.png", b"x"), ("0.png", b"y"), ("0.json", b'{"a": [{"b": " deep "}]}')]
    header, rows, _ = scan(write_tar(tmp_path / "z.tar", nested), Fields(caption=(("txt",), ("json", "a", "0", "b"))))
    assert header.conditioning == "text" and header.captions[rows["caption"][0]] == ["json", "a", "0", "b"]
    assert rows["medium_at"][0] == 3 * 512  # 0.png, not the mask before it


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: b[:700], "is truncated inside of 0000.png"),
        (lambda b: b[: b.rindex(b"a 3") + 512 - b.rindex(b"a 3") % 512], "truncated: it has no end-of-archive mark"),
        (lambda b: b.replace(b"0002.txt", b"0002.\xff\xff\xff"), "damaged: no member's header at byte"),
        (lambda b: gzip.compress(b), "it is compressed; unpack it"),
        (lambda b: b"", "can't be read as a tar"),
        (lambda b: bytes(10240), "holds no samples"),
    ],
)
def test_spoilt_tars_are_named(tmp_path, spoil, says):
    path = write_tar(tmp_path / "x.tar", captioned(4))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=says) as caught:
        scan(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.png", b"1"), ("b.png", b"2"), ("a.txt", b"3")], "the key a is in two places"),
        ([("a.png", b"1"), ("a.PNG", b"2")], "a.PNG is there twice"),
        ([("a.txt", b"1")], r"holds no samples \(a: no picture or clip beside .txt\)"),
    ],
)
def test_keys_twice_and_nothing_at_all(tmp_path, members, says):
    with pytest.raises(ValueError, match=says):
        scan(write_tar(tmp_path / "x.tar", members))


def test_damaged_indexes_say_so(tmp_path):
    path = write_tar(tmp_path / "x.tar", captioned(4))
    index = index_of(path)
    write_index(index, *scan(path))
    whole = index.read_bytes()
    for content in (
        whole[:-1],
        whole[:40],
        b"",
        b"OTHER" + whole,
        whole + b"x",
        whole.replace(b'"rows": 4', b'"rows": 5'),
    ):
        index.write_bytes(content)
        with pytest.raises(ValueError, match="x.tar.index"):
            TarIndex(index)
