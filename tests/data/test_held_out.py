"""A held-out share: which rows it has, and that training never sees them."""

import copy
import pickle
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.common.utils import hash_parts
from opendit.data import build_dataset, build_loader, build_schedule
from opendit.data.base import BadSample, Description, Fingerprint, Item, MediaDataset, SampleKey, Shapes
from opendit.data.blend import BlendedDataset
from opendit.data.held_out import SEED, hold_out
from opendit.data.order import permuted


class Numbers(MediaDataset):
    """Row i holds the number i; rows of a file are next to each other, and shapes alternate."""

    def __init__(self, count: int, rows_of_a_file: int = 1, shapes: int = 1, broken=frozenset()):
        self.count, self.rows_of_a_file, self.kinds, self.broken = count, rows_of_a_file, shapes, broken

    def __len__(self):
        return self.count

    def read(self, row, view=None):
        if row in self.broken:
            raise BadSample(f"file {row}", "broken")
        return Item(torch.tensor([float(row)]))

    def shapes(self):
        return Shapes(keys=np.arange(self.count) % self.kinds)

    def files(self):
        numbers = np.arange(self.count) // self.rows_of_a_file if self.rows_of_a_file > 1 else None
        return [(self.count, numbers)]

    def fingerprint(self):
        return Fingerprint(lambda: str(self.count))

    def describe(self):
        return Description(text="numbers", sample_shape=(1,), class_names=["one"], max_bad=1.0, files=self.files)


def read(dataset) -> list[int]:
    return [int(dataset[SampleKey(row, 0, row)].x) for row in range(len(dataset))]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 300), st.floats(0.001, 0.9), st.floats(0.001, 0.9), st.integers(1, 5))
def test_the_two_parts_are_all_rows_once_and_files_whole(count, share, other, rows_of_a_file):
    dataset = Numbers(count, rows_of_a_file)
    files = -(-count // rows_of_a_file)
    if max(1, round(max(share, other) * files)) >= files:
        return
    training, held = hold_out(dataset, share)
    assert sorted(read(training) + read(held)) == list(range(count))
    file_of = [{row // rows_of_a_file for row in read(part)} for part in (training, held)]
    assert not file_of[0] & file_of[1] and len(file_of[1]) == max(1, round(share * files))
    assert read(hold_out(dataset, share)[1]) == read(held)
    small, large = sorted((share, other))
    assert set(read(hold_out(dataset, small)[1])) <= set(read(hold_out(dataset, large)[1]))
    assert training.fingerprint().identity != dataset.fingerprint().identity != held.fingerprint().identity


def test_the_share_is_not_a_block_of_rows():
    held = read(hold_out(Numbers(1000), 0.1)[1])
    assert len(held) == 100 and [sum(low <= row < low + 250 for row in held) > 10 for low in (0, 250, 500, 750)]


@pytest.mark.parametrize("workers", [0, 1])
def test_training_never_reads_a_held_out_row_not_even_for_a_broken_one(workers):
    dataset = Numbers(60, shapes=2, broken=frozenset(range(0, 60, 3)))
    training, held = hold_out(dataset, 0.3)
    kept_away = set(held.rows.tolist())
    schedule = build_schedule(training, 4, 1, seed=3)
    how = dict(dp_rank=0, dp_size=1, batch_size=4, num_workers=workers, max_bad=1.0)
    with build_loader(training, schedule, end_step=3 * schedule.steps_per_epoch, **how) as loader:
        seen = [{int(x) for x in batch.x.flatten()} for batch in loader]
    assert not set().union(*seen) & kept_away and len(set().union(*seen)) > 15
    assert all(len({row % 2 for row in rows}) == 1 for rows in seen)  # rows of one shape stay together


def test_all_else_is_as_in_the_whole_in_copies_too():
    dataset = build_dataset("digits", 8, seed=0, random_flip=True)
    training, _ = hold_out(dataset, 0.25)
    whole = dataset.describe()
    for each in (training, copy.copy(training), pickle.loads(pickle.dumps(training))):
        about = each.describe()
        assert about.random_flip and about.class_names == whole.class_names and len(each) == len(training)
    assert "1,078 of them, 360 held out" in training.describe().text


def test_nothing_left_is_refused():
    with pytest.raises(ValueError, match="--validate_share 0.9: of 3 samples 3 are held out, and none is left"):
        hold_out(Numbers(3), 0.9)


def test_a_picture_s_captions_are_on_one_side(tmp_path):
    lines = [f"{name}.png,caption {number}" for number in range(3) for name in "abcdefgh"]
    (tmp_path / "set.csv").write_text("\n".join(["path,text", *lines]) + "\n")
    for number, name in enumerate("abcdefgh"):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{name}.png")
    dataset = build_dataset(str(tmp_path / "set.csv"), 8, seed=0)
    training, held = hold_out(dataset, 0.25)
    sides = [{part.source(row) for row in range(len(part))} for part in (training, held)]
    assert len(held) == 6 and len(sides[1]) == 2 and not sides[0] & sides[1]


def listed_sides(dataset, share):
    """Return (rows left, rows held out) from a list of all rows, as earlier versions found them."""
    numbers, files = [], 0
    for rows, file_of in dataset.describe().files():
        numbers.append(files + (np.arange(rows) if file_of is None else file_of))
        files = int(numbers[-1].max()) + 1
    chosen = np.zeros(files, dtype=bool)
    chosen[permuted(np.arange(max(1, round(share * files))), files, SEED, 0, 0)] = True
    held = chosen[np.concatenate(numbers)]
    return np.flatnonzero(~held), np.flatnonzero(held)


sources = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=60)
@given(st.lists(sources, min_size=1, max_size=4), st.floats(0.01, 0.99))
def test_both_sides_are_those_of_lists_of_all_rows(of, share):
    parts = [Numbers(*each) for each in of]
    weights = [(0, [Fraction(1)] * len(parts))]
    dataset = BlendedDataset([str(i) for i in range(len(parts))], parts, weights, shown="x") if of[1:] else parts[0]
    files = sum(-(-count // rows) for count, rows, _ in of)
    if max(1, round(share * files)) >= files:
        return
    keys = dataset.shapes().array
    sides = listed_sides(dataset, share)
    for side, rows in zip(hold_out(dataset, share), sides, strict=True):
        assert side.rows[:].tolist() == rows.tolist()
        assert side.fingerprint().identity == hash_parts(
            "rows", dataset.fingerprint().identity, rows.astype(np.int64).tobytes()
        )
        assert (side.shapes().array is None) == (keys is None)
        assert keys is None or side.shapes().array.tolist() == keys[rows].tolist()
        if of[1:]:
            assert side.describe().sources.ends == tuple(np.searchsorted(rows, dataset.ends).tolist())
        for row in range(len(side)):
            later = [(row + step) % len(side) for step in range(1, len(side) + 1)]
            assert side.next_row(row) == next(n for n in later if side.shapes().key(n) == side.shapes().key(row))
    assert f"{len(sides[0]):,} of them, {len(sides[1]):,} held out" in hold_out(dataset, share)[0].describe().text


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_what_is_in_memory_are_the_fewer_rows(share):
    """With 2 M rows, 8 bytes a row would take 16 MB."""
    parts = [Numbers(1_000_000), Numbers(1_000_000)]
    dataset = BlendedDataset(["a", "b"], parts, [(0, [Fraction(1), Fraction(1)])], shown="x")
    tracemalloc.start()
    try:
        sides = hold_out(dataset, share)
        for side in sides:
            assert side.fingerprint().identity
            assert len({int(side.rows[row]) for row in range(0, len(side), 997)}) == -(-len(side) // 997)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1_000_000 and sum(map(len, sides)) == 2_000_000
