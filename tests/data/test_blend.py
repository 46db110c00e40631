"""Blends of several sources: what they read, and what they refuse."""

import numpy as np
import pytest
import torch
from PIL import Image

from opendit.data import SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.held_out import hold_out
from opendit.data.shaped import TokenSize, shape_media, shape_table
from opendit.data.shards.program import make_indexes
from tests.data.shards.tars import captioned, picture, write_tar


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write folders a, b and c of one grey level each, with two classes, and d.csv. c has hounds instead of dogs."""
    root = tmp_path_factory.mktemp("blend")
    for name, names, count, value in (
        ("a", ("cat", "dog"), 7, 10),
        ("b", ("cat", "dog"), 5, 200),
        ("c", ("cat", "hound"), 3, 90),
    ):
        for each in names:
            (root / name / each).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(root / name / each / f"{i}.png")
    (root / "d.csv").write_text("path,text\na/cat/0.png,a cat\n")
    return root


def blend(folder, text):
    (folder / "blend.yaml").write_text(text)
    return build_dataset(str(folder / "blend.yaml"), 8, seed=3)


def test_rows_are_those_of_the_sources(folder):
    data = blend(folder, "sources: [{path: a, weight: 3}, {path: c, weight: 1, classes: {hound: dog}}]")
    parts = [build_dataset(str(folder / name), 8, seed=3) for name in "ac"]
    assert len(data) == 20 and data.class_names == ["cat", "dog"] and data.shapes().array is None
    for row in range(20):
        part, place = (parts[0], row) if row < 14 else (parts[1], row - 14)
        item, same = data[SampleKey(row, 2, 1)], part[SampleKey(place, 2, 1)]
        assert torch.equal(item.x, same.x) and item.y == same.y and data.source(row) == part.source(place)
    assert data.describe().files() == [(14, None), (6, None)]
    inline = build_dataset(f"{folder}/a:0.7,{folder}/b:0.3", 8, seed=3)
    assert len(inline) == 24 and inline.describe().blend.count("0.7") == 1
    union = blend(folder, "{classes: union, sources: [{path: a, epochs: 3}, {path: c, epochs: 1}]}")
    assert union.class_names == ["cat", "dog", "hound"] and union.label(19) == 2
    assert union.describe().sources.epoch == 3 * 14 + 6


@pytest.mark.parametrize("how", [{"bucket_tokens": 64}, {"pack_tokens": 64}, {}])
def test_epochs_of_a_source_are_of_the_rows_that_are_left(tmp_path, how):
    """A pass does not count rows that are held out or too small for buckets and packs."""
    for name, small in (("a", 6), ("b", 0)):
        for i in range(12):
            side = 2 if i < small else 32
            (tmp_path / name / "one").mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((side, side, 3), i, np.uint8)).save(tmp_path / name / "one" / f"{i:02d}.png")
    data = blend(tmp_path, "sources: [{path: a, epochs: 1}, {path: b, epochs: 2}]")
    if how:
        left = shape_media(data, shape_table(32, 1, TokenSize(1, 1, (4, 4)), 64), 1, 1.25, "--bucket_tokens")
    else:
        left, _ = hold_out(data, 0.25)
    sizes = left.describe().sources.sizes
    assert left.describe().sources.epoch == sizes[0] + 2 * sizes[1] and min(sizes) > 0
    schedule = build_schedule(left, 1, 1, 3, **how)
    # Steps have one sample each. A window of packs has 192 samples, so 32 x 30 fill five.
    steps = 32 * left.describe().sources.epoch
    rows = [row for step in range(steps) for row in schedule.rows(step)]
    counts = np.bincount(rows, minlength=len(left))
    assert (set(counts[: sizes[0]]), set(counts[sizes[0] :])) == ({32}, {64})


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_read_what_the_schedule_says(folder, workers):
    data = blend(folder, "sources: [{path: a, weight: 0.75}, {path: b, weight: 0.25}]")
    schedule = build_schedule(data, 8, 1, 3)
    with build_loader(
        data, schedule, dp_rank=0, dp_size=1, batch_size=8, start_step=5, end_step=9, num_workers=workers
    ) as loader:
        for batch in loader:
            wanted = [10 if row < 14 else 200 for row in schedule.rows(batch.step)]
            assert ((batch.x[:, 0, 0, 0] + 1) * 127.5).round().int().tolist() == wanted


@pytest.mark.parametrize(
    "text, message",
    [
        ("sources: [{path: a, weight: 0}, {path: b, weight: 1}]", "weight of a must be a number above 0, not 0"),
        ("sources: [{path: a, weight: -1}, {path: b, weight: 1}]", "above 0, not -1"),
        ("sources: [{path: a, weight: .nan}, {path: b, weight: 1}]", "above 0, not nan"),
        ("sources: [{path: a, weight: 1}, {path: a, weight: 1}]", "names the source a twice"),
        ("sources: [{path: a, weight: 1}, {path: ./a, weight: 1}]", "twice .by path"),
        ("sources: [{path: a, wieght: 1}]", "unknown key 'wieght'; known here: path, name, weight"),
        ("sources: [{path: a, weight: 1}, {path: b, epochs: 1}]", "every source a weight, or every source epochs"),
        ("sources: &s [*s]", r", line 1: \*s is inside of what it repeats"),
        ("sources: [{path: blend.yaml, weight: 1}]", "can't hold another blend"),
        ("sources: [{path: mock, weight: 1}]", "can't hold mock"),
        ("sources: [", "not YAML that can be read"),
        ("[1]", "must be like"),
        ("sources: [{path: a, weight: 1}, {path: c, weight: 1}]", "a has no class 'hound'.*classes: union"),
        ("sources: [{path: a, weight: 1}, {path: c, weight: 1, classes: {wolf: dog}}]", "no class 'wolf'"),
        ("sources: [{path: a, weight: 1}, {path: d.csv, weight: 1}]", "differ in conditioning.*CSV of path,text"),
        ("{sources: [{path: a, weight: 1}], changes: [{step: 0, weights: {a: 1}}]}", "rising steps above 0, not 0"),
        ("{sources: [{path: a, weight: 1}], changes: [{step: 5, weights: {b: 1}}]}", "unknown key 'b'"),
    ],
)
def test_what_is_refused(folder, text, message):
    with pytest.raises(ValueError, match=f"--data_path .*blend.yaml.*{message}"):
        blend(folder, text)


def test_captions_come_from_a_table_and_from_tars(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(picture(50 + i))
    (tmp_path / "some.csv").write_text("path,text\n" + "".join(f"{i}.png,the {i}\n" for i in range(5)))
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "x.tar", captioned(7))
    make_indexes(str(tmp_path / "tars"), num_workers=1)
    data = blend(tmp_path, "sources: [{path: some.csv, weight: 1}, {path: tars, weight: 2}]")
    parts = [build_dataset(str(tmp_path / name), 8, seed=3) for name in ("some.csv", "tars")]
    assert data.describe().conditioning == "text" and len(data) == 12
    for row in range(12):
        part, place = (parts[0], row) if row < 5 else (parts[1], row - 5)
        item, same = data[SampleKey(row, 2, 1)], part[SampleKey(place, 2, 1)]
        assert torch.equal(item.x, same.x) and item.text == same.text == (f"the {row}" if row < 5 else f"a {row - 5}")


def test_sources_are_told_which_of_their_rows_come_next(folder):
    data, told = blend(folder, "sources: [{path: a, weight: 3}, {path: b, weight: 1}]"), []
    for name, part in zip("ab", data.parts, strict=True):
        part.prefetch = lambda rows, name=name: told.append((name, rows))
    data.__getitems__([SampleKey(row, 2, row) for row in (3, 15, 1)])
    assert told == [("a", [3, 1]), ("b", [1])]
