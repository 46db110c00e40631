"""Test pipeline parallelism on GPUs with all fused kernels against one GPU: all gradients and the loss curve. In bf16,
the error of a loss or gradient against fp32 may be at most 1.5 times that of one GPU, which rounds as often."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.zoo import build_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import build_engine
from opendit.parallel.fsdp import Sharding
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.pipeline import mesh_stages
from opendit.parallel.tensor import tensor_group
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import build_runner
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs
from tests.numbers import off_by
from tests.objectives import SquaredError
from tests.parallel.tensor.models import MODELS
from tests.ranks import run_ranks
from train import EagerPasses

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
WIDE = {"hidden_size": 512, "num_heads": 8, "in_channels": 4, "depth": 5}  # 253 tokens
CONFIGS = {
    name: replace(MODELS[name], **WIDE, input_size=(22, 46) if len(MODELS[name].patch) == 2 else (11, 2, 46))
    for name in ("DiT, every option", "vDiT", "ST-DiT", "MovieGen, bias")
}
MICRO_BATCHES, STEPS = 4, 20


def micro_batches(config, mesh: Mesh, step: int) -> list[MicroBatch]:
    made, generator = [], torch.Generator().manual_seed(step % 3)
    for number in range(MICRO_BATCHES):
        x, t, y = inputs(config, 3, torch.float32)
        noise = torch.randn(x.shape, generator=generator)
        made.append(MicroBatch(*(part.to(mesh.device) for part in (x + number, t, noise, y))))
    return made


def engine_of(config, mesh: Mesh, plugin: str, precision: str, schedule: str):
    torch.manual_seed(0)
    values = {name: p.detach() for name, p in randomised(build_model(config)).named_parameters()}
    model: DiT = build_model(config).to(mesh.device)
    half = torch.float32 if precision == "fp32" else torch.bfloat16
    kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, half, config.head_dim, config.tokens)
    stages, tensor = mesh_stages(mesh, config, schedule), tensor_group(mesh)
    apply_parallel(model, ops=kernels.ops, attend=kernels.attend, stages=stages, tensor=tensor)
    return build_engine(
        model,
        mesh,
        plugin=plugin,
        precision=precision,
        lr=1e-4,
        grad_clip=1.0,
        grad_accumulation=MICRO_BATCHES,
        sharding=Sharding(),
        initial=lambda name, shard: shard.take(values[name]),
    )


def gradients(config, mesh: Mesh, precision: str, schedule: str = "1f1b") -> dict[str, Tensor]:
    """Return the loss and this rank's gradients after the passes of a step, unsharded because the plugin is ddp."""
    engine = engine_of(config, mesh, "ddp", precision, schedule)
    runner = build_runner(EagerPasses(engine, SquaredError(), MICRO_BATCHES))
    loss = runner.passes(micro_batches(config, mesh, 0))
    shards = engine.gradient_shards()
    engine.replicated and engine.replicated.sum(list(shards.values()))
    found = {name: shard.float().clone() for name, shard in shards.items()}
    return found | {"loss": mesh.sum(loss, "pp").float().view(1)}


def every_model(mesh: Mesh) -> dict[str, tuple]:
    """Return errors against one GPU in fp32: two GPUs in fp32, one in bf16, two in bf16."""
    torch.set_float32_matmul_precision("highest")
    alone = Mesh(0, 1, mesh.local_rank, mesh.device, ParallelDims())
    two, found = init_mesh(dims=ParallelDims(pp=2)), {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        schedule = ("1f1b", "interleaved")[number % 2]
        whole = gradients(config, alone, "fp32")
        others = gradients(config, two, "fp32", schedule), gradients(config, alone, "bf16")
        others += (gradients(config, two, "bf16", schedule),)
        held = others[0].keys()
        found[name] = tuple(
            {part: ((one[part] - whole[part]).norm() / whole[part].norm()).item() for part in held} for one in others
        )
    return found


def test_losses_and_every_gradient_are_those_of_one_gpu():
    for rank in run_ranks(2, every_model):
        for name, (exact, one, two) in rank.items():
            assert max(exact.values()) < 2e-4, (name, max(exact, key=exact.get), max(exact.values()))
            for part, distance in two.items():
                assert distance < 1.5 * one[part] + 1e-3, (name, part, distance, one[part])


def curves(mesh: Mesh, cases: list) -> list[list[float]]:
    found, config = [], CONFIGS["DiT, every option"]
    for sizes, plugin, schedule in cases:
        here = init_mesh(dims=ParallelDims.fill(mesh.world_size, **sizes))
        engine = engine_of(config, here, plugin, "bf16", schedule)
        runner = build_runner(EagerPasses(engine, SquaredError(), MICRO_BATCHES))
        steps = (micro_batches(config, here, step) for step in range(STEPS))
        found.append([runner.train_step(given).loss.item() for given in steps])
        runner.close()
    return found


TWO = [(dict(), "ddp", "1f1b"), (dict(pp=2), "zero2", "1f1b"), (dict(pp=2), "ddp", "interleaved")]
FOUR = [(dict(), "ddp", "1f1b"), (dict(pp=2), "fsdp", "1f1b"), (dict(pp=2), "fsdp", "interleaved"),
        (dict(pp=2, tp=2), "zero2", "1f1b"), (dict(pp=4), "zero2", "1f1b")]  # fmt: skip


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_a_training_run_has_the_curve_of_data_parallelism(ranks, cases):
    """All ranks see the same samples, so data parallelism computes the same as one GPU."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for alone, *others in run_ranks(ranks, curves, cases):
        assert alone[-1] < 0.95 * alone[0]
        for case, losses in zip(cases[1:], others, strict=True):
            assert off_by(losses, alone) < 0.01, case
