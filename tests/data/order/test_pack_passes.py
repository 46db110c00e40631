"""Packs take every sample of a pass once: at no step was one seen over two times more often than another."""

import json
import random
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.order.packs import PackSchedule
from opendit.data.order.schedule import SourceRows

DRAWN = 2500  # samples of an example, about
KINDS = {
    "lognormal": lambda random, n: np.clip(random.lognormal(3.5, 1, n), 1, 300).astype(np.int64),
    "uniform": lambda random, n: random.integers(4, 65, n),
    "constant": lambda random, n: np.full(n, 17),
    "bimodal": lambda random, n: np.where(random.random(n) < 0.7, 5, 90),
}
EXAMPLES = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 2000), st.integers(0, 2**40))


def lengths_of(example):
    kind, count, seed = example
    return KINDS[kind](np.random.default_rng(seed), count)


class Seen:
    """Counts how often each row was seen, step by step. ends: where the rows of each source end."""

    def __init__(self, ends):
        self.starts, self.counts = [0, *ends[:-1]], np.zeros(ends[-1], dtype=np.int64)

    def take(self, rows):
        np.add.at(self.counts, rows, 1)
        least = np.minimum.reduceat(self.counts, self.starts)
        most = np.maximum.reduceat(self.counts, self.starts)
        assert (most - least <= 2).all(), (least, most)


def check_packs(schedule, step):
    rows, ends = schedule.rows(step), list(schedule.ends(step))
    assert len(ends) == schedule.global_batch and ends[-1] == len(rows) > 0
    tokens = np.add.reduceat(np.append(schedule.tokens[rows], 0), np.minimum([0, *ends[:-1]], len(rows)))
    tokens[np.diff([0, *ends]) == 0] = 0
    assert tokens.max() <= schedule.capacity
    return rows


@settings(deadline=None, max_examples=15)
@given(EXAMPLES, st.floats(0, 3), st.integers(0, 2**32))
def test_counts_stay_within_two_over_resumes_and_other_worlds(example, more, moments):
    """Ranks, micro-batches and the size of packs change at random steps, at which the run stops and resumes."""
    lengths, state, step, draw = lengths_of(example), None, 0, random.Random(moments)
    tight = int(lengths.max() * (1 + more))
    seen, left = Seen([len(lengths)]), DRAWN
    while left > 0:
        ranks, packs = draw.randint(1, 8), draw.choice([1, 2, 5])
        capacity = draw.choice([tight, tight + 1, 2 * tight + 7])
        schedule = PackSchedule(lengths, capacity, ranks * packs, example[2], attention=100.0)
        if state is not None:
            same = (state["global_batch"], state["capacity"]) == (ranks * packs, capacity)
            assert schedule.restore(state, step) == same
        for _ in range(draw.randint(1, 60)):
            rows = check_packs(schedule, step)
            places = [p for m in range(packs) for rank in range(ranks) for p in schedule.share(step, m, rank, ranks, 1)]
            assert places == list(range(len(rows)))
            seen.take(rows)
            left, step = left - len(rows), step + 1
        counts, times = np.unique(seen.counts, return_counts=True)
        assert schedule.seen(step) == dict(zip(counts.tolist(), times.tolist(), strict=True))
        state = json.loads(json.dumps(schedule.state(step)))


@settings(deadline=None, max_examples=12)
@given(EXAMPLES, EXAMPLES, st.integers(1, 24), st.sampled_from([(1, 1), (9, 1), (1, 50)]), st.integers(0, 2**32))
def test_the_same_holds_within_each_source_of_a_blend(one, other, packs, weights, moments):
    parts = lengths_of(one), lengths_of(other)
    lengths, ends = np.concatenate(parts), (len(parts[0]), len(parts[0]) + len(parts[1]))
    exact = tuple(map(Fraction, weights))
    sources = SourceRows(("a", "b"), ends, ((0, exact), (20, exact[::-1])), ends[-1])
    draw, seen, left, step, state = random.Random(moments), Seen(ends), DRAWN, 0, None
    capacity = int(lengths.max() * draw.uniform(1, 4))
    while left > 0:
        schedule = PackSchedule(lengths, capacity, packs, one[2], sources=sources)
        assert state is None or schedule.restore(state, step)
        for _ in range(draw.randint(1, 60)):
            rows = check_packs(schedule, step)
            seen.take(rows)
            left, step = left - len(rows), step + 1
        state = json.loads(json.dumps(schedule.state(step)))


@settings(deadline=None, max_examples=15)
@given(EXAMPLES, st.floats(0, 3), st.integers(1, 24), st.integers(1, 3))
def test_an_epoch_sees_every_sample_up_to_the_packs_in_flight(example, more, packs, epochs):
    """The samples that an epoch leaves over would fit into the packs of two steps, however badly packed. The next step
    has all of them if one step can hold them."""
    lengths = lengths_of(example)
    schedule = PackSchedule(lengths, int(lengths.max() * (1 + more)), packs, example[2])
    steps, counts = schedule.steps(epochs), np.zeros(len(lengths), dtype=np.int64)
    if steps * packs > 3000:
        return
    for step in range(steps):
        np.add.at(counts, schedule.rows(step), 1)
    if counts.sum() <= epochs * len(lengths):  # else an epoch is less than a step
        assert lengths[counts < epochs].sum() <= (1.25 * packs + 1) * schedule.capacity
        assert counts.sum() + len(schedule.rows(steps)) > epochs * len(lengths)
    for step in range(steps, steps + 3):
        np.add.at(counts, schedule.rows(step), 1)
    assert counts.min() >= epochs


def test_five_hundred_clips():
    """Their first epoch left half of them out once."""
    lengths = np.random.default_rng(0).integers(64, 513, 500)
    schedule = PackSchedule(lengths, 1024, 4, 0)
    counts, steps = np.zeros(500, dtype=np.int64), schedule.steps(1)
    for step in range(steps):
        np.add.at(counts, schedule.rows(step), 1)
    in_flight = len(schedule.rows(steps))
    assert counts.max() <= 2 and (counts == 0).sum() <= in_flight < 20
    assert "every sample once" in schedule.passes


def test_a_resume_after_many_windows_knows_the_steps_of_an_epoch():
    """They are asked for at every start; after a resume the first windows are not the ones that are at hand."""
    lengths = np.random.default_rng(0).integers(8, 64, 3000)
    whole, resumed = PackSchedule(lengths, 150, 8, 0), PackSchedule(lengths, 150, 8, 0)
    assert resumed.restore(whole.state(60), 60)
    assert [resumed.steps(epochs) for epochs in (1, 3, 99)] == [whole.steps(epochs) for epochs in (1, 3, 99)]
    assert resumed.fill == whole.fill and resumed.rows(61) == whole.rows(61)
