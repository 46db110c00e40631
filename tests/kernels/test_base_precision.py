"""Test weights stored in 8 or 4 bits: their error against other libraries, and products with them against float64."""

import math

import pytest
import torch

from opendit.kernels import base_precision as stored
from opendit.kernels.fp8 import E4M3, EXACT, float8_factor_reference, float8_reference
from opendit.models.finetuning import A, B, Lora, add_lora
from opendit.models.layers import Projection
from opendit.training.memory import Setup, stored_weights
from tests.kernels.test_public_fp8 import given, model_of

KINDS = ("fp8", "int8", "nf4")
# Error for weights from N(0, 0.02): the steps of e4m3 are 1/8 to 1/16 of a number, those of int8 are 1/127 of the row's
# largest number, and nf4 has 16 levels.
ERRORS = {"fp8": 0.028, "int8": 0.012, "nf4": 0.1}


def layer_of(weight, kind, dtype=torch.float32, rank=None):
    """Return a projection with the stored weight, and with LoRA if a rank is given."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([Projection(weight.shape[1], len(weight))])
    model.requires_grad_(False)
    if rank is not None:
        model.blocks[0].add_low_rank(rank, 0.5)
    stored.store_base(model, kind, dtype, torch.device("cpu"))
    layer = model.blocks[0]
    packed = torch.empty_like(layer.weight, device="cpu")
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.store(packed, weight, torch.clone)
    return layer


def fill(model, plain):
    """Store the weights of ``plain`` in the stored layers of a model."""
    for name, layer in stored.base_layers(model):
        packed = torch.empty_like(layer.weight, device="cpu")
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.store(packed, plain.get_parameter(name).detach(), torch.clone)


def error(found, wanted):
    """Return the RMS difference, relative to that of ``wanted``."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def normal(*shape, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ((48, 64), (16, 80), (5, 37), (3, 129)), ids=str)
def test_error_and_bytes(kind, shape):
    weight = normal(*shape, scale=0.02)
    weight[1] = 0
    layer = layer_of(weight, kind)
    dense = layer.matrix.dense()
    assert dense.shape == shape and (dense[1] == 0).all()
    assert 0 < error(dense, weight) < ERRORS[kind]
    assert layer.weight.nbytes == shape[0] * stored.row_bytes(kind, shape[1])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer.matrix.to(dtype).dense(), dense.to(dtype))


def test_bytes_of_large_rows():
    assert [stored.row_bytes(kind, 3072) / 3072 for kind in KINDS] == [1, 1 + 16 / 3072, 0.5625]


def test_fp8_has_the_numbers_of_fp8_products():
    weight = normal(32, 48, scale=0.02).to(torch.bfloat16)
    float8 = layer_of(weight, "fp8", torch.bfloat16).matrix.float8
    factor = float8_factor_reference(weight.abs().amax().float(), EXACT)
    assert torch.equal(float8.data.view(torch.uint8), float8_reference(weight, factor, E4M3).view(torch.uint8))
    assert float8.descale.tolist() == [1 / factor]


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(24, 192, scale=0.02)
    codes, state = functional.quantize_4bit(weight, blocksize=stored.NEIGHBOURS, quant_type="nf4")
    assert error(layer_of(weight, "nf4").matrix.dense(), functional.dequantize_4bit(codes, state)) < 1e-6


def test_int8_is_as_exact_as_that_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    weight = normal(24, 192, scale=0.02)
    model = torch.nn.Sequential(torch.nn.Linear(192, 24, bias=False))
    model[0].weight.data.copy_(weight)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    theirs = error(model[0].weight.dequantize(), weight)
    assert error(layer_of(weight, "int8").matrix.dense(), weight) <= 1.02 * theirs


def test_rows_by_themselves_have_the_bytes_of_the_whole():
    weight = normal(20, 72)
    for kind in ("int8", "nf4"):
        whole = stored.quantise(weight, kind)
        assert torch.equal(whole, torch.cat([stored.quantise(part, kind) for part in weight.split((7, 12, 1))]))


@pytest.mark.parametrize("low_rank", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_for_the_stored_numbers(kind, low_rank):
    """Compare the output and gradients with float64 and the dequantised weights."""
    layer = layer_of(normal(24, 40), kind, rank=3 if low_rank else None)
    factors = list(layer.low_rank[:2]) if low_rank else []
    for factor in factors:
        factor.data.copy_(normal(*factor.shape))
    x, dy = normal(2, 5, 40).requires_grad_(), normal(2, 5, 24)
    found = torch.autograd.grad(layer(x), [x, *factors], dy)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *factors)]
    y = wide[0] @ layer.matrix.dense().double().t() + layer.bias.double()
    if low_rank:
        y = y + 0.5 * wide[0] @ wide[1].t() @ wide[2].t()
    assert error(layer(x).detach(), y.detach()) < 1e-6
    wanted = torch.autograd.grad(y, wide, dy.double())
    assert all(error(one, other) < 1e-6 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_outputs_and_gradients_of_its_dense_weights(kind):
    """Compare a model that stores its weights with one that has the dequantised weights, and with the original model.
    All linear layers in the blocks are stored, and no others."""

    def with_lora():
        model = model_of("flux")
        add_lora(model, Lora(3, 6.0, ""), (), seed=0)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(B):
                parameter.data.copy_(normal(*parameter.shape, number + 1, scale=0.1)[..., 0])
        return model

    def results(model):
        output = model(*given("flux", torch.float32))
        output.square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"": output.detach()}

    plain, dense, model = with_lora(), with_lora(), with_lora()
    stored.store_base(model, kind, torch.float32, torch.device("cpu"))
    layers = dict(stored.base_layers(model))
    matrices = {n for n, p in plain.named_parameters() if not n.endswith((A, B)) and n[:7] == "blocks." and p.dim() > 1}
    assert layers.keys() == matrices
    fill(model, plain)
    setup = Setup(precision="fp32", lora=Lora(3, 6.0, ""), base_precision=kind)
    sizes = [(math.prod(layer.shape), layer.weight.nbytes) for layer in layers.values()]
    numbers, size, largest = stored_weights(model.config, setup)
    assert (numbers, size) == tuple(map(sum, zip(*sizes, strict=True))) and largest == max(sizes)[0]
    for name, layer in layers.items():
        dense.get_parameter(name).data.copy_(layer.matrix.dense())
    found, wanted, before = results(model), results(dense), results(plain)
    assert found.keys() == wanted.keys() and len(found) > 10
    assert max(error(found[name], wanted[name]) for name in found) < 1e-5
    assert 0 < max(error(found[name], before[name]) for name in found) < 12 * ERRORS[kind]
