"""The order of runs that began before there were keyed permutations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.order.sorted import SortedBucketSchedule, SortedSchedule


def test_the_order_never_changes():
    """A checkpoint of an older version goes on with the samples that it was going to draw."""
    assert SortedSchedule(12, 12, 42).rows(3) == [1, 6, 3, 4, 5, 9, 2, 8, 0, 7, 11, 10]
    assert SortedBucketSchedule([0, 1, 0, 1, 0, 1, 0, 1, 0], 4, 2, 42).rows(5) == [7, 5, 1, 3]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.data(), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_is_a_sort_of_philox_words_without_its_remainder(size, data, seed, epoch):
    batch = data.draw(st.integers(1, size))
    schedule = SortedSchedule(size, batch, seed)
    assert schedule.steps_per_epoch == size // batch and schedule.steps(3) == 3 * (size // batch)
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size).tolist()
    steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
    rows = [row for step in steps for row in schedule.rows(step)]
    assert rows == sorted(range(size), key=words.__getitem__)[: len(rows)]
    assert all(schedule.epoch(step) == epoch for step in steps)
    assert SortedSchedule(size, batch, seed).rows(steps[-1]) == rows[-batch:]  # one that starts there


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    part=st.integers(1, 6),
    micro=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 100),
)
def test_every_micro_batch_has_one_shape_and_an_epoch_repeats_nothing(keys, part, micro, seed, epoch):
    parts = sum(keys.count(key) // part for key in set(keys))
    if parts < micro:
        with pytest.raises(ValueError):
            SortedBucketSchedule(keys, part * micro, micro, seed)
        return
    schedule = SortedBucketSchedule(keys, part * micro, micro, seed)
    assert (schedule.dataset_size, schedule.global_batch) == (len(keys), part * micro)
    assert schedule.steps_per_epoch == parts // micro
    steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
    batches = [schedule.rows(step) for step in steps]
    assert all(schedule.epoch(step) == epoch for step in steps)
    for rows in batches:
        assert len(rows) == part * micro
        assert all(len({keys[row] for row in rows[i : i + part]}) == 1 for i in range(0, len(rows), part))
    seen = [row for rows in batches for row in rows]
    assert len(seen) == len(set(seen))
    assert SortedBucketSchedule(keys, part * micro, micro, seed).rows(steps[-1]) == batches[-1]  # one that starts there
