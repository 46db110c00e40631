"""The order of samples equals a recorded one, so a resumed run draws the samples that it would have drawn."""

import hashlib
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from opendit.data.order import BatchSchedule, BlendSchedule, BucketSchedule, RowsByKey, SourceRows
from opendit.data.packs import PackSchedule
from opendit.data.shaped import Lengths, summary_of

ROWS = 200_003  # too many to permute them by sorting, and no multiple of a block
KEYS = np.random.Generator(np.random.Philox(7)).integers(0, 12, ROWS, dtype=np.int16)
TOKENS = 256 * np.arange(1, 13, dtype=np.int32)
SOURCES = SourceRows(
    ("a", "b", "c"),
    (20_000, 100_000, ROWS),
    ((0, (Fraction(1), Fraction(2), Fraction(3))), (40, (Fraction(1), Fraction(0), Fraction(1)))),
    ROWS,
)
TWO = SourceRows(("a", "b"), (20_000, ROWS), ((0, (Fraction(1), Fraction(2))),), ROWS)
SAMPLES = [12 // n for n in range(1, 13)]
SCHEDULES = {
    "plain": lambda: BatchSchedule(ROWS, 256, 5),
    "blend": lambda: BlendSchedule(SOURCES, 256, 1, 5),
    "shapes": lambda: BucketSchedule(KEYS, 256, 2, 5),
    "lots": lambda: BucketSchedule(RowsByKey(KEYS), 64, 2, 5, SAMPLES),
    "shapes of a blend": lambda: BlendSchedule(SOURCES, 256, 2, 5, KEYS),
    "large shapes": lambda: BucketSchedule(KEYS % 2, 256, 2, 5),
    "large shapes of a blend": lambda: BlendSchedule(TWO, 256, 2, 5, KEYS % 2),
    "packs": lambda: PackSchedule(TOKENS[KEYS], 65536, 24, 5, attention=6912.0),
    "packs of a blend": lambda: PackSchedule(Lengths(KEYS, TOKENS), 65536, 24, 5, sources=SOURCES, attention=6912.0),
}
RECORDED = {
    "plain": "07c8a2b83896989e",
    "blend": "30a7045a58b96a37",
    "shapes": "c09a15d7b183526a",
    "lots": "087990794df1e019",
    "shapes of a blend": "c2be9fea07431d54",
    "large shapes": "72272e942d7c1262",
    "large shapes of a blend": "f41faeedaac1904f",
    "packs": "0921605612e59a57",
    "packs of a blend": "66384e48e78a6a80",
}


def digest(schedule):
    """Hash the numbers of steps, and the rows at the start, at a change of weights and at the end of an epoch."""
    found = hashlib.sha256(repr([schedule.steps(epochs) for epochs in (1, 2, 9)]).encode())
    turn = schedule.steps(1)
    for step in (*range(6), *range(38, 50), *range(turn - 2, turn + 3)):
        found.update(repr((step, schedule.rows(step), list(schedule.ends(step)))).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_the_recorded_one(name):
    assert digest(SCHEDULES[name]()) == RECORDED[name]


def test_lengths_by_shape_are_those_of_a_list():
    lengths, listed = Lengths(KEYS, TOKENS), TOKENS[KEYS]
    some = np.array([ROWS - 1, 0, 77, 77])
    assert len(lengths) == ROWS and lengths[some].tolist() == listed[some].tolist() and lengths[5] == listed[5]
    for start, stop in ((0, ROWS), (3, 4), (100, 150_000)):
        part = listed[start:stop]
        wanted = (len(part), part.min(), part.max(), part.sum())
        assert summary_of(lengths, start, stop) == wanted and summary_of(listed, start, stop).mean == part.mean()
    long = np.tile(np.array([9, 1, 5], dtype=np.int32), 2**19)  # over more than one chunk
    assert summary_of(long, 0, len(long)) == (3 * 2**19, 1, 9, 15 * 2**19)
    assert summary_of(long, 1, len(long)).total == 15 * 2**19 - 9


def test_packs_hold_no_list_of_rows():
    """A list with 4 bytes a row would take 16 MB."""
    lengths = Lengths(np.resize(KEYS, 4_000_000), TOKENS)
    tracemalloc.start()
    schedule = PackSchedule(lengths, 65536, 8, 5, attention=6912.0)
    schedule.rows(0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2e6 and peak < 14e6 and schedule.steps(1) > 0
