"""Test that weights quantised shard by shard have the same bits as a cast of the whole weight. The tests run in
Triton's interpreter; tests/gpu/test_fp8_gpu.py runs the same on a GPU."""

import math

import pytest
import torch
from torch import Tensor, nn

from opendit.kernels import fp8
from opendit.kernels.fp8 import E4M3, Float8Weight, weight_in_float8
from opendit.kernels.fp8_shards import BLOCK, ShardQuantizer, amax_reference, quantize_reference

DEVICE = "cpu"
SHAPES = ((48, 64), (33, 100), (5, 3), (1, BLOCK), (130, 72), (16, 16))
HALF = (torch.bfloat16, torch.float16)


def weights(scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) * scale * 4.0**i for i, shape in enumerate(SHAPES)]
    drawn[4][-3, 5] = 1e5 * scale  # only in the last rows
    drawn[5].zero_()
    return [weight.to(DEVICE) for weight in drawn]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def by_shards(whole: list[Tensor], ranks: int, rounded: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Quantise every weight from the shards of all ranks, and return the joined weights and the descales."""
    shards = [list(zip(*(_chunks(weight, ranks) for weight in whole), strict=True))[rank] for rank in range(ranks)]
    made = [[torch.zeros(s.shape, dtype=torch.uint8, device=DEVICE) for s in own] for own in shards]
    quantizers = [ShardQuantizer(own, out, rounded) for own, out in zip(shards, made, strict=True)]
    own = [quantizer.amax() for quantizer in quantizers]
    for found, parts in zip(own, shards, strict=True):
        assert torch.equal(found, amax_reference(parts, rounded))
    for quantizer in quantizers:
        quantizer.quantize(torch.stack(own).amax(0))
    assert all(torch.equal(q.descales, quantizers[0].descales) for q in quantizers)
    return [torch.cat(parts).view(E4M3) for parts in zip(*made, strict=True)], quantizers[0].descales


def _chunks(weight: Tensor, ranks: int) -> list[Tensor]:
    found = [part.clone() for part in torch.chunk(weight, ranks)]
    return found + [weight[:0].clone()] * (ranks - len(found))


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("rounded", (*HALF, torch.float32), ids=str)
def test_shards_are_those_of_the_whole_weight(ranks, rounded):
    whole = weights(scale=2e-3)
    made, descales = by_shards(whole, ranks, rounded)
    for weight, data, descale in zip(whole, made, descales, strict=True):
        cast = fp8.cast(weight.to(rounded), E4M3, exact=True)
        assert same(cast.data, data) and cast.descale.item() == descale.item()


def test_it_is_the_reference():
    whole = weights(scale=1e-2)[:-1]  # the reference can't scale zeros
    for rounded in HALF:
        made, descales = by_shards(whole, 2, rounded)
        want, theirs = quantize_reference(whole, amax_reference(whole, rounded), rounded)
        assert all(map(same, made, want)) and torch.equal(descales, theirs)
        largest = [data.float().abs().max() for data in made]
        assert all(2**7 <= value < 2**8 or value == 2**8 for value in largest)  # can be rounded up to 2^8


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_what_is_not_finite_becomes_nan(value):
    whole = weights()[:2]
    whole[1][7, 3] = value
    made, _ = by_shards(whole, 2, torch.bfloat16)
    assert made[0].float().isfinite().all() and made[1].float().isnan().nonzero().tolist() == [[7, 3]]
    assert same(made[1], fp8.cast(whole[1].bfloat16(), E4M3, exact=True).data)


def test_what_lies_behind_the_rows_stays():
    shard, target = weights()[0], torch.full((50, 64), 7, dtype=torch.uint8, device=DEVICE)
    quantizer = ShardQuantizer([shard], [target], torch.bfloat16)
    quantizer.quantize(quantizer.amax())
    assert (target[48:] == 7).all() and same(target[:48], fp8.cast(shard.bfloat16(), E4M3, exact=True).data)


def test_shards_that_are_empty_on_this_rank_get_the_others_scale():
    shards = [torch.zeros(0, 16, device=DEVICE)] * 2
    quantizer = ShardQuantizer(shards, shards, torch.bfloat16)
    assert quantizer.amax().tolist() == [0, 0]
    quantizer.quantize(torch.tensor([1.0, 100.0], device=DEVICE))
    assert quantizer.descales.tolist() == [2.0**-7, 2.0**-1]


# --------------------------------------------------------------------------------------------------- weights in float8


def in_float8(weight: Tensor) -> Float8Weight:
    return Float8Weight(fp8.cast(weight, E4M3, exact=True), weight.dtype)


def test_it_is_a_parameter_of_its_dtype_and_has_a_gradient():
    weight = nn.Parameter(torch.as_strided(in_float8(weights()[0].bfloat16()), (48, 64), (64, 1), 0))
    assert isinstance(weight, Float8Weight) and weight.is_leaf and weight.requires_grad and "48" in repr(weight)
    assert (weight.shape, weight.dtype, weight.device.type) == ((48, 64), torch.bfloat16, DEVICE)
    assert not torch.overrides.has_torch_function((weight,))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.float8.data.float() * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.bfloat16() * 2

    for times in (1, 2):
        Twice.apply(weight).sum().backward()
        assert type(weight.grad) is Tensor and weight.grad.dtype == torch.bfloat16
        assert (weight.grad == 2 * times).all()
    assert torch.equal(torch.zeros_like(weight), torch.zeros(48, 64, dtype=torch.bfloat16, device=DEVICE))


def test_whoever_reads_it_otherwise_is_told():
    weight = in_float8(weights()[0])
    for use in (lambda w: w + 1, lambda w: w[:2], lambda w: nn.functional.linear(torch.ones(1, 64), w), Tensor.double):
        with pytest.raises(RuntimeError, match=r"\(48, 64\) that is there in float8 only"):
            use(nn.Parameter(weight))
    with pytest.raises(RuntimeError, match="as_strided"):
        torch.as_strided(weight, (24, 64), (64, 1), 0)


def test_rows_have_the_scale_of_the_whole():
    whole = weights()[4].bfloat16()  # the largest number is in the last rows
    cast = fp8.cast(whole, E4M3, exact=True)

    def rows(weight: Tensor) -> Tensor:
        return torch.cat([weight[8:24], weight[40:56]])

    for weight in (whole, in_float8(whole)):
        every, some = weight_in_float8(weight), weight_in_float8(weight, rows)
        assert same(every.data, cast.data) and torch.equal(every.descale, cast.descale)
        assert same(some.data, rows(cast.data.view(torch.uint8))) and torch.equal(some.descale, cast.descale)
    assert not same(weight_in_float8(rows(whole)).data, some.data)
