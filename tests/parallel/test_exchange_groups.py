"""Ulysses by collectives in groups of samples and heads is compared with one process in float64."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opendit.kernels.rotate_heads import StreamHeads, pack_heads_reference
from opendit.models.attention import Attention, GridAttention, TokenGrid
from opendit.models.layers import TORCH_OPS, Options
from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.choose import Shape, StrategyChoice, split_groups
from opendit.parallel.sequence.ulysses import UlyssesRing
from tests.parallel.shared_memory import SharedMemory
from tests.ranks import run_ranks

HEADS, WIDTH, EPS = 12, 48, 1e-6
# (samples, tokens, groups, norm across heads, key heads, rotations, masked keys). With 13 tokens, 2, 3 and 4 ranks
# have 1, 2 and 3 padding rows. With 5 tokens, the last of 4 ranks has only padding.
CASES = [
    (2, 12, 2, True, HEADS, "shared", False),
    (2, 13, 1, True, HEADS, "shared", False),
    (2, 13, 2, False, HEADS, "of samples", True),
    (2, 13, 6, True, HEADS, "of samples", False),
    (2, 5, 2, False, 4, "shared", False),
    (1, 13, 3, True, HEADS, "shared", False),
    (3, 13, 3, True, HEADS, None, True),
    (3, 12, 2, False, HEADS, "shared", False),  # groups of heads: 2 does not divide 3 samples
    (4, 5, 2, False, 4, "of samples", True),
    (2, 13, 2, True, HEADS, "channels", False),
]


def made(case: tuple) -> tuple[Attention, Tensor, Tensor, TokenGrid]:
    """Return the layer, its input, the loss weights and the grid."""
    samples, tokens, _, across, kv_heads, rotations, masked = case
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS, Options(qk_norm=True, qk_across=across, qk_eps=EPS), kv_heads).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, weights = torch.randn(2, samples, tokens, WIDTH, dtype=torch.float64).unbind(0)
    width = WIDTH if rotations == "channels" else WIDTH // HEADS
    angles = 3 * torch.randn(*((samples,) if rotations == "of samples" else ()), tokens, width // 2)
    table = None if rotations is None else torch.stack([angles.cos(), angles.sin()], dim=-1).double()
    keys = torch.rand(samples, tokens) < 0.6
    keys[:, 0] = True
    return layer, x, weights, TokenGrid((tokens,), table, keys=keys if masked else None)


def packed_at_once(q, k, v, q_norm, k_norm, table, across, parts):
    weights = (None, None) if q_norm is None else (q_norm.weight, k_norm.weight)
    return pack_heads_reference(StreamHeads(q, k, v, *weights, table), parts, EPS, across)


def strategy(mesh: Mesh, kind: str, groups: int, memory: SharedMemory | None = None) -> SequenceParallel:
    if kind == "usp":
        return sequence_parallel(mesh, kind, Shape(16, WIDTH, HEADS))
    alone, group = Group(None, 0, 1), Group(None, 0, 1) if mesh.world_size == 1 else Group.of(mesh.sp_group)
    return SequenceParallel(group, StrategyChoice(kind, ""), UlyssesRing(group, alone, groups, memory))


def gathered(x: Tensor, tokens: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.is_initialized() else [x]
    if dist.is_initialized():
        dist.all_gather(parts, x.contiguous(), group=dist.group.WORLD)
    return torch.cat(parts, dim=1)[:, :tokens]


def errors(mesh: Mesh, kind: str) -> list[tuple]:
    """Return the largest errors of outputs with and without gradients, and of the gradients of x and the parameters."""
    mesh, found = init_mesh(sequence_parallel=mesh.world_size), []
    for case in CASES:
        layer, x, weights, grid = made(case)
        if kind == "usp" and grid.keys is not None:
            continue  # ring attention has no masks
        exact = x.clone().requires_grad_()
        wanted = layer.output(exact, grid=grid)
        wanted_grads = torch.autograd.grad((wanted * weights).sum(), [exact, *layer.parameters()], allow_unused=True)
        shards = strategy(mesh, kind, case[2])(case[1])
        if layer.turns_all_channels(grid):
            grid = replace(grid, rotary=shards.of_projections(grid.rotary.flatten(1)).unflatten(1, (-1, 2)))
        grid, own = replace(grid, shards=shards), shards.take(x).requires_grad_()
        output = layer.output(own, grid=grid)
        grads = torch.autograd.grad(
            (output * shards.take(weights)).sum(), [own, *layer.parameters()], allow_unused=True
        )
        worst = [(gathered(output.detach(), case[1]) - wanted).abs().max()]
        for ops in (TORCH_OPS, replace(TORCH_OPS, pack_heads=packed_at_once)):
            with torch.no_grad():
                worst.append((gathered(layer.output(own, ops, grid), case[1]) - wanted).abs().max())
        worst.append((gathered(grads[0], case[1]) - wanted_grads[0]).abs().max())
        for grad, reference in zip(grads[1:], wanted_grads[1:], strict=True):
            if reference is not None:
                worst.append((mesh.sum(grad) - reference).abs().max() / reference.abs().max())
        found.append((case, [error.item() for error in worst]))
    return found


@pytest.mark.parametrize(
    ("world", "kind"), [(1, "ulysses"), (2, "ulysses"), (3, "ulysses"), (4, "ulysses"), (4, "usp")]
)
def test_ranks_together_are_one_process(world, kind):
    for rank in run_ranks(world, errors, kind):
        assert len(rank) == len(CASES) - 3 * (kind == "usp")
        for case, worst in rank:
            assert all(error < 1e-12 for error in worst), (case, worst)


def errors_of_sampling(mesh: Mesh, folder: str) -> list[tuple]:
    """Return the largest errors of two successive layers when every rank can access the others' memory."""
    mesh, found = init_mesh(sequence_parallel=mesh.world_size), []
    memory, ops = SharedMemory(Group.of(mesh.sp_group), folder), replace(TORCH_OPS, pack_heads=packed_at_once)
    for case in CASES:
        layer, x, _, grid = made(case)
        if layer.turns_all_channels(grid):
            continue
        wanted = layer.output(layer.output(x, grid=grid), grid=grid)
        shards = strategy(mesh, "ulysses", case[2], memory)(case[1])
        grid = replace(grid, shards=shards)
        with torch.inference_mode():
            output = layer.output(layer.output(shards.take(x), ops, grid), ops, grid)
        found.append((case, (gathered(output, case[1]) - wanted).abs().max().item()))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_samples_by_the_ranks_memory_are_those_of_one_process(world, tmp_path):
    for rank in run_ranks(world, errors_of_sampling, str(tmp_path)):
        assert len(rank) == len(CASES) - 1
        assert all(error < 1e-12 for _, error in rank), rank


def without_copies(mesh: Mesh) -> list[tuple]:
    mesh, found = init_mesh(sequence_parallel=mesh.world_size), []
    for samples, groups in ((1, 1), (1, 3), (2, 2), (2, 6), (2, 1)):
        layer, x, _, grid = made((samples, 13, groups, True, HEADS, "shared", False))
        shards, received = strategy(mesh, "ulysses", groups)(13), []

        def attend(q: Tensor, k: Tensor, v: Tensor, received=received) -> Tensor:
            received.append((q.shape, *(part.untyped_storage() for part in (q, k, v))))
            return v.contiguous()

        layer.attend = attend
        with torch.no_grad():
            layer.output(shards.take(x), grid=replace(grid, shards=shards))
        views = all(len({part.data_ptr() for part in parts}) == 1 for _, *parts in received)
        size = samples * HEADS // 2 * 14 * 3 * WIDTH // HEADS * 8  # bytes of all received tensors with padding
        found.append((len(received), views, sum(parts[0].nbytes() for _, *parts in received) == size))
    return found


def test_attention_reads_single_samples_from_the_received_tensor():
    for rank in run_ranks(2, without_copies):
        assert rank[:4] == [(1, True, True), (3, True, True), (2, True, True), (6, True, True)]
        assert rank[4][0] == 1  # both samples together


def test_samples_are_divided_before_heads():
    for groups, samples, heads in itertools.product(range(1, 9), range(1, 5), (1, 3, 6)):
        number, of_heads = split_groups(groups, samples, heads)
        assert samples % number == heads % of_heads == 0 and groups % (number * of_heads) == 0
    assert [split_groups(groups, 2, 6) for groups in (1, 2, 3, 4, 6)] == [(1, 1), (2, 1), (1, 3), (2, 2), (2, 3)]
    assert split_groups(2, 1, 6) == (1, 2) and split_groups(2, 3, 5) == (1, 1)


def test_a_part_of_the_batch_has_its_own_rotations_and_keys():
    table, keys = torch.randn(3, 5, 2, 2), torch.rand(3, 5) < 0.5
    part = GridAttention(Attention(8, 2), TokenGrid((5,), table, keys=keys)).of_samples(slice(1, 3)).grid
    assert torch.equal(part.rotary, table[1:]) and torch.equal(part.keys, keys[1:])
