"""Test FP8 on a GPU: the cases of tests/kernels/test_fp8.py, large tensors, and a whole model."""

import itertools
import math

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import fp8
from opendit.kernels.common import interpreting
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from tests.gpu.test_model_gpu import gradients
from tests.kernels import test_fp8 as cases
from tests.kernels import test_fp8_shards as shards
from tests.models.test_dit import randomised

AVAILABLE, REASON = float8_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
FORMATS = (fp8.E4M3, fp8.E5M2)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda")
    monkeypatch.setattr(shards, "DEVICE", "cuda")
    monkeypatch.setattr(cases, "ACTIVATIONS", torch.bfloat16)


def test_casts():
    sources, shapes = (torch.bfloat16, torch.float16, torch.float32), ((1, 64), (17, 72), (3, 7, 144), (1000, 1152))
    for dtype, source, shape, scale in itertools.product(FORMATS, sources, shapes, (1e-3, 3.0)):
        cases.test_cast_is_torchs_with_the_right_factor(dtype, source, shape, scale)
    for dtype in FORMATS:
        cases.test_what_is_not_finite_becomes_nan_and_what_is_too_large_the_limit(dtype)
    cases.test_zeros_and_the_smallest_numbers()


def test_operations():
    for rows, width in ((1, 64), (37, 200), (1000, 4608)):
        cases.test_gelu(rows, width)
        cases.test_gelu_of_rows(rows, width)
    for width, source in itertools.product((72, 1152, 4608), (torch.bfloat16, torch.float32)):
        cases.test_rows_have_a_scale_each(width, source)
    cases.test_layernorm_modulate_with_a_scale_for_every_sample()
    for layout in ("heads first", "tokens first", "packed"):
        cases.test_gathered_heads(layout)
    for largest in (1.0, 30.0):
        cases.test_layernorm_modulate_never_exceeds_the_range(largest)


@pytest.mark.parametrize("config", cases.SAMPLED.values(), ids=cases.SAMPLED)
def test_sampling(config, monkeypatch):
    cases.test_sampling_has_a_scale_a_row(config, monkeypatch)


def test_shards():
    for ranks, rounded in itertools.product((1, 2, 4), (torch.bfloat16, torch.float16, torch.float32)):
        shards.test_shards_are_those_of_the_whole_weight(ranks, rounded)
    shards.test_it_is_the_reference()
    for value in (math.inf, math.nan):
        shards.test_what_is_not_finite_becomes_nan(value)
    shards.test_what_lies_behind_the_rows_stays()
    shards.test_shards_that_are_empty_on_this_rank_get_the_others_scale()
    shards.test_it_is_a_parameter_of_its_dtype_and_has_a_gradient()
    shards.test_rows_have_the_scale_of_the_whole()


def test_large_shards():
    whole = [torch.randn(9216, 3072, device="cuda") * 0.02, torch.randn(4099, 3072, device="cuda")]
    made, descales = shards.by_shards(whole, 2, torch.bfloat16)
    for weight, data, descale in zip(whole, made, descales, strict=True):
        cast = fp8.cast(weight.bfloat16(), fp8.E4M3, exact=True)
        assert shards.same(cast.data, data) and cast.descale.item() == descale.item()


def test_linear_layers():
    cases.test_linear_layers_against_float64()
    cases.test_gradients_that_are_not_finite_stay_so()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_large_tensor_from_a_sample(dtype):
    x = torch.randn(32768, 4608, device="cuda", dtype=torch.bfloat16).clamp_(-5, 5)
    assert fp8.sample_step(32768 * 36, 36) > 1
    x[0, 128] = 6.0  # in the second run of 128 numbers, which is not sampled
    got = fp8.cast(x, dtype)
    assert 4.0 < fp8.amax(x).max() <= 5.0
    assert torch.equal(got.data.float(), fp8.float8_reference(x, 1 / got.descale, dtype).float())
    assert torch.equal(fp8.transposed(got.data).view(torch.uint8), got.data.view(torch.uint8).t())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_model_in_fp8_is_near_the_model_in_float64(dtype, checkpointed):
    torch.manual_seed(0)
    config = model_config("DiT-S/2", input_size=(16, 16), in_channels=4, num_classes=10)
    model = randomised(DiT(config)).cuda().double()
    want, want_grads = gradients(model, torch.float64)
    positions = model.pos_embed.float()
    model.to(dtype).pos_embed = positions
    kernels = select_kernels(SpeedFlags(True, True, True, fp8=True), torch.device("cuda"), dtype, 64, config.tokens)
    model.use(ops=kernels.ops, attend=kernels.attend).grad_checkpoint = checkpointed
    output, grads = gradients(model, dtype)
    assert (output - want).norm() < 0.1 * want.norm()
    for name, grad in want_grads.items():
        if not name.endswith("qkv.bias"):  # the part for the keys is rounding noise
            assert (grads[name] - grad).norm() < 0.25 * grad.norm(), name
