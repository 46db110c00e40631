"""Test the segments of a pack: positions, runs of equal length, the part of a rank, and patches."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendit.models.segments import Segments, segment_means, to_patches
from tests.models.packs import from_patches, pack_patches, unpack_patches

CPU = torch.device("cpu")
grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=9)


@st.composite
def packs(draw) -> Segments:
    found = tuple(draw(grids))
    if draw(st.booleans()):  # sorted as in plans
        found = tuple(sorted(found, key=math.prod, reverse=True))
    return Segments(found, sum(map(math.prod, found)) + draw(st.integers(0, 7)))


def owners(segments: Segments) -> list[tuple[int, tuple[int, int, int]] | None]:
    """Return (segment, place in its grid) for each token, or None for padding."""
    found = []
    for number, (frames, height, width) in enumerate(segments.grids):
        places = itertools.product(range(frames), range(height), range(width))
        found += [(number, place) for place in places]
    return found + [None] * (segments.tokens - len(found))


@given(packs())
def test_every_token_has_its_segment_and_place(segments):
    placed, wanted = segments.place(CPU), owners(segments)
    assert placed.sample_of_row.dtype == placed.offsets.dtype == torch.int32
    assert placed.sample_of_row.tolist() == [len(segments.grids) - 1 if w is None else w[0] for w in wanted]
    coordinates = placed.coordinates()
    for row, want in enumerate(wanted):
        last = [side - 1 for side in segments.grids[-1]]
        assert coordinates[row].tolist() == (last if want is None else list(want[1]))
    assert tuple(placed.offsets.tolist()) == segments.offsets
    assert segments.filled == sum(w is not None for w in wanted) == round(segments.fill * segments.tokens)


@given(packs(), st.data())
def test_runs_are_neighbours_of_equal_length(segments, data):
    first = data.draw(st.integers(0, segments.tokens))
    stop = data.draw(st.integers(first, segments.tokens))
    runs, wanted = segments.within(first, stop), owners(segments)[first:stop]
    numbers = [w[0] for w in wanted if w is not None]
    found = [run.segment + i for run in runs for i in range(run.count) for _ in range(run.length)]
    assert found == numbers
    assert all(a.length != b.length for a, b in itertools.pairwise(runs))
    placed = segments.place(CPU).part(first, stop - first)
    assert placed.runs == runs and len(placed.sample_of_row) == stop - first
    assert placed.coordinates().tolist() == segments.place(CPU).coordinates()[first:stop].tolist()
    assert segments.runs == segments.within(0, segments.tokens)


@given(packs(), st.data())
def test_offsets_of_some_segments_begin_at_0(segments, data):
    first = data.draw(st.integers(0, len(segments.grids) - 1))
    count = data.draw(st.integers(1, len(segments.grids) - first))
    wanted = [0, *itertools.accumulate(segments.lengths[first : first + count])]
    assert segments.place(CPU).offsets_of(first, count).tolist() == wanted


@given(packs())
def test_means_are_those_of_each_segment(segments):
    x = torch.randn(segments.tokens, dtype=torch.float64)
    ends = zip(segments.offsets, segments.offsets[1:], strict=False)
    wanted = torch.stack([x[begin:end].mean() for begin, end in ends])
    torch.testing.assert_close(segment_means(x, segments), wanted)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4), st.booleans(), st.integers(0, 3)
)
def test_patches_come_back(sides, video, padding):
    patch = (2, 2, 3) if video else (2, 3)
    sizes = [(2 * h, 3 * w) for h, w in sides]
    sizes = [(frames, *size) for frames, size in zip((1, 2, 4, 1), sizes, strict=False)] if video else sizes
    latents = [torch.randn(5, *size) for size in sizes]
    tokens = Segments.of(sizes, patch, 1 << 20).filled + padding
    segments = Segments.of(sizes, patch, tokens)
    x = pack_patches(latents, patch, tokens)
    assert x.shape == (tokens, 5, *patch) and not x[segments.filled :].any()
    for found, latent in zip(unpack_patches(x, segments), latents, strict=True):
        assert torch.equal(found, latent)
    assert segments.repeated == (tuple(size[0] == 1 for size in sizes) if video else ())


def test_a_patchs_values_lie_as_the_convolution_reads_them():
    x, conv = torch.randn(2, 3, 4, 6, 8), torch.nn.Conv3d(3, 7, (2, 2, 2), stride=2, bias=False)
    patches = to_patches(x, (2, 2, 2))
    found = patches.flatten(2) @ conv.weight.flatten(1).T
    torch.testing.assert_close(found, conv(x).flatten(2).mT, rtol=1e-4, atol=1e-5)
    assert torch.equal(from_patches(patches, (2, 3, 4)), x)


def test_what_is_no_pack_is_named():
    with pytest.raises(ValueError, match="from 1 on"):
        Segments((), 5)
    with pytest.raises(ValueError, match="from 1 on"):
        Segments(((1, 0, 2),), 5)
    with pytest.raises(ValueError, match="6 tokens don't fit into a pack of 5"):
        Segments(((1, 2, 3),), 5)
    with pytest.raises(ValueError, match="1 segments, but 2 marks"):
        Segments(((1, 2, 3),), 6, (True, False))
    with pytest.raises(ValueError, match="3 x 4 do not divide by patch 2 x 2"):
        Segments.of([(3, 4)], (2, 2), 64)
    with pytest.raises(ValueError, match="do not divide"):
        Segments.of([(2, 4, 4)], (2, 2), 64)
    with pytest.raises(ValueError, match="8 tokens don't fit into a pack of 7"):
        pack_patches([torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)], (2, 2), 7)
