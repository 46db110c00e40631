"""The search for the longest clip that can be trained on, without GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_sequence_model import next_try


@given(start=st.floats(0, 80), frame=st.floats(0.02, 1), more=st.floats(0, 1), beyond=st.integers(0, 3000))
def test_the_search_ends_at_the_longest_clip_that_fits(start, frame, more, beyond):
    def gib(frames: int) -> float:  # grows, and faster beyond some length
        return start + frame * frames + more * max(0, frames - beyond)

    limit, used = 132.0, {frames: gib(frames) for frames in (16, 32)}
    for _ in range(200):
        if (frames := next_try(used, limit)) in used:
            break
        assert frames > 0 and frames % 2 == 0
        used[frames] = gib(frames)
    found = max(frames for frames in used if used[frames] <= limit)
    assert frames in used and gib(found + 2) > limit - 1e-6  # the limit itself is subject to rounding


def test_nothing_fits():
    with pytest.raises(ValueError, match="16 frames take 140.0 GiB"):
        next_try({16: 140.0, 32: 150.0}, 132.0)
