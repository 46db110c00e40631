"""--optimizer adamw8bit under each plugin is compared with one process that uses torchao's functions."""

import pytest
import torch
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels import eight_bit_moments
from opendit.models.dit import DiT, DiTConfig
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import init_mesh
from tests.models.test_dit import randomised
from tests.parallel.engines.test_engines import BETAS, CLIP, GLOBAL_BATCH, LR, loss_of
from tests.parallel.engines.test_fsdp import FREED, backward, gathered
from tests.ranks import run_ranks

STEPS, DECAY, UNIT = 4, 0.01, 256
# Each of two ranks holds complete units of 256 numbers, so the units don't depend on the number of ranks.
CONFIG = DiTConfig((4, 6), 2, 3, 32, depth=2, num_heads=2, num_classes=6)
WAYS = {  # plugin, fsdp replicas, micro-batches
    1: [("zero2", 1, 1), ("fsdp", 1, 2)],
    2: [("zero2", 1, 2), ("ddp", 1, 1), ("fsdp", 1, 1), ("fsdp", 2, 1)],
}


def build_model() -> DiT:
    torch.manual_seed(0)
    return randomised(DiT(CONFIG))


def plain_run(quantised: bool) -> tuple[list[float], dict[str, Tensor]]:
    theirs = pytest.importorskip("torchao.optim.adam")
    model, losses = build_model(), []
    states = {}
    for name, p in model.named_parameters():
        small = not quantised or p.numel() < 2 * UNIT or p.numel() % UNIT
        states[name] = [
            torch.zeros_like(p) if small else theirs.OptimState8bit.zeros(p.shape, signed, UNIT, dtype=p.dtype)
            for signed in (True, False)
        ]
    for step in range(STEPS):
        loss = loss_of(model, step, torch.arange(GLOBAL_BATCH))
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        settings = None, torch.tensor(LR), *BETAS, DECAY, 1e-8, True, False
        with torch.no_grad():
            for name, p in model.named_parameters():
                theirs.single_param_adam(p, p.grad, torch.tensor(step + 1.0), *states[name], *settings)
        model.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def all_trained(mesh, ways) -> list[tuple]:
    eight_bit_moments.LEAST = UNIT  # this model's parameters are small
    found = []
    for plugin, copies, accumulation in ways:
        own = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=copies)) if copies > 1 else mesh
        settings = dict(lr=LR, weight_decay=DECAY, betas=BETAS, grad_clip=CLIP, sharding=FREED, eight_bits=True)
        engine = build_engine(
            build_model(), own, plugin=plugin, precision="fp32", grad_accumulation=accumulation, **settings
        )
        losses = []
        for step in range(STEPS):
            loss = backward(engine, own, step, accumulation)
            assert engine.step().finite
            losses.append(own.sum(loss).item() / own.world_size)
        kept = [moment for state in engine.adam.state.values() for moment in state.values()]
        assert sum(isinstance(moment, eight_bit_moments.EightBits) for moment in kept) > 8 * CONFIG.depth
        found.append((losses, gathered(engine, engine.masters())))
    return found


@pytest.mark.parametrize("world", sorted(WAYS))
def test_curves_are_those_of_one_plain_process(world):
    losses, weights = plain_run(quantised=True)
    start, exact = dict(build_model().named_parameters()), plain_run(quantised=False)[1]

    def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        """Return the distance between weights relative to the distance that they moved."""
        of_blocks = [name for name in weights if name.startswith("blocks") and name.endswith(".weight")]
        return max(((one[n] - other[n]).norm() / (other[n] - start[n].detach()).norm()).item() for n in of_blocks)

    quantisation = apart(exact, weights)
    assert quantisation > 0.02
    for way, (got, masters) in zip(WAYS[world], run_ranks(world, all_trained, WAYS[world])[0], strict=True):
        assert got == pytest.approx(losses, rel=1e-4), way
        assert apart(masters, weights) < 0.1 * quantisation, (way, quantisation)
