"""Prepared folders, metadatasets and blends made to exhaust time or memory are refused quickly, in one line."""

import json
import os
import shutil
import socket
import time

import pytest

from opendit.data import build_dataset
from opendit.data import energon_source as source
from opendit.data.energon_source import read_metadataset
from opendit.data.shards import store
from tests.data.energon.test_energon import PREPARED

HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))
    shutil.copytree(PREPARED, tmp_path / "sets")
    return tmp_path / "sets"


@pytest.fixture(autouse=True)
def soon():
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 60


def refused(path, says):
    with pytest.raises((ValueError, FileNotFoundError), match=f"^--data_path .*{says}") as caught:
        build_dataset(str(path), 8, seed=0)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000


def blend(path, *names):
    path.write_text(HEAD + "    blend:\n" + "".join(f"    - {{path: ./{name}}}\n" for name in names))


# ------------------------------------------------------------------------------------------ braces


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("{0..999999}" * 3, "names more than 1,000,000 tars"),
        ("{a,b}" * 30, "names more than 1,000,000 tars"),
        ("x" * 5000 + "{0..999999}", "names of 134,217,728 characters"),
        ("{" + "0" * 17 + "..999999}" + "y" * 300, "names of 134,217,728 characters"),
        ("{" + "0" * 5000 + "1..9}", "a number of more than 18 digits"),
        ("{0..9..1" + "0" * 400 + "}", "a number of more than 18 digits"),
        ("{" * 100_000 + "}" * 100_000, "more than 200 pairs of braces"),
        ("{" * 10 + "}" * 9, "a { without its }"),
        ("{" * 100_000, "more than 200 pairs of braces"),
        ("}" * 100_000, "a } without its {"),
        ("{a}" * 100_000, "more than 200 pairs of braces"),
        ("{" + "a," * 1_000_001 + "}", "names more than 1,000,000"),
    ],
)
def test_braces_are_bounded(pattern, says):
    with pytest.raises(ValueError, match=says) as caught:
        store.expand([pattern])
    assert len(str(caught.value)) < 300


def test_braces_of_several_patterns_are_bounded_together(monkeypatch):
    monkeypatch.setattr(store, "MOST_TARS", 10)
    assert len(store.expand(["{0..4}", "{0..4}"])) == 10
    with pytest.raises(ValueError, match="'{0..4}' names more than 10 tars"):
        store.expand(["{0..4}", "{0..4}", "{0..4}"])
    monkeypatch.setattr(store, "MOST_LETTERS", 9)
    with pytest.raises(ValueError, match="or names of 9 characters"):
        store.expand(["{0..4}", "{0..4}"])


def test_a_split_with_too_many_names(folder):
    path = folder / "captions" / ".nv-meta" / "split.yaml"
    path.write_text("split_parts: {train: ['x{0..999999}', 'y{0..999999}']}\n")
    refused(folder / "captions", "'y{0..999999}' names more than 1,000,000 tars, .* in .*split.yaml; correct it")


def test_samples_with_thousands_of_slashes(folder):
    path = folder / "captions" / ".nv-meta" / "split.yaml"
    content = path.read_text()
    assert "exclude:" in content
    keys = [f"'{'a/' * 200_000}{number}'" for number in range(20)] + ["'parts/00.tar/" + "b/" * 100_000 + "c'"]
    expected = build_dataset(str(folder / "captions"), 8, seed=0)
    path.write_text(content.replace("exclude: [", f"exclude: [{', '.join(keys)}, "))
    assert path.read_text() != content
    data = build_dataset(str(folder / "captions"), 8, seed=0)
    assert len(data) == len(expected)


def test_a_name_twice_at_the_end_of_many(folder):
    meta = folder / "captions" / ".nv-meta"
    counts = {f"{number}.tar": 1 for number in range(200_000)}
    (meta / ".info.json").write_text(json.dumps({"shard_counts": counts}))
    (meta / "split.yaml").write_text("split_parts: {train: ['{0..199999}.tar', '{199999..199999}.tar']}\n")
    refused(folder / "captions", "split.yaml names 199999.tar twice in the split train")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a.tar": 10**300}, "has no shard_counts"),
        ({"a/../../b.tar": 1}, "which is not in the folder"),
    ],
)
def test_lists_of_tars(folder, content, says):
    (folder / "captions" / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": content}))
    refused(folder / "captions", says)


def test_fields_with_too_many_places(folder):
    path = folder / "captions" / ".nv-meta" / "dataset.yaml"
    for options in (",".join(["jpg"] * 65), "jpg" + "[0]" * 65):
        path.write_text(
            f"sample_type: {{__module__: a, __class__: b}}\nfield_map: {{image: '{options}', caption: txt}}\n"
        )
        refused(folder / "captions", "too many places of image")


# ------------------------------------------------------------------------------------------ metadatasets


def test_eight_wide_and_eight_deep(folder):
    for level in range(8):
        blend(folder / f"{level}.yaml", *[f"{level + 1}.yaml" if level < 7 else "captions"] * 8)
    refused(folder / "0.yaml", "7.yaml, split train: leads to more than 1,000 folders; name fewer")


def test_files_are_read_once_and_diamonds_are_legal(folder, monkeypatch):
    for level in range(3):
        blend(folder / f"{level}.yaml", *[f"{level + 1}.yaml" if level < 2 else "captions"] * 4)
    read, reads = source.read_yaml, []
    monkeypatch.setattr(source, "read_yaml", lambda path, where: reads.append(path.name) or read(path, where))
    _, leaves = read_metadataset(folder / "0.yaml", ("train",), "--data_path x")
    assert len(leaves) == 64 and {leaf.share for leaf in leaves} == {leaves[0].share} and leaves[0].share * 64 == 1
    assert reads == ["0.yaml", "1.yaml", "2.yaml"]
    names = build_dataset(str(folder / "1.yaml"), 8, seed=0).names
    assert names == ["captions", *(f"captions #{number}" for number in range(2, 17))]


def test_circles_and_long_chains(folder):
    blend(folder / "a.yaml", "b.yaml")
    blend(folder / "b.yaml", "a.yaml")
    refused(folder / "a.yaml", "a.yaml leads back to itself")
    for number in range(100):
        blend(folder / f"c{number}.yaml", f"c{number + 1}.yaml")
    refused(folder / "c0.yaml", "c16.yaml: more than 16 files lead to each other; name fewer")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{path: ./captions, weight: " + "9" * 300 + "}", "must be a number above 0"),
        ("{path: ./captions, weight: '1" + "0" * 10**5 + "'}", "must be a number above 0"),
        ("{path: ./captions, weight: .inf}", "must be a number above 0"),
        ("{path: ./captions, weight: 1:30}", "must be a number above 0"),
        ("{path: ./captions, weight: 2024-01-01}", "must be a number above 0"),
        ("{path: ./captions, split_config: ../../../etc/passwd}", "no plain name of a file"),
        ("{path: ./captions, dataset_config: /etc/passwd}", "no plain name of a file"),
        ("{path: ./captions, split_part: [a]}", "is no name"),
        ("{path: " + "a" * 5000 + "}", "every data set needs a path"),
        ('{path: "a\\0b"}', "every data set needs a path"),
        ("{path: ~nobody-of-this-name/x}", "the home folder of ~nobody-of-this-name is not known"),
        ("{path: ./loop}", "loop doesn't exist"),
        ("{path: 3}", "every data set needs a path"),
        ("{path: ./captions, subset: {range: [.nan, 1]}}", "a subset's range is in percent"),
        ("{path: ./captions, subflavors: [" + "[" * 90 + "]" * 90 + "]}", "line 6: nested more than 64 levels"),
    ],
)
def test_entries_of_a_metadataset(folder, entry, says):
    (folder / "loop").symlink_to("loop")
    (folder / "m.yaml").write_text(HEAD + f"    blend:\n    - {entry}\n")
    refused(folder / "m.yaml", says)


# ------------------------------------------------------------------------------------------ blends


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("sources: [" + "{path: a, weight: 1}, " * 1001 + "]", "more than 1,000 sources or changes"),
        ("sources: [{path: a, weight: 1, name: no}]", "name must be a text, not false; put quotes around it"),
        ("sources: [{path: a, weight: 1, name: [b]}]", "name must be a text"),
        ("sources: [{path: a, weight: 1, classes: {b: no}}]", "must be its names: the blend's, all texts"),
        ("sources: [{path: a, weight: 1, classes: {no: b}}]", "line 1: the key false is no text"),
        ("sources: [{path: '', weight: 1}]", "a source is like"),
        ("sources: [{path: 2024-01-01, weight: 1:30}]", "weight of 2024-01-01 must be a number above 0, not '1:30'"),
        ("sources: [{path: a, weight: 1e-400}]", "above 0"),
        ("sources: [{path: 'a.csv:1,b.csv:1', weight: 1}]", "can't hold another blend"),
        (
            "sources: [{path: ~nobody-of-this-name/x, weight: 1}]",
            "the home folder of ~nobody-of-this-name is not known",
        ),
        ('sources: [{path: "a\\0", weight: 1}]', "a source is like"),
        ("sources: [{path: loop, weight: 1}]", "loop: can't be read"),
        ("sources: [{path: 'http://', weight: 1}]", "names no server"),
        ("sources: [{path: 's3://', weight: 1}]", "names no bucket"),
        (
            "sources: [{path: a, weight: 1}]\nsources: [{path: b, weight: 1}]",
            "line 2: the key 'sources' is there twice",
        ),
    ],
)
def test_blends(tmp_path, content, says):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "b.yaml").write_text(content)
    refused(tmp_path / "b.yaml", says)


# ------------------------------------------------------------------------------------------ pipes and sockets


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
@pytest.mark.parametrize(
    "name",
    [".nv-meta/.info.json", ".nv-meta/split.yaml", ".nv-meta/dataset.yaml", "parts/00.tar", "parts/00.tar.index"],
)
def test_what_is_no_file(folder, name, kind, monkeypatch):
    monkeypatch.chdir(folder / "captions")  # a socket's path must be short
    path = folder / "captions" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(name)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    if name.endswith(".index"):  # an index of another program that can't be read is ignored
        assert len(build_dataset(str(folder / "captions"), 8, seed=0)) == 5
        return
    refused(folder / "captions", f"{name} is no regular file")


@pytest.mark.parametrize("name", ["x.yaml", "x.csv", "x.tar", "inner.yaml"])
def test_a_pipe_as_a_data_set(folder, name):
    path = folder / name
    os.mkfifo(path)
    if name == "inner.yaml":
        blend(folder / "outer.yaml", name)
        refused(folder / "outer.yaml", "inner.yaml is no regular file")
        return
    refused(path, f"{name}: a named pipe")
    (folder / "b.yaml").write_text(f"sources: [{{path: {name}, weight: 1}}, {{path: captions, weight: 1}}]")
    refused(folder / "b.yaml", "can't hold another blend" if name == "x.yaml" else f"{name}: a named pipe")
