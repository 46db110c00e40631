"""Packs are full and equal in cost, lose or repeat no sample, and do not depend on ranks or restarts.

At any step, two samples differ by at most two in how often they were seen.
"""

import json
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bench_packing import MIXES, balance
from opendit.data.order import BatchSchedule, BlendSchedule, SourceRows
from opendit.data.packs import Packer, PackSchedule, work_of

LENGTHS = st.lists(st.integers(8, 64), min_size=3, max_size=60)


def naive(lengths, first, packs, capacity, attention):
    """Pack the longest first, each into the cheapest pack with room, by searching all packs."""
    spent, room, filled, left = [0.0] * packs, [capacity] * packs, [[] for _ in range(packs)], []
    for number in sorted(range(len(lengths)), key=lambda i: (i >= first, -lengths[i], i)):
        fits = [pack for pack in range(packs) if room[pack] >= lengths[number]]
        if not fits:
            left.append(number)
            continue
        pack = min(fits, key=lambda pack: (spent[pack], pack))
        spent[pack] += lengths[number] * (1 + lengths[number] / attention)
        room[pack] -= lengths[number]
        filled[pack].append(number)
    return filled, sorted(left)


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(0, 10), st.integers(1, 9), st.integers(64, 200), st.sampled_from([3.0, 40.0, float("inf")]))
def test_a_window_is_packed_as_a_look_at_every_pack_does(lengths, first, packs, capacity, attention):
    first, lengths = min(first, len(lengths)), np.array(lengths)
    packer, left = Packer(packs, capacity, int(lengths.min()), attention), []
    for numbers in np.split(np.arange(len(lengths)), [first]):
        left += packer.place(numbers, lengths[numbers])
    plain, plain_left = naive(lengths.tolist(), first, packs, capacity, attention)
    assert [sorted(pack) for pack in packer.packs] == [sorted(pack) for pack in plain]
    assert sorted(left) == plain_left
    assert sorted(sum(packer.packs, []) + left) == list(range(len(lengths)))


def flat(schedule, steps):
    return [row for step in steps for row in schedule.rows(step)]


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(64, 300), st.integers(1, 16), st.integers(0, 2**63), st.integers(1, 40))
def test_nothing_is_lost_or_repeated(lengths, capacity, packs, seed, stop):
    """At the start of a window, the samples drawn and those left over are exactly the first ones in the order."""
    lengths = np.array(lengths)
    schedule = PackSchedule(lengths, capacity, packs, seed, attention=50.0)
    begins = schedule.state(stop)["step"]
    for step in range(stop):
        rows, ends = schedule.rows(step), schedule.ends(step)
        assert len(ends) == packs and ends[-1] == len(rows)
        for first, end in zip([0, *ends], ends, strict=False):
            pack = lengths[rows[first:end]]
            assert pack.sum() <= capacity and (np.diff(pack) <= 0).all()
    state = schedule.state(begins)
    assert state["step"] == begins
    rows = BatchSchedule(len(lengths), 1, seed).rows_between(0, state["position"])
    assert Counter(flat(schedule, range(begins))) + Counter(rows[state["carry"]].tolist()) == Counter(rows.tolist())


@settings(deadline=None, max_examples=3)
@given(LENGTHS, st.lists(st.integers(0, 20), min_size=3, max_size=3), st.integers(0, 2**40), st.booleans(), st.data())
def test_any_world_and_any_restart_give_one_sequence(lengths, restarts, seed, blended, data):
    """Read 24 packs a step with 8, 6, 3 and 1 ranks and various micro-batches, changing at random steps. Each run
    resumes from the samples left over in the last checkpoint, and the packs are those of an undisturbed run."""
    lengths, sources = np.array(lengths), None
    if blended:
        half = data.draw(st.integers(1, len(lengths) - 1))
        weights = data.draw(st.lists(st.sampled_from([0.1, 0.3333, 1, 7.5]), min_size=4, max_size=4))
        stages = ((0, weights[:2]), (6, weights[2:]))
        exact = tuple((step, tuple(Fraction(str(w)) for w in of)) for step, of in stages)
        sources = SourceRows(("a", "b"), (half, len(lengths)), exact, len(lengths))

    def make():
        return PackSchedule(lengths, 150, 24, seed, sources=sources, attention=30.0)

    stops, found, state = [0, *sorted(restarts), 22], {}, None
    for world, start, stop in zip((8, 6, 3, 1), stops[:-1], stops[1:], strict=True):
        schedule = make()
        assert state is None or schedule.restore(json.loads(state), start)
        units = data.draw(st.sampled_from([n for n in (1, 2, 4) if 24 // world % n == 0]))
        for step in range(start, stop):
            rows, ends = schedule.rows(step), schedule.ends(step)
            packs = np.searchsorted(ends, np.arange(len(rows)), side="right").tolist()
            for micro in range(24 // world // units):
                for rank in range(world):
                    for place in schedule.share(step, micro, rank, world, units):
                        assert (step, place) not in found
                        found[step, place] = rows[place], packs[place]
        state = json.dumps(schedule.state(stop))
        assert json.loads(state) == make().state(stop)  # a run from the start leaves over the same samples
    whole = make()
    for step in range(22):
        rows, ends = whole.rows(step), whole.ends(step)
        packs = np.searchsorted(ends, np.arange(len(rows)), side="right").tolist()
        assert [found.pop((step, place)) for place in range(len(rows))] == list(zip(rows, packs, strict=True))
    assert not found


@settings(deadline=None, max_examples=15)
@given(LENGTHS, st.integers(64, 300), st.integers(1, 16), st.integers(0, 2**63), st.integers(0, 40))
def test_how_often_samples_were_seen(lengths, capacity, packs, seed, stop):
    schedule = PackSchedule(lengths, capacity, packs, seed, attention=50.0)
    times = np.bincount(flat(schedule, range(stop)), minlength=len(lengths))
    assert schedule.seen(stop) == dict(Counter(times.tolist()))


def test_how_often_samples_of_many_windows_were_seen():
    """Each pass has many windows, so some steps end within a pass and some close to its end."""
    lengths = MIXES["pictures and clips"](np.random.default_rng(4), 1000)
    schedule = PackSchedule(lengths, 32768, 8, 9, attention=6912)
    times, ended = np.zeros(1000, dtype=np.int64), set()
    for step in range(schedule.steps(3) + 40):
        assert schedule.seen(step) == dict(Counter(times.tolist()))
        np.add.at(times, schedule.rows(step), 1)
        ended.add(schedule.epoch(step))
    assert len(ended) >= 3


def test_nothing_waits_for_more_than_a_window():
    lengths = MIXES["lognormal"](np.random.default_rng(1), 5000)
    schedule = PackSchedule(lengths, 65536, 24, 3, attention=6912)
    states = {(state := schedule.state(step))["step"]: state for step in range(12 * schedule.steps_per_window)}
    waits = [set(state["carry"]) for state in states.values()]
    assert len(waits) > 12 and all(waits[1:]) and not any(a & b for a, b in zip(waits, waits[1:], strict=False))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("packs", [8, 24])
def test_packs_are_full_and_ranks_carry_equal_work(mix, packs):
    lengths = MIXES[mix](np.random.default_rng(0), 20_000)
    schedule = PackSchedule(lengths, 65536, packs, 0, attention=6912)
    steps = range(400 // packs)
    tokens = sum(lengths[schedule.rows(step)].sum() for step in steps)
    assert tokens / (len(steps) * packs * 65536) >= 0.99
    assert balance(schedule, lengths, steps, ranks=8, attention=6912) >= 0.97
    work = work_of(lengths, 6912)
    for step in steps:  # packs are sorted by work, so neighbours are similar for any number of ranks
        of_packs = np.add.reduceat(work[schedule.rows(step)], [0, *schedule.ends(step)[:-1]])
        assert (np.diff(of_packs) <= 1e-6 * of_packs[0]).all()
    assert abs(schedule.fill - tokens / (len(steps) * packs * 65536)) < 0.01


def test_many_samples_on_paper():
    """After three passes, every row has been drawn two to four times."""
    lengths = MIXES["pictures and clips"](np.random.default_rng(2), 100_000)
    schedule = PackSchedule(lengths, 65536, 64, 5, attention=6912)
    steps = schedule.steps(3)
    counts = np.zeros(len(lengths), dtype=np.int64)
    for step in range(steps):
        np.add.at(counts, schedule.rows(step), 1)
    remainder = 3 * len(lengths) - counts.sum()
    assert counts.max() <= 4 and counts.min() >= 2 and abs(remainder) < 10_000
    assert schedule.epoch(steps) in (2, 3)


def test_many_samples_of_a_blend_on_paper():
    """Runs that restart at random with another number of ranks read what one undisturbed process reads."""
    rng, moments = np.random.default_rng(0), random.Random(1)
    short, even = np.full(60_000, 256), 16 * rng.integers(128, 2049, 6000)
    lognormal = np.clip(16 * np.round(rng.lognormal(np.log(128), 1, 30_000)).astype(int), 64, 32_768)
    weights = tuple(map(Fraction, (8, 1, 1))), tuple(map(Fraction, (6, 1, 3)))
    sources = SourceRows(("a", "b", "c"), (60_000, 66_000, 96_000), ((0, weights[0]), (40, weights[1])), 96_000)

    def make():
        lengths = np.concatenate([short, even, lognormal])
        return PackSchedule(lengths, 65_536, 24, 7, sources=sources, attention=6912)

    schedule, whole, drawn = make(), [], 0
    while drawn < 300_000:
        whole.append((schedule.rows(len(whole)), schedule.ends(len(whole))))
        drawn += len(whole[-1][0])
    step, state = 0, None
    while step < len(whole):
        world, schedule = moments.choice([8, 6, 3, 1]), make()
        units = moments.choice([units for units in (1, 2, 3, 4) if 24 // world % units == 0])
        assert state is None or schedule.restore(json.loads(state), step)
        stop = min(len(whole), step + moments.randint(1, 80))
        while step < stop:
            rows, ends = schedule.rows(step), schedule.ends(step)
            micro, ranks = range(24 // world // units), range(world)
            places = [p for m in micro for rank in ranks for p in schedule.share(step, m, rank, world, units)]
            assert places == list(range(len(rows))) and (rows, list(ends)) == (whole[step][0], list(whole[step][1]))
            step += 1
        state = json.dumps(schedule.state(step))


def test_weights_of_sources_hold_and_change_with_a_window():
    lengths, ends = np.repeat([4, 7, 30], [300, 200, 100]), (300, 500, 600)
    stages = ((0, (Fraction(3), Fraction(1), Fraction(0))), (40, (Fraction(0), Fraction(1), Fraction(1))))
    sources = SourceRows(("a", "b", "c"), ends, stages, 600)
    schedule = PackSchedule(lengths, 64, 24, 7, sources=sources, attention=20.0)
    change = -(-40 // schedule.steps_per_window) * schedule.steps_per_window
    before = np.searchsorted(ends, flat(schedule, range(change)), side="right")
    after = np.searchsorted(ends, flat(schedule, range(change + 16, change + 200)), side="right")
    assert np.allclose(np.bincount(before, minlength=3) / len(before), (0.75, 0.25, 0), atol=0.01)
    assert np.allclose(np.bincount(after, minlength=3) / len(after), (0, 0.5, 0.5), atol=0.02)
    resumed = PackSchedule(lengths, 64, 24, 7, sources=sources, attention=20.0)
    resumed.restore(schedule.state(change + 3), change + 3)
    for at in (1, 5, change, change + 3, change + 4 * schedule.steps_per_window):  # also within a window
        drawn = np.bincount(np.searchsorted(ends, flat(schedule, range(at)), side="right"), minlength=3)
        for each in (schedule, resumed) if at > change else (schedule,):
            log = each.log(at)["sources"]
            assert [log[name]["epoch"] for name in "abc"] == (drawn / (300, 200, 100)).tolist()
            assert [log[name]["share"] for name in "abc"] == (drawn / drawn.sum()).tolist()
            assert each.epoch(at) == drawn.sum() // 600
    assert schedule.state(change + 16)["stages"][1] == schedule.state(change)["position"]


def test_steps_of_a_pass_count_the_changes_of_a_blend():
    lengths, sources = np.repeat([30, 1], [50, 50]), lambda *stages: SourceRows(("a", "b"), (50, 100), stages, 6_000)
    long, short = (Fraction(1), Fraction(0)), (Fraction(0), Fraction(1))
    for stages in (((0, long), (100, short)), ((0, short), (10, long))):
        schedule = PackSchedule(lengths, 64, 8, 7, sources=sources(*stages))
        steps = schedule.steps(1)
        drawn = sum(len(schedule.rows(step)) for step in range(steps))
        # New weights take effect at the next window, up to 24 steps after the step that they name.
        assert abs(drawn - 6_000) <= 24 * max(len(schedule.rows(step)) for step in (0, steps))


@settings(deadline=None, max_examples=8)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40))
def test_other_packs_go_on_with_what_was_not_taken(lengths, stop, more, packs, others, seed):
    """A resume with another size or number of packs loses and repeats no sample."""
    lengths = np.array(lengths)
    before, after = PackSchedule(lengths, 64, packs, seed), PackSchedule(lengths, 100, others, seed)
    assert not after.restore(json.loads(json.dumps(before.state(stop))), stop)
    drawn = np.bincount(flat(before, range(stop)), minlength=len(lengths))
    for end in (stop, stop + more):
        all_drawn = drawn + np.bincount(flat(after, range(stop, end)), minlength=len(lengths))
        assert after.seen(end) == dict(sorted(Counter(all_drawn.tolist()).items()))
        assert after.epoch(end) == all_drawn.sum() // len(lengths)
    again = PackSchedule(lengths, 100, others, seed)
    assert again.restore(json.loads(json.dumps(after.state(stop + more))), stop + more)
    assert flat(again, range(stop + more, stop + more + 9)) == flat(after, range(stop + more, stop + more + 9))


def test_a_run_that_had_no_packs_begins_where_it_is():
    fresh, late = PackSchedule([5, 3, 8], 16, 24, 42), PackSchedule([5, 3, 8], 16, 24, 42)
    late.begin_at(10**9)
    assert [late.rows(10**9 + step) for step in range(20)] == [fresh.rows(step) for step in range(20)]
    assert late.epoch(10**9) == 0 and late.seen(10**9 + 5) == fresh.seen(5)


def test_a_blend_that_lost_its_changes_or_a_source():
    stages = ((0, (Fraction(1), Fraction(1))), (3, (Fraction(1), Fraction(3))))
    make = lambda stages, ends=(5, 9): PackSchedule(  # noqa: E731
        np.arange(1, ends[-1] + 1), 16, 96, 1, sources=SourceRows(("a", "b"), ends, stages, 9)
    )
    state = make(stages).state(9)
    with pytest.raises(ValueError, match="changed 1 times before the checkpoint, and it lists 0 changes now"):
        make(stages[:1]).restore(state, 9)
    with pytest.raises(ValueError, match="the source b has no samples"):
        make(stages, (5, 5))


def test_a_damaged_checkpoint():
    lengths = np.arange(1, 60)
    schedule = PackSchedule(lengths, 100, 2, 1)
    step = next(step for step in range(200, 300) if schedule.state(step)["step"] < step)  # within a window
    state = schedule.state(step)
    for change in (
        {"step": 3},
        {"step": step + 1},
        {"carry": [5, 5]},
        {"carry": [-1]},
        {"carry": [state["position"]]},
        {"stages": []},
        {"stages": [0, 9]},
    ):
        with pytest.raises(ValueError, match="packs are damaged"):
            PackSchedule(lengths, 100, 2, 1).restore(state | change, step)


@pytest.mark.parametrize("packs", [8, 3])
def test_a_checkpoint_of_windows_of_a_fixed_length(packs):
    """The run resumes at the start of the checkpoint's window, with the samples left over there."""
    old = {"window": 1, "origin": 0, "position": 200, "carry": [180, 199], "stages": [0]}
    schedule = PackSchedule(np.arange(1, 60), 100, packs, 1)
    assert not schedule.restore({**old, "global_batch": 8, "capacity": 100}, 31)
    assert schedule.drawn(31) == 198 and schedule.state(31)["step"] == 31
    state = next(state for step in range(32, 99) if (state := schedule.state(step))["step"] == step)
    rows = BatchSchedule(59, 1, 1).rows_between(0, state["position"])
    drawn = Counter(flat(schedule, range(31, state["step"])) + rows[state["carry"]].tolist())
    assert drawn == Counter(rows[[180, 199, *range(200, len(rows))]].tolist())


def test_the_packs_never_change():
    schedule = PackSchedule([5, 3, 8, 1, 2, 9], 16, 2, 42, attention=10.0)
    assert schedule.rows(3) == [5, 0, 2, 1, 4, 4, 3] and list(schedule.ends(3)) == [2, 7]


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="--pack_tokens 10: a sample has 11 tokens"):
        PackSchedule([3, 11], 10, 1, 0)
    with pytest.raises(ValueError, match="at least one pack"):
        PackSchedule([3], 10, 0, 0)


def test_work_counts_the_square():
    assert work_of(np.array([10, 20]), 20.0).tolist() == [15, 40]
    order = BlendSchedule(SourceRows(("a",), (5,), ((0, (Fraction(1),)),), 5), 1, 1, 3)
    assert sorted(order.rows_between(0, 5).tolist()) == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------ how often samples are seen

DRAWN = 1500  # approximate number of samples drawn in an example
KINDS = {
    "lognormal": lambda random, n: np.clip(random.lognormal(3.5, 1, n), 1, 300).astype(np.int64),
    "uniform": lambda random, n: random.integers(4, 65, n),
    "constant": lambda random, n: np.full(n, 17),
    "bimodal": lambda random, n: np.where(random.random(n) < 0.7, 5, 90),
}
EXAMPLES = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 800), st.integers(0, 2**40))


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


@settings(deadline=None, max_examples=10)
@given(EXAMPLES, st.floats(0, 3), st.integers(0, 2**32))
def test_counts_stay_within_two_over_resumes_and_other_worlds(example, more, moments):
    """The run stops at random steps and resumes with other ranks, micro-batches and pack sizes."""
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


@settings(deadline=None, max_examples=8)
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


@settings(deadline=None, max_examples=8)
@given(EXAMPLES, st.floats(0, 3), st.integers(1, 24), st.integers(1, 3))
def test_an_epoch_sees_every_sample_up_to_the_packs_in_flight(example, more, packs, epochs):
    """An epoch leaves over little more than one step can hold, and three more steps draw all of it."""
    lengths = lengths_of(example)
    schedule = PackSchedule(lengths, int(lengths.max() * (1 + more)), packs, example[2])
    steps, counts = schedule.steps(epochs), np.zeros(len(lengths), dtype=np.int64)
    if steps * packs > 1000:
        return
    for step in range(steps):
        np.add.at(counts, schedule.rows(step), 1)
    if counts.sum() <= epochs * len(lengths):  # otherwise an epoch is shorter than a step
        assert lengths[counts < epochs].sum() <= (1.25 * packs + 1) * schedule.capacity
        assert counts.sum() + len(schedule.rows(steps)) > epochs * len(lengths)
    for step in range(steps, steps + 3):
        np.add.at(counts, schedule.rows(step), 1)
    assert counts.min() >= epochs


def test_five_hundred_clips():
    """After an epoch, no clip was drawn more than twice, and the clips left out are fewer than those of a step."""
    lengths = np.random.default_rng(0).integers(64, 513, 500)
    schedule = PackSchedule(lengths, 1024, 4, 0)
    counts, steps = np.zeros(500, dtype=np.int64), schedule.steps(1)
    for step in range(steps):
        np.add.at(counts, schedule.rows(step), 1)
    in_flight = len(schedule.rows(steps))
    assert counts.max() <= 2 and (counts == 0).sum() <= in_flight < 20
    assert "every sample once" in schedule.passes


def test_a_resume_after_many_windows_knows_the_steps_of_an_epoch():
    """Each start asks for the number of steps, though a resumed schedule has not computed the first windows."""
    lengths = np.random.default_rng(0).integers(8, 64, 3000)
    whole, resumed = PackSchedule(lengths, 150, 8, 0), PackSchedule(lengths, 150, 8, 0)
    assert resumed.restore(whole.state(60), 60)
    assert [resumed.steps(epochs) for epochs in (1, 3, 99)] == [whole.steps(epochs) for epochs in (1, 3, 99)]
    assert resumed.fill == whole.fill and resumed.rows(61) == whole.rows(61)
