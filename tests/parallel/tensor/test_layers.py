"""Tensor-parallel models are compared with one process: outputs and all gradients, in float64."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.models.attention import TokenGrid
from opendit.models.dit import DiT
from opendit.models.zoo import build_model
from opendit.parallel import tensor as division
from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import Part, ReplicatedGradients, divide, divided_parameters, held_parameters
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs
from tests.parallel.shared_memory import SharedMemory
from tests.parallel.tensor.models import DIT, MODELS
from tests.parallel.test_sequence import shared_memory
from tests.ranks import run_ranks

TOLERANCE = 1e-10
MEETS_FOUR = {"MovieGen": replace(MODELS["MovieGen"], kv_heads=4)}  # key heads that 4 ranks can divide


def model_of(config) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config)).double()


def gradients(model: DiT, batch: int) -> tuple[Tensor, list[Tensor]]:
    output = model(*(part[-batch:] for part in inputs(model.config)))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return output.detach(), list(torch.autograd.grad((output * weights).sum(), list(model.parameters())))


def compare(
    mesh: Mesh,
    config,
    batch: int,
    sequence: SequenceParallel | None = None,
    checkpointed=False,
    ops=None,
    memory: SharedMemory | None = None,
    **how,
) -> dict[str, float]:
    """Return relative errors of the output and of every parameter's gradient.

    ``sequence`` divides the tokens among further ranks. ``ops`` replaces the blocks' operations and selects fp32.
    Products overlap with communication through ``memory``.
    """
    whole = model_of(config) if ops is None else model_of(config).float()
    wanted, of_parameters = gradients(whole, batch)
    model, tensor = copy.deepcopy(whole), mesh.group("tp")
    model.use(ops=ops, sequence=divide(model, Group.of(tensor), sequence, **how)).grad_checkpoint = checkpointed
    for part in model.modules():
        if isinstance(part, Part):
            part.memory = memory
    output, found = gradients(model, batch)
    divided, names = divided_parameters(model), [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    if not how:
        held = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.blocks[0].parameters())
        assert held == held_parameters(config, mesh.tp_size)
    ReplicatedGradients(mesh, names, divided).sum(found)
    errors = {"output": ((output - wanted).norm() / wanted.norm()).item()}
    for name, expected, ours in zip(names, of_parameters, found, strict=True):
        if sequence is not None:  # each rank's gradient covers its own tokens, times the number of ranks
            dist.all_reduce(ours, group=mesh.group("sp"))
            ours /= mesh.sp_size
        if name in divided:
            shape, cut = divided[name].shape, divided[name].cut
            assert shape == expected.shape
            ranges = cut.ranges[mesh.coordinate("tp")]
            expected = torch.cat([expected.narrow(cut.dim, start, stop - start) for start, stop in ranges], cut.dim)
        scale = expected.norm()
        assert scale > 1e-8, name
        errors[name] = ((ours - expected).norm() / scale).item()
    return errors


def kept_by_a_block(mesh: Mesh) -> dict[str, float]:
    """Return how many times its share a rank's block saves for the backward pass, or 0 if that is below 1.1."""
    kept, tokens = [], 64
    for ranks in (1, mesh.tp_size):
        model, shards = model_of(DIT), None
        if ranks > 1:
            tensor = divide(model, Group.of(mesh.group("tp")))
            shards = model.use(sequence=tensor).sequence(tokens)
        block, x = model.blocks[0], torch.randn(2, tokens // ranks, 48, dtype=torch.float64, requires_grad=True)
        m = torch.randn(2, 6 * 48, dtype=torch.float64)
        storages = {}

        def keep(saved: Tensor, storages=storages) -> Tensor:
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            output = block(x, m, None, TokenGrid((tokens,), shards=shards))
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
        kept.append(sum(size for place, size in storages.items() if place not in weights))
        del output
    share = kept[1] * mesh.tp_size / kept[0]
    return {"more than its share": 0.0 if share < 1.1 else share}  # the gathered input adds 1 / 18


def shared(mesh: Mesh, config, kind: str) -> SequenceParallel:
    shape = Shape(config.tokens, config.hidden_size, config.num_heads // mesh.tp_size)
    return sequence_parallel(mesh, kind, shape)


def every_model(mesh: Mesh, size: int) -> dict:
    tensor = init_mesh(dims=ParallelDims.fill(4, tp=size))
    models = MODELS | (MEETS_FOUR if size == 4 else {})
    found = {name: compare(tensor, config, 5 - size, checkpointed=size == 4) for name, config in models.items()}
    if size == 2:
        return found
    found["kept"] = kept_by_a_block(tensor)
    found["modulation on every rank"] = compare(tensor, DIT, 2, column_modulation=False)
    both = init_mesh(dims=ParallelDims(sp=2, tp=2))
    for kind in ("fastseq", "ulysses", "ring"):
        found[kind] = compare(both, MODELS["DiT of text"], 2, shared(both, MODELS["DiT of text"], kind))
    found["experts among all tokens"] = compare(both, MODELS["EC-DiT"], 2, shared(both, MODELS["EC-DiT"], "ulysses"))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_output_and_every_gradient_are_those_of_one_process(size):
    for rank in run_ranks(4, every_model, size):
        for case, errors in rank.items():
            bad = {name: error for name, error in errors.items() if not error < TOLERANCE}
            assert not bad, (case, bad)


def overlapped(mesh: Mesh, size: int) -> dict:
    tensor = init_mesh(dims=ParallelDims.fill(4, tp=size))
    memory = shared_memory(Group.of(tensor.group("tp")), early=size == 4)
    with mock.patch.object(division, "LEAST_TOKENS", 1), mock.patch.object(SharedMemory, "SIZE", 2**22):
        with mock.patch.object(torch, "addmm", wraps=torch.addmm) as products:
            models = MODELS | (MEETS_FOUR if size == 4 else {})
            found = {name: compare(tensor, config, 2, memory=memory) for name, config in models.items()}
        assert products.call_count > 4 * len(found), "the collectives' products"
        found["recomputed"] = compare(tensor, MODELS["DiT of text"], 1, checkpointed=True, memory=memory)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_products_that_overlap_with_communication_give_the_same(size):
    for rank in run_ranks(4, overlapped, size):
        for case, errors in rank.items():
            bad = {name: error for name, error in errors.items() if not error < TOLERANCE}
            assert not bad, (case, bad)
