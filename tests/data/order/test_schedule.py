"""Every epoch trains on each sample once, for any batch, ranks and restart."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data import BatchSchedule, BucketSchedule
from opendit.data import order as schedules
from opendit.data import order as sequences
from opendit.data.loader import requests
from opendit.data.order import RowsByKey


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.data(), st.integers(0, 2**63), st.integers(1, 40))
def test_every_epoch_has_every_row_once(size, data, seed, epochs):
    batch = data.draw(st.integers(1, size))
    schedule = BatchSchedule(size, batch, seed)
    steps = schedule.steps(epochs)
    assert steps == epochs * size // batch
    rows = np.array([schedule.rows(step) for step in range(steps)])
    assert rows.shape == (steps, batch)
    flat = rows.ravel()
    for epoch in range(epochs):
        part = flat[epoch * size : (epoch + 1) * size]
        assert len(np.unique(part)) == len(part) and (len(part) == size or epoch == epochs - 1)
    assert [schedule.epoch(step) for step in range(steps)] == [step * batch // size for step in range(steps)]
    far = data.draw(st.integers(0, steps - 1))
    assert BatchSchedule(size, batch, seed).rows(far) == rows[far].tolist()  # schedule starting here


def test_epochs_and_seeds_differ_and_every_row_comes_first_equally_often():
    first = [BatchSchedule(10, 10, seed).rows(epoch)[0] for seed in range(25) for epoch in range(40)]
    counts = np.bincount(first, minlength=10)
    assert abs(counts - 100).max() < 45  # 4.7 standard deviations
    schedule = BatchSchedule(100, 100, 0)
    assert schedule.rows(0) != schedule.rows(1) != BatchSchedule(100, 100, 1).rows(1)
    assert schedule.rows(0) != list(range(100))


@settings(max_examples=80, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    part=st.integers(1, 6),
    micro=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 12),
    data=st.data(),
)
def test_shapes_over_epochs_lose_and_repeat_nothing(keys, part, micro, seed, epochs, data):
    """In E epochs every row is drawn E times, except for less than a micro-batch of each shape and the micro-batches of
    one step. No row is drawn n times before all others of its shape are drawn n - 1 times."""
    if len(keys) < part * micro or sum(keys.count(key) // part for key in set(keys)) < micro:
        with pytest.raises(ValueError):
            BucketSchedule(keys, part * micro, micro, seed)
        return
    schedule = BucketSchedule(keys, part * micro, micro, seed)
    steps = schedule.steps(epochs)
    assert steps == sum(epochs * keys.count(key) // part for key in set(keys)) // micro
    seen, batches = Counter(), [schedule.rows(step) for step in range(steps)]
    for rows in batches:
        assert len(rows) == part * micro
        for first in range(0, len(rows), part):
            assert len({keys[row] for row in rows[first : first + part]}) == 1
    parts_seen = {key: 0 for key in keys}
    for row in (row for rows in batches for row in rows):
        seen[row] += 1
        parts_seen[keys[row]] += 1
    for key in set(keys):
        counts = [seen[row] for row in range(len(keys)) if keys[row] == key]
        assert max(counts) <= epochs and (steps == 0 or parts_seen[key] % part == 0)
        assert sum(epochs - count for count in counts) < part * (1 + micro)
    assert schedule.drawn(steps) == sum(seen.values()) and schedule.samples_of_a_pass == len(keys)
    lost = epochs * len(keys) - steps * part * micro
    assert lost < len(set(keys)) * part + micro * part
    for step in range(steps):
        made = schedule.epoch(step)
        assert schedule.steps(made) <= step and (step + 1) * micro > sum(
            made * keys.count(k) // part for k in set(keys)
        )
    if steps:
        far = data.draw(st.integers(0, steps - 1))
        assert BucketSchedule(keys, part * micro, micro, seed).rows(far) == batches[far]  # schedule starting here


def test_what_fills_no_batch_begins_the_shapes_first_batch_of_the_next_epoch():
    """With 5 rows in micro-batches of 2, the fifth row of one permutation is batched with the first row of the next."""
    schedule = BucketSchedule([0] * 5 + [1] * 4, 2, 1, seed=3)
    parts = [rows for rows in map(schedule.rows, range(schedule.steps(2))) if rows[0] < 5]
    order = [row for rows in parts for row in rows]
    assert len(order) == 10 and sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]


def test_a_shape_with_less_than_a_micro_batch_is_not_dropped():
    schedule = BucketSchedule([0] * 50 + [1] * 3, 4, 1, seed=0)
    rows = [row for step in range(schedule.steps(8)) for row in schedule.rows(step)]
    assert Counter(row for row in rows if row >= 50) == {50: 8, 51: 8, 52: 8}


def test_epochs_seeds_and_the_order_of_shapes_differ():
    keys = [0] * 40 + [1] * 40
    schedule = BucketSchedule(keys, 4, 1, 0)
    shapes = [[keys[schedule.rows(step)[0]] for step in range(20 * e, 20 * e + 20)] for e in range(3)]
    assert shapes[0] != shapes[1] != shapes[2] and all(sum(s) == 10 for s in shapes)
    assert sorted(schedule.rows(0)) != sorted(BucketSchedule(keys, 4, 1, 1).rows(0))
    first = np.bincount([BucketSchedule([0, 1] * 5, 2, 1, seed).rows(0)[0] for seed in range(400)], minlength=10)
    assert abs(first - 40).max() < 28  # 4.7 standard deviations


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(0, 2**32), st.sampled_from([1, 4095, 4096, 4097, 20000]))
def test_rows_of_a_key_are_those_that_a_list_of_them_names(kinds, seed, count):
    keys = np.random.default_rng(seed).choice([3, 7, 250][:kinds], count).astype(np.uint8)
    shapes = RowsByKey(keys)
    assert shapes.values.tolist() == sorted(set(keys.tolist()))
    for number, value in enumerate(shapes.values):
        rows = np.flatnonzero(keys == value)
        assert shapes.totals[number] == len(rows)
        wanted = np.random.default_rng(seed).permutation(len(rows))[:300]
        assert np.array_equal(shapes.select(number, wanted), rows[wanted])


@pytest.mark.parametrize("few", [0, 2, 32])
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64])
def test_keys_that_first_come_late_are_found(monkeypatch, few, kind):
    monkeypatch.setattr(sequences, "CHUNK", 1024)
    monkeypatch.setattr(sequences, "FEW", few)
    keys = np.array([9] * 1500 + [3] * 1000 + [100] * 1024 + [9, 3, 1], kind)
    values = RowsByKey(keys).values
    assert values.tolist() == [1, 3, 9, 100] and values.dtype == kind and RowsByKey(keys[:0]).values.dtype == kind


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 60), min_size=3, max_size=3, unique=True), st.integers(0, 2**40), st.booleans())
def test_any_world_and_any_restart_give_one_sequence(restarts, seed, shaped):
    """Read 24 samples a step with 8, 6, 3 and 1 ranks, changing at random steps: the sequence of (step, index, row) is
    that of an undisturbed run."""
    keys = [row % 3 % 2 for row in range(101)]
    make = (lambda: BucketSchedule(keys, 24, 1, seed)) if shaped else (lambda: BatchSchedule(101, 24, seed))
    stops = [0, *sorted(restarts), 64]
    found = {}
    for world, start, stop in zip((8, 6, 3, 1), stops[:-1], stops[1:], strict=True):
        for rank in range(world):
            for request in requests(make(), rank, world, 24 // world, 1, start, stop):
                for key in request.sample_keys:
                    assert (key.step, key.index) not in found
                    found[key.step, key.index] = key.sample
    whole = make()
    assert found == {(step, index): row for step in range(64) for index, row in enumerate(whole.rows(step))}


def test_many_samples_on_paper():
    """With three shapes, one of them rare, each row is drawn once an epoch."""
    keys = np.repeat(np.array([0, 1, 2], dtype=np.uint8), [70_000, 29_989, 11])
    schedule = BucketSchedule(keys, 256, 2, seed=5)
    rows = np.concatenate([schedule.rows(step) for step in range(schedule.steps(3))])
    counts = np.bincount(rows, minlength=len(keys))
    assert len(rows) > 300_000 - 128 * 3 - 256 and counts.max() == 3 and (3 - counts).sum() == 300_000 - len(rows)


def test_rows_are_computed_in_windows_that_change_nothing(monkeypatch):
    wide = [BatchSchedule(70, 6, 1).rows(step) for step in (0, 5, 37, 4)]
    monkeypatch.setattr(schedules, "WINDOW", 1)
    assert [BatchSchedule(70, 6, 1).rows(step) for step in (0, 5, 37, 4)] == wide


def test_no_places_have_no_rows():
    assert BatchSchedule(10, 2, 0).rows_between(4, 4).tolist() == []
