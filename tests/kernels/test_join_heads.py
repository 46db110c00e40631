"""Test join_heads and pack_heads in Triton's interpreter against float64, and FLUX.1 with join_heads."""

from dataclasses import replace

import pytest
import torch

from opendit.kernels import operations
from opendit.kernels.common import Launch, forced_launch
from opendit.kernels.rotate_heads import StreamHeads, join_heads, pack_heads
from opendit.models.attention import TokenGrid
from opendit.models.blocks import ResidualStream
from opendit.models.conditioning import TextCondition
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.layers import TORCH_OPS, RMSNorm
from tests.kernels.cases import DTYPES, check_join_heads, check_pack_heads, pairwise
from tests.models.families.oracles import FLUX
from tests.models.test_dit import randomised


@pytest.mark.parametrize(
    ("batch", "lengths", "heads", "head_dim", "dtype", "norm", "table"),
    pairwise(
        (1, 3),
        ((1, 1), (7, 13), (13, 2, 5)),
        ((1, 1), (3, 3), (4, 2)),
        (64, 72, 128, 10),
        DTYPES,
        (False, True),
        (None, "shared", "of samples"),
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_values(batch, lengths, heads, head_dim, dtype, norm, table):
    with forced_launch(join_heads=Launch(rows=4, tiles=2, warps=1)):
        check_join_heads(batch, lengths, heads, head_dim, dtype, norm, table)


def test_default_launch():
    check_join_heads(2, (23, 41), (5, 5), 72, torch.bfloat16, True, "shared", weight_dtype=torch.float32)


def test_streams_that_do_not_fit_are_named():
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 16)
    with pytest.raises(ValueError, match="stream 1"):
        join_heads([StreamHeads(q, q, q), StreamHeads(k, k, k)])
    with pytest.raises(ValueError, match="stream 0"):
        join_heads([StreamHeads(q, q, q, q_weight=torch.ones(8))])


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim", "dtype", "norm", "table"),
    pairwise(
        (1, 3),
        (1, 13),
        ((6, 1), (6, 2), (6, 3), (4, 4), (12, 2)),
        (64, 72, 128, 10),
        DTYPES,
        (None, "head", "across"),
        (None, "shared", "of samples"),
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_packed_values(batch, length, heads, head_dim, dtype, norm, table):
    rows = 1 if norm == "across" else 4
    with forced_launch(join_heads=Launch(rows=rows, tiles=2, warps=1)):
        check_pack_heads(batch, length, *heads, head_dim, dtype, norm, table)


def test_heads_that_can_not_be_packed():
    q, weight = torch.randn(2, 5, 6, 8), torch.ones(8)
    for stream, parts, across in (
        (StreamHeads(q, q, q), 4, False),
        (StreamHeads(q, q[:, :, :3], q[:, :, :3]), 3, False),
        (StreamHeads(q, q, q, weight, weight), 2, True),
        (StreamHeads(q, q, q, weight), 2, False),
    ):
        with pytest.raises(ValueError, match="can't be packed"):
            pack_heads(stream, parts, across=across)


def test_a_model_with_it():
    """Captions come before media, and each has its own weights, so a wrong order would change the output."""
    torch.manual_seed(0)
    config = public_config("flux", FLUX, (4, 6), 5)
    model = randomised(PublicDiT(config)).eval()
    text = config.spec.text
    x, t = torch.randn(3, config.in_channels, 4, 6), torch.tensor([10.0, 500.0, 900.0])
    y = TextCondition(torch.randn(3, 5, text.width), torch.ones(3, 5, dtype=torch.bool), torch.randn(3, text.pooled))
    asked, ours = [], next(kernel.function for kernel in operations.KERNELS if kernel.operation == "join_heads")

    def counted(streams):
        asked.append(len(streams))
        return ours(streams)

    with torch.no_grad():
        wanted = model(x, t, y)
        found = model.use(ops=replace(TORCH_OPS, join_heads=counted))(x, t, y)
    assert asked == [2] * 2
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_under_compile():
    """Under torch.compile, torch's rotation and concatenation are traced instead of the kernel."""
    join = next(kernel.function for kernel in operations.KERNELS if kernel.operation == "join_heads")
    norms = [RMSNorm(8, 1e-6) for _ in range(4)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    projections = [torch.randn(2, n, 48, requires_grad=True) for n in (5, 7)]
    tables = [torch.randn(n, 4, 2) for n in (5, 7)]

    def joined(*projections):
        parts = [x.unflatten(-1, (3, 2, 8)).unbind(2) for x in projections]
        pairs = zip(parts, (norms[:2], norms[2:]), tables, strict=True)
        return join([(*qkv, *own, table) for qkv, own, table in pairs])

    found = []
    for function in (joined, torch.compile(joined, backend="eager", fullgraph=True)):
        outputs = function(*projections)
        found.append([*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], projections)])
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(*found, strict=True))


def test_streams_are_joined_when_asked_for():
    x = torch.randn(2, 7, 4)
    stream = ResidualStream(x)
    grid = TokenGrid((4,), streams=(3, 4))
    first, second = stream.split(grid, TORCH_OPS)
    first.put(first.take(TORCH_OPS) + 1)
    assert stream.split(grid, TORCH_OPS)[1] is second
    shift, scale = torch.zeros(2, 4), torch.ones(2, 4)
    y = stream.norm(TORCH_OPS, shift, scale)
    joined = torch.cat([x[:, :3] + 1, x[:, 3:]], dim=1)
    assert torch.equal(stream.take(TORCH_OPS), joined)
    assert torch.equal(y, TORCH_OPS.layernorm_modulate(joined, shift, scale))
