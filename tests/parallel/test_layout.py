"""Shards are compared with slices by numpy, torch.chunk and torch's fully_shard, on 1, 4 and 8 ranks."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from opendit.config.parallel_sizes import ParallelDims
from opendit.parallel.layout import Cut, Layout, dim_cut, flat_cut
from opendit.parallel.mesh import Mesh, init_mesh
from tests.ranks import run_ranks

HEADS, HEAD = 4, 3  # of the packed qkv below
WIDTH = HEADS * HEAD


def mesh_of(dims: ParallelDims, rank: int) -> Mesh:
    """Return a rank's mesh without creating process groups."""
    mesh = Mesh(rank, dims.world_size, rank, torch.device("cpu"), dims)
    mesh.groups.update(dict.fromkeys(("sp", "tp", "fsdp", "dp_shard", "world", "ep"), None))
    return mesh


def numbered(shape) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).view(shape)


class Case(NamedTuple):
    """A parameter, its cuts on one rank, and the shard that numpy takes."""

    name: str
    shape: tuple[int, ...]
    cuts: list[Cut]
    expected: np.ndarray


def cases(dims: ParallelDims, rank: int) -> list[Case]:
    """Return flat, dim-0, row, column and head cuts, some divided again over ``fsdp``."""
    tp, shards, world = dims.tp, dims.size("fsdp"), dims.world_size
    t, s = dims.coordinate("tp", rank), dims.coordinate("fsdp", rank)

    def flat(a: np.ndarray, parts: int, place: int) -> np.ndarray:
        width = -(-a.size // parts)
        return a.reshape(-1)[place * width : (place + 1) * width]

    def first(a: np.ndarray, parts: int, place: int) -> np.ndarray:
        width = -(-len(a) // parts)
        return a[place * width : (place + 1) * width]

    rows, columns, qkv = (numbered(shape).numpy() for shape in ((8, 5), (7, 8), (3 * WIDTH, 5)))
    share = WIDTH // tp
    heads = np.concatenate([part[t * share : (t + 1) * share] for part in np.split(qkv, 3)])
    down, across = rows.reshape(tp, -1, 5)[t], columns.reshape(7, tp, -1)[:, t]
    by_row, by_column = dim_cut("tp", 0, 8, tp), dim_cut("tp", 1, 8, tp)
    thirds = [[(part * WIDTH + r * share, part * WIDTH + (r + 1) * share) for part in range(3)] for r in range(tp)]
    by_head = Cut("tp", 0, tuple(map(tuple, thirds)))
    odd, vector, scalar = (numbered(shape).numpy() for shape in ((5, 7), (3,), ()))
    return [
        Case("flat", (5, 7), [flat_cut("world", 35, world)], flat(odd, world, rank)),
        Case("few", (3,), [flat_cut("world", 3, world)], flat(vector, world, rank)),
        Case("scalar", (), [flat_cut("world", 1, world)], flat(scalar, world, rank)),
        Case("whole", (5, 7), [], odd),
        Case("rows", (8, 5), [by_row], down),
        Case("columns", (7, 8), [by_column], across),
        Case("heads", (3 * WIDTH, 5), [by_head], heads),
        Case("dim 0", (5, 7), [dim_cut("fsdp", 0, 5, shards)], first(odd, shards, s)),
        Case("rows, dim 0", (8, 5), [by_row, dim_cut("fsdp", 0, 8 // tp, shards)], first(down, shards, s)),
        Case("rows, flat", (8, 5), [by_row, flat_cut("fsdp", 40 // tp, shards)], flat(down, shards, s)),
        Case("columns, dim 0", (7, 8), [by_column, dim_cut("fsdp", 0, 7, shards)], first(across, shards, s)),
        Case("columns, flat", (7, 8), [by_column, flat_cut("fsdp", 56 // tp, shards)], flat(across, shards, s)),
        Case("heads, dim 0", (3 * WIDTH, 5), [by_head, dim_cut("fsdp", 0, 3 * share, shards)], first(heads, shards, s)),
        Case("heads, flat", (3 * WIDTH, 5), [by_head, flat_cut("fsdp", 15 * share, shards)], flat(heads, shards, s)),
        Case("irregular", (6,), [Cut("world", None, chunks(world))], chunk_of(world, rank)),
    ]


def chunks(world: int) -> tuple:
    """Return ranges like those of Gemini's chunks: some are empty, others are unequal."""
    edges = [(0, 0), (0, 1), (1, 6), (6, 6)] if world > 1 else [(0, 6)]
    return tuple((edges[min(rank, 3)],) for rank in range(world)) if world != 2 else (((0, 1),), ((1, 6),))


def chunk_of(world: int, rank: int) -> np.ndarray:
    (start, stop), *_ = chunks(world)[rank]
    return np.arange(6.0)[start:stop]


def layout_of(mesh: Mesh) -> tuple[Layout, list[Case]]:
    found = cases(mesh.dims, mesh.rank)
    return Layout(mesh, {c.name: c.shape for c in found}, {c.name: c.cuts for c in found}), found


MESHES = [
    ParallelDims(),
    ParallelDims(dp_shard=4),
    ParallelDims(dp_shard=2, tp=2),
    ParallelDims(dp_replicate=2, dp_shard=2),
    ParallelDims(sp=2, tp=2),
    ParallelDims(dp_shard=3, sp=2, tp=4),
    ParallelDims(dp_replicate=2, dp_shard=5, tp=2),
]


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_a_shard_is_the_slice_that_numpy_takes(dims):
    for rank in range(dims.world_size):
        layout, found = layout_of(mesh_of(dims, rank))
        for case in found:
            shard = layout.take(case.name, numbered(case.shape))
            assert shard.shape == case.expected.shape == layout.local(case.name).shape, (case.name, rank)
            assert np.array_equal(shard, case.expected), (case.name, rank)
            assert layout.local(case.name).numel == case.expected.size
            assert [dim for dim, _ in layout.local(case.name).slices] == [cut.dim for cut in case.cuts]


def test_what_every_rank_takes_is_the_tensor_once():
    """Every element is held by as many ranks as there are replicas."""
    for dims in MESHES:
        held: dict[str, np.ndarray] = {}
        for rank in range(dims.world_size):
            layout, found = layout_of(mesh_of(dims, rank))
            for case in found:
                count = held.setdefault(case.name, np.zeros(int(np.prod(case.shape))))
                np.add.at(count, layout.take(case.name, numbered(case.shape)).numpy().astype(int).ravel(), 1)
                groups = {cut.group for cut in case.cuts}
        for case in found:
            groups = {cut.group for cut in case.cuts}
            copies = dims.world_size // int(np.prod([dims.size(group) for group in groups]))
            assert (held[case.name] == copies).all(), (case.name, dims)


def test_one_range_is_a_view():
    layout, _ = layout_of(mesh_of(ParallelDims(dp_shard=2, tp=2), 3))
    for name, view in (("flat", True), ("rows, flat", True), ("heads", False)):
        full = numbered(layout.shapes[name])
        assert (layout.take(name, full).untyped_storage().data_ptr() == full.untyped_storage().data_ptr()) == view


def test_cuts_that_are_none_are_refused():
    mesh = mesh_of(ParallelDims(dp_shard=2, tp=2), 0)
    wrong = [
        ([flat_cut("tp", 11, 2)], "do not hold each of 12 indices once"),
        ([flat_cut("tp", 12, 4)], "shard ranges of 4 ranks for a group of 2"),
        ([dim_cut("tp", 2, 4, 2)], "a tensor of 2 dimensions can't be divided along 2"),
        ([Cut("tp", None, (((0, 6),), ((5, 12),)))], "do not hold each of 12 indices once"),
        ([Cut("tp", None, (((0, 5),), ((6, 12),)))], "do not hold each of 12 indices once"),
        ([dim_cut("tp", 0, 3, 2), flat_cut("fsdp", 12, 2)], "do not hold each of 8 indices once"),
    ]
    for cuts, message in wrong:
        with pytest.raises(ValueError, match=f"^layout of w: .*{message}$"):
            Layout(mesh, {"w": (3, 4)}, {"w": cuts})


def test_random_ranges():
    """Random divisions of a dimension give the expected shards."""
    draw = random.Random(0)
    for _ in range(50):
        size, ranks, dim = draw.randint(1, 12), draw.randint(1, 4), draw.choice((None, 0, 1))
        edges = sorted({0, size, *(draw.randint(0, size) for _ in range(4))})
        held = [[] for _ in range(ranks)]
        for edge in draw.sample(list(zip(edges, edges[1:], strict=False)), len(edges) - 1):
            held[draw.randrange(ranks)].append(edge)
        shape = (size,) if dim is None else (size, 3) if dim == 0 else (3, size)
        cut, full = Cut("world", dim, tuple(map(tuple, held))), numbered(shape)
        for rank in range(ranks):
            layout = Layout(mesh_of(ParallelDims(dp_shard=ranks), rank), {"w": shape}, {"w": [cut]})
            index = [i for start, stop in held[rank] for i in range(start, stop)]
            assert torch.equal(
                layout.take("w", full), full.index_select(dim or 0, torch.tensor(index, dtype=torch.int))
            )


def gathered(mesh: Mesh, meshes: list[ParallelDims]) -> int:
    """Gather every case on every mesh; return the number of gathers."""
    count = 0
    for dims in meshes:
        layout, found = layout_of(init_mesh(dims=dims))
        for case in found:
            for dtype in (torch.float32, torch.bfloat16):
                shard = torch.from_numpy(np.array(case.expected)).to(dtype)
                before, full = shard.clone(), layout.gather(case.name, shard)
                assert torch.equal(full, numbered(case.shape).to(dtype)), (case.name, dims, mesh.rank)
                full.add_(1)  # must not share memory with the shard
                assert torch.equal(shard, before) and full.dtype == dtype
                count += 1
    if mesh.world_size == 4:
        as_fully_shard_divides()
        collectives_of_a_gather()
    return count


def collectives_of_a_gather() -> None:
    """Check that every cut takes one all-gather of at most the padded shards, and that replicated tensors take none."""
    layout, found = layout_of(init_mesh(dims=ParallelDims(dp_shard=2, tp=2)))
    sent, original = [], dist.all_gather_into_tensor

    def counted(received, send, group):
        sent.append((dist.get_process_group_ranks(group), received.numel()))
        return original(received, send, group=group)

    dist.all_gather_into_tensor = counted
    try:
        for case in found:
            sent.clear()
            layout.gather(case.name, torch.from_numpy(np.array(case.expected)))
            groups = [dist.get_process_group_ranks(layout.mesh.group(cut.group)) for cut in reversed(case.cuts)]
            assert [ranks for ranks, _ in sent] == groups, case.name
            longest = [max(cut.lengths()) * len(cut.ranges) for cut in case.cuts[-1:] if cut.dim is None]
            assert not longest or sent[0][1] == longest[0], case.name
    finally:
        dist.all_gather_into_tensor = original


def as_fully_shard_divides() -> None:
    """Compare with FSDP2's shards of full and tensor-parallel weights, and gather them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for dims in (ParallelDims(dp_shard=4), ParallelDims(dp_replicate=2, sp=2), ParallelDims(dp_shard=2, tp=2)):
        mesh = init_mesh(dims=dims)
        names = [name for name in ("dp_replicate", "fsdp", "tp") if dims.size(name) > 1]
        whole = mesh.device_mesh(*names)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        full = {name: p.detach().clone() for name, p in module.named_parameters()}
        cuts = {name: [] for name in full}
        if dims.tp > 1:
            parallelize_module(module, whole["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for name, dim in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
                cuts[name] = [dim_cut("tp", dim, 6, dims.tp)]
        data = tuple(name for name in names if name != "tp")
        for layer in module:
            fully_shard(layer, mesh=whole[data])
        rows = {"0.weight": 6 // dims.tp, "0.bias": 6 // dims.tp, "1.weight": 3, "1.bias": 3}
        cuts = {name: [*cuts[name], dim_cut("fsdp", 0, rows[name], dims.size("fsdp"))] for name in full}
        layout = Layout(mesh, {name: p.shape for name, p in full.items()}, cuts)
        for name, parameter in module.named_parameters():
            local = parameter.to_local().detach()
            assert torch.equal(local, layout.take(name, full[name])), (name, dims)
            assert torch.equal(layout.gather(name, local), full[name])


@pytest.mark.parametrize("world", [4, 8])
def test_gather_gives_the_canonical_tensor(world):
    meshes = {
        4: [dims for dims in MESHES if dims.world_size == 4],
        8: [
            ParallelDims(dp_shard=8),
            ParallelDims(dp_shard=4, tp=2),
            ParallelDims(dp_shard=2, tp=4),
            ParallelDims(dp_replicate=2, dp_shard=2, tp=2),
            ParallelDims(dp_replicate=2, sp=2, tp=2),
        ],
    }[world]
    assert run_ranks(world, gathered, meshes) == [2 * 15 * len(meshes)] * world
