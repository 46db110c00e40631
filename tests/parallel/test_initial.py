"""Shards drawn by themselves equal slices of the full tensor."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.config.parallel_sizes import ParallelDims
from opendit.models.initialization import Normal, draw, initialize
from opendit.models.zoo import build_model
from opendit.parallel import layout as module
from opendit.parallel.layout import Cut, InitialValues, Layout, dim_cut, flat_cut, initial_values
from tests.models.test_zoo import CONFIGS
from tests.parallel import test_layout
from tests.parallel.test_layout import mesh_of

KIND = Normal(1)


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    return draw(KIND, 2, "w", shape, 0, torch.empty(math.prod(shape))).view(shape)


@pytest.mark.parametrize(("gap", "span"), [(0, 1), (1, 3), (module.GAP, module.SPAN)])
@pytest.mark.parametrize("dims", test_layout.MESHES, ids=str)
def test_shards_of_every_kind_of_cut(dims, gap, span, monkeypatch):
    monkeypatch.setattr(module, "GAP", gap)
    monkeypatch.setattr(module, "SPAN", span)
    for rank in range(dims.world_size):
        for case in test_layout.cases(dims, rank):
            layout = Layout(mesh_of(dims, rank), {case.name: case.shape}, {case.name: case.cuts})
            shard = initial_values(KIND, 2, "w", case.shape, layout.local(case.name))
            assert torch.equal(shard, layout.take(case.name, whole_of(case.shape))), case.name


@st.composite
def cuts(draw, size: int, group: str, dim: int | None):
    """Draw a cut for 2 ranks from up to four ranges in any order; some may be empty."""
    edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
    ranges, held = list(zip(edges, edges[1:], strict=False)), ([], [])
    for part in draw(st.permutations(ranges)):
        held[draw(st.integers(0, 1))].append(part)
    return Cut(group, dim, tuple(map(tuple, held)))


@st.composite
def layouts(draw):
    """Draw a rank's layout of a tensor that is cut up to three times."""
    dims = ParallelDims(tp=2, dp_replicate=2, dp_shard=2)
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh, chain, left = mesh_of(dims, draw(st.integers(0, 7))), [], shape
    for group in draw(st.lists(st.sampled_from(("tp", "dp_shard", "dp_replicate")), unique=True, max_size=3)):
        mesh.groups[group] = None
        dim = draw(st.sampled_from([None, *range(len(left))]))
        cut = draw(cuts(math.prod(left) if dim is None else left[dim], group, dim))
        chain.append(cut)
        left = cut.shape(left, mesh.coordinate(group))
    return shape, Layout(mesh, {"w": shape}, {"w": chain})


@settings(max_examples=300, database=None)
@given(layouts(), st.sampled_from([0, 2, 1000]))
def test_shards_of_any_chain_of_cuts(made, gap):
    shape, layout = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GAP", gap)
        shard = initial_values(KIND, 2, "w", shape, layout.local("w"))
    assert torch.equal(shard, layout.take("w", whole_of(shape)))


def test_little_more_than_what_is_held_is_drawn(monkeypatch):
    """Only the shard's elements are drawn, except that short gaps between columns are drawn too."""
    drawn, draw_range = [], module.draw
    monkeypatch.setattr(module, "draw", lambda *args: drawn.append((args[4], len(args[5]))) or draw_range(*args))
    shape, mesh = (9, 100_000), mesh_of(ParallelDims(dp_shard=4), 2)
    for cut, expected in (
        (flat_cut("world", 900_000, 4), [(450_000, 225_000)]),
        (dim_cut("world", 0, 9, 4), [(600_000, 300_000)]),
        (dim_cut("world", 1, 100_000, 4), [(row * 100_000 + 50_000, 25_000) for row in range(9)]),
        (dim_cut("world", 1, 6, 4), []),
    ):
        drawn.clear()
        if not expected:  # a rank that holds nothing
            shape, mesh = (9, 6), mesh_of(ParallelDims(dp_shard=4), 3)
        layout = Layout(mesh, {"w": shape}, {"w": [cut]})
        assert initial_values(KIND, 2, "w", shape, layout.local("w")).shape == layout.local("w").shape
        assert drawn == expected
    narrow = Layout(mesh_of(ParallelDims(dp_shard=4), 1), {"w": (5, 8)}, {"w": [dim_cut("world", 1, 8, 4)]})
    initial_values(KIND, 2, "w", (5, 8), narrow.local("w"))
    assert drawn == [(2, 34)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_draw_what_one_process_draws(config, world):
    """Every parameter drawn by rows or flat from a meta model matches one process bit for bit."""
    whole = build_model(replace(config, depth=1), seed=3)
    with torch.device("meta"):
        values = InitialValues(build_model(replace(config, depth=1)), 3)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    rows = {name: [dim_cut("world", 0, shape[0], world)] for name, shape in shapes.items()}
    flat = {name: [flat_cut("world", math.prod(shape), world)] for name, shape in shapes.items()}
    for chain in (rows, flat):
        layouts = [Layout(mesh_of(ParallelDims(dp_shard=world), rank), shapes, chain) for rank in range(world)]
        for name, parameter in whole.named_parameters():
            shards = [values(name, layout.local(name)) for layout in layouts]
            assert torch.equal(torch.cat(shards).view_as(parameter), parameter), name


def test_columns_of_heads_after_a_division_over_tensor_parallel_ranks():
    """A rank draws the row ranges of a large parameter in several chunks."""
    config = replace(CONFIGS[0], hidden_size=1200, num_heads=4, depth=1, adaln_lora=None)
    whole = build_model(config, seed=3)
    name, dims = "blocks.0.mlp.fc2.weight", ParallelDims(dp_shard=2, tp=2)
    full = whole.get_parameter(name).detach()
    for rank in range(4):
        columns, rows = dim_cut("tp", 1, full.shape[1], 2), dim_cut("fsdp", 0, full.shape[0], 2)
        layout = Layout(mesh_of(dims, rank), {name: tuple(full.shape)}, {name: [columns, rows]})
        assert torch.equal(InitialValues(whole, 3)(name, layout.local(name)), layout.take(name, full))


def test_present_values_play_no_part():
    model = build_model(CONFIGS[0], seed=3)
    layout = Layout(mesh_of(ParallelDims(), 0), {n: tuple(p.shape) for n, p in model.named_parameters()}, NoCuts())
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    initialize(model, seed=4)
    for name, value in expected.items():
        assert torch.equal(InitialValues(model, 3)(name, layout.local(name)), value)


class NoCuts(dict):
    def __missing__(self, name):
        return []
