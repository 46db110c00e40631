"""Expert parallelism, and expert choice under sequence parallelism, are compared with one process."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims, check_expert_parallel_size
from opendit.models.variants import ECDiTConfig
from opendit.models.zoo import model_config
from opendit.parallel.experts import check_expert_parallel, divide_among, expert_group, expert_parameters
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import divided_parameters
from opendit.training.memory import Setup, estimate
from tests.models.test_zoo import inputs
from tests.parallel.tensor.models import MODELS
from tests.parallel.tensor.test_layers import TOLERANCE, model_of
from tests.parallel.test_products import Meshes
from tests.ranks import run_ranks

# 15 tokens and 8 experts that take 4 each. Without qk_norm the gradient of the keys' bias is rounding noise.
CONFIG: ECDiTConfig = replace(MODELS["EC-DiT"], qk_norm=True)
TEXT: ECDiTConfig = MODELS["EC-DiT of text"]  # 4 experts that take 5 tokens each
SAMPLES = 4


def weighted(model, index: slice) -> Tensor:
    """Return a loss for some of the four samples."""
    output = model(*(part[index] for part in inputs(model.config, SAMPLES)))
    weights = torch.randn(SAMPLES, *output.shape[1:], generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return (output * weights[index]).sum() / len(output)


def exact(mesh: Mesh, config: ECDiTConfig, checkpointed: bool = False) -> dict[str, float]:
    """Return relative errors of the loss and of every parameter's gradient in float64."""
    whole = model_of(config)
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
        if name in divided:  # the gradient is already summed over the expert group's tokens
            assert divided[name].shape == full.shape
            ((start, stop),) = divided[name].cut.ranges[mesh.coordinate("ep")]
            full, grad = full[start:stop], mesh.sum(grad, "ep_shard") / mesh.world_size
        else:
            grad = mesh.sum(grad) / mesh.world_size
        assert full.norm() > 1e-8, name
        errors[name] = ((grad - full).norm() / full.norm()).item()
    return errors


SIZES = [dict(ep=2), dict(ep=4), dict(sp=4), dict(sp=2), dict(ep=2, sp=2), dict(ep=4, sp=2), dict(ep=2, sp=4)]


def every_size(mesh: Mesh) -> dict:
    meshes, found = Meshes(), {}
    for sizes in SIZES:
        for config in (CONFIG, TEXT) if sizes.get("ep", 1) * sizes.get("sp", 1) == 4 else (CONFIG,):
            found[(*sizes.items(), config is TEXT)] = exact(meshes.of(sizes), config, config is TEXT)
    return found


def test_loss_and_every_gradient_are_those_of_one_process():
    for rank in run_ranks(4, every_size):
        for case, errors in rank.items():
            bad = {name: error for name, error in errors.items() if not error < TOLERANCE}
            assert not bad, (case, bad)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 1, 1, 1), "--expert_parallel_size 2: needs 2 processes and there is one"),
        ((3, 1, 1, 8), "--expert_parallel_size 3: does not divide the 8 processes; change it"),
        ((8, 1, 2, 8), "--expert_parallel_size 8: does not divide the 8 processes, .*_replicate makes 2 copies"),
        ((4, 2, 1, 8), "--expert_parallel_size 4: the ranks of --tensor_parallel_size 2 divide the experts already"),
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
