"""Runs of shards are compared with the indices that numpy selects, for arbitrarily nested cuts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.parallel.layout import Runs, Shard, copy_overlap, hold_each_once, runs_of

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def cuts_for(draw, shape: tuple[int, ...], parts: int, depth: int) -> list[list[tuple]]:
    """Draw ``parts`` or more shards that hold each element once, with ranges in any order; some may be empty."""
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    size = math.prod(shape) if dim is None else shape[dim]
    ranges_each = draw(st.integers(1, 3))
    edges = sorted(
        draw(st.lists(st.integers(0, size), min_size=parts * ranges_each - 1, max_size=parts * ranges_each - 1))
    )
    pieces = draw(st.permutations(list(zip([0, *edges], [*edges, size], strict=True))))
    shards = []
    for part in range(parts):
        ranges = tuple(pieces[part * ranges_each : (part + 1) * ranges_each])
        length = sum(stop - start for start, stop in ranges)
        left = (length,) if dim is None else (*shape[:dim], length, *shape[dim + 1 :])
        if depth > 1 and math.prod(left):
            inner = draw(cuts_for(left, draw(st.integers(1, 3)), depth - 1))
            shards += [[(dim, ranges), *more] for more in inner]
        else:
            shards.append([(dim, ranges)])
    return shards


@st.composite
def divided(draw, number: int = 2):
    """Draw a shape and ``number`` ways to divide it into shards."""
    shape = draw(shapes)
    return shape, [draw(cuts_for(shape, draw(st.integers(1, 4)), draw(st.integers(1, 3)))) for _ in range(number)]


def taken(full: np.ndarray, slices) -> np.ndarray:
    """Return a shard's elements, flattened, with numpy alone."""
    for dim, ranges in slices:
        full = full.reshape(-1) if dim is None else full
        index = [i for start, stop in ranges for i in range(start, stop)]
        full = np.take(full, index, axis=dim or 0)
    return full.reshape(-1)


def indices(runs: Runs) -> np.ndarray:
    every = [np.arange(start, start + length) for start, length in zip(runs.start, runs.length, strict=True)]
    return np.concatenate([*every, np.zeros(0, np.int64)])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(divided())
def test_runs_are_what_numpy_takes_and_copies_what_two_shards_share(case):
    shape, (written, wanted) = case
    full = np.arange(math.prod(shape)).reshape(shape)
    runs = [runs_of(shape, slices) for slices in written]
    for slices, found in zip(written, runs, strict=True):
        assert np.array_equal(indices(found), taken(full, slices))
        assert (found.length > 0).all()
        assert (found.start[1:] != found.stop[:-1]).all()  # adjacent runs are joined
        assert np.array_equal(found.offset, np.cumsum([0, *found.length])[: len(found.start)])
    assert hold_each_once(full.size, runs)
    held = [torch.from_numpy(taken(full, slices)).float() for slices in written]
    for slices in wanted:
        expected, copied = taken(full, slices), 0
        target, target_runs = torch.full((expected.size,), -1.0), runs_of(shape, slices)
        for source, source_runs in zip(held, runs, strict=True):
            copied += copy_overlap(target, target_runs, source, source_runs)
        assert copied == expected.size and np.array_equal(target.numpy(), expected)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(divided(1), st.data())
def test_a_shard_more_less_or_moved_is_no_cover(case, data):
    shape, (written,) = case
    runs = [found for found in (runs_of(shape, slices) for slices in written) if len(found.start)]
    which = data.draw(st.integers(0, len(runs) - 1))
    assert not hold_each_once(math.prod(shape), runs[:which] + runs[which + 1 :])
    assert not hold_each_once(math.prod(shape), [*runs, runs[which]])
    moved = Runs(runs[which].start + 1, runs[which].length)
    assert not hold_each_once(math.prod(shape), [*runs[:which], moved, *runs[which + 1 :]])


def test_columns_are_copied_at_once(monkeypatch):
    shape, columns = (64, 12), runs_of((64, 12), [(1, ((4, 8),))])
    full, target, copies = torch.arange(64 * 12.0), torch.zeros(64 * 4), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: (copies.append(1), copy(self, other))[1])
    assert copy_overlap(target, columns, full, runs_of(shape, ())) == 256 and len(copies) == 3
    assert torch.equal(target.view(64, 4), full.view(shape)[:, 4:8])
    # The first and the last row are incomplete.
    part, target = runs_of(shape, [(1, ((4, 8),)), (None, ((3, 201),))]), torch.zeros(198)
    copy_overlap(target, part, full, runs_of(shape, ()))
    assert torch.equal(target, full.view(shape)[:, 4:8].reshape(-1)[3:201])


@pytest.mark.parametrize("slices", [[(1, ((0, 0),))], [(0, ()), (1, ((0, 3),))], [(1, ((2, 2), (5, 5)))]])
def test_an_empty_shard_costs_nothing_whatever_the_shape(slices):
    assert len(runs_of((1 << 40, 1 << 7), slices).start) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_replicas_divide_a_shard_evenly(parts):
    shard = Shard((5, 2), ((0, ((1, 6),)),))
    full = torch.arange(16.0).view(8, 2)
    found = [shard.flat_part(part, parts) for part in range(parts)]
    assert torch.equal(torch.cat([part.take(full).reshape(-1) for part in found]), shard.take(full).reshape(-1))
    assert max(part.numel for part in found) == -(-10 // parts)
