"""Test ST-DiT with sequence parallelism on 2 and 4 GPUs in bf16: gradients, and steps replayed from a CUDA graph. The
error of an output or gradient against fp32 may be at most 1.5 times that of one GPU in bf16, which rounds as often."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opendit.config.components import SpeedFlags
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.variants import STDiTConfig
from opendit.models.zoo import build_model
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.axial import AllToAll, DirectExchange
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.sequence.peer_memory import connect
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import build_runner
from tests.gpu.test_sequence_gpu import distances, needs, ranks
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.objectives import SquaredError
from tests.ranks import run_ranks
from train import EagerPasses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
LATTE = STDiTConfig((7, 16, 20), (1, 2, 2), 4, 512, 2, 8, num_classes=10)  # 7 frames of 80 tokens
EVEN = replace(LATTE, input_size=(8, 18, 22), full_attention=True, qk_norm=True, positions="rope")
SAMPLES, STEPS = 2, 8
WAYS = ["collectives 1", "collectives 2", "direct 1", "direct 2", "direct 3"]


def model_on(config: STDiTConfig, device: torch.device) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config)).to(device)


def use(model: DiT, dtype: torch.dtype, sequence: SequenceParallel | None = None, fp8: bool = False) -> DiT:
    config, flags = model.config, SpeedFlags(True, True, True, fp8=fp8)
    kernels = select_kernels(flags, model.device, dtype, config.head_dim, config.tokens)
    return model.use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)


def shared_by(mesh: Mesh, config: STDiTConfig, way: str) -> SequenceParallel:
    how = dict(types=config.sequence_types, axial=True)
    made = sequence_parallel(mesh, "auto", Shape(config.tokens, config.hidden_size, config.num_heads, SAMPLES, **how))
    kind, parts = way.split()
    memory, why = connect(made.group, mesh.device)
    assert memory is not None, why
    return replace(made, axial=AllToAll(int(parts)) if kind == "collectives" else DirectExchange(memory, int(parts)))


def batch(config: STDiTConfig, device: torch.device, step: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 4, *config.input_size, generator=generator).to(device)
    weights = torch.randn(SAMPLES, 8, *config.input_size, generator=generator).to(device)
    return x, torch.tensor([7, 700], device=device), torch.tensor([3, 10], device=device), weights


def gradients(model: DiT) -> tuple[Tensor, dict]:
    *arguments, weights = batch(model.config, model.device)
    model.zero_grad()
    output = model(*arguments)
    (output.float() * weights).sum().div(SAMPLES).backward()
    return output.detach().float(), {name: p.grad.float() for name, p in model.named_parameters()}


def every_way(mesh: Mesh) -> list:
    """Return errors against one GPU in fp32, for each configuration: first for one GPU in bf16, then for every way."""
    torch.set_float32_matmul_precision("highest")
    mesh, device, half, found = init_mesh(sequence_parallel=mesh.world_size), mesh.device, torch.bfloat16, []
    for config in (LATTE, EVEN):
        exact = gradients(use(model_on(config, device), torch.float32))
        results = [distances(gradients(use(model_on(config, device).place(device, half), half)), exact)]
        for number, way in enumerate(WAYS):
            model = model_on(config, device).place(device, half)
            model.grad_checkpoint = number % 2 == 1
            output, grads = gradients(use(model, half, shared_by(mesh, config, way)))
            for grad in grads.values():
                dist.all_reduce(grad)
                grad /= mesh.world_size
            results.append(distances((output, grads), exact))
        found.append(results)
    return found


@ranks
def test_outputs_and_every_gradient_are_those_of_one_gpu_in_bf16(world):
    needs(world)
    for rank in run_ranks(world, every_way):
        for (output, grads), *others in rank:
            assert 1e-4 < output < 3e-2
            for way, (ours, our_grads) in zip(WAYS, others, strict=True):
                assert ours < 1.5 * output, way
                for name, distance in our_grads.items():
                    assert distance < 1.5 * grads[name] + 1e-3, (way, name, distance, grads[name])


def recorded(mesh: Mesh) -> list[list[tuple[str, list[float]]]]:
    """Return (the runner's note on CUDA graphs, losses) for each way, without a graph and with one."""
    shared, found = init_mesh(sequence_parallel=mesh.world_size), []
    for way in ("collectives 2", "direct 2"):
        runs = []
        for graph in (False, True):
            model = use(model_on(EVEN, mesh.device), torch.bfloat16, shared_by(shared, EVEN, way))
            engine, losses = build_engine(model, shared, plugin="zero2", precision="bf16", lr=1e-3, grad_clip=0.0), []
            runner = build_runner(EagerPasses(engine, SquaredError()), graph=graph)
            for step in range(STEPS):
                x, t, y, target = batch(EVEN, mesh.device, step % 3)
                losses.append(runner.train_step([MicroBatch(x, t, target, y)]).loss.item())
            runs.append((runner.note, losses))
        found.append(runs)
    return found


@ranks
def test_a_recorded_step_is_the_step(world):
    needs(world)
    for rank in run_ranks(world, recorded):
        for (off, losses), (note, replayed) in rank:
            assert off.startswith("off") and note.startswith("forward and backward")
            assert off_by(replayed, losses) < 0.01 and losses[-1] < 0.95 * losses[0]
