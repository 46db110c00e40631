"""Test that ranks that share a sample can record their steps and communication as a CUDA graph, with the same bits."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import DDPMObjective
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT, DiTConfig
from opendit.parallel.collectives import SharedBatch
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh, make_replicas
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import divide, tensor_group
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
CONFIG = DiTConfig((22, 46), 2, 4, 512, 2, 8, num_classes=10)  # 253 tokens, so one of 2 GPUs has one less
SAMPLES, STEPS = 3, 7


def draw(mesh: Mesh, kind: str) -> list[tuple[str, torch.Tensor]]:
    """Return the engine's note and the latents of two batches, recorded, then unrecorded."""
    torch.manual_seed(0)
    model, around = randomised(DiT(CONFIG)), None
    head = CONFIG.hidden_size // CONFIG.num_heads
    sequence = None
    if kind == "cfg_parallel":
        halves = make_replicas(mesh, True).halves
        around = lambda forward: SharedBatch(forward, halves)  # noqa: E731
    elif kind == "tensor":
        group = tensor_group(init_mesh(tensor_parallel=2))
        sequence = divide(model, group)
    else:
        mesh = init_mesh(sequence_parallel=2)
        shape = Shape(CONFIG.tokens, CONFIG.hidden_size, CONFIG.num_heads, 2 * SAMPLES)
        sequence = sequence_parallel(mesh, kind, shape)
    speed = SpeedFlags(True, True, True)
    kernels = select_kernels(speed, mesh.device, torch.bfloat16, head, CONFIG.tokens, inference=kind != "tensor")
    model.place(mesh.device, torch.bfloat16).eval().use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)
    found = []
    for record in (True, False):
        engine = SamplingEngine(model, DDPMObjective(), steps=STEPS, around=around, record=record)
        for seed in (0, 1):
            y, null = torch.tensor([1, 7, 3], device=mesh.device), torch.tensor([10], device=mesh.device)
            latents = engine.sample(y, null, torch.arange(SAMPLES), seed)
            found.append((engine.note, latents.cpu()))
    return found


@pytest.mark.parametrize("kind", ["cfg_parallel", "ulysses", "fastseq", "ring", "tensor"])
def test_recorded_steps_give_the_same_bits(kind):
    for (note, first), (_, second), (other, want), (_, other_want) in run_ranks(2, draw, kind):
        assert note == "recorded as a CUDA graph" and other.startswith("kernel by kernel")
        assert torch.equal(first, want) and torch.equal(second, other_want) and not torch.equal(first, second)


KEPT = []


def leave(mesh: Mesh) -> bool:
    """Close the process groups while an engine with recorded communication still exists."""
    halves = make_replicas(mesh, True).halves
    model = randomised(DiT(CONFIG)).place(mesh.device, torch.bfloat16).eval()
    around = lambda forward: SharedBatch(forward, halves)  # noqa: E731
    engine = SamplingEngine(model, DDPMObjective(), steps=STEPS, around=around)
    y, null = torch.tensor([1, 7, 3], device=mesh.device), torch.tensor([10], device=mesh.device)
    engine.sample(y, null, torch.arange(SAMPLES), 0)
    KEPT.append(engine)
    close_mesh()
    return engine.records and not torch.distributed.is_initialized()


@pytest.mark.timeout(120)  # a failure would hang
def test_recorded_communication_does_not_hold_up_the_end():
    assert run_ranks(2, leave) == [True, True]
