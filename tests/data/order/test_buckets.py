"""Buckets: shapes within a budget of tokens, the shape with the least crop, and lots that drop no row."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.order import BlendSchedule, BucketSchedule, SourceRows
from opendit.data.shaped import LEVELS, LONGEST, TokenSize, assign, kept_shares, shape_table

TOKENS = st.builds(
    TokenSize, st.integers(1, 3), st.sampled_from([1, 4]), st.tuples(st.integers(2, 20), st.integers(2, 20))
)


@settings(deadline=None, max_examples=60)
@given(TOKENS, st.integers(3, 16), st.integers(1, 17), st.integers(1, 20), st.booleans())
def test_shapes_are_whole_tokens_within_the_budget(token, sides, length, budget, fine):
    size, frames = sides * token.side[0] * token.side[1], token.clip_frames(length)
    square = size**2 // (token.side[0] * token.side[1])
    table = shape_table(size, frames, token, square * budget, fine)
    assert len(np.unique(table.shapes, axis=0)) == len(table.shapes) and (table.tokens <= square * budget).all()
    assert [1, size, size] in table.shapes.tolist()
    for (count, height, width), tokens, level in zip(table.shapes.tolist(), table.tokens, table.level, strict=True):
        down, across = height // token.side[0], width // token.side[1]
        assert (down * token.side[0], across * token.side[1]) == (height, width)
        assert down * across * token.length(count) == tokens and height * width <= size**2 / 2**level
        assert max(height / width, width / height) <= LONGEST and 0 <= level < LEVELS
        if count > 1:  # the frames of a clip fill its tokens, and no clip is longer than the limit
            assert token.clip_frames(token.length(count)) == count <= frames
    if budget >= length:
        assert frames == 1 or [frames, size, size] in table.shapes.tolist()


def test_a_square_that_is_over_the_budget():
    with pytest.raises(ValueError, match="255: a picture of --image_size 256 has 256 tokens; raise it"):
        shape_table(256, 1, TokenSize(1, 1, (16, 16)), 255)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.25, 3.0]),
    st.integers(256, 3000),
)
def test_the_shape_is_the_best_of_those_allowed(sizes, interval, upscale, budget):
    """Compare with a search over all shapes: no medium is enlarged too much, and no clip gets more frames than it has.
    Among these shapes the largest area wins, then the longest clip, then the least crop."""
    table = shape_table(256, 16, TokenSize(2, 1, (16, 16)), budget)
    found = assign(np.array(sizes, dtype=np.int32), interval, table, upscale)
    for (frames, height, width), chosen in zip(sizes, found.tolist(), strict=True):
        ranks = []
        for number, ((count, down, across), level) in enumerate(zip(table.shapes.tolist(), table.level, strict=True)):
            if min(height, width) == 0 or max(down / height, across / width) > upscale * (1 + 1e-9):
                continue
            if count > 1 and 1 + (count - 1) * interval > frames:
                continue
            unit = min(height / down, width / across)
            ranks.append((int(level), -count, -round(unit**2 * down * across / (height * width), 6), number))
        best = min(ranks, default=None)
        assert (chosen == -1) == (best is None)
        if best is not None:
            mine = next(rank for rank in ranks if rank[3] == chosen)
            assert mine[:2] == best[:2] and abs(mine[2] - best[2]) < 1e-5


def test_crops_are_small_and_pictures_of_a_shapes_own_size_are_whole():
    table = shape_table(256, 1, TokenSize(1, 1, (16, 16)), 256)
    random = np.random.default_rng(0)
    sizes = np.stack([np.ones(5000), *random.integers(256, 2000, (2, 5000))], axis=1).astype(np.int32)
    sizes = sizes[(sizes[:, 1] < 3.9 * sizes[:, 2]) & (sizes[:, 2] < 3.9 * sizes[:, 1])]
    chosen = assign(sizes, 1, table, 1.0)
    kept = kept_shares(sizes, table.shapes[chosen])
    assert kept.mean() > 0.95 and kept.min() > 0.85
    own = kept_shares(table.shapes, table.shapes[assign(table.shapes, 1, table, 1.0)])
    assert (own[table.level == 0] == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=150),
    counts=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    units=st.integers(1, 3),
    micro=st.integers(1, 3),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 9),
)
def test_lots_over_epochs_lose_and_repeat_nothing(keys, counts, units, micro, seed, epochs):
    present = sorted(set(keys))
    samples = [counts[key] for key in present]
    part = {key: units * counts[key] for key in present}
    whole = sum(keys.count(key) // part[key] for key in present)
    if len(keys) < units * micro or whole < micro:
        with pytest.raises(ValueError):
            BucketSchedule(keys, units * micro, micro, seed, samples)
        return
    schedule = BucketSchedule(keys, units * micro, micro, seed, samples)
    steps = schedule.steps(epochs)
    assert steps == sum(epochs * keys.count(key) // part[key] for key in present) // micro
    seen = Counter()
    for step in range(steps):
        rows, ends = schedule.rows(step), schedule.ends(step)
        assert len(ends) == units * micro and ends[-1] == len(rows)
        for number in range(micro):
            of_part = rows[(ends[number * units - 1] if number else 0) : ends[(number + 1) * units - 1]]
            assert len({keys[row] for row in of_part}) == 1 and len(of_part) == part[keys[of_part[0]]]
        seen.update(rows)
    lost = epochs * len(keys) - sum(seen.values())
    assert max(seen.values(), default=0) <= epochs and lost < sum(part.values()) + micro * max(part.values())
    for key in present:  # no row is drawn n times before all others of its shape are drawn n - 1 times
        of_key = [seen[row] for row, other in enumerate(keys) if other == key]
        assert sum(epochs - count for count in of_key) < part[key] * (1 + micro)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 60), min_size=3, max_size=3), st.integers(0, 2**40), st.booleans())
def test_any_world_and_any_restart_give_one_sequence(restarts, seed, blended):
    """Read 24 lots a step with 8, 6, 3 and 1 ranks, changing at random steps."""
    keys, samples = np.arange(2000) % 3 % 2, [5, 2]
    stages = ((0, (Fraction(1), Fraction(3))), (30, (Fraction(2), Fraction(1))))
    sources = SourceRows(("a", "b"), (700, 2000), stages, 2000)

    def make():
        if blended:
            return BlendSchedule(sources, 24, 1, seed, keys, samples)
        return BucketSchedule(keys, 24, 1, seed, samples)

    stops, found = [0, *sorted(restarts), 64], {}
    for world, start, stop in zip((8, 6, 3, 1), stops[:-1], stops[1:], strict=True):
        schedule = make()
        for step in range(start, stop):
            rows = schedule.rows(step)
            for rank in range(world):
                for place in schedule.share(step, 0, rank, world, 24 // world):
                    assert (step, place) not in found
                    found[step, place] = rows[place]
    whole = make()
    assert found == {(step, place): row for step in range(64) for place, row in enumerate(whole.rows(step))}


def test_a_blend_in_lots_keeps_its_weights_and_counts_its_samples():
    """Shapes come in lots of 6 and of 1; the larger lots must not be drawn more often."""
    keys = (np.arange(900) % 4 == 0).astype(np.int16)
    sources = SourceRows(("a", "b"), (600, 900), ((0, (Fraction(1), Fraction(3))),), 900)
    schedule = BlendSchedule(sources, 4, 2, 11, keys, [6, 1])
    steps = schedule.steps(20)
    rows = np.array([row for step in range(steps) for row in schedule.rows(step)])
    assert 20 * 900 - 4 * 6 <= len(rows) <= 20 * 900 and schedule.epoch(steps - 1) == 19
    assert schedule.consumed(steps).tolist() == [(rows < 600).sum(), (rows >= 600).sum()]
    assert abs((rows >= 600).mean() - 0.75) < 0.01 and abs(keys[rows].mean() - 0.25) < 0.02
    assert abs(schedule.log(steps)["sources"]["b"]["share"] - 0.75) < 0.01
    for source in (rows[rows < 600], rows[rows >= 600]):
        counts = np.unique(source, return_counts=True)[1]
        assert np.ptp(counts) <= 2
