"""Test the registry of operations: every entry can be chosen and declares its properties correctly."""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.operations import FLOAT8, INFERENCE, KERNELS, MODULATE, NORM, SPLIT, chosen
from opendit.models.layers import TORCH_OPS, BlockOps, Projection

SWITCHES = (set(), {MODULATE}, {MODULATE, NORM}, {SPLIT}, {MODULATE, NORM, SPLIT}, {FLOAT8})
SWITCHES += ({MODULATE, NORM, SPLIT, INFERENCE}, {FLOAT8, INFERENCE})


def test_every_line_is_chosen_by_some_switches():
    lines = {(kernel.operation, kernel.function) for kernel in KERNELS}
    assert lines == {(k.operation, k.function) for on in SWITCHES for k in chosen(on).kernels}
    assert {kernel.operation for kernel in KERNELS} <= set(BlockOps.names())
    assert chosen(set()) == TORCH_OPS == BlockOps()


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda on: " ".join(sorted(on)) or "none")
def test_operations_are_what_their_lines_say(switches):
    ops = chosen(switches)
    for name in BlockOps.names():
        kernel = ops.kernel(name)
        assert getattr(ops, name) is (getattr(TORCH_OPS, name) if kernel is None else kernel.function)
    assert ops.float8 == (FLOAT8 in switches)
    assert ops.by_reference(BlockOps.names()) == TORCH_OPS
    given = BlockOps.names(projection=True)
    assert given == [name for name in BlockOps.names() if name.startswith("linear")]
    plain = ops.by_reference(given)
    assert not set(plain.replaced) & set(given) and set(plain.replaced) == set(ops.replaced) - set(given)


def test_only_those_that_say_so_read_a_weight():
    for kernel in KERNELS:
        if inspect.isfunction(kernel.function) and kernel.operation in BlockOps.names(projection=True):
            source = inspect.getsource(kernel.function).replace("norm.weight", "")
            assert kernel.takes_projection == (".weight" in source or ".matrix" in source)


def test_a_projection_is_a_linear_layer_in_two_parts():
    layer, x = Projection(5, 7).double(), torch.randn(2, 3, 5, dtype=torch.float64)
    assert torch.equal(layer.product(x, layer.bias), layer(x)) and torch.equal(layer.product(x), x @ layer.weight.T)
    torch.testing.assert_close(layer.product(x) + layer.bias, F.linear(x, layer.weight, layer.bias))
    torch.manual_seed(0)
    ours = Projection(5, 7).state_dict()
    torch.manual_seed(0)
    theirs = torch.nn.Linear(5, 7).state_dict()
    assert list(ours) == list(theirs) and all(map(torch.equal, ours.values(), theirs.values()))


def test_a_product_of_more_than_a_weight_is_used_by_whatever_takes_it_apart():
    """Tensor parallelism relies on this: it sums partial products before it adds the bias."""

    class Doubled(Projection):
        def product(self, x: Tensor, bias: Tensor | None = None, multiply=F.linear) -> Tensor:
            whole = 2 * super().product(x, multiply=multiply)
            return whole if bias is None else whole + bias

    layer, z = Doubled(6, 6).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    seen = layer.product(z, layer.bias)
    torch.testing.assert_close(seen, 2 * (z @ layer.weight.T) + layer.bias)


def test_lines_are_plain_data():
    kernel = KERNELS[0]
    assert dataclasses.replace(kernel, float8=True) != kernel and hash(kernel) == hash(dataclasses.replace(kernel))
