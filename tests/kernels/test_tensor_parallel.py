"""Test the fused kernels with tensor parallelism against torch in one process. The tests run in Triton's interpreter,
on gloo ranks; tests/gpu/test_tensor_gpu.py has the same on GPUs."""

from dataclasses import replace

from opendit.kernels.operations import MODULATE, NORM, SPLIT, chosen
from opendit.parallel.mesh import Mesh, init_mesh
from tests.kernels import conftest  # noqa: F401  (ranks need its interpreter patches, too)
from tests.parallel.tensor.models import MODELS
from tests.parallel.tensor.test_layers import compare
from tests.ranks import run_ranks

CASES = "DiT", "MovieGen, bias"


def with_kernels(mesh: Mesh) -> list[dict[str, float]]:
    mesh, ops = init_mesh(tensor_parallel=2), chosen({MODULATE, NORM, SPLIT})
    return [compare(mesh, replace(MODELS[name], hidden_size=64), 3, ops=ops) for name in CASES]


def test_kernels_on_a_rank_s_part_are_torch_on_the_whole():
    for rank in run_ranks(2, with_kernels):
        for name, errors in zip(CASES, rank, strict=True):
            assert max(errors.values()) < 1e-5, (name, max(errors, key=errors.get), max(errors.values()))
