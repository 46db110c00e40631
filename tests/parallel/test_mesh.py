"""Mesh groups are compared with tables made by numpy, and summed over on 8 ranks."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from opendit.config.parallel_sizes import AXES, VIEWS, ParallelDims
from opendit.parallel.mesh import Mesh, init_mesh
from tests.ranks import run_ranks

NAMES = (*AXES, *VIEWS, "ep", "ep_shard")
MESHES = [
    ParallelDims(dp_shard=4, sp=2),
    ParallelDims(pp=2, dp_shard=2, tp=2, ep=4),
    ParallelDims(dp_replicate=2, dp_shard=2, sp=2, ep=2),
    ParallelDims(pp=2, dp_replicate=2, sp=2, ep=2),
    ParallelDims(pp=2, dp_replicate=1, dp_shard=2, sp=2, tp=1, ep=4),
    ParallelDims(sp=8),
    ParallelDims(dp_shard=8, ep=8),
]
FOUR = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "sp": 2, "tp": 2}  # 16 ranks: compared with the table only


def table(dims: ParallelDims, name: str) -> np.ndarray:
    """Return an array (groups, ranks in a group) from a reshaped arange."""
    ranks = np.arange(dims.pp * dims.dp_replicate * dims.dp_shard * dims.sp * dims.tp)
    if name in ("ep", "ep_shard"):
        grid = ranks.reshape(dims.pp * dims.dp_replicate, -1, dims.ep)
        return grid.reshape(-1, dims.ep) if name == "ep" else grid.swapaxes(1, 2).reshape(-1, grid.shape[1])
    grid = ranks.reshape(dims.pp, dims.dp_replicate, dims.dp_shard, dims.sp, dims.tp)
    along = {
        **{axis: [i] for i, axis in enumerate(("pp", "dp_replicate", "dp_shard", "sp", "tp"))},
        "dp": [1, 2],
        "fsdp": [2, 3],
        "loss": [1, 2, 3],
        "world": [0, 1, 2, 3, 4],
    }[name]
    moved = np.moveaxis(grid, along, range(5 - len(along), 5))
    return moved.reshape(-1, int(np.prod([grid.shape[i] for i in along])))


def dims_of(sizes: random.Random) -> ParallelDims:
    shape = [sizes.choice((1, 1, 2, 3, 4, 5)) for _ in AXES]
    inner = shape[2] * shape[3] * shape[4]
    return ParallelDims(*shape, ep=sizes.choice([n for n in range(1, inner + 1) if inner % n == 0]))


def test_groups_are_those_of_the_reshaped_arange():
    sizes = random.Random(0)
    for dims in (*MESHES, ParallelDims(**FOUR, ep=4), *(dims_of(sizes) for _ in range(60))):
        for name in NAMES:
            expected = table(dims, name)
            assert sorted(dims.groups(name)) == sorted(expected.tolist()), (dims, name)
            assert dims.size(name) == expected.shape[1]
            places = {rank: place for group in expected.tolist() for place, rank in enumerate(group)}
            assert [dims.coordinate(name, rank) for rank in range(dims.world_size)] == [
                places[rank] for rank in range(dims.world_size)
            ], (dims, name)


def test_without_pipelines_and_tensor_parallelism_ranks_stand_where_they_stood():
    for world in (1, 2, 6, 8, 12):
        for sp in (n for n in range(1, world + 1) if world % n == 0):
            for rank in range(world):
                mesh = Mesh(rank, world, rank, torch.device("cpu"), ParallelDims.fill(world, sp=sp))
                assert (mesh.coordinate("sp"), mesh.dp_rank, mesh.dp_size) == (rank % sp, rank // sp, world // sp)


def test_sizes_that_do_not_fit_are_one_clear_line():
    sizes = random.Random(1)
    for _ in range(60):
        dims = dims_of(sizes)
        given = {axis: getattr(dims, axis) for axis in AXES if axis != "dp_shard"}
        assert ParallelDims.fill(dims.world_size, **given, ep=dims.ep) == dims
        dims.check(dims.world_size)
        with pytest.raises(ValueError, match=f"need {dims.world_size} processes and there are {dims.world_size + 1}$"):
            dims.check(dims.world_size + 1)
    with pytest.raises(ValueError, match=r"^the parallel sizes pp 1 .* sp 2 x tp 2 \(ep 1\) do not divide the 6 proc"):
        ParallelDims.fill(6, sp=2, tp=2)
    with pytest.raises(ValueError, match="^parallel size ep 3 does not divide dp_shard x sp x tp, which is 8$"):
        ParallelDims(pp=3, dp_shard=2, sp=2, tp=2, ep=3)
    for wrong in (0, -2, 1.5, "2"):
        with pytest.raises(ValueError, match="^parallel size tp .*: must be a whole number above 0$"):
            ParallelDims(tp=wrong)
    with pytest.raises(KeyError, match="no group cp: there are pp, dp_replicate"):
        ParallelDims().groups("cp")
    with pytest.raises(ValueError, match="need 2 processes and there are 1"):
        Mesh(0, 1, 0, torch.device("cpu"), ParallelDims(tp=2))


def all_groups(mesh: Mesh) -> list:
    """Return every group of this rank with its sum of 2^rank, and the results of the functions below."""
    results = []
    for dims in MESHES:
        mesh = init_mesh(dims=dims)
        for name in NAMES:
            group = mesh.group(name)
            total = mesh.sum(torch.tensor(2**mesh.rank), over=name).item()
            members = [mesh.rank] if group is None else dist.get_process_group_ranks(group)
            assert group is mesh.group(name)
            results.append((dims, name, members, total))
        whole = mesh.device_mesh()
        names = whole.mesh_dim_names
        assert names == tuple(axis for axis in AXES if getattr(dims, axis) > 1)
        assert whole.mesh.tolist() == np.arange(8).reshape([getattr(dims, axis) for axis in names]).tolist()
        for name in names:
            assert whole.get_group(name) is mesh.group(name) and whole[name].get_group() is mesh.group(name)
            assert whole.get_local_rank(name) == mesh.coordinate(name)
    return results, views_of_one_mesh(), lazy_groups(), grids_of_a_sequence()


def views_of_one_mesh() -> list:
    """Return grids and groups of torch meshes with flattened dimensions."""
    mesh, found = init_mesh(dims=ParallelDims(dp_replicate=2, dp_shard=1, sp=2, tp=2, ep=2)), []
    for names in (("dp_replicate", "fsdp", "tp"), ("dp_replicate", "ep_shard", "ep"), ("loss", "tp"), ("world",)):
        whole = mesh.device_mesh(*names)
        found.append((names, whole.mesh.tolist(), [dist.get_process_group_ranks(whole.get_group(n)) for n in names]))
        part = whole[names[:2]] if len(names) > 2 else whole
        assert part.mesh_dim_names == names[:2]
    for wrong in (("tp", "sp", "dp"), ("dp_replicate", "tp"), ("sp", "dp_replicate", "tp"), ("fsdp", "dp", "tp")):
        with pytest.raises(ValueError, match="is no grid of the 8 ranks"):
            mesh.device_mesh(*wrong)
    return found


def lazy_groups() -> tuple:
    """Return which groups exist at the start, and whether groups of all ranks are the default group."""
    plain, shared, alone = init_mesh(), init_mesh(sequence_parallel=8), init_mesh()
    own = alone.own_group("tp")
    assert alone.group("tp") is None and dist.get_process_group_ranks(own) == [alone.rank] and own is not None
    assert alone.own_group("tp") is own and alone.own_group("loss") is dist.group.WORLD
    default = [plain.group(name) is dist.group.WORLD for name in ("dp_shard", "dp", "fsdp", "loss", "world")]
    return [*plain.groups], [*shared.groups], default, shared.sp_group is dist.group.WORLD


def grids_of_a_sequence() -> list:
    """Return split_sequence's two groups for sequences over 8 and 4 ranks."""
    grids = []
    for dims, inner in ((ParallelDims(sp=8), 2), (ParallelDims(dp_shard=2, sp=4), 2), (ParallelDims(sp=4, tp=2), 2)):
        groups = init_mesh(dims=dims).split_sequence(inner)
        grids.append([dist.get_process_group_ranks(group) for group in groups])
    return grids


def test_sums_over_every_named_group_of_eight_ranks():
    for rank, (results, views, (plain, shared, default, own), grids) in enumerate(run_ranks(8, all_groups)):
        for dims, name, members, total in results:
            (expected,) = (group for group in table(dims, name).tolist() if rank in group)
            assert members == expected and total == sum(2**other for other in expected), (dims, name, rank)
        (three, experts, two, one) = views
        cube = np.arange(8).reshape(2, 2, 2)
        i, j, k = np.argwhere(cube == rank)[0]
        lines = [cube[:, j, k].tolist(), cube[i, :, k].tolist(), cube[i, j].tolist()]
        assert three[1:] == (cube.tolist(), lines) and experts[1:] == (cube.tolist(), lines)
        assert two[1:] == (cube.reshape(4, 2).tolist(), [cube[:, :, k].ravel().tolist(), cube[i, j].tolist()])
        assert one[1:] == (list(range(8)), [list(range(8))])
        # A run creates only the communicators that it uses. A sequence group is separate even if it has all ranks.
        assert plain == [] and shared == ["sp"] and all(default) and not own
        flat, blocks, with_tp = grids
        assert flat == [cube.reshape(4, 2)[rank // 2].tolist(), cube.reshape(4, 2)[:, rank % 2].tolist()]
        assert blocks == [cube[i, j].tolist(), cube[i, :, k].tolist()]
        assert with_tp == [cube[i, :, k].tolist(), cube[:, j, k].tolist()]
