"""Test public models in the sampling engine on GPUs. Recorded steps give the same bits as unrecorded ones, for captions
of unequal lengths and batches of varying lengths. Two ranks draw the same samples as one."""

import pytest
import torch
from torch import Tensor

from opendit.models.families.network import PublicDiT
from opendit.parallel.mesh import Mesh
from opendit.sampling.sampling_engine import SamplingEngine
from tests.ranks import run_ranks
from tests.sampling.public import CASES, MORE, WAYS, Case, drawn, exact, network, placed, shared

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = [f"{case.family}, {case.sampler}" for case in CASES]
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # as in test_sampling_gpu.py
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
NUMBERS = (0, 1, 2, 0)


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def recorded_and_not(model: PublicDiT, case: Case, around=None, **asked) -> tuple[list[Tensor], list[Tensor]]:
    """Draw batches with and without recorded steps, and return both lists of latents."""
    found = []
    for record in (True, False):
        settings = case.settings | asked
        engine = SamplingEngine(model, case.objective, around=around, record=record, **settings)
        found.append(drawn(engine, case.family, model.device, NUMBERS))
        assert engine.records == record, engine.note
        assert all(bool(loop.recordings) == record for loop in engine.loops.values())
    return found[0], found[1]


def cuda(case: Case, dtype: torch.dtype) -> PublicDiT:
    torch.set_float32_matmul_precision("highest")
    return placed(network(case.family), torch.device("cuda"), dtype)


@DTYPES
@pytest.mark.parametrize("case", CASES + MORE, ids=lambda case: f"{case.family}, {case.sampler}")
def test_recorded_steps_are_the_steps(case, dtype):
    latents, eager = recorded_and_not(cuda(case, dtype), case)
    for number, one, other in zip(NUMBERS, latents, eager, strict=True):
        assert torch.equal(one, other), number
        assert off(one, exact(case, number)) < BOUNDS[dtype], (number, off(one, exact(case, number)))


@pytest.mark.parametrize("asked", [{"cache": "taylor:2:1"}, {"cache": "first_block:10"}], ids=str)
@pytest.mark.parametrize("case", CASES[:3], ids=NAMES[:3])
def test_recorded_approximations(case, asked):
    latents, eager = recorded_and_not(cuda(case, torch.bfloat16), case, steps=6, **asked)
    assert all(map(torch.equal, latents, eager))


def distances(mesh: Mesh, dtype: torch.dtype) -> list[tuple[str, bool, list[float], list[float]]]:
    """Compare two ranks and one with fp32 on a CPU. Returns, for every case and way, whether recorded steps give the
    same bits, and the errors of two ranks and of one."""
    torch.set_float32_matmul_precision("highest")
    found = []
    for case in CASES[:3]:
        wanted = [exact(case, number) for number in NUMBERS]
        one = SamplingEngine(placed(network(case.family), mesh.device, dtype), case.objective, **case.settings)
        alone = [off(*pair) for pair in zip(drawn(one, case.family, mesh.device, NUMBERS), wanted, strict=True)]
        for way in WAYS:
            model, around = shared(case, way, mesh, dtype)
            latents, eager = recorded_and_not(model, case, around)
            errors = [off(*pair) for pair in zip(latents, wanted, strict=True)]
            found.append((f"{case.family}, {way}", all(map(torch.equal, latents, eager)), errors, alone))
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@DTYPES
def test_two_ranks_draw_what_one_draws(dtype):
    for results in run_ranks(2, distances, dtype):
        for name, equal, errors, alone in results:
            assert equal, name
            assert max(errors) < BOUNDS[dtype], (name, errors)
            assert max(errors) < 2 * max(alone) + 1e-5, (name, errors, alone)
