"""Blends draw every source at its share and in its own epochs, also after restarts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.loader import requests
from opendit.data.order import BlendSchedule, SourceRows


def sources_of(sizes, *stages, epoch=None):
    ends = tuple(np.cumsum(sizes).tolist())
    exact = tuple((step, tuple(Fraction(str(weight)) for weight in weights)) for step, weights in stages)
    return SourceRows(tuple("abcdefgh"[: len(sizes)]), ends, exact, epoch or ends[-1])


def drawn(schedule, steps):
    return np.array([schedule.rows(step) for step in range(steps)]).ravel()


def check_epochs(rows, members):
    """Check that a pool's rows are drawn as one permutation of its members after another, and return their number."""
    of_pool = rows[np.isin(rows, members)]
    for first in range(0, len(of_pool), len(members)):
        part = of_pool[first : first + len(members)]
        assert len(np.unique(part)) == len(part)
    return len(of_pool)


SIZES = st.lists(st.integers(40, 300), min_size=2, max_size=5)
WEIGHTS = st.lists(st.sampled_from([0.01, 0.1, 0.25, 0.3333, 1, 2, 7.5]), min_size=5, max_size=5)


@settings(deadline=None, max_examples=5)
@given(SIZES, WEIGHTS, st.integers(0, 2**40), st.integers(0, 9000))
def test_any_window_has_the_weights_and_every_source_its_epochs(sizes, weights, seed, start):
    batch, weights = min(sum(sizes), 50), weights[: len(sizes)]
    schedule = BlendSchedule(sources_of(sizes, (0, weights)), batch, 1, seed)
    rows = drawn(schedule, -(-19_000 // batch))
    source = np.searchsorted(np.cumsum(sizes), rows, side="right")
    window = np.bincount(source[start : start + 10_000], minlength=len(sizes)) / 10_000
    assert abs(window - np.array(weights) / sum(weights)).max() < 0.01
    counts = [
        check_epochs(rows, np.arange(sum(sizes))[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))
    ]
    steps = len(rows) // batch
    assert schedule.consumed(steps).tolist() == counts
    log = schedule.log(steps)["sources"]
    assert [log[name]["epoch"] for name in "abcde"[: len(sizes)]] == [n / size for n, size in zip(counts, sizes)]  # noqa: B905
    assert BlendSchedule(sources_of(sizes, (0, weights)), batch, 1, seed).rows(171) == schedule.rows(171)


def test_weights_change_at_their_step_and_epochs_go_on():
    sizes = [70, 50, 31]
    schedule = BlendSchedule(sources_of(sizes, (0, (3, 1, 0)), (500, (0, 1, 1)), (900, (1, 1, 2))), 20, 1, 7)
    rows = drawn(schedule, 1500)
    source = np.searchsorted(np.cumsum(sizes), rows, side="right").reshape(1500, 20)
    assert not (source[:500] == 2).any() and not (source[500:900] == 0).any()
    for steps, shares in (
        (slice(0, 500), (0.75, 0.25, 0)),
        (slice(500, 900), (0, 0.5, 0.5)),
        (slice(900, None), (0.25, 0.25, 0.5)),
    ):
        part = source[steps].ravel()
        assert abs(np.bincount(part, minlength=3) / len(part) - shares).max() < 0.005
    for first, last in ((0, 70), (70, 120), (120, 151)):
        check_epochs(rows, np.arange(first, last))


def test_epochs_of_each_source_are_exact():
    """One pass over the blend has exactly 3, 1 and 2 passes over sources with 35, 400 and 97 rows."""
    sizes, epochs = [35, 400, 97], [3, 1, 2]
    weights = [size * count for size, count in zip(sizes, epochs, strict=True)]
    schedule = BlendSchedule(sources_of(sizes, (0, weights), epoch=sum(weights)), 1, 1, 3)
    assert schedule.steps(2) == 2 * sum(weights) and schedule.epoch(sum(weights)) == 1
    for passes in (1, 2):
        counts = np.bincount(drawn(schedule, schedule.steps(passes)))
        assert counts.tolist() == np.repeat([passes * count for count in epochs], sizes).tolist()


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 3))
def test_shapes_and_sources(seed, part, micro):
    """A micro-batch has one shape, but its rows may come from several sources. The shares hold, and the rows with one
    shape and source come in permutations."""
    sizes, keys = [60, 45, 20], np.array(([0, 0, 1] * 20) + [1] * 45 + [0, 5] * 10, dtype=np.uint8)
    schedule = BlendSchedule(sources_of(sizes, (0, (5, 3, 2)), (40, (1, 1, 1))), part * micro, micro, seed, keys)
    assert schedule.micro_batches == micro
    steps = 3000 // (part * micro)
    rows = drawn(schedule, steps)
    assert (np.ptp(keys[rows].reshape(-1, part), axis=1) == 0).all()
    source = np.searchsorted(np.cumsum(sizes), rows, side="right")
    later = source[40 * part * micro :]
    assert abs(np.bincount(later, minlength=3) / len(later) - 1 / 3).max() < 0.03
    for number in range(3):
        for key in (0, 1, 5):
            members = np.flatnonzero(
                (keys == key) & (np.searchsorted(np.cumsum(sizes), np.arange(125), "right") == number)
            )
            if len(members):
                check_epochs(rows, members)
    assert schedule.consumed(steps).tolist() == np.bincount(source, minlength=3).tolist()


@settings(deadline=None, max_examples=6)
@given(st.lists(st.integers(0, 60), min_size=3, max_size=3), WEIGHTS, st.integers(0, 2**40), st.booleans())
def test_any_world_and_any_restart_give_one_sequence(restarts, weights, seed, shaped):
    """Read 24 samples a step with 8, 6, 3 and 1 ranks, changing at random steps."""
    sizes = [61, 17, 40]
    keys = (np.arange(118) % 3 % 2).astype(np.uint8) if shaped else None
    stages = (0, weights[:3]), (30, weights[2:])

    def make():
        return BlendSchedule(sources_of(sizes, *stages), 24, 1, seed, keys)

    stops, found = [0, *sorted(restarts), 64], {}
    for world, start, stop in zip((8, 6, 3, 1), stops[:-1], stops[1:], strict=True):
        for rank in range(world):
            for request in requests(make(), rank, world, 24 // world, 1, start, stop):
                found |= {(key.step, key.index): key.sample for key in request.sample_keys}
    whole = make()
    assert found == {(step, index): row for step in range(64) for index, row in enumerate(whole.rows(step))}


def test_many_samples_on_paper():
    """Two sources are drawn 7 to 3, and the second has two shapes. The shares hold, and rows with the same source and
    shape differ by at most one draw."""
    sizes, keys = (
        [90_001, 30_011],
        np.concatenate([np.zeros(90_001, np.uint8), np.arange(30_011, dtype=np.int64) % 7 == 0]),
    )
    schedule = BlendSchedule(sources_of(sizes, (0, (0.7, 0.3))), 512, 2, 5, keys.astype(np.uint8))
    counts = np.bincount(drawn(schedule, 300_000 // 512), minlength=sum(sizes))
    assert abs(counts[:90_001].sum() / counts.sum() - 0.7) < 1e-3
    assert np.ptp(counts[:90_001]) <= 1 and np.ptp(counts[90_001:][keys[90_001:] == 0]) <= 1


def test_the_order_never_changes():
    schedule = BlendSchedule(sources_of([9, 4], (0, (2, 1))), 6, 1, 42)
    assert schedule.rows(3) == [1, 8, 5, 7, 4, 0]


def test_a_source_without_samples():
    with pytest.raises(ValueError, match="source b has no samples"):
        BlendSchedule(sources_of([9, 0], (0, (2, 1))), 6, 1, 42)
