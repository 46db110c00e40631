"""Test LoRA on a GPU: with the kernels in bf16 and in FP8, with recomputation, and in a CUDA graph."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import fp8, lora
from opendit.kernels.common import interpreting, missing
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.lora import (
    add_low_rank,
    low_rank_gradients,
    low_rank_gradients_and_cast,
    low_rank_product,
    thin_gradient,
    thin_product,
)
from opendit.kernels.recompute import recompute_in
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.finetuning import B, Lora, add_lora
from opendit.models.zoo import model_config
from opendit.parallel.engines import build_engine
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import build_runner
from tests.gpu.test_public_fp8_gpu import MIDDLE, SIZES
from tests.kernels import test_fp8_lora as cases
from tests.kernels import test_public_fp8 as public
from tests.models.test_dit import randomised
from tests.objectives import SquaredError
from tests.ranks import run_ranks
from train import EagerPasses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or interpreting(), reason="needs a GPU")
FLOAT8, REASON = float8_available("cuda", torch.bfloat16)
TOO_OLD = missing("low_rank_product") if torch.cuda.is_available() else "needs a GPU"
needs_descriptors = pytest.mark.skipif(TOO_OLD is not None, reason=str(TOO_OLD))
needs_float8 = pytest.mark.skipif(not FLOAT8, reason=REASON)
CONFIG = model_config("DiT-S/2", input_size=(32, 32), in_channels=4, num_classes=10)
LORA = Lora(16, 32.0, "", ("attn.*", "fc1:8", "fc2"))
BATCH = 32


def model_of(fp8: bool = False, kernels: bool = True, recompute: str = "none", dtype=torch.bfloat16) -> DiT:
    torch.manual_seed(0)
    on = SpeedFlags(kernels, kernels, kernels, fp8=fp8)
    chosen = select_kernels(on, torch.device("cuda"), dtype, 64, CONFIG.tokens)
    model = randomised(DiT(CONFIG))
    add_lora(model, LORA, (), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith(B):
            torch.nn.init.normal_(parameter, std=0.05)
    assert chosen.ops.float8 == fp8
    model = model.cuda().use(ops=chosen.ops, attend=chosen.attend)
    recompute_in(model, recompute)
    return model


def batch(number: int = 0) -> MicroBatch:
    generator = torch.Generator("cuda").manual_seed(number)
    x, noise = torch.randn(2, BATCH, 4, 32, 32, device="cuda", generator=generator).unbind()
    index = torch.arange(BATCH, device="cuda")
    return MicroBatch(x, index * 15, noise, index % 10)


def gradients(model: DiT, dtype) -> dict[str, torch.Tensor]:
    given = batch()
    out = model.place("cuda", dtype)(given.x0, given.t, given.condition).float()
    (out * torch.cat([given.noise, given.x0], 1)).mean().backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}


def test_gradients_beside_kernels_are_near_fp32():
    torch.set_float32_matmul_precision("highest")
    wanted = gradients(model_of(kernels=False, dtype=torch.float32), torch.float32)
    ways = [(dict(), 0.05), (dict(recompute="half"), 0.05), (dict(kernels=False), 0.05)]
    ways += [(dict(fp8=True), 0.3)] if FLOAT8 else []
    for how, bound in ways:
        found = gradients(model_of(**how), torch.bfloat16)
        errors = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in wanted.items()}
        assert found.keys() == wanted.keys() and max(errors.values()) < bound, (
            how,
            max(errors.items(), key=lambda e: e[1]),
        )


@pytest.mark.parametrize(
    ("rows", "width", "rank"), [(32768, 4608, 16), (4608, 3072, 16), (4097, 1160, 5), (300, 64, 64)]
)
def test_both_gradients_of_one_read_are_near_fp64_and_repeat(rows, width, rank):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (rows, width), (width, rank), (rows, rank)
    dy, b, thin = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    found, again = (low_rank_gradients(dy, b, thin, 0.5) for _ in range(2))
    exact = 0.5 * (dy.double() @ b.double()), 0.5 * (dy.double().t() @ thin.double())
    for got, same, want in zip(found, again, exact, strict=True):
        assert torch.equal(got, same) and (got.double() - want).norm() < 3e-3 * want.norm()
    dy8 = fp8.Float8.empty(dy.shape, fp8.E5M2, dy.device)
    arguments = fp8.kernel_arguments(dy8, fp8.amax(dy), fp8.SAMPLED_GRADIENT)
    also = low_rank_gradients_and_cast(dy, b, thin, 0.5, *arguments) if FLOAT8 else found
    assert also is not None and all(map(torch.equal, also, found))
    assert not FLOAT8 or torch.equal(dy8.data.float(), fp8.cast(dy, fp8.E5M2).data.float())


@needs_float8
@pytest.mark.parametrize(
    ("rows", "width", "rank"), [(32768, 4608, 16), (4608, 3072, 16), (4097, 1168, 5), (300, 64, 64)]
)
def test_thin_products_beside_float8_are_near_fp64_and_repeat(rows, width, rank):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (rows, width), (rank, width), (rows, rank)
    x, a, thin = (torch.randn(s, device="cuda", generator=generator) for s in shapes)
    x, a, thin, descale = (8 * x).to(torch.float8_e4m3fn), a.bfloat16(), thin.bfloat16(), torch.tensor([0.25]).cuda()
    y = x.bfloat16()
    added = [y.clone() for _ in range(2)]
    for out in added:
        add_low_rank(out, thin, a, 0.5)
    pairs = [(thin_product(x, descale, a), thin_gradient(thin, x, descale)) for _ in range(2)]
    exact = 0.25 * (x.double() @ a.double().t()), 0.25 * (thin.double().t() @ x.double())
    exact += (y.double() + 0.5 * (thin.double() @ a.double()),)
    for got, same, want in zip((*pairs[0], added[0]), (*pairs[1], added[1]), exact, strict=True):
        assert torch.equal(got, same) and (got.double() - want).norm() < 3e-3 * want.norm()


@needs_descriptors
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "rank"),
    [(32768, 1152, 4608, 16), (4097, 1160, 1032, 8), (129, 3072, 3080, 40), (777, 64, 256, 64)],
)
def test_product_and_thin_term_are_near_fp64_and_repeat(rows, depth, columns, rank, monkeypatch):
    monkeypatch.setattr(lora, "low_rank_product_reference", None)
    monkeypatch.setattr(lora, "SMALLEST_OUTPUT", 0)
    monkeypatch.setattr(lora, "LONGEST_SUM", depth)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (rows, depth), (columns, depth), (rows, rank), (columns, rank), (columns,)
    x, weight, thin, factor, bias = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    for turned in (True, False):
        matrices = [matrix.t() if turned else matrix.t().contiguous() for matrix in (weight, factor)]
        found, again = (low_rank_product(x, matrices[0], thin, matrices[1], 0.5, bias) for _ in range(2))
        want = x.double() @ weight.double().t() + 0.5 * (thin.double() @ factor.double().t()) + bias.double()
        assert torch.equal(found, again) and (found.double() - want).norm() < 3e-3 * want.norm()


@needs_float8
@pytest.mark.parametrize("family", MIDDLE)
def test_public_models_in_float8_are_near_fp32(family, monkeypatch):
    """The bounds are those of tests/gpu/test_public_fp8_gpu.py."""
    for name, value in (("DEVICE", "cuda"), ("SIZES", SIZES), ("VALUES", MIDDLE)):
        monkeypatch.setattr(public, name, value)
    torch.set_float32_matmul_precision("highest")
    want, wanted = cases.gradients(cases.with_lora(family), torch.float32)
    got, found = cases.gradients(public.in_float8(cases.with_lora(family), torch.bfloat16), torch.bfloat16)
    assert 1e-3 < public.error(got, want) < 0.15
    errors = {name: public.error(found[name], gradient) for name, gradient in wanted.items()}
    assert not {name: value for name, value in errors.items() if value > 0.375}


def steps(mesh, fp8: bool, graph: bool) -> list[float]:
    engine = build_engine(model_of(fp8), mesh, plugin="zero2", precision="bf16", lr=1e-3)
    assert engine.shapes and all(".lora_" in name for name in engine.shapes)
    runner = build_runner(EagerPasses(engine, SquaredError()), graph=graph)
    losses = [runner.train_step([batch(number % 2)]).loss.item() for number in range(8)]
    assert "failed" not in runner.note and runner.note.startswith("off") != graph
    return losses


@pytest.mark.parametrize("fp8", (False, pytest.param(True, marks=needs_float8)))
def test_replayed_steps_are_the_steps(fp8):
    (eager,), (recorded,) = (run_ranks(1, steps, fp8, graph) for graph in (False, True))
    assert eager[-2] < 0.95 * eager[0]
    assert recorded == pytest.approx(eager, rel=2e-2)  # cuDNN adds the parts of dq in any order
