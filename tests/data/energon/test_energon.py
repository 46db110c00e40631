"""Folders that Energon prepared give the samples that Energon itself reads, as recorded by make_fixtures.py."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import braceexpand
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import preprocess
from opendit.data import SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.energon_source import Subset, kept_rows
from opendit.data.shards import store
from opendit.data.shards.program import make_indexes
from opendit.data.sources import NoSplit
from opendit.training.run import example_captions
from tests.data.shards.tars import captioned, write_tar
from tests.encoders.test_vae import small_vae

PREPARED = Path(__file__).parent / "prepared"
EXPECTED = json.loads((PREPARED / "expected.json").read_text())
SPLITS = {"train": "train", "val": "test"}  # Energon's name -> this project's name


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))


def seen(data) -> list:
    """Return [key, SHA-256 of the pixels, caption or class] for every sample."""
    out = []
    for row in range(len(data)):
        x = ((data.read(row).x + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous()
        key = data.source(row).rpartition(": ")[2].partition(".")[0]
        text = data.caption(row) if data.describe().conditioning == "text" else data.label(row)
        out.append([key, hashlib.sha256(x.numpy().tobytes()).hexdigest(), text])
    return out


@pytest.mark.parametrize(("name", "split"), [(n, s) for n in EXPECTED for s in EXPECTED[n] if s in SPLITS])
def test_samples_are_those_that_energon_reads(name, split):
    data = build_dataset(str(PREPARED / name), 8, seed=0, split=SPLITS[split])
    parts = data.parts if hasattr(data, "parts") else [data]
    expected = EXPECTED[name][split]
    assert [seen(part) for part in parts] == [part["samples"] for part in expected]
    if len(expected) > 1:
        shares = [part["share"] for part in expected]
        weights = data.describe().sources.stages[0][1]
        if name == "epochs.yaml":
            shares = [share * len(part) for share, part in zip(shares, parts, strict=True)]
            assert data.describe().sources.epoch == sum(shares) == 15
        assert [float(weight) for weight in weights] == pytest.approx(shares, rel=1e-12)
        assert len(set(data.names)) == len(parts)


@pytest.fixture
def folder(tmp_path):
    """Return a copy of all prepared sets."""
    return Path(shutil.copytree(PREPARED, tmp_path / "sets"))


def opened(path, **options):
    return build_dataset(str(path), 8, seed=0, **options)


def test_indexes_are_made_once_and_those_beside_the_tars_are_taken(folder, tmp_path, capsys):
    first = opened(folder / "captions")
    seen_first = seen(first)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "energon").glob("*.index")}
    assert len(made) == 2 and not list(folder.rglob("*.tar.index"))
    opened(folder / "captions")
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert preprocess.main(["index", str(folder / "captions"), "--num_workers", "1"]) == 0
    assert "16 samples (16 pictures with captions) in 4 tars" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "cache")
    second = opened(folder / "captions")
    assert not (tmp_path / "cache" / "energon").exists()  # the indexes beside the tars are used
    assert seen_first == seen(second) and second.fingerprint().checksums.files  # indexes beside the tars have checksums
    (folder / "classes" / "class_names.json").write_text('["a", "b", "c", "d"]')
    data = opened(folder / "classes")
    assert data.class_names == ["a", "b", "c", "d"] and data.random_flip
    meta = folder / "captions" / ".nv-meta" / "dataset.yaml"
    meta.write_text(meta.read_text().replace("image: jpg,png", "image: mask.png"))  # other fields need other indexes
    assert seen(opened(folder / "captions"))[0][1] != seen_first[0][1]


def test_captions_and_pictures_reach_a_batch(folder):
    item = opened(folder / "two.yaml")[SampleKey(3, 0, 0)]
    assert item.x.shape == (3, 8, 8) and item.text == "nested 7" and not item.skipped
    assert "4 sources by weight (captions 0.375, captions (val) 0.125, crude 0.1667, captions #2 0.3333)" in (
        opened(folder / "two.yaml").describe().text
    )


COOKER = """
import io
from types import SimpleNamespace
from PIL import Image

def upper(raw):
    assert raw["__key__"] and isinstance(raw["jpg"], bytes) and "txt" not in raw
    return dict(image=raw["jpg"], caption=raw["json"]["caption"].upper())

def parts(raw):
    return SimpleNamespace(image=Image.open(io.BytesIO(raw["jpg"])), label=len(raw["txt"]) - 11, video=None)

def flavor(raw):
    return dict(image=raw["jpg"], caption=str(raw["__subflavors__"]))

def some(raw):
    if raw["__key__"] == "3":
        raise KeyError("three")
    return None if raw["__key__"] == "4" else dict(image=raw["jpg"], caption=f"number {raw['__key__']}")

def wrong(raw):
    return dict(image=3, caption="x")
"""


@pytest.fixture
def cookers(tmp_path, monkeypatch):
    name = f"cookers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(COOKER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_of_the_user_s_reads_the_samples(folder, cookers):
    expected = EXPECTED["crude"]["train"][0]["samples"]
    data = opened(folder / "crude", energon_cooker=f"{cookers}:upper")
    assert seen(data) == [[key, pixels, text.upper()] for key, pixels, text in expected]
    assert data.preview(0)[1].shape == (1, 8, 8, 3)
    assert (
        f"read by {cookers}:upper" in data.describe().text
        and data.fingerprint().identity != opened(folder / "crude").fingerprint().identity
    )
    again = pickle.loads(pickle.dumps(data))
    assert again[SampleKey(1, 0, 0)].text == "CRUDE 1"
    with build_loader(
        data, build_schedule(data, 5, 1, 0), dp_rank=0, dp_size=1, batch_size=5, end_step=2, num_workers=2
    ) as batches:
        assert sorted(text for batch in batches for text in batch.text) == [f"CRUDE {i}" for i in range(10)]
    late = opened(folder / "two.yaml", energon_cooker=f"{cookers}:flavor")
    assert [late.parts[i].caption(0) for i in (1, 2)] == ["{'kind': 'late'}", "{'kind': 'crude'}"]


def test_a_cooker_of_classes_needs_their_names(folder, cookers):
    meta = folder / "crude" / ".nv-meta" / "dataset.yaml"
    meta.write_text(meta.read_text().replace("[jpg, json]", "[jpg, txt]"))
    with pytest.raises(ValueError, match="gives labels; name the classes in class_names.json"):
        opened(folder / "crude", energon_cooker=f"{cookers}:parts")
    (folder / "crude" / "class_names.json").write_text('["x", "y"]')
    data = opened(folder / "crude", energon_cooker=f"{cookers}:parts")
    assert data[SampleKey(2, 0, 0)].y == 1 and data.class_names == ["x", "y"]
    assert data.preview(0)[1].shape == (1, 8, 8, 3)
    assert [pixels for _, pixels, _ in seen(data)] == [
        pixels for _, pixels, _ in EXPECTED["crude"]["train"][0]["samples"]
    ]


def test_what_a_cooker_can_t_read_is_counted_and_named(folder, cookers):
    data = opened(folder / "crude", energon_cooker=f"{cookers}:some")
    item = data[SampleKey(3, 0, 0)]
    assert item.text == "number 5" and len(item.skipped) == 2
    assert item.skipped[0].endswith(f"0.tar: 3: {cookers}:some: KeyError: 'three'")
    assert "4: " in item.skipped[1] and "gave no picture and no clip; it returns a mapping" in item.skipped[1]


@pytest.mark.parametrize(
    ("cooker", "says"),
    [
        ("nothing", "must be MODULE:FUNCTION"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("{}:no", "AttributeError"),
        ("{}:COOKER", "AttributeError"),
        ("{}:io", "io is no function"),
        ("{}:wrong", "reads none of the first samples .*an image that is a int, not bytes or a PIL image"),
    ],
)
def test_mistakes_with_cookers(folder, cookers, cooker, says):
    with pytest.raises(ValueError, match=f"--energon_cooker .*{says}"):
        opened(folder / "crude", energon_cooker=cooker.format(cookers))


def test_captions_that_can_t_be_read_end_neither_a_start_nor_a_cache(folder, cookers, tmp_path, capsys):
    data = opened(folder / "crude", energon_cooker=f"{cookers}:some")
    assert example_captions(data) == [f"number {key}" for key in (0, 1, 2, 5, 6, 7, 8, 9)]
    vae = small_vae()
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", **vae.config}))
    save_file(vae.state_dict(), tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    flags = f"--data_path {folder}/crude --energon_cooker {cookers}:some --vae {tmp_path}/vae --image_size 8"
    argv = ["latents", *flags.split(), "--num_workers", "0", "--output", str(tmp_path / "latents")]
    assert preprocess.main([*argv, "--max_bad", "0.1"]) == 2
    assert "more than --max_bad 0.1" in capsys.readouterr().err
    assert preprocess.main([*argv, "--max_bad", "0.3"]) == 0
    latents = build_dataset(str(tmp_path / "latents"), 8, seed=0)
    assert [latents.caption(row) for row in range(len(latents))] == example_captions(data)


def test_index_and_look_take_a_cooker(folder, cookers, capsys):
    """The indexes are those that training with the cooker reads, not those of the field map."""
    how = ["--energon_cooker", f"{cookers}:upper"]
    assert preprocess.main(["index", str(folder / "crude"), "--num_workers", "1", *how]) == 0
    made = {path: path.stat().st_mtime_ns for path in (folder / "crude").glob("*.index")}
    assert made and len(opened(folder / "crude", energon_cooker=f"{cookers}:upper")) > 0
    assert not list(Path(os.environ[store.FOLDER]).rglob("*.index"))
    assert preprocess.main(["look", str(folder / "crude"), "--output", str(folder / "look"), *how]) == 0
    assert "read by" in capsys.readouterr().out and (folder / "look" / "contact_sheet.png").stat().st_size > 0
    assert preprocess.main(["index", str(folder / "crude"), "--num_workers", "1", "--force", *how]) == 0
    assert all(path.stat().st_mtime_ns > before for path, before in made.items())
    capsys.readouterr()
    assert preprocess.main(["index", str(folder), *how]) == 2
    assert "--energon_cooker" in capsys.readouterr().err


def test_a_cooker_of_something_else_is_refused(folder, tmp_path):
    (tmp_path / "pictures").mkdir()
    write_tar(tmp_path / "pictures" / "a.tar", captioned(3))
    make_indexes(str(tmp_path / "pictures"), num_workers=1)
    with pytest.raises(ValueError, match="--energon_cooker a:b: .* is no folder that Energon prepared"):
        opened(tmp_path / "pictures", energon_cooker="a:b")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("dataset.yaml", "image: jpg", "picture: jpg", "has neither image nor video .*--energon_cooker"),
        ("dataset.yaml", "json[texts]", "pyd[texts]", ".pyd holds no text"),
        ("dataset.yaml", "jpg,png", "json[url]", "a picture inside of another member, json.url."),
        ("dataset.yaml", "caption:", "context:", "has neither caption nor label"),
        ("dataset.yaml", "field_map", "field_mop", "has the unknown key 'field_mop'"),
        (
            "dataset.yaml",
            "field_map:",
            "sample_loader: sample_loader.py:f\nsubflavors:",
            "names Python code, sample_loader",
        ),
        ("dataset.yaml", "caption: json", "caption: [", "not YAML that can be read"),
        ("split.yaml", "train:", "other:", "has no split train in .*; it has other, val"),
        ("split.yaml", "{00..02}", "{00..07}", "names parts/04.tar; .*of which .info.json knows nothing"),
        ("split.yaml", "{00..02}", "{00..02", "a { without its }"),
        ("split.yaml", "'parts/{01..01}.tar'", "'parts/{00..02}.tar'", "every tar of the split train is excluded"),
        (".info.json", '"parts/00.tar": 3', '"parts/00.tar": 4', "parts/00.tar has 3 samples, and 4 when Energon"),
        (".info.json", '"parts/00.tar": 3', '"../00.tar": 3', "names ../00.tar, which is not in the folder"),
        (".info.json", '"shard_counts"', '"shards"', "has no shard_counts"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(folder, file, old, new, says):
    edit(folder / "captions" / ".nv-meta" / file, old, new)
    with pytest.raises(ValueError, match=f"^--data_path .*{says}"):
        opened(folder / "captions")


def test_missing_files_are_named(folder, tmp_path, monkeypatch):
    (folder / "captions" / "parts" / "02.tar").unlink()
    with pytest.raises(ValueError, match="parts/02.tar can't be read .No such file"):
        opened(folder / "captions")
    tar = folder / "crude" / "0.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    with pytest.raises(ValueError, match="0.tar is truncated or damaged"):
        opened(folder / "crude")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file"))
    with pytest.raises(ValueError, match="can't be written .*OPENDIT_SHARD_CACHE .*python preprocess.py index"):
        opened(folder / "classes")
    for name in ("dataset.yaml", "split.yaml"):
        (folder / "classes" / ".nv-meta" / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name} doesn't exist"):
            opened(folder / "classes")


def test_a_held_out_split(folder):
    assert len(opened(folder / "classes", split="test")) == 4  # Energon calls it val
    edit(folder / "classes" / ".nv-meta" / "split.yaml", "val:\n  - 3.tar", "val: []")
    assert seen(opened(folder / "classes", split="test")) == EXPECTED["classes"]["test"][0]["samples"]
    with pytest.raises(NoSplit, match="has no split val or test"):
        opened(folder / "crude", split="test")
    with pytest.raises(NoSplit, match="has no split val or test"):
        opened(folder / "epochs.yaml", split="test")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("weight: 3", "weight: 0", "weight of ./captions must be a number above 0, not 0"),
        ("weight: 3", "weight: -1", "must be a number above 0, not -1"),
        ("weight: 3", "weight: .nan", "must be a number above 0"),
        ("weight: 3", "wait: 3", "has the unknown key 'wait'"),
        ("blend:", "blend_epochized:", "has the unknown key 'weight'"),
        ("./nested.yaml", "./two.yaml", "leads back to itself, over .*two.yaml -> .*two.yaml"),
        ("./nested.yaml", "./epochs.yaml", "has repetitions where this has weights"),
        ("./nested.yaml", "./gone", "gone doesn't exist"),
        ("./nested.yaml", "s3://bucket/set", "is an address"),
        ("./nested.yaml", "texts.jsonl", "holds texts alone"),
        ("./nested.yaml", ".", "has not been prepared: run energon prepare"),
        ("[1, end]", "[9, end]", r"range \[9, 6\] of 6 samples"),
        ("[1, end]", "[6, end]", "no sample of its 6 is left"),
        ("[1, end]", "[1, 50%]", "must rise"),
        ("[1, end]", "[a, b]", "a subset's range is in percent"),
        ("[1, end]", "[80%, 20%]", "must rise"),
        ("MetadatasetV2", "Other", "__class__ must be Metadataset or MetadatasetV2"),
        ("splits:", "splat:", "needs splits"),
        ("  train:", "  tran:", "has no split train; it has tran, val"),
        ("- {weight: 3, path: ./captions}", "- join: []", "join puts samples of several folders together"),
        ("- {weight: 3, path: ./captions}", "- {path: ./captions, aux: {a: b}}", "aux of ./captions"),
        ("- {weight: 3, path: ./captions}", "- 3", "an entry of blend is like"),
    ],
)
def test_what_is_wrong_with_a_metadataset_is_told(folder, old, new, says):
    (folder / "texts.jsonl").write_text("{}\n")
    edit(folder / "two.yaml", old, new)
    with pytest.raises(ValueError, match=f"^--data_path .*{says}"):
        opened(folder / "two.yaml")


def test_a_subset_around_numbers_is_refused(folder):
    edit(folder / "nested.yaml", "subset: {range: [25%, 100%]}", "subset: {range: [0, 3]}")
    with pytest.raises(ValueError, match="a subset of numbers must be that of a prepared folder"):
        opened(folder / "nested.yaml")


def test_other_yaml_files_are_this_project_s_blends(folder):
    (folder / "blend.yaml").write_text("sources: [{path: captions, weight: 1}, {path: crude, weight: 3}]\n")
    assert opened(folder / "blend.yaml").describe().blend == "captions 0.25, crude 0.75"


PATTERNS = st.recursive(
    st.text("ab.01-/", max_size=4)
    | st.builds("{{{}..{}}}".format, st.sampled_from(["0", "3", "00", "08", "-1", "-02"]), st.integers(-3, 11))
    | st.builds("{{{}..{}..{}}}".format, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)),
    lambda inner: (
        st.lists(inner, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda items: "{" + ",".join(items) + "}")
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=200)
@given(PATTERNS)
def test_braces_are_expanded_as_by_braceexpand(pattern):
    assert store.expand([pattern]) == list(braceexpand.braceexpand(pattern, escape=False))


@pytest.mark.parametrize("pattern", ["{a", "a}", "{0..99999999}", "{0..999}" * 3, "{a,{b}"])
def test_braces_that_do_not_match_or_name_too_many(pattern):
    with pytest.raises(ValueError, match="without its|names more than 1,000,000"):
        store.expand([pattern])


def test_a_subset_of_a_subset_is_a_part_of_it():
    """Fractions can be nested and can be applied to a range of rows."""
    assert Subset(0.25, 0.75).within(Subset(0.5, 1.0)).of(100) == (50, 75)
    assert Subset(0.25, 0.75).within(Subset(0.25, 0.5)).of(1000) == (375, 500)
    assert Subset(0, 1, 10, 30).within(Subset(0.9, 1.0)).of(100) == (28, 30)
    assert Subset(0.25, 0.75).within(None).of(100) == (25, 75)


@settings(deadline=None)
@given(st.data())
def test_rows_of_a_tar_within_a_range_and_without_keys(data):
    """The range also counts the samples that the index leaves out."""
    count = data.draw(st.integers(1, 12))
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    first, last = data.draw(st.integers(-3, 14)), data.draw(st.integers(-3, 14))
    keys = {f"key {number}" for number in data.draw(st.sets(st.sampled_from(numbers.tolist())))}
    rows = np.zeros(len(numbers), [("number", np.int64)])
    rows["number"] = numbers
    header = SimpleNamespace(rows=len(numbers), left_out=count - len(numbers))
    index = SimpleNamespace(header=header, rows=rows, key=lambda row: f"key {numbers[row]}")
    kept = kept_rows(index, first, last, keys)
    found = list(range(len(numbers))) if kept is None else kept.rows.tolist()
    assert found == [i for i, n in enumerate(numbers) if first <= n < last and f"key {n}" not in keys]
