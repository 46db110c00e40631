"""Test FP8 in the blocks of public models, against fp32 and against torch's operations with rounded factors.

These tests run in Triton's interpreter; tests/gpu/test_public_fp8_gpu.py runs the same on a GPU, at larger sizes.
test_fp8.py explains the error of a single product.
"""

import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import FlowObjective
from opendit.kernels import fp8, fp8_inference
from opendit.kernels.fp8 import E4M3, E5M2, Float8Weight, KeptWeight
from opendit.kernels.operations import FLOAT8, INFERENCE, chosen
from opendit.kernels.select import select_kernels
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.layers import Projection
from opendit.models.plan import Execution
from opendit.models.zoo import plan_of
from opendit.parallel.apply import apply_parallel
from opendit.parallel.fsdp import Sharding, float8_weights
from opendit.parallel.rules import fits
from opendit.sampling.sampling_engine import SamplingEngine
from tests.kernels import conftest  # noqa: F401  (ranks must round as hardware does, too)
from tests.models.families.oracles import (
    COSMOS2,
    FLUX,
    FLUX2,
    LTX,
    LUMINA2,
    QWEN_IMAGE,
    SD3,
    WAN,
    Z_IMAGE,
    captions,
    is_read,
)
from tests.ranks import run_ranks

DEVICE = "cpu"
STEPS = 2  # for sampling
ACTIVATIONS = torch.float32  # bf16 on a GPU, because _scaled_mm adds no bias in fp32
# Sizes of latents that give an odd number of tokens, including captions. Z-Image pads both.
SIZES = {
    "flux": (4, 8), "z_image": (6, 10), "wan": (3, 2, 6), "qwen_image": (6, 10), "flux2": (3, 5), "ltx": (3, 2, 3),
    "sd3": (6, 10), "cosmos2": (6, 10),
}  # fmt: skip
VALUES: dict[str, dict[str, Any]] = {
    "flux": FLUX | dict(num_layers=1, num_single_layers=2, attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    "z_image": Z_IMAGE | dict(dim=96, n_layers=1, n_refiner_layers=1, axes_dims=[8, 12, 12]),
    "wan": WAN | dict(attention_head_dim=32, ffn_dim=160),
    "qwen_image": QWEN_IMAGE | dict(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    "flux2": FLUX2 | dict(num_layers=1, num_single_layers=2, attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8)),
    "ltx": LTX | dict(attention_head_dim=32, cross_attention_dim=64),
    "sd3": SD3 | dict(attention_head_dim=32, caption_projection_dim=64),
    "cosmos2": COSMOS2 | dict(attention_head_dim=32),
}  # fmt: skip
every_family = pytest.mark.parametrize("family", VALUES)


def model_of(family: str) -> PublicDiT:
    """Return a model with random values added to all parameters, so that a missing part changes the results."""
    torch.manual_seed(0)
    model = PublicDiT(public_config(family, VALUES[family], SIZES[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std_of = 0.3 if "modulation" in name else 1.0
            wide = parameter.dim() > 1 and not name.endswith(("filling", "table"))
            std = 1 / math.sqrt(parameter[0].numel()) if wide else 0.2
            parameter.add_(torch.randn(parameter.shape) * std * std_of)
    return model.to(DEVICE)


def given(family: str, dtype: torch.dtype, count: int = 3) -> tuple[Any, ...]:
    """Return latents, times and captions of unequal length."""
    torch.manual_seed(1)
    channels = public_config(family, VALUES[family], SIZES[family]).in_channels
    x = torch.randn(count, channels, *SIZES[family]).to(DEVICE)
    y = captions(family, VALUES[family], [5, 7, 2][:count], torch.float32)
    return x, torch.tensor([300.0, 700.0, 900.0])[:count].to(DEVICE), y.to(DEVICE, dtype)


def gradients(model: PublicDiT, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(*given(model.config.family, dtype))
    torch.manual_seed(2)
    (output.float() * torch.randn(output.shape).to(DEVICE)).sum().backward()
    return output.detach().float(), {name: p.grad.float() for name, p in model.named_parameters()}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def in_float8(model: PublicDiT, dtype: torch.dtype, inference: bool = False) -> PublicDiT:
    on = SpeedFlags(True, True, True, fp8=True)
    config, device = model.config, torch.device(DEVICE)
    choice = select_kernels(on, device, dtype, config.head_dim, config.tokens, inference=inference)
    assert choice.ops.float8
    return model.to(dtype).use(ops=choice.ops, attend=choice.attend)


def linears(model: PublicDiT) -> dict[str, Projection]:
    """Return the linear layers applied to tokens in blocks and refiners, except the captions' keys and values."""
    layers = {name: module for name, module in model.named_modules() if name.startswith(("blocks", "media_", "text_r"))}
    left_out = ("modulation", "cross_attn.kv")
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, torch.nn.Linear) and not any(part in name for part in left_out)
    }  # type: ignore[return-value]


class RoundedLinear(torch.autograd.Function):
    """x W^T + b, with gradients dy W and dy^T x. Factors are rounded to float8 and multiplied in fp32."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x, weight = rounded(x, E4M3, fp8.SAMPLED), rounded(weight, E4M3, fp8.EXACT)
        ctx.save_for_backward(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        rows = rounded(dy, E5M2, fp8.SAMPLED_GRADIENT)
        dw = rows.flatten(0, -2).t() @ x.flatten(0, -2)
        return rows @ weight, dw, None if bias is None else dy.flatten(0, -2).sum(0)


def rounded(x: torch.Tensor, dtype: torch.dtype, target: int) -> torch.Tensor:
    factor = fp8.float8_factor_reference(x.abs().max(), target)
    return fp8.float8_reference(x, factor, dtype).float() / factor


@every_family
def test_output_and_gradients_are_those_of_rounded_factors(family, monkeypatch):
    got, found = gradients(in_float8(model_of(family), ACTIVATIONS), ACTIVATIONS)
    model = model_of(family)
    for layer in linears(model).values():
        monkeypatch.setattr(
            layer, "product", lambda x, bias=None, _=None, layer=layer: RoundedLinear.apply(x, layer.weight, bias)
        )
        monkeypatch.setattr(layer, "forward", lambda x, layer=layer: layer.product(x, layer.bias))
    want, want_gradients = gradients(model, torch.float32)
    assert error(got, want) < 1e-3
    # If a value is almost halfway between two float8 numbers, the order of a sum may decide how it is rounded.
    read = {name: gradient for name, gradient in want_gradients.items() if is_read(family, name)}
    assert not {name: e for name, gradient in read.items() if (e := error(found[name], gradient)) > 1e-2}


def check_gradients(family: str, output_bound: float, gradient_bound: float, checkpointed: bool = True) -> None:
    """Compare the output and gradients with fp32, without and with recomputed blocks."""
    model = model_of(family)
    want, want_gradients = gradients(model, torch.float32)
    got, found = gradients(in_float8(model, ACTIVATIONS), ACTIVATIONS)
    assert 1e-3 < error(got, want) < output_bound, error(got, want)
    want_gradients = {name: gradient for name, gradient in want_gradients.items() if is_read(family, name)}
    errors = {name: error(found[name], gradient) for name, gradient in want_gradients.items()}
    assert all(gradient.any() for gradient in want_gradients.values())
    assert not {name: value for name, value in errors.items() if value > gradient_bound}
    for name in linears(model):  # FP8 was used
        assert errors.get(f"{name}.weight", 1) > 1e-2, name
    if not checkpointed:
        return
    model.grad_checkpoint = True
    again, found_again = gradients(model, ACTIVATIONS)
    assert error(again, want) < output_bound
    assert all(error(found_again[name], gradient) < gradient_bound for name, gradient in want_gradients.items())


@every_family
def test_output_and_gradients_are_near_fp32(family):
    bound = 0.25 if family == "cosmos2" else 0.17  # Z-Image's gradients pass two more blocks than a DiT's
    check_gradients(family, 0.06, bound, checkpointed=family == "flux")


@every_family
def test_every_large_linear_layer_is_multiplied_in_float8(family, monkeypatch):
    """The weights cast to e4m3, and those that the plan lists, are those of all linear layers for tokens."""
    model = in_float8(model_of(family), ACTIVATIONS)
    cast, weights = fp8.cast, []

    def counted(x, *args, **how):
        if how.get("exact"):
            weights.append(x.data_ptr())
        return cast(x, *args, **how)

    monkeypatch.setattr(fp8, "cast", counted)
    with torch.no_grad():
        model(*given(family, ACTIVATIONS))
    expected = linears(model)
    assert sorted(weights) == sorted(layer.weight.data_ptr() for layer in expected.values())
    assert set(float8_weights(model)) == {f"{name}.weight" for name in expected}
    of_blocks = sum(layer.weight.numel() for name, layer in expected.items() if name.startswith("blocks"))
    plan, config = plan_of(model.config), model.config
    assert plan.kept(config, Execution(fp8=True)).weights * config.depth == of_blocks
    patterns = plan.projections(config)
    assert {name for name, _ in model.named_modules() if any(fits(p, name) for p in patterns)} == set(expected)


def test_a_parallel_block_computes_its_norm_once(monkeypatch):
    from opendit.kernels import layernorm_modulate as adaln

    model, counted = in_float8(model_of("flux"), ACTIVATIONS), []
    real = adaln.layernorm_modulate_float8
    monkeypatch.setattr(adaln, "layernorm_modulate_float8", lambda *a, **k: (counted.append(1), real(*a, **k))[1])
    with torch.no_grad():
        model(*given("flux", ACTIVATIONS))
    # once for each stream of the double block and for the first single block; the other norms are fused with a sum
    assert len(counted) == 3


@every_family
def test_sampling_is_near_and_keeps_its_weights(family, monkeypatch, bound: float = 0.06):
    """Each row has its own scale, so a sample does not depend on the others in its batch. Weights are cast once."""
    model = model_of(family).eval().to(ACTIVATIONS)
    x, t, y = given(family, ACTIVATIONS, 2)
    objective = FlowObjective(3.0)

    def draw() -> torch.Tensor:
        engine = SamplingEngine(model, objective, steps=STEPS, cfg_scale=1.0)
        return engine.sample(y, y[:1], torch.arange(len(y)), seed=0).float()

    with torch.no_grad():
        want, latents = model(x, t, y), draw()
        in_float8(model, ACTIVATIONS, inference=True)
        assert model.blocks[0].ops == chosen({FLOAT8, INFERENCE})
        monkeypatch.setattr(fp8, "amax", lambda *a, **how: how["exact"] and real_amax(*a, **how))
        errors = []
        for cast_from in (1 << 20, 0):  # the two ways for few and for many rows
            monkeypatch.setattr(fp8_inference, "CAST_FROM", cast_from)
            got = model(x, t, y)
            errors.append(error(got.float(), want.float()))
        other = model(torch.cat([x[:1], 50 * x[1:]]), t, y)
        assert error(other[:1].float(), got[:1].float()) < 1e-2
        assert 1e-3 < errors[0] < bound and 1e-3 < errors[1] < bound, errors
        assert error(draw(), latents) < bound
    kept = {name for name, layer in linears(model).items() if isinstance(layer.weight.kept_float8, KeptWeight)}
    assert kept == set(linears(model))


real_amax = fp8.amax


def curves(mesh, family: str, plugin: str, steps: int, lr: float, sizes=SIZES, values=VALUES) -> list[list[float]]:
    """Return the losses of training steps, without and with FP8."""
    from opendit.parallel.engines import build_engine

    globals().update(DEVICE=mesh.device.type, SIZES=sizes, VALUES=values)  # set in the rank's process
    found = []
    for ops in (None, chosen({FLOAT8})):
        engine = build_engine(model_of(family).use(ops=ops), mesh, plugin=plugin, precision="bf16", lr=lr)
        found.append([])
        for _ in range(steps):
            with engine.micro_batch(last=True):
                loss = (engine.forward(*given(family, torch.bfloat16)).float() - 1).square().mean()
                engine.backward(loss)
            engine.step()
            found[-1].append(loss.item())
    return found


# for ddp, torch's norms return fp32
@pytest.mark.parametrize(("family", "plugin"), [("flux", "zero2"), ("wan", "ddp")])
def test_training_follows_the_curve_of_bf16(family, plugin, steps: int = 2):
    ((want, got),) = run_ranks(1, curves, family, plugin, steps, 1e-3)
    assert want[-1] < 0.95 * want[0]
    assert got == pytest.approx(want, rel=0.06)


@pytest.mark.parametrize(
    ("family", "change", "width"),
    [
        ("flux", dict(attention_head_dim=12, axes_dims_rope=(2, 4, 6)), 24),
        ("wan", dict(ffn_dim=100), 100),
        ("z_image", dict(dim=36, axes_dims=[4, 2, 6]), 36),
    ],
)
def test_widths_that_do_not_fit_are_refused(family, change, width):
    config = public_config(family, VALUES[family] | change, SIZES[family])
    with pytest.raises(ValueError, match=f"^--fp8: a width of {width} is no multiple of 16; leave it out$"):
        config.check_speed(True, "none")
    config.check_speed(False, "none")


def test_shared_keys_are_refused():
    config = public_config("lumina2", LUMINA2 | dict(hidden_size=64, axes_dim_rope=(4, 6, 6), multiple_of=32), (6, 10))
    with pytest.raises(ValueError, match="^--fp8: does not work with heads that share keys and values; leave it out$"):
        config.check_speed(True, "none")


@every_family
def test_fp8_is_taken_where_widths_fit(family):
    public_config(family, VALUES[family], SIZES[family]).check_speed(True, "none")


def sharded(mesh, family: str) -> list[list[Any]]:
    """Return the losses under fsdp and the number of float8 weights, with gathering in float8 and in bf16."""
    from opendit.parallel.engines import build_engine

    found = []
    for gathered in (True, False):
        model = apply_parallel(model_of(family), ops=chosen({FLOAT8}))
        count = len(float8_weights(model))
        sharding = Sharding(keep_gathered=False, gather_float8=gathered)
        engine = build_engine(model, mesh, plugin="fsdp", precision="bf16", lr=0.01, sharding=sharding)
        found.append([count])
        for _ in range(2):
            with engine.micro_batch(last=True):
                loss = (engine.forward(*given(family, torch.bfloat16, 1)).float() - 1).square().mean()
                engine.backward(loss)
            engine.step()
            found[-1].append(loss.item())
        for unit in engine.module.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
        found[-1].append(sum(isinstance(parameter, Float8Weight) for parameter in engine.module.parameters()))
    return found


@pytest.mark.timeout(300)
def test_shards_are_gathered_in_float8():
    for (count, *losses, in_float8), (_, *others, none) in run_ranks(2, sharded, "flux"):
        assert losses == others and losses[1] < 0.95 * losses[0]
        assert (in_float8, none) == (count, 0) and count >= 7
