"""Indexes with impossible records and labels without a class are refused, with the names of tar and sample."""

import io
import json
import os

import numpy as np
import pytest

from opendit.data import DataError, SampleKey, build_dataset
from opendit.data.shards import dataset
from opendit.data.shards.index import TarIndex, index_of, write_index
from opendit.data.shards.program import index_latents, make_indexes
from opendit.training.data_plan import check_classes
from tests.data.shards.tars import captioned, picture, write_tar


def forge(tar, row=None, header=None, keys=None, **values):
    """Replace values in one record of a tar's index, or in the index's header."""
    index = TarIndex(index_of(tar))
    rows, names = np.array(index.rows), index.path.read_bytes()[-index.header.key_bytes :]
    for name, value in values.items():
        rows[name][row] = value
    write_index(index_of(tar), index.header.model_copy(update=header or {}), rows, keys or names)


@pytest.fixture
def tars(tmp_path):
    """Write one tar with captions and one with classes, in separate folders, and their indexes."""
    members = [part for i in range(4) for part in ((f"{i}.png", picture(i)), (f"{i}.cls", b"%d" % (i % 3)))]
    for name, content in (("text", captioned(4)), ("label", members)):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "x.tar", content)
        make_indexes(str(tmp_path / name), num_workers=1)
    return tmp_path


FORGED = [
    ("text", dict(medium_at=2**63)),
    ("text", dict(medium_at=2**64 - 1, medium_bytes=2**64 - 1)),
    ("text", dict(medium_at=100, medium_bytes=2**64 - 50)),
    ("text", dict(text_at=2**64 - 1, text_bytes=3)),
    ("text", dict(medium_bytes=2**31)),
    ("text", dict(text_at=2**40)),
    ("text", dict(text_bytes=2**32 - 1)),
    ("text", dict(suffix=7)),
    ("text", dict(caption=200)),
    ("text", dict(key_end=2**32 - 1)),
    ("label", dict(label=3)),
    ("label", dict(label=-1)),
    ("label", dict(label=2**31 - 1)),
]
SAYS = "x.tar.index is damaged: the record of sample 2 is out of range"


@pytest.mark.parametrize(("kind", "values"), FORGED)
def test_a_record_that_can_not_be_is_told_at_the_start(tars, kind, values):
    forge(tars / kind / "x.tar", 2, **values)
    with pytest.raises(ValueError, match=f"^--data_path .*{SAYS}"):
        build_dataset(str(tars / kind), 8, seed=0)


@pytest.mark.parametrize(("kind", "values"), FORGED)
def test_of_too_many_samples_it_is_told_before_it_is_used(tars, monkeypatch, kind, values):
    monkeypatch.setattr(dataset, "CHECKED", 3)
    forge(tars / kind / "x.tar", 2, **values)
    data = build_dataset(str(tars / kind), 8, seed=0)
    assert not data[SampleKey(0, 0, 0)].skipped
    with pytest.raises(DataError, match=SAYS):
        data[SampleKey(2, 0, 0)]


@pytest.mark.parametrize(
    ("header", "values", "says"),
    [
        ({"pictures": 3}, {}, "its header counts 3 pictures and 16 bytes of keys, its records 4 and 16"),
        ({}, {"key_end": 12}, "its header counts 4 pictures and 16 bytes of keys, its records 4 and 12"),
        ({"tar_bytes": 10**15}, {}, "x.tar is truncated: it has .* bytes, its index says 1,000,000,000,000,000"),
        ({"num_classes": 0, "conditioning": "label"}, {}, "the record of sample 0 is out of range"),
        ({"suffixes": []}, {}, "the record of sample 0 is out of range"),
        ({"captions": []}, {}, "the record of sample 0 is out of range"),
    ],
)
def test_headers_that_do_not_fit(tars, header, values, says):
    forge(tars / "text" / "x.tar", 3, header, **values)
    with pytest.raises(ValueError, match=says):
        build_dataset(str(tars / "text"), 8, seed=0)


def test_keys_that_do_not_rise(tars, monkeypatch):
    forge(tars / "text" / "x.tar", 1, key_end=1)
    with pytest.raises(ValueError, match="the record of sample 1 is out of range"):
        build_dataset(str(tars / "text"), 8, seed=0)
    monkeypatch.setattr(dataset, "CHECKED", 0)
    with pytest.raises(DataError, match="x.tar.index is damaged: the record of sample 1 is out of range"):
        build_dataset(str(tars / "text"), 8, seed=0).source(1)


def test_sound_indexes_pass(tars):
    for kind in ("text", "label"):
        index = TarIndex(index_of(tars / kind / "x.tar"))
        index.check()
        assert [index.record(row).number for row in range(4)] == [0, 1, 2, 3]


def test_a_label_without_a_class_names_tar_and_sample(tars):
    (tars / "label" / "class_names.json").write_text('["a", "b"]')
    with pytest.raises(ValueError, match=r"names 2 classes, the labels go to 2 \(.*/label/x.tar: 2\); name all"):
        build_dataset(str(tars / "label"), 8, seed=0)
    (tars / "label" / "class_names.json").unlink()
    data = build_dataset(str(tars / "label"), 8, seed=0)
    with pytest.raises(ValueError, match=r"--num_classes 2: .* labels 0 to 2 \(.*/label/x.tar: 2 has the label 2\)"):
        check_classes(2, "label", data.describe())
    check_classes(3, "label", data.describe())
    check_classes(None, "label", data.describe())


def latents(folder, members):
    content = io.BytesIO()
    np.save(content, np.zeros((8, 2, 2), np.float32))
    write_tar(
        folder / "x.tar", [part for name, *more in members for part in ((f"{name}.npy", content.getvalue()), *more)]
    )


def test_labels_of_latents_of_another_program(tmp_path):
    latents(tmp_path, [("a", ("a.cls", b"1")), ("b", ("b.cls", b"7"))])
    (tmp_path / "class_names.json").write_text('["a", "b"]')
    with pytest.raises(ValueError, match=r"names 2 classes, the labels go to 7 \(.*x.tar: b\); name all"):
        index_latents(str(tmp_path), "mean_std", image_size=16, num_workers=1)
    (tmp_path / "class_names.json").unlink()
    latents(tmp_path, [("a", ("a.cls", b"2000000000"))])
    with pytest.raises(ValueError, match="has the class 2,000,000,000; at most 1,000,000 classes"):
        index_latents(str(tmp_path), "mean_std", image_size=16, num_workers=1, force=True)


def test_an_index_of_latents_that_tells_of_other_classes(tmp_path):
    latents(tmp_path, [("a", ("a.cls", b"1")), ("b", ("b.cls", b"2"))])
    index_latents(str(tmp_path), "mean_std", image_size=16, num_workers=1)
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    assert len(build_dataset(str(tmp_path), 16, seed=0)) == 2
    content["sizes"][0]["class_names"] = ["a", "b"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index.json names 2 classes, the labels go to 2 \(.*x.tar: b\)"):
        build_dataset(str(tmp_path), 16, seed=0)
    content["sizes"][0] |= {"class_names": [], "conditioning": "text"}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="index.json tells of captions, its tars have classes"):
        build_dataset(str(tmp_path), 16, seed=0)


@pytest.mark.parametrize("name", ["x.tar", "x.tar.index", "class_names.json"])
def test_a_pipe_in_place_of_a_file(tars, name):
    path = tars / "label" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{name}.*(is no regular file|a named pipe)"):
        build_dataset(str(tars / "label"), 8, seed=0)
    if name == "x.tar":
        with pytest.raises(ValueError, match="x.tar is no regular file"):
            make_indexes(str(tars / "label"), num_workers=1, force=True)


def test_a_tar_that_becomes_a_pipe(tars):
    data = build_dataset(str(tars / "text"), 8, seed=0)
    (tars / "text" / "x.tar").unlink()
    os.mkfifo(tars / "text" / "x.tar")
    with pytest.raises(DataError, match="x.tar is no regular file"):
        data[SampleKey(0, 0, 0)]
