"""Joined and split tensors are compared with slices of the full tensor."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from opendit.checkpoint.matched import MatchedTensors
from opendit.checkpoint.tensor_set import WholeTensors, open_set
from opendit.models.families.base import Match
from opendit.parallel.layout import Shard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@st.composite
def joins(draw):
    """Draw (shape, dim, sizes on either side) for a tensor that is split differently on either side."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = draw(st.integers(1, 13))

    def cut():
        edges = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
        return [stop - start for start, stop in pairwise([0, *edges, shape[dim]])]

    return tuple(shape), dim, cut(), cut()


@st.composite
def shards(draw, shape):
    """Draw nested cuts of a tensor, outer to inner, like those of several groups of ranks."""
    slices = []
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        size = torch.Size(shape).numel() if dim is None else shape[dim]
        edges = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
        length = sum(stop - start for start, stop in ranges)
        slices.append((dim, ranges))
        shape = (length,) if dim is None else (*shape[:dim], length, *shape[dim + 1 :])
    return Shard(tuple(shape), tuple(slices))


def numbers(shape, dtype=torch.float32):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def in_memory(whole, dim, theirs, ours):
    """Return the stored parts and the expected parts of a tensor."""
    stored = {f"t{i}": part.contiguous() for i, part in enumerate(whole.split(theirs, dim))}
    expected = {f"o{i}": part for i, part in enumerate(whole.split(ours, dim))}
    return stored, expected


@settings(deadline=None, max_examples=150)
@given(joins(), st.data())
def test_any_shard_of_any_part_is_that_of_the_whole_tensor(tmp_path_factory, join, data):
    shape, dim, theirs, ours = join
    whole = numbers(shape, data.draw(st.sampled_from(DTYPES)))
    stored, expected = in_memory(whole, dim, theirs, ours)
    source = stored
    if data.draw(st.booleans()):  # in memory, in one file or in two
        folder, files = tmp_path_factory.mktemp("set"), data.draw(st.integers(1, 2))
        parts = [{name: stored[name] for name in list(stored)[i::files]} for i in range(files)]
        for i, part in enumerate(parts):
            save_file(part, folder / f"{i}.safetensors")
        place = {name: f"{i}.safetensors" for i, part in enumerate(parts) for name in part}
        path = folder / ("0.safetensors" if files == 1 else "x.safetensors.index.json")
        source = WholeTensors(path, place)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    tensors = MatchedTensors(source, [(tuple(expected), tuple(stored), dim)], shapes, tmp_path_factory.getbasetemp())
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == whole.dtype
        shard = data.draw(shards(tuple(tensor.shape)))
        assert torch.equal(tensors.read(name, shard), shard.take(tensor))
        reading = tensors.reading(name, shard)
        pieces, size = torch.empty(reading.numel, dtype=reading.dtype), data.draw(st.integers(1, 9))
        for start in range(0, reading.numel, size):
            reading.copy_to(pieces[start : start + size], start)
        assert torch.equal(pieces.view(shard.shape), shard.take(tensor))
    # convert back
    back = MatchedTensors(tensors, [(tuple(stored), tuple(expected), dim)], {k: v.shape for k, v in stored.items()},
                          tensors.path)  # fmt: skip
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_goes_there_and_back(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    whole = torch.cat([bits.view(torch.uint8)] * 8).view(dtype)[: 1 << 15].reshape(1 << 8, 1 << 7)  # includes NaNs
    stored, expected = in_memory(whole, 1, [100, 28], [1, 63, 64])
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    here = MatchedTensors(stored, [(tuple(expected), tuple(stored), 1)], shapes, None)
    state = {name: here[name] for name in here}
    back = MatchedTensors(state, [(tuple(stored), tuple(expected), 1)], {k: v.shape for k, v in stored.items()}, None,
                          here.dtypes and dict.fromkeys(stored, here.dtypes["o0"]))  # fmt: skip
    for name, tensor in stored.items():
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_part_that_lies_in_one_run_is_a_view_and_others_are_copies(tmp_path):
    save_file({"t": numbers((6, 4)), "u": numbers((2, 4))}, tmp_path / "x.safetensors")
    source = open_set(tmp_path / "x.safetensors")
    tensors = MatchedTensors(source, [(("a", "b"), ("t", "u"), 0)], {"a": (5, 4), "b": (3, 4)}, tmp_path)
    assert tensors["a"].data_ptr() == source["t"].data_ptr()
    rows = tensors.read("a", Shard((2, 4), ((0, ((1, 3),)),)))
    assert rows.data_ptr() == source["t"][1:].data_ptr()
    assert tensors.reading("b").view() is None  # from two tensors
    assert tensors.reading("a", Shard((5, 2), ((1, ((1, 3),)),))).view() is None  # columns
    assert tensors.read("a", Shard((0, 4), ((0, ((2, 2),)),))).shape == (0, 4)


def test_tensors_of_several_dtypes_become_the_one_that_holds_all(tmp_path):
    stored = {"t": numbers((2, 3), torch.bfloat16), "u": numbers((1, 3), torch.float32) / 3}
    tensors = MatchedTensors(stored, [(("a",), ("t", "u"), 0)], {"a": (3, 3)}, tmp_path)
    assert tensors.dtypes == {"a": "F32"} and torch.equal(tensors["a"], torch.cat([stored["t"].float(), stored["u"]]))
    kinds = {"t": "BF16", "u": "F32"}
    back = MatchedTensors(dict(tensors), [(("t", "u"), ("a",), 0)], {"t": (2, 3), "u": (1, 3)}, tmp_path, kinds)
    assert all(back[n].dtype == stored[n].dtype and torch.equal(back[n], stored[n]) for n in stored)


def test_one_tensor_may_have_another_shape_if_its_numbers_stand_in_the_same_order(tmp_path):
    def made(theirs, ours):
        return MatchedTensors({"t": numbers(theirs)}, [(("a",), ("t",), 0)], {"a": ours}, tmp_path)["a"]

    for theirs, ours in (
        ((4, 3, 1, 2, 2), (4, 12)),
        ((1, 6, 5), (6, 5)),
        ((6, 5), (1, 6, 5)),
        ((), (1,)),
        ((0,), (0,)),
    ):
        assert torch.equal(made(theirs, ours), numbers(ours))
    for theirs, ours in (((4, 12), (12, 4)), ((2, 3), (6,)), ((4, 3), (4, 4)), ((2, 3, 4), (6, 4))):
        with pytest.raises(ValueError, match=r"'t' has the shape"):
            made(theirs, ours)


def test_a_block_of_ours_has_another_number_there():
    match = Match(("blocks.*.qkv",), ("single.*.q", "single.*.k"), blocks=range(3, 5), offset=3)
    stored = {f"single.{i}.{part}": numbers((2, 2)) + 10 * i for i in range(2) for part in "qk"}
    pairs = [(*names, match.dim) for names in match.names()]
    tensors = MatchedTensors(stored, pairs, {f"blocks.{i}.qkv": (4, 2) for i in (3, 4)}, None)
    assert torch.equal(tensors["blocks.4.qkv"], torch.cat([stored["single.1.q"], stored["single.1.k"]]))


def test_names_that_are_matched_twice_are_refused(tmp_path):
    stored, shapes = {"t": numbers((2,)), "u": numbers((2,))}, {"a": (2,), "b": (2,)}
    with pytest.raises(ValueError, match=r"of our weights, 1 are matched twice \(first: 'a'\), 1 are missing|twice"):
        MatchedTensors(stored, [(("a",), ("t",), 0), (("a",), ("u",), 0)], shapes, tmp_path)
    with pytest.raises(ValueError, match=r"of the weights, 1 are matched twice \(first: 't'\), 1 are unexpected"):
        MatchedTensors(stored, [(("a",), ("t",), 0), (("b",), ("t",), 0)], shapes, tmp_path)
    for dim in (1, -1):
        with pytest.raises(ValueError, match="joined along"):
            MatchedTensors(stored, [(("a", "b"), ("t", "u"), dim)], shapes, tmp_path)
