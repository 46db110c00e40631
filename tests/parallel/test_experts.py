"""Experts on different ranks, and experts that choose among tokens of several ranks, against one process."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims, check_expert_parallel_size
from opendit.models import model_config
from opendit.models.ecdit import ECDiTConfig
from opendit.parallel.expert import check_expert_parallel, divide_among, expert_group, expert_parameters
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import divided_parameters
from opendit.training.memory import Setup, estimate
from tests.models.test_zoo import inputs
from tests.numbers import off_by
from tests.parallel.tensor.models import MODELS
from tests.parallel.tensor.test_engines import (
    Meshes,
    engine_of,
    engine_run,
    loss_of,
    model_of,
    plain_run,
    resumed,
)
from tests.parallel.tensor.test_layers import TOLERANCE
from tests.ranks import run_ranks

# 15 tokens, 8 experts, of which each takes 4. Without qk_norm the gradient of the keys' bias is rounding noise.
CONFIG: ECDiTConfig = replace(MODELS["EC-DiT"], qk_norm=True)
TEXT: ECDiTConfig = MODELS["EC-DiT of text"]  # 4 experts, of which each takes 5
SAMPLES = 4


def weighted(model, index: slice) -> Tensor:
    """A loss of these samples of four."""
    output = model(*(part[index] for part in inputs(model.config, SAMPLES)))
    weights = torch.randn(SAMPLES, *output.shape[1:], generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return (output * weights[index]).sum() / len(output)


def exact(mesh: Mesh, config: ECDiTConfig, checkpointed: bool = False) -> dict[str, float]:
    """The relative error of the loss and of every parameter's gradient, in float64."""
    whole = model_of(config).double()
    wanted = weighted(whole, slice(None))
    expected = dict(
        zip(dict(whole.named_parameters()), torch.autograd.grad(wanted, [*whole.parameters()]), strict=True)
    )
    model, sequence, group = copy.deepcopy(whole), None, expert_group(mesh)
    if mesh.sp_size > 1:
        shape = Shape(config.tokens, config.hidden_size, config.num_heads)
        sequence = sequence_parallel(mesh, "ulysses", shape)
    if group is not None:
        divide_among(model, group)
    model.use(sequence=sequence).grad_checkpoint = checkpointed
    share = SAMPLES // mesh.dp_size
    loss = weighted(model, slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share))
    loss.backward()
    errors = {"loss": (mesh.sum(loss.detach()) / mesh.world_size / wanted - 1).abs().item()}
    divided = divided_parameters(model)
    assert len(divided) == (0 if group is None else 2 * config.depth)
    for name, parameter in model.named_parameters():
        grad, full = parameter.grad, expected[name]
        if name in divided:  # the sum over the group's tokens is there
            assert divided[name].shape == full.shape
            ((start, stop),) = divided[name].cut.ranges[mesh.coordinate("ep")]
            full, grad = full[start:stop], mesh.sum(grad, "ep_shard") / mesh.world_size
        else:
            grad = mesh.sum(grad) / mesh.world_size
        assert full.norm() > 1e-8, name
        errors[name] = ((grad - full).norm() / full.norm()).item()
    return errors


SIZES = [dict(ep=2), dict(ep=4), dict(sp=4), dict(sp=2), dict(ep=2, sp=2), dict(ep=4, sp=2), dict(ep=2, sp=4)]
# Sizes; micro-batches, and how the model is run.
RUNS = [
    (dict(ep=2), 1, {}),
    (dict(ep=4), 1, dict(grad_checkpoint=True)),
    (dict(ep=2, sp=2), 2, {}),
    (dict(ep=4, sp=2), 1, dict(grad_checkpoint=True)),
    (dict(ep=2, dp_replicate=2), 1, {}),
]
ELASTIC = [
    (dict(ep=2), "fsdp", True, [(dict(ep=4), "fsdp"), (dict(), "zero2")]),
    (dict(ep=4), "fsdp", False, [(dict(ep=2, sp=2), "fsdp"), (dict(tp=2), "fsdp")]),
    (dict(), "zero2", True, [(dict(ep=2, dp_replicate=2), "fsdp")]),
]


def gradients(mesh: Mesh) -> dict[str, Tensor]:
    """Canonical gradients as the engine has them before it clips."""
    engine, share = engine_of(mesh, "fsdp", config=CONFIG), SAMPLES // mesh.dp_size
    engine.backward(loss_of(engine.forward, 0, slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)))
    return {name: engine.layout.gather(name, part).clone() for name, part in engine.gradient_shards().items()}


def after_one_bad_gradient(mesh: Mesh) -> tuple[bool, bool]:
    """A step in fp16 in which one rank's experts have a gradient that is not finite: whether it was taken, and whether
    anything has changed."""
    engine = engine_of(mesh, "fsdp", "fp16", config=CONFIG)
    before = {name: master.clone() for name, master in engine.masters().items()}
    engine.backward(loss_of(engine.forward, 0, slice(mesh.dp_rank, mesh.dp_rank + 1)))
    if mesh.rank == 3:
        engine.gradient_shards()["blocks.1.mlp.expert_fc2"].view(-1)[0] = torch.inf
    taken = bool(engine.step().finite)
    return taken, not all(torch.equal(engine.master(name), master) for name, master in before.items())


def everything(mesh: Mesh, folder: Path) -> dict:
    meshes = Meshes()
    found = {"exact": {}}
    for sizes in SIZES:
        for config in (CONFIG, TEXT) if sizes.get("ep", 1) * sizes.get("sp", 1) == 4 else (CONFIG,):
            found["exact"][(*sizes.items(), config is TEXT)] = exact(meshes.of(sizes), config, config is TEXT)
    found["gradients"] = [gradients(meshes.of(sizes)) for sizes, *_ in RUNS]
    found["runs"] = [engine_run(meshes.of(sizes), "fsdp", "fp32", n, config=CONFIG, **how) for sizes, n, how in RUNS]
    found["bad"] = after_one_bad_gradient(meshes.of(dict(ep=2)))
    found["different"] = resumed(meshes, folder, ELASTIC, CONFIG)
    return found


def test_ranks_give_what_one_process_gives(tmp_path):
    losses, norms, averages, moments = plain_run(CONFIG)
    whole = model_of(CONFIG)
    loss_of(whole, 0, slice(None)).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for rank in run_ranks(4, everything, tmp_path):
        for case, errors in rank["exact"].items():
            bad = {name: error for name, error in errors.items() if not error < TOLERANCE}
            assert not bad, (case, bad)
        for case, found in zip(RUNS, rank["gradients"], strict=True):
            assert found.keys() == expected.keys()
            for name, grad in expected.items():
                assert (found[name] - grad).norm() / grad.norm() < 1e-5, (case, name)
        for case, (curve, of_gradients, means, ours) in zip(RUNS, rank["runs"], strict=True):
            assert off_by(curve, losses) < 1e-5 and off_by(of_gradients, norms) < 1e-5, case
            for name, moment in moments.items():
                assert (ours[name] - moment).norm() / moment.norm() < 1e-4, (case, name)
                assert (means[name] - averages[name]).norm() / averages[name].norm() < 1e-4, (case, name)
        assert rank["different"] == [] and rank["bad"] == (False, False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 1, 1, 1, 1), "--expert_parallel_size 2: needs 2 processes and there is one"),
        ((3, 1, 1, 1, 8), "--expert_parallel_size 3: does not divide the 8 processes; change it"),
        ((8, 1, 1, 2, 8), "--expert_parallel_size 8: does not divide the 8 processes, .*_replicate makes 2 copies"),
        ((4, 1, 2, 1, 8), "--expert_parallel_size 4: the ranks of --tensor_parallel_size 2 divide the experts already"),
    ],
)
def test_processes_that_can_not_have_different_experts(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_expert_parallel_size(*sizes)


def test_models_that_can_not_be_divided():
    check_expert_parallel(CONFIG, ParallelDims.fill(8, ep=4))
    for config, ranks, ep, message in (
        (MODELS["DiT"], 2, 2, "--expert_parallel_size 2: dit models have nothing that it divides"),
        (
            CONFIG,
            6,
            3,
            "--expert_parallel_size 3: the model's number of experts, 8, can't be divided by it; use 2, 4, 8",
        ),
        (CONFIG, 14, 2, "--expert_parallel_size 2: 7 ranks have the same experts, and can't divide .*_fc1 of 1,920"),
    ):
        with pytest.raises(ValueError, match=message):
            check_expert_parallel(config, ParallelDims.fill(ranks, ep=ep))


def test_ranks_gather_no_experts_but_their_own():
    config = model_config("EC-DiT-1B/2", input_size=(32, 32), in_channels=4, num_classes=10)
    setup = Setup("fsdp", world=4, reshard="never", keep_gradients=True)
    whole, divided = (estimate(config, replace(setup, expert_parallel=ep), 2) for ep in (1, 4))
    assert expert_parameters(config) == 2 * 64 * 1152 * 144
    assert whole.gathered - divided.gathered == 2 * config.depth * expert_parameters(config) * 3 / 4
    assert whole.states == divided.states and whole.activations == divided.activations
