"""Test the fused operations and the attention kernels on a GPU: all shapes, memory, and repeatable results."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from opendit import fused
from opendit.diffusion.random import Stream, random_bits
from opendit.kernels.add_table import add_table
from opendit.kernels.attention import LocalAttention, flash_attn, resolve_attention
from opendit.kernels.common import Launch, forced_launch, interpreting, kernels_available
from opendit.kernels.flash_attention_4 import CUTE, backward_pass
from opendit.kernels.philox import philox_bits
from opendit.kernels.split_heads import split_heads, split_heads_reference
from opendit.training.prepare import make_deterministic
from tests.kernels.cases import (
    BATCHES,
    BOUNDS,
    DTYPES,
    KERNELS,
    LENGTHS,
    MODULATED,
    OPERATORS,
    WIDTHS,
    arguments_of,
    check,
    check_join_heads,
    check_pack_heads,
    check_rotate_heads,
    check_split_heads,
    make_inputs,
    output_gradients,
    run,
)

AVAILABLE, REASON = kernels_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32

operators = pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
modulated = pytest.mark.parametrize("op", MODULATED.values(), ids=MODULATED)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@operators
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_full_grid(op, dtype, width):
    for batch in BATCHES:
        for length in LENGTHS:
            try:
                check(op, *make_inputs(op, batch, length, width, dtype, "cuda"))
            except AssertionError as error:
                raise AssertionError(f"B {batch}, N {length}: {error}") from error


@operators
@pytest.mark.parametrize("width", (384, 1152))
def test_enough_rows_for_the_default_launch(op, width):
    """Use sizes for which a program has its maximum of rows, except the last one of a sample."""
    for length in (250, 16_384):
        check(op, *make_inputs(op, 140_000 // length, length, width, BFLOAT16, "cuda"))


@operators
@pytest.mark.parametrize(
    "launch",
    (Launch(1, 8, 1), Launch(1, 8, 1, 2), Launch(1, 8, 2, 3, False), Launch(2, 4, 4, 3), Launch(4, 4, 2, 2, True, 128)),
)
def test_other_launch_shapes(op, launch):
    with forced_launch(**dict.fromkeys(KERNELS, launch)):
        check(op, *make_inputs(op, 3, 257, 1152, BFLOAT16, "cuda"))


@modulated
@dtypes
@pytest.mark.parametrize("width", (72, 1152))
def test_packed(op, dtype, width):
    for lengths in ((256, 1, 7, 0, 255, 3, 1000), (2048,), (1,) * 50, (0, 100, 0)):
        leaves, sample_of_row = make_inputs(op, 0, 0, width, dtype, "cuda", lengths=lengths)
        check(op, leaves, sample_of_row)
        with forced_launch(**dict.fromkeys(KERNELS, Launch(4, 8, 2, 2))):
            check(op, leaves, sample_of_row.long())


@operators
def test_bf16_modulation_of_fp32_activations(op):
    check(op, *make_inputs(op, 3, 257, 1152, FLOAT32, "cuda", modulation_dtype=BFLOAT16))


@operators
@pytest.mark.parametrize("lengths", (None, (1000, 24, 7168, 1)), ids=("batched", "packed"))
def test_two_runs_give_the_same_bits(op, lengths):
    if lengths is not None and not op.modulated:
        pytest.skip("has no packed form")
    leaves, sample_of_row = make_inputs(op, 64, 256, 1152, BFLOAT16, "cuda", lengths=lengths)
    weights = output_gradients(op, leaves)
    first = run(op, op.function, leaves, sample_of_row, weights)
    for _ in range(5):
        for name, value in run(op, op.function, leaves, sample_of_row, weights).items():
            assert torch.equal(value, first[name]), name


@operators
def test_under_compile(op):
    torch.compiler.reset()
    leaves, _ = make_inputs(op, 4, 256, 1152, BFLOAT16, "cuda")
    weights = output_gradients(op, leaves)

    def between(*args):
        outputs = op.function(*(a * 2 for a in args))
        return tuple(o * 0.5 for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

    want = run(op, between, leaves, None, weights)
    got = run(op, torch.compile(between, fullgraph=True), leaves, None, weights)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-2)


@operators
def test_under_compile_with_changing_lengths(op):
    compiled = torch.compile(op.function, dynamic=True, fullgraph=True)
    for batch, length in ((2, 256), (3, 100), (1, 300)):
        leaves, _ = make_inputs(op, batch, length, 384, FLOAT32, "cuda")
        weights = output_gradients(op, leaves)
        want, got = (run(op, function, leaves, None, weights) for function in (op.function, compiled))
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)


@operators
def test_under_checkpoint(op):
    leaves, _ = make_inputs(op, 4, 256, 1152, BFLOAT16, "cuda")
    weights = output_gradients(op, leaves)
    want = run(op, op.function, leaves, None, weights)
    got = run(op, lambda *args: checkpoint(op.function, *args, use_reentrant=False), leaves, None, weights)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@operators
def test_gradients_are_finite_differences(op):
    """Compare with finite differences of <output, weight> in fp32, along a random direction of every input."""
    leaves, _ = make_inputs(op, 2, 40, 384, FLOAT32, "cuda")
    weights = output_gradients(op, leaves)

    def value(shifted) -> float:
        outputs = op.function(*arguments_of(op, shifted))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((o.double() * w.double()).sum().item() for o, w in zip(outputs, weights, strict=True))

    grads = run(op, op.function, leaves, None, weights)
    for name, leaf in leaves.items():
        direction = torch.randn_like(leaf)
        step = 1e-2
        ends = [value({**leaves, name: leaf.detach() + sign * step * direction}) for sign in (1, -1)]
        slope = (grads[f"d{name}"].double() * direction.double()).sum().item()
        size = (grads[f"d{name}"].norm() * direction.norm()).item()
        assert abs((ends[0] - ends[1]) / (2 * step) - slope) <= 1e-3 * size, name


@operators
def test_no_full_size_temporaries(op):
    """Besides its results, the backward pass allocates only partial sums, a small part of an activation's size."""
    leaves, _ = make_inputs(op, 512, 256, 1152, BFLOAT16, "cuda")
    weights = output_gradients(op, leaves)
    arguments = [a if a.is_leaf else a.detach().requires_grad_() for a in arguments_of(op, leaves)]
    outputs = op.function(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, arguments, weights, retain_graph=True)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(outputs, arguments, weights)
    kept = {grad.data_ptr(): grad.nbytes for grad in grads if grad.data_ptr() not in {w.data_ptr() for w in weights}}
    extra = torch.cuda.max_memory_allocated() - before - sum(kept.values())
    assert extra <= 0.15 * leaves["x"].nbytes, f"{extra / leaves['x'].nbytes:.2f} x an activation"


# --------------------------------------------------------------------------------------------------------- attention


@dtypes
@pytest.mark.parametrize("head_dim", (64, 72, 80, 20))
@pytest.mark.parametrize("tokens_first", (True, False))
def test_split_heads(dtype, head_dim, tokens_first):
    for batch, length, heads in ((1, 1, 4), (3, 7, 6), (9, 257, 16), (128, 256, 16)):
        for bias_dtype in (None, dtype, FLOAT32):
            check_split_heads(
                batch, length, heads, head_dim, dtype, "cuda", tokens_first=tokens_first, bias_dtype=bias_dtype
            )


@pytest.mark.parametrize("dtype", (BFLOAT16, torch.float16))
@pytest.mark.parametrize("mode", ("eager", "compile", "checkpoint"))
def test_packed_attention(dtype, mode):
    """Compare the output, and the gradients of qkv and its bias, with float64."""
    backend, _ = resolve_attention("auto", "cuda", dtype, 72, 256, tiled=True)
    torch.manual_seed(0)
    qkv = torch.randn(3, 257, 3 * 4 * 72, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.randn(3 * 4 * 72, device="cuda", dtype=dtype, requires_grad=True)
    attend = LocalAttention(backend)

    def block(qkv, bias):
        return attend(*split_heads(qkv * 1.5, 4, bias))  # an operation before it, as in a model

    run = {
        "eager": block,
        "compile": torch.compile(block, fullgraph=True),
        "checkpoint": lambda *args: checkpoint(block, *args, use_reentrant=False),
    }[mode]
    weight = torch.randn(3, 4, 257, 72, device="cuda", dtype=dtype)
    output = run(qkv, bias)
    grads = torch.autograd.grad(output, (qkv, bias), weight)
    exact = [leaf.detach().double().requires_grad_() for leaf in (qkv, bias)]
    q, k, v = split_heads_reference(exact[0] * 1.5, 4, exact[1])
    want = torch.softmax(q @ k.transpose(-1, -2) / 72**0.5, dim=-1) @ v
    wanted = torch.autograd.grad(want, exact, weight.double())
    D = 4 * 72
    for a, b in (
        (output, want),
        (grads[0], wanted[0]),
        (grads[1][:D], wanted[1][:D]),
        (grads[1][2 * D :], wanted[1][2 * D :]),
    ):
        assert ((a.double() - b).norm() / b.norm()).item() <= (1e-2 if dtype == BFLOAT16 else 2e-3)


@pytest.mark.parametrize("tokens", (257, 1100))
@pytest.mark.parametrize(("backend", "dtype"), (("flash", BFLOAT16), ("flash", torch.float16), ("efficient", FLOAT32)))
def test_attention_of_deterministic_runs_repeats_its_bits(backend, dtype, tokens):
    """Without --deterministic, some kernels add the parts of dq in any order.

    This was seen with cuDNN in fp16 at 257 tokens, and with torch's flash at 1,088 tokens. A sum of two parts does not
    depend on their order, so more parts are needed.
    """
    torch.manual_seed(0)
    qkv = torch.randn(16, tokens, 3 * 16 * 72, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(16, 16, tokens, 72, device="cuda", dtype=dtype)
    make_deterministic()
    try:
        runs = [torch.autograd.grad(LocalAttention(backend)(*split_heads(qkv, 16)), qkv, weight)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.skipif(flash_attn() is None, reason="no flash_attn package is installed")
@pytest.mark.parametrize("head_dim", (64, 72, 128))
@pytest.mark.parametrize("dtype", (BFLOAT16, torch.float16))
def test_the_flash_attn_package_against_float64(dtype, head_dim):
    """Check the output, the gradients, repeatable bits and CUDA graphs, for lengths that are no multiple of a tile.
    With head size 72, heads are padded in the backward pass through a private function of flash-attn-4 4.0.0b36."""
    assert flash_attn()[1] != CUTE or backward_pass() is not None
    backend, reason = resolve_attention("flash_attn", "cuda", dtype, head_dim, 257, tiled=True)
    assert backend == "flash_attn" and reason.startswith(f"asked for, {flash_attn()[1]}")
    attend = LocalAttention(backend)
    torch.manual_seed(0)
    for length in (1, 257, 1031):
        qkv = torch.randn(3, length, 3, 4, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(3, length, 4, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
        got = attend(*qkv.permute(2, 0, 3, 1, 4))
        exact = qkv.detach().double().requires_grad_()
        q, k, v = exact.permute(2, 0, 3, 1, 4)
        want = torch.softmax(q @ k.transpose(-1, -2) / head_dim**0.5, dim=-1) @ v
        (dgot,), (dwant,) = torch.autograd.grad(got, qkv, weight), torch.autograd.grad(want, exact, weight.double())
        for a, b in ((got, want), (dgot, dwant)):
            assert ((a.double() - b).norm() / b.norm()).item() <= (1e-2 if dtype == BFLOAT16 else 2e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # A new leaf, because the old one would wait for the stream of its earlier graph.
        leaf = qkv.detach().requires_grad_()
        (replayed,) = torch.autograd.grad(attend(*leaf.permute(2, 0, 3, 1, 4)), leaf, weight)
    graph.replay()
    assert ((replayed.double() - dwant).norm() / dwant.norm()).item() <= (1e-2 if dtype == BFLOAT16 else 2e-3)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(attend(*qkv.permute(2, 0, 3, 1, 4)), qkv, weight)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("length", (256, 1024))
@pytest.mark.parametrize("dtype", (BFLOAT16, torch.float16))
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compile"))
@pytest.mark.parametrize("way", ("picked", "torch's choice", "fused"))
def test_attention_that_is_picked(length, dtype, compiled, way):
    backend, reason = resolve_attention("auto", "cuda", dtype, 72, length, tiled=True)
    if torch.cuda.get_device_capability() >= (9, 0):
        assert backend == "cudnn", reason
    torch.manual_seed(0)
    qkv = torch.randn(2, length, 3, 4, 72, device="cuda", dtype=dtype, requires_grad=True)
    attend = LocalAttention(backend if way == "picked" else "auto")

    def block(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if way != "fused":
            return attend(q, k, v)
        with fused.attention():
            return F.scaled_dot_product_attention(q, k, v)

    got = torch.compile(block, fullgraph=True)(qkv) if compiled else block(qkv)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.permute(2, 0, 3, 1, 4)
    want = torch.softmax(q @ k.transpose(-1, -2) / 72**0.5, dim=-1) @ v
    weight = torch.randn_like(got)
    (dgot,), (dwant,) = torch.autograd.grad(got, qkv, weight), torch.autograd.grad(want, exact, weight.double())
    for a, b in ((got, want), (dgot, dwant)):
        assert ((a.double() - b).norm() / b.norm()).item() <= (1e-2 if dtype == BFLOAT16 else 2e-3)


@pytest.mark.parametrize("requested", ("cudnn", "flash", "efficient"))
def test_forced_attention_never_builds_the_scores(requested):
    backend, reason = resolve_attention(requested, "cuda", BFLOAT16, 64, 8192, tiled=True)
    assert (backend, reason) == (requested, "asked for")
    q, k, v = (torch.randn(1, 4, 8192, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    LocalAttention(backend)(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * 8192 * 8192 * 2 / 4  # a quarter of the scores in bf16


@dtypes
@pytest.mark.parametrize("norm", (None, "head", "across"))
@pytest.mark.parametrize("head_dim", (64, 72, 80, 96, 128, 256))
def test_rotate_heads(dtype, norm, head_dim):
    for table in (None, "shared", "of samples"):
        if norm is None and table is None:
            continue
        for batch, length, heads in ((1, 1, (1, 1)), (3, 257, (16, 16)), (1, 4608, (24, 24)), (2, 255, (5, 5))):
            for layout in ("projection", "heads first"):
                check_rotate_heads(batch, length, heads, head_dim, dtype, norm, table, layout, "cuda")
        check_rotate_heads(2, 1000, (12, 3), head_dim, dtype, norm, table, "inside out", "cuda", FLOAT32)


@dtypes
@pytest.mark.parametrize("norm", (False, True))
@pytest.mark.parametrize("table", (None, "shared", "of samples"))
def test_join_heads(dtype, norm, table):
    for batch, lengths, heads, head_dim in ((1, (512, 4096), (24, 24), 128), (3, (7, 255, 1), (12, 3), 72)):
        check_join_heads(batch, lengths, heads, head_dim, dtype, norm, table, "cuda", FLOAT32)


@dtypes
@pytest.mark.parametrize("norm", (None, "head", "across"))
@pytest.mark.parametrize("table", (None, "shared", "of samples"))
def test_pack_heads(dtype, norm, table):
    for batch, length, heads, parts, head_dim in ((1, 4096, 12, 2, 128), (3, 255, 12, 4, 72)):
        check_pack_heads(batch, length, heads, parts, head_dim, dtype, norm, table, "cuda")


@dtypes
@pytest.mark.parametrize("shape", ((1, 1, 64), (9, 7, 72), (256, 256, 1152), (3, 8193, 384)))
def test_add_table(shape, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    table = torch.randn(shape[1:], device="cuda")
    y, want = add_table(x, table), x.double() + table
    assert y.dtype == dtype and (y - want).norm() <= BOUNDS[dtype] * want.norm()
    dy = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)


@pytest.mark.parametrize("seed", (42, 0x0123456789ABCDEF, 2**64 - 1))
@pytest.mark.parametrize("step", (0, 1, 2**32 - 1))
def test_philox_gives_the_bits_of_the_cpu(seed, step):
    index = torch.tensor([0, 5, 2**31 + 1, 2**32 - 1] * 64)
    for count in (1, 9, 4096, 5001):
        got = philox_bits(seed, step, index.cuda(), int(Stream.NOISE), count)
        assert torch.equal(got.cpu(), random_bits(seed, step, index, Stream.NOISE, count))
