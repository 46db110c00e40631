"""Test FP8 casts, scales and the block's linear layers against float64 and the rounding error of the formats.

These tests run in Triton's interpreter; tests/gpu/test_fp8_gpu.py runs the same on a GPU. Rounding to e4m3 changes a
number by up to 2^-4 of its value (e5m2: 2^-3). For a uniform error, the RMS is at most 2^-4 / sqrt(3) = 0.036 (e5m2:
0.072). So the relative error of a product is sqrt(2) * 0.036 = 0.051 for two e4m3 matrices, and 0.081 for e5m2 and
e4m3.
"""

import math
from dataclasses import replace

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import fp8, fp8_inference
from opendit.kernels.bias_gelu import bias_gelu_backward_float8, bias_gelu_float8, bias_gelu_reference
from opendit.kernels.fp8 import E4M3, E5M2, keep_weights, rows_in_float8, rows_in_float8_reference
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate_float8
from opendit.kernels.layernorm_modulate import layernorm_modulate_float8, layernorm_modulate_reference
from opendit.kernels.operations import FLOAT8, INFERENCE, chosen
from opendit.kernels.select import select_kernels
from opendit.kernels.split_heads import gather_heads_float8
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import TORCH_OPS, Projection
from opendit.models.variants import STDiTConfig
from opendit.models.zoo import build_model
from tests.kernels.test_kernels_in_models import gradients, inputs
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

DEVICE = "cpu"
ACTIVATIONS = torch.float32  # bf16 on a GPU, because _scaled_mm adds no bias in fp32
CONFIG = DiTConfig((4, 4), 2, 2, 64, 2, 2, num_classes=3)
FORMATS = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}  # half a step: relative, and for subnormals
PRODUCT = {E4M3: 0.06, E5M2: 0.09}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale


def assert_rounded(got: fp8.Float8, want: torch.Tensor, slack: float = 1e-5) -> None:
    """Assert that every element is within half a step of the format. ``slack`` allows for errors before rounding."""
    relative, absolute = FORMATS[got.data.dtype]
    error = (got.data.double() * got.descale.double() - want.double()).abs()
    bound = want.double().abs() * (relative + slack) + absolute * got.descale.double() + slack * want.abs().max()
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
@pytest.mark.parametrize("source", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((1, 64), (17, 72), (3, 7, 144), (300, 64)))
@pytest.mark.parametrize("scale", (1e-3, 3.0))
def test_cast_is_torchs_with_the_right_factor(dtype, source, shape, scale):
    x = normal(*shape, scale=scale).to(source)
    for exact in (False, True):
        got = fp8.cast(x, dtype, exact=exact)
        target = fp8.EXACT if exact else fp8.SAMPLED if dtype == E4M3 else fp8.SAMPLED_GRADIENT
        factor = fp8.float8_factor_reference(x.abs().max(), target)
        assert got.descale.item() == 1 / factor.item()
        assert torch.equal(got.data.float(), fp8.float8_reference(x, factor, dtype).float())
    columns = fp8.transposed(got.data)
    rows = x.numel() // x.shape[-1]
    assert columns.shape == (x.shape[-1], math.ceil(rows / 16) * 16)
    assert torch.equal(columns[:, :rows].float(), got.data.flatten(0, -2).float().t())
    assert not columns[:, rows:].float().any()


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
def test_what_is_not_finite_becomes_nan_and_what_is_too_large_the_limit(dtype):
    x = normal(40, 64)
    clean = fp8.cast(x, dtype)
    for value in (math.inf, -math.inf, math.nan):
        spoilt = x.clone()
        spoilt[3, 5] = value
        assert fp8.cast(spoilt, dtype).data.float().isnan().nonzero().tolist() == [[3, 5]]
    cut = fp8.float8_reference(x * 1e6, 1 / clean.descale, dtype).float()
    assert cut.isfinite().all() and cut.abs().max() == fp8.LIMIT[dtype]


def test_zeros_and_the_smallest_numbers():
    for value in (0.0, 1e-44):
        got = fp8.cast(torch.full((20, 64), value, device=DEVICE), E5M2)
        assert got.descale.isfinite().all() and (got.data.float() * got.descale).abs().max() <= 1e-40


def test_a_sample_sees_every_column():
    for rows, width in ((32768, 1152), (131072, 1024), (32768, 4608), (65536, 3456), (100, 64)):
        blocks = -(-width // 128)
        runs = rows * blocks
        step = fp8.sample_step(runs, blocks)
        assert {run % blocks for run in range(0, runs, step)} == set(range(blocks))
        assert min(runs, fp8.SAMPLE // 128) <= -(-runs // step) <= 2 * blocks * fp8.SAMPLE // 128


@pytest.mark.parametrize(("rows", "width"), ((1, 64), (37, 200)))
def test_gelu(rows, width):
    x, bias, dy = normal(rows, width, scale=3), normal(width, seed=1), normal(rows, width, seed=2, scale=1e-7)
    x64, bias64 = x.double().requires_grad_(), bias.double().requires_grad_()
    want = bias_gelu_reference(x64, bias64)
    want.backward(dy.double())
    assert_rounded(bias_gelu_float8(x, bias), want.detach())
    dx, dbias = bias_gelu_backward_float8(dy, x, bias, sums=True)
    assert_rounded(dx, x64.grad)
    torch.testing.assert_close(dbias.double(), bias64.grad, rtol=1e-4, atol=1e-11)  # sums of values before rounding


@pytest.mark.parametrize("layout", ("heads first", "tokens first", "packed"))
def test_gathered_heads(layout):
    B, H, N, d = 2, 3, 21, 24
    grads = [normal(B, H, N, d, seed=s, scale=1e-6) for s in range(3)]
    want = torch.stack(grads).permute(1, 3, 0, 2, 4).reshape(B, N, 3 * H * d)
    if layout == "tokens first":
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    elif layout == "packed":
        grads = list(want.view(B, N, 3, H, d).permute(2, 0, 3, 1, 4).unbind(0))
    got, dbias = gather_heads_float8(*grads, torch.float32)
    assert_rounded(got, want)
    torch.testing.assert_close(dbias, want.sum((0, 1)), rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("largest", (1.0, 30.0))  # one channel far above the rest, so that LN(x) is near its bound
def test_layernorm_modulate_never_exceeds_the_range(largest):
    x, modulation = normal(2, 19, 200), normal(2, 1200, seed=1)
    x[..., 7] *= 100 * largest
    shift, scale, gate = modulation.chunk(6, dim=1)[:3]
    branch, bias = normal(2, 19, 200, seed=3), normal(200, seed=4)
    got, _, _ = layernorm_modulate_float8(x, shift, scale)
    assert_rounded(got, layernorm_modulate_reference(x.double(), shift.double(), scale.double()), slack=1e-4)
    h, y, _, _ = gate_residual_layernorm_modulate_float8(x, gate, branch, shift, scale, bias)
    torch.testing.assert_close(h, x + gate[:, None] * (branch + bias), rtol=1e-5, atol=1e-5)
    assert_rounded(y, layernorm_modulate_reference(h.double(), shift.double(), scale.double()), slack=1e-4)


@pytest.mark.parametrize("width", (64, 72, 200, 1152))
@pytest.mark.parametrize("source", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_rows_have_a_scale_each(width, source):
    x = (normal(3, 7, width) * torch.logspace(-6, 3, 21).to(DEVICE).view(3, 7, 1)).to(source)
    got, want = rows_in_float8(x), rows_in_float8_reference(x)
    assert got.descale.shape == (21, 1) and torch.equal(got.descale, want.descale)
    assert torch.equal(got.data.float(), want.data.float())
    for rows in (slice(2, 3), slice(0, 2)):  # independent of the other rows
        alone = rows_in_float8(x[rows], chunk=4)
        assert torch.equal(alone.data.float(), got.data[rows].float())
        assert torch.equal(alone.descale.view(-1, 7), got.descale.view(3, 7)[rows])
    spoilt = x.clone()
    spoilt[1, 2, 5] = math.inf
    bad = rows_in_float8(spoilt)
    values = bad.data.float() * bad.descale.view(3, 7, 1)
    assert values.isnan().all(2).nonzero().tolist() == [[1, 2]] and values.isnan().sum() == width
    spoilt[1, 2, 5] = math.nan
    bad = rows_in_float8(spoilt)
    assert (bad.data.float() * bad.descale.view(3, 7, 1)).isnan()[1, 2, 5]
    number = torch.exp2(torch.arange(21.0, device=DEVICE) - 10).view(21, 1)
    scaled = rows_in_float8(x.float() / number.view(3, 7, 1), scale=number)
    assert torch.equal(scaled.data.float(), got.data.float()) and torch.equal(scaled.descale, got.descale)


def by_row(float8: fp8.Float8) -> list[fp8.Float8]:
    return [fp8.Float8(*pair) for pair in zip(float8.data.flatten(0, -2), float8.descale, strict=True)]


@pytest.mark.parametrize(("rows", "width"), ((1, 64), (37, 200)))
def test_gelu_of_rows(rows, width):
    x, bias = normal(rows, width, scale=3), normal(width, seed=1)
    want = bias_gelu_reference(x.double(), bias.double())
    for got, row in zip(by_row(rows_in_float8(x, bias)), want, strict=True):
        assert_rounded(got, row, slack=1e-5 if DEVICE == "cpu" else 5e-4)  # the hardware's tanh is less accurate


def test_layernorm_modulate_with_a_scale_for_every_sample():
    """The modulation differs between samples by orders of magnitude. The scale comes from LayerNorm's bound."""
    x, modulation, branch, bias = normal(3, 19, 200), normal(3, 600, seed=1), normal(3, 19, 200, seed=3), normal(200)
    x[..., 7] *= 3000
    shift, scale, gate = (modulation * torch.tensor([[0.01], [1.0], [100.0]], device=DEVICE)).chunk(3, dim=1)
    shift[1:] /= 50
    got, _, _ = layernorm_modulate_float8(x, shift, scale, by_row=True)
    h, y, _, _ = gate_residual_layernorm_modulate_float8(x, gate, branch, shift, scale, bias, by_row=True)
    for float8, source in ((got, x), (y, h)):
        want = layernorm_modulate_reference(source.double(), shift.double(), scale.double()).flatten(0, 1)
        for found, row in zip(by_row(float8), want, strict=True):
            assert_rounded(found, row, slack=1e-4)
        assert len(float8.descale.view(3, 19)[:, 0].unique()) == 3 and len(float8.descale.unique()) == 3
    torch.testing.assert_close(h, x + gate[:, None] * (branch + bias), rtol=1e-5, atol=1e-5)
    number = normal(57, 1, seed=5).abs() + 0.1
    given = x, gate, branch / number.view(3, 19, 1), shift, scale, bias
    again, _, _, _ = gate_residual_layernorm_modulate_float8(*given, by_row=True, branch_scale=number)
    torch.testing.assert_close(again, h, rtol=1e-5, atol=1e-5)


def run_ops(ops, dtype, linears, tensors, seeds):
    """Return results and gradients by name, for all operations of a block except attention."""
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in tensors.items()}
    qkv, proj, fc1, fc2 = linears = [Projection(*w.t().shape).to(DEVICE, dtype) for w in linears]
    for i, (linear, weight) in enumerate(zip(linears, seeds, strict=True)):
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(normal(weight.shape[0], seed=90 + i))
    q, k, v = ops.linear_heads(ops.layernorm_modulate(leaves["x"], leaves["shift"], leaves["scale"]), qkv, 4)
    h, y = ops.residual_then_norm(leaves["x"], leaves["gate"], leaves["z"], proj, leaves["shift"], leaves["scale"])
    hidden = ops.linear_gelu(y, fc1)
    out = ops.linear_gate_residual(h, leaves["gate"], hidden, fc2) - h
    results = {"q": q, "k": k, "v": v, "h": h - leaves["x"], "out": out}
    loss = sum((r * normal(*r.shape, seed=50 + i).to(dtype)).sum() for i, r in enumerate(results.values()))
    loss.backward()
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    for name, linear in zip(("qkv", "proj", "fc1", "fc2"), linears, strict=True):
        grads |= {f"d{name}.weight": linear.weight.grad, f"d{name}.bias": linear.bias.grad}
    return {name: r.detach() for name, r in results.items()} | grads


def test_linear_layers_against_float64():
    B, N, D = 3, 13, 96  # 39 rows: not a multiple of 16
    tensors = {"x": normal(B, N, D), "z": normal(B, N, D, seed=1)}
    tensors |= {name: normal(B, D, seed=2 + i) for i, name in enumerate(("shift", "scale", "gate"))}
    weights = [normal(3 * D, D, seed=10), normal(D, D, seed=11), normal(4 * D, D, seed=12), normal(D, 4 * D, seed=13)]
    weights = [w / math.sqrt(w.shape[1]) for w in weights]
    want = run_ops(TORCH_OPS, torch.float64, weights, tensors, weights)
    got = run_ops(chosen({FLOAT8}), ACTIVATIONS, weights, tensors, weights)
    for name, reference in want.items():
        error = ((got[name].double() - reference).norm() / reference.norm()).item()
        # q, k, v and h involve one product, out involves two, and gradients up to four.
        bound = PRODUCT[E4M3] * (1 if name in "qkvh" else 2) if name[0] != "d" else 1.5 * PRODUCT[E5M2]
        assert error < bound, (name, error)
        assert error > 1e-2 or "weight" not in name, (name, error)  # FP8 was used


def test_gradients_that_are_not_finite_stay_so():
    linear = Projection(64, 64).to(DEVICE, ACTIVATIONS)
    x, gate, z = normal(2, 9, 64), normal(2, 64, seed=1), normal(2, 9, 64, seed=2).to(ACTIVATIONS).requires_grad_()
    for value in (math.inf, math.nan):
        dout = torch.ones(2, 9, 64, device=DEVICE)
        dout[1, 3, 5] = value
        out = chosen({FLOAT8}).linear_gate_residual(x, gate, z, linear)
        dz, dw = torch.autograd.grad(out, (z, linear.weight), dout)
        assert not dw.isfinite().all() and not dz.isfinite().all()


def test_models_keep_what_is_not_a_linear_layer_of_a_block():
    torch.manual_seed(0)  # most seeds have a worst gradient error of 0.04 to 0.09; one in some hundreds has 0.15
    model = randomised(DiT(CONFIG))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(std=0.5)
    want, want_grads = gradients(model)
    choice = select_kernels(SpeedFlags(True, True, True, fp8=True), torch.device("cpu"), torch.float32, 32, 4)
    assert "FP8" in choice.ops_note
    model.use(ops=choice.ops, attend=choice.attend)
    got, grads = gradients(model)
    assert (got - want).norm() < 0.06 * want.norm()
    for name, grad in want_grads.items():
        assert (grads[name] - grad).norm() < 0.1 * grad.norm(), name
    x, c = normal(2, 4, 64), normal(2, 64, seed=1)
    m = model.final_layer.modulate(c)
    final = model.final_layer(x, m)
    model.grad_checkpoint = True
    again, grads_again = gradients(model)
    assert torch.equal(again, got)
    # recomputed blocks are not fused with the next, so sums are rounded at other places
    for name, grad in grads.items():
        assert (grads_again[name] - grad).norm() < 1e-6 * grad.norm(), name
    with torch.no_grad():
        assert torch.equal(model(*inputs()), got)
    model.use()
    torch.testing.assert_close(final, model.final_layer(x, m), rtol=1e-5, atol=1e-6)


SAMPLED = {
    "DiT": CONFIG,
    "ST-DiT": STDiTConfig((2, 4, 4), (1, 2, 2), 2, 64, 1, 2, text=TextConfig("t5", 8, 5, True), qk_norm=True),
}


@pytest.mark.parametrize("config", SAMPLED.values(), ids=SAMPLED)
def test_sampling_has_a_scale_a_row(config, monkeypatch):
    """A sample does not depend on the others in its batch, whether attention's output is cast or not."""
    torch.manual_seed(0)
    model = randomised(build_model(config)).place(DEVICE, ACTIVATIONS)
    given = [x.to(DEVICE) for x in inputs(config)]
    want = model(*given)
    on = SpeedFlags(True, True, True, fp8=True)
    choice = select_kernels(on, torch.device(DEVICE), ACTIVATIONS, 32, config.tokens, inference=True)
    shared = select_kernels(on, torch.device(DEVICE), ACTIVATIONS, 32, config.tokens, inference=True, shared=True)
    assert shared.ops == chosen({FLOAT8}) and choice.ops == chosen({FLOAT8, INFERENCE}) != shared.ops
    model.use(ops=choice.ops, attend=choice.attend)
    with torch.inference_mode():
        keep_weights(model.blocks)
    monkeypatch.setattr(fp8, "amax", lambda *_, **how: pytest.fail("a pass that looks for a scale"))
    errors = []
    for cast_from, tiles in ((0, 0), (0, 1 << 20), (1 << 20, 1 << 20)):
        monkeypatch.setattr(fp8_inference, "CAST_FROM", cast_from)
        monkeypatch.setattr(fp8_inference, "TILES", tiles)
        with torch.inference_mode():
            got = model(*given)
            x, *rest = given
            other = torch.cat([x[:1], 50 * x[1:]])
            assert (model(other, *rest)[:1] - got[:1]).norm() < 1e-5 * got[:1].norm()
        errors.append(((got - want).norm() / want.norm()).item())
    assert 1e-3 < errors[2] < errors[1] < 0.06 and abs(errors[0] - errors[1]) < 1e-3 * errors[0], errors


def test_weights_that_stay_are_cast_once(monkeypatch):
    model = randomised(DiT(CONFIG)).to(DEVICE, ACTIVATIONS)
    choice = select_kernels(SpeedFlags(fp8=True), torch.device(DEVICE), ACTIVATIONS, 32, CONFIG.tokens)
    model.use(ops=choice.ops)
    given = [x.to(DEVICE) for x in inputs(CONFIG)]
    cast, weights = fp8.cast, []
    monkeypatch.setattr(
        fp8, "cast", lambda x, *args, **how: (weights.append(how.get("exact")), cast(x, *args, **how))[1]
    )
    with torch.inference_mode():
        want = model(*given)
        assert weights.count(True) == 4 * CONFIG.depth
        weights.clear()
        taken = keep_weights(model.blocks)
        assert taken == sum(p.numel() for n, p in model.blocks.named_parameters() if p.dim() == 2 and "adaLN" not in n)
        assert weights.count(True) == 4 * CONFIG.depth
        assert torch.equal(model(*given), want) and weights.count(True) == 4 * CONFIG.depth
    weight = model.blocks[1].mlp.fc1.weight
    kept = weight.kept_float8.float8
    with torch.no_grad():
        weight[5] *= -4
    assert not any("float8" in name for name in model.state_dict())
    with torch.inference_mode():
        changed = model(*given)
        assert weights.count(True) == 4 * CONFIG.depth + 1
        del weight.kept_float8
        assert torch.equal(model(*given), changed) and not torch.equal(changed, want)
    assert not torch.equal(fp8.cast(weight.detach(), E4M3, exact=True).data.float(), kept.data.float())


def test_widths_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="no multiple of 16"):
        chosen({FLOAT8}).linear_gelu(normal(1, 4, 72), Projection(72, 100))


def curves(mesh, plugin: str) -> list[list[float]]:
    """Return the losses of a few steps, without and with FP8."""
    from opendit.parallel.engines import build_engine

    found = []
    for ops in (None, chosen({FLOAT8})):
        torch.manual_seed(0)
        model = randomised(DiT(replace(CONFIG, depth=1))).use(ops=ops)
        engine = build_engine(model, mesh, plugin=plugin, precision="bf16", lr=3e-3)
        found.append([])
        for _ in range(3):
            with engine.micro_batch(last=True):
                loss = (engine.forward(*inputs()).float() - 1).square().mean()
                engine.backward(loss)
            engine.step()
            found[-1].append(loss.item())
    return found


@pytest.mark.parametrize("plugin", ("zero2", "ddp"))
def test_plugins(plugin):
    ((want, got),) = run_ranks(1, curves, plugin)
    assert want[-1] < 0.9 * want[0]
    assert got == pytest.approx(want, rel=0.06)
