"""Test the fused operations in Triton's interpreter against float64, with odd shapes and all gradients."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from opendit.kernels import common
from opendit.kernels.common import Launch, forced_launch
from tests.kernels.cases import (
    ACTIVATIONS,
    DTYPES,
    KERNELS,
    LENGTHS,
    MODULATED,
    OPERATORS,
    WIDTHS,
    arguments_of,
    check,
    make_inputs,
    output_gradients,
    pairwise,
    run,
)

operators = pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
modulated = pytest.mark.parametrize("op", MODULATED.values(), ids=MODULATED)
# RMSNorm uses LayerNorm's kernels with another constant. Tests that do not depend on it use one of the two.
DISTINCT = [
    op
    for op in OPERATORS.values()
    if not op.function.__module__.endswith(".rmsnorm_modulate") or op.name.endswith("with_bias")
]
distinct = pytest.mark.parametrize("op", DISTINCT, ids=[op.name for op in DISTINCT])
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def every_kernel(launch: Launch):
    return forced_launch(**dict.fromkeys(KERNELS, launch))


# With one row per tile, as on the GPU for D >= 1024, the interpreter would take minutes for 257 rows. With two tiles of
# 128 rows per program, 255 and 256 rows need one program per sample (no second stage), and 257 rows need two.
TALL = Launch(rows=128, tiles=2, warps=1)
TWINS = (
    "residual_layernorm_modulate", "modulate", "gate_residual", "gate_residual_layernorm_modulate",
    "residual_rmsnorm_modulate", "gate_residual_rmsnorm_modulate", "gate_residual_rmsnorm_modulate_with_bias",
    "gate_rmsnorm_residual",
)  # fmt: skip
CASES = pairwise((1, 2, 9), LENGTHS, WIDTHS, DTYPES, allowed=lambda b, n, d, dtype: b * n * d <= 100_000)


@pytest.mark.parametrize(
    ("op", "batch", "length", "width", "dtype"),
    # Twins share another operation's kernels, so a third of the cases is enough for them.
    [(op, *case) for op in OPERATORS.values() for case in CASES[:: 3 if op.name in TWINS else 1]],
    ids=lambda value: str(getattr(value, "name", value)).removeprefix("torch."),
)
def test_forward_and_gradients(op, batch, length, width, dtype):
    with every_kernel(TALL):
        check(op, *make_inputs(op, batch, length, width, dtype))


@operators
@pytest.mark.parametrize("width", (64, 1152, 8192))
def test_launch_shapes_used_on_the_gpu(op, width):
    check(op, *make_inputs(op, 2, 3, width, FLOAT32))


@distinct
@pytest.mark.parametrize("launch", (Launch(1, 4, 1, 2), Launch(1, 4, 1, hold=False), Launch(2, 2, 2, 1, False, 64)))
def test_other_launch_shapes(op, launch):
    with every_kernel(launch):
        check(op, *make_inputs(op, 2, 6, 72, FLOAT32))


@modulated
@pytest.mark.parametrize("lengths", ((5, 1, 37, 0, 8, 16), (40,), (1,) * 9, (0, 15, 17, 0)), ids=str)
def test_packed(op, lengths):
    leaves, sample_of_row = make_inputs(op, 0, 0, 72, FLOAT32, lengths=lengths)
    with every_kernel(Launch(rows=4, tiles=4, warps=1)):
        check(op, leaves, sample_of_row if len(lengths) > 1 else sample_of_row.long())


@modulated
def test_packed_equals_batched(op):
    leaves, _ = make_inputs(op, 2, 12, 72, BFLOAT16)
    weights = output_gradients(op, leaves)
    packed = {name: leaf.detach() for name, leaf in leaves.items()}
    packed = {name: leaf.view(24, 72) if leaf.dim() == 3 else leaf for name, leaf in packed.items()}
    packed = {name: leaf.clone().requires_grad_() for name, leaf in packed.items()}
    with every_kernel(Launch(rows=2, tiles=4, warps=1)):
        batched = run(op, op.function, leaves, None, weights)
        rows = run(op, op.function, packed, torch.arange(24) // 12, [w.view(24, 72) for w in weights])
    for name, value in batched.items():
        if name == "dbias":  # a sum over all slots, which the packed form divides differently
            torch.testing.assert_close(value, rows[name])
        else:
            assert torch.equal(value.flatten(), rows[name].flatten()), name
    # samples (B, N, D) with a sample index for each token (B, N)
    with every_kernel(Launch(rows=2, tiles=4, warps=1)):
        found = run(op, op.function, leaves, torch.arange(24).view(2, 12) // 12, weights)
    assert all(torch.equal(value.flatten(), rows[name].flatten()) for name, value in found.items())


@operators
def test_bf16_modulation_of_fp32_activations(op):
    """With autocast, a linear layer computes the modulation in bf16, and the residual stream stays in fp32."""
    check(op, *make_inputs(op, 2, 7, 72, FLOAT32, modulation_dtype=BFLOAT16))


@operators
def test_gradients_that_are_not_contiguous(op):
    leaves, _ = make_inputs(op, 2, 3, 64, FLOAT32)
    outputs = op.function(*arguments_of(op, leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(o.sum() for o in outputs).backward()  # the gradient is an expanded tensor
    exact = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    want = op.reference(*arguments_of(op, exact))
    sum(o.sum() for o in (want if isinstance(want, tuple) else (want,))).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, exact[name].grad, rtol=1e-4, atol=1e-4)


# The number of activations that the backward pass reads besides the gradients, if only activations need gradients.
KEPT_BESIDE_FROZEN = {
    "modulate": 0, "gate_residual": 0, "gate_residual_with_bias": 0, "gate_rmsnorm_residual": 2,
    "gate_rmsnorm_residual_rmsnorm_modulate": 2,
}  # fmt: skip


@operators
@pytest.mark.parametrize("packed", (False, True))
def test_frozen_modulation_biases_and_weights_cost_nothing(op, packed, monkeypatch):
    """LoRA freezes them: no sums over tokens are computed, and nothing is saved that only these sums need."""
    if packed and not op.modulated:
        pytest.skip("has no packed form")
    leaves, sample_of_row = make_inputs(op, 2, 40, 72, BFLOAT16, lengths=(17, 23) if packed else None)
    weights, frozen = output_gradients(op, leaves), [name for name in leaves if name not in ACTIVATIONS]
    with every_kernel(Launch(rows=4, tiles=2, warps=1)):
        want = run(op, op.function, leaves, sample_of_row, weights)
        for name in frozen:
            leaves[name].requires_grad_(False)
        extra = {} if sample_of_row is None else {"sample_of_row": sample_of_row}
        monkeypatch.setattr(common, "_finish", None)  # the kernel that adds up partial sums
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t}) or t, lambda t: t):
            outputs = op.function(*arguments_of(op, leaves), **extra)
        inputs = [leaves[name] for name in leaves if name not in frozen]
        got = torch.autograd.grad(outputs, inputs, weights)
    for name, value in zip((name for name in leaves if name not in frozen), got, strict=True):
        assert torch.equal(value, want[f"d{name}"]), name
    large = [tensor for tensor in saved.values() if tensor.shape == leaves["x"].shape]
    assert len(large) == KEPT_BESIDE_FROZEN.get(op.name, 1)


@pytest.mark.parametrize("op", [op for op in OPERATORS.values() if "bias" in op.arguments], ids=lambda op: op.name)
@pytest.mark.parametrize("trained", ("six", "bias"))
def test_a_bias_or_a_modulation_is_trained_without_the_other(op, trained):
    leaves, _ = make_inputs(op, 2, 7, 72, FLOAT32)
    weights = output_gradients(op, leaves)
    want = run(op, op.function, leaves, None, weights)
    kept = {name: leaf for name, leaf in leaves.items() if name in (trained, *ACTIVATIONS)}
    for name in leaves.keys() - kept.keys():
        leaves[name].requires_grad_(False)
    got = torch.autograd.grad(op.function(*arguments_of(op, leaves)), kept.values(), weights)
    for name, value in zip(kept, got, strict=True):
        assert torch.equal(value, want[f"d{name}"]), name


@pytest.mark.parametrize("name", ("gate_residual_layernorm_modulate", "gate_rmsnorm_residual_rmsnorm_modulate"))
@pytest.mark.parametrize("used", (0, 1))
def test_joined_operation_with_one_output_used(name, used):
    op = OPERATORS[name]
    leaves, _ = make_inputs(op, 2, 7, 72, FLOAT32)
    weight = output_gradients(op, leaves)[used]
    got = torch.autograd.grad(op.function(*arguments_of(op, leaves))[used], leaves.values(), weight, allow_unused=True)
    want = torch.autograd.grad(
        op.reference(*arguments_of(op, leaves))[used], leaves.values(), weight, allow_unused=True
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@distinct
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_under_compile(op, backend):
    torch.compiler.reset()
    leaves, _ = make_inputs(op, 2, 5, 64, FLOAT32)
    weights = output_gradients(op, leaves)

    def between(*args):  # with operations for the compiler on both sides, as in a block
        outputs = op.function(*(a * 1.5 for a in args))
        return tuple(o * 0.5 for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

    want = run(op, between, leaves, None, weights)
    got = run(op, torch.compile(between, backend=backend, fullgraph=True), leaves, None, weights)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)


@operators
def test_under_checkpoint(op):
    leaves, _ = make_inputs(op, 2, 5, 64, FLOAT32)
    weights = output_gradients(op, leaves)
    want = run(op, op.function, leaves, None, weights)
    got = run(op, lambda *args: checkpoint(op.function, *args, use_reentrant=False), leaves, None, weights)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@operators
def test_registered_as_torch_wants_it(op):
    leaves, sample_of_row = make_inputs(op, 1, 3, 64, FLOAT32, lengths=(2, 1) if op.modulated else None)
    name, extra = {
        "layernorm_modulate": ("layernorm_modulate", (sample_of_row, 1e-6, True, True)),
        "residual_layernorm_modulate": ("layernorm_modulate", (sample_of_row, 1e-6, True, True)),
        "rmsnorm_modulate": ("layernorm_modulate", (sample_of_row, 1e-6, True, False)),
        "residual_rmsnorm_modulate": ("layernorm_modulate", (sample_of_row, 1e-6, True, False)),
        "modulate": ("layernorm_modulate", (sample_of_row, 0.0, False, False)),
        "gate_residual": ("gate_residual", (None, sample_of_row)),
        "gate_residual_with_bias": ("gate_residual", (sample_of_row,)),
        "gate_residual_layernorm_modulate": ("gate_residual_layernorm_modulate", (None, sample_of_row, 1e-6, True)),
        "gate_residual_layernorm_modulate_with_bias": ("gate_residual_layernorm_modulate", (sample_of_row, 1e-6, True)),
        "gate_residual_rmsnorm_modulate": ("gate_residual_layernorm_modulate", (None, sample_of_row, 1e-6, False)),
        "gate_rmsnorm_residual": ("gate_rmsnorm_residual", (None, None, None, sample_of_row, 1e-6, 1e-6)),
        "gate_rmsnorm_residual_rmsnorm_modulate": ("gate_rmsnorm_residual", (sample_of_row, 1e-6, 1e-6)),
        "gate_residual_rmsnorm_modulate_with_bias": ("gate_residual_layernorm_modulate", (sample_of_row, 1e-6, False)),
    }.get(op.name, (op.name, ()))
    overload = getattr(torch.ops.opendit, name).default
    arguments = zip(op.arguments, arguments_of(op, leaves), strict=True)
    folded = () if name == "gate_rmsnorm_residual" else ("weight",)  # folded into the scale
    torch.library.opcheck(overload, (*(a for argument, a in arguments if argument not in folded), *extra))


@modulated
def test_modulation_chunks_are_not_copied(op):
    leaves, _ = make_inputs(op, 2, 3, 64, FLOAT32)
    chunk = leaves["six"].chunk(6, dim=1)[1]
    assert not chunk.is_contiguous()
    assert common.unit_columns(chunk)[0] is chunk


@operators
def test_wrong_inputs_are_refused(op):
    leaves, _ = make_inputs(op, 2, 3, 64, FLOAT32)
    good = dict(zip(op.arguments, arguments_of(op, leaves), strict=True))
    wrongs = [("x", good["x"][..., :63]), ("x", good["x"].double())]
    wrongs += [(name, good[name][:1]) for name in op.arguments if name not in ACTIVATIONS]
    wrongs += [(name, good[name].double()) for name in ("bias", "weight") if name in good]
    if op.modulated:
        wrongs += [("x", good["x"][0]), ("sample_of_row", torch.zeros(6, dtype=torch.int32))]
    for name, wrong in wrongs:
        with pytest.raises(ValueError):
            op.function(**{**good, name: wrong})
