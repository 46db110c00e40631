"""Test FP8 with sequence parallelism: errors against fp32 are as small as those of one process in FP8. The tests run in
Triton's interpreter, on gloo ranks; tests/gpu/test_sequence_gpu.py has the same on GPUs."""

import pytest
import torch

from opendit.kernels.operations import FLOAT8, chosen
from opendit.models.dit import DiT, DiTConfig
from opendit.models.variants import STDiTConfig
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import products, sequence_parallel
from opendit.parallel.sequence.choose import Shape
from tests.kernels import conftest  # noqa: F401  (ranks must round as hardware does, too)
from tests.kernels.test_kernels_in_models import with_vectors
from tests.parallel.test_sequence import fresh, run, strategy, summed
from tests.ranks import run_ranks

# 15 tokens; with 4 ranks, each has one head and 48 rows of qkv
CONFIG = DiTConfig((6, 10), 2, 2, 64, 1, 4, num_classes=5)
CLIPS = STDiTConfig((2, 2, 6), (1, 2, 2), 3, 64, 1, 4, num_classes=5)  # 2 frames of 3 tokens
TYPES = {
    2: ["fastseq", "fastseq, kept", "ulysses", "ring", "direct ulysses", "direct fastseq", "direct fastseq, kept"],
    4: ["fastseq", "usp", "direct ulysses", "direct fastseq, early"],
}
SIZES = {2: (6, 10), 4: (2, 10)}  # 5 tokens are divided among 4 ranks as 2, 2, 1, 0
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def distances(found: Result, exact: Result) -> dict[str, float]:
    """Return relative errors of the output, of all gradients together, and of each gradient."""
    (output, grads), (exact_output, exact_grads) = found, exact
    errors = {"output": ((output - exact_output).norm() / exact_output.norm()).item()}
    errors |= {name: ((grads[name] - grad).norm() / grad.norm()).item() for name, grad in exact_grads.items()}
    total, size = (sum(t.double().square().sum() for t in tensors) for tensors in (
        [grads[name] - grad for name, grad in exact_grads.items()], exact_grads.values()
    ))  # fmt: skip
    return errors | {"all": (total / size).sqrt().item()}


def model_in_float8(config: DiTConfig = CONFIG) -> DiT:
    return with_vectors(fresh(config)).use(ops=chosen({FLOAT8}))


def of_every_type(mesh: Mesh) -> list[dict[str, float]]:
    """Return errors against fp32 in one process: first for FP8 in one process, then for every type."""
    ranks = mesh.world_size
    mesh, index, size = init_mesh(sequence_parallel=ranks), torch.arange(2), SIZES[ranks]
    exact = run(with_vectors(fresh(CONFIG)), index, size)
    found = [distances(run(model_in_float8(), index, size), exact)]
    for name in TYPES[ranks]:
        model = model_in_float8()
        ops = model.ops
        output, grads = run(model.use(ops=ops, sequence=strategy(mesh, name, CONFIG)), index, size)
        grads = {name: grad / ranks for name, grad in summed(grads).items()}
        found.append(distances((output, grads), exact))
    return found + of_a_grid(mesh) if ranks == 2 else found


def of_a_grid(mesh: Mesh) -> list[dict[str, float]]:
    """Return the same for an ST-DiT: in one process, and divided by frames and by places."""
    index, size = torch.arange(2), CLIPS.input_size
    exact = run(with_vectors(fresh(CLIPS)), index, size)
    model, shape = model_in_float8(CLIPS), Shape(CLIPS.tokens, 64, 4, types=CLIPS.sequence_types, axial=True)
    alone = distances(run(model, index, size), exact)
    output, grads = run(model.use(ops=model.ops, sequence=sequence_parallel(mesh, "auto", shape)), index, size)
    grads = {name: grad / mesh.world_size for name, grad in summed(grads).items()}
    return [alone, distances((output, grads), exact)]


@pytest.mark.parametrize("ranks", (2, 4))
def test_gradients_are_as_near_as_those_of_one_process(ranks):
    for alone, *shared in run_ranks(ranks, of_every_type):
        if ranks == 2:
            *shared, one, several = shared
            assert several["output"] < 1.1 * one["output"] and several["all"] < 1.1 * one["all"]
            assert all(error < 1.25 * one[name] + 0.01 for name, error in several.items())
        assert 0.01 < alone["blocks.0.attn.qkv.weight"] < 0.1
        for kind, errors in zip(TYPES[ranks], shared, strict=True):
            assert errors["output"] < 1.1 * alone["output"] and errors["all"] < 1.1 * alone["all"], (kind, errors)
            for name, error in errors.items():
                assert error < 1.25 * alone[name] + 0.01, (kind, name, error, alone[name])


def test_heads_that_do_not_fit_are_named():
    x = torch.randn(1, 4, 64)
    with pytest.raises(ValueError, match=r"a weight of \(24, 64\), of the heads of one rank"):
        products.Float8Products((x.dtype, x.dtype), torch.ones(1)).factor(torch.randn(24, 64))


def test_an_input_without_an_agreed_scale_is_refused():
    with pytest.raises(AssertionError, match="have not agreed"):
        products.prepare_projection(torch.randn(1, 4, 64), torch.nn.Linear(64, 192), float8=True)
