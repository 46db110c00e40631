"""Test cases of the kernels: inputs, the float64 reference, error bounds, and a pairwise subset of shapes.

The interpreter tests in this folder, tests/gpu and benchmarks/bench_kernels.py use this module.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.kernels.bias_gelu import bias_gelu, bias_gelu_reference
from opendit.kernels.gate_residual import gate_residual, gate_residual_reference
from opendit.kernels.gate_residual_layernorm_modulate import (
    gate_residual_layernorm_modulate,
    gate_residual_layernorm_modulate_reference,
)
from opendit.kernels.gate_rmsnorm_residual import (
    gate_rmsnorm_residual,
    gate_rmsnorm_residual_reference,
    gate_rmsnorm_residual_rmsnorm_modulate,
    gate_rmsnorm_residual_rmsnorm_modulate_reference,
)
from opendit.kernels.layernorm_modulate import (
    layernorm_modulate,
    layernorm_modulate_reference,
    modulate,
    modulate_reference,
    residual_layernorm_modulate,
    residual_layernorm_modulate_reference,
)
from opendit.kernels.rmsnorm_modulate import (
    gate_residual_rmsnorm_modulate,
    gate_residual_rmsnorm_modulate_reference,
    residual_rmsnorm_modulate,
    residual_rmsnorm_modulate_reference,
    rmsnorm_modulate,
    rmsnorm_modulate_reference,
)
from opendit.kernels.rotate_heads import StreamHeads, join_heads, pack_heads, rotate_heads
from opendit.kernels.split_heads import split_heads, split_heads_reference
from opendit.kernels.swiglu import swiglu, swiglu_reference


@dataclass(frozen=True)
class Operator:
    """A fused operation and its reference.

    Attributes:
        arguments: names of the arguments: activations (B, N, D), modulation (B, D), bias or weight (D,).
        outputs: names of the results.
        halves: True if x is (B, N, 2 D) and the results are (B, N, D).
    """

    function: Callable
    reference: Callable
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    halves: bool = False

    @property
    def name(self) -> str:
        has_a_twin = self.arguments[-1] == "bias" and self.modulated
        return self.function.__name__ + ("_with_bias" if has_a_twin else "")

    @property
    def modulated(self) -> bool:
        """True if arguments depend on the sample, so that the operation has a packed form."""
        return not {"shift", "scale", "gate"}.isdisjoint(self.arguments)


ACTIVATIONS, WEIGHTS = ("x", "branch"), ("weight", "next_weight")
JOINED = (gate_residual_layernorm_modulate, gate_residual_layernorm_modulate_reference)
RMSNORM_JOINED = (gate_residual_rmsnorm_modulate, gate_residual_rmsnorm_modulate_reference)
OPERATORS = {
    op.name: op
    for op in (
        Operator(layernorm_modulate, layernorm_modulate_reference, ("x", "shift", "scale"), ("y",)),
        Operator(
            residual_layernorm_modulate,
            residual_layernorm_modulate_reference,
            ("x", "shift", "scale"),
            ("out", "y"),
        ),
        Operator(modulate, modulate_reference, ("x", "shift", "scale"), ("y",)),
        Operator(gate_residual, gate_residual_reference, ("x", "gate", "branch"), ("out",)),
        Operator(gate_residual, gate_residual_reference, ("x", "gate", "branch", "bias"), ("out",)),
        Operator(*JOINED, ("x", "gate", "branch", "shift", "scale"), ("h", "y")),
        Operator(*JOINED, ("x", "gate", "branch", "shift", "scale", "bias"), ("h", "y")),
        Operator(bias_gelu, bias_gelu_reference, ("x", "bias"), ("y",)),
        Operator(rmsnorm_modulate, rmsnorm_modulate_reference, ("x", "weight", "shift", "scale"), ("y",)),
        Operator(
            residual_rmsnorm_modulate,
            residual_rmsnorm_modulate_reference,
            ("x", "weight", "shift", "scale"),
            ("out", "y"),
        ),
        Operator(*RMSNORM_JOINED, ("x", "gate", "branch", "weight", "shift", "scale"), ("h", "y")),
        Operator(*RMSNORM_JOINED, ("x", "gate", "branch", "weight", "shift", "scale", "bias"), ("h", "y")),
        Operator(gate_rmsnorm_residual, gate_rmsnorm_residual_reference, ("x", "gate", "branch", "weight"), ("out",)),
        Operator(
            gate_rmsnorm_residual_rmsnorm_modulate,
            gate_rmsnorm_residual_rmsnorm_modulate_reference,
            ("x", "gate", "branch", "weight", "next_weight", "shift", "scale"),
            ("h", "y"),
        ),
        Operator(swiglu, swiglu_reference, ("x",), ("y",), halves=True),
    )
}
MODULATED = {name: op for name, op in OPERATORS.items() if op.modulated}
KERNELS = [f"{op.function.__name__}_{way}" for op in OPERATORS.values() for way in ("forward", "backward")]

BATCHES = tuple(range(1, 10))
LENGTHS = (1, 7, 255, 256, 257)
WIDTHS = (64, 72, 384, 1000, 1152, 3072)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Bounds of ||result - reference|| / ||reference||. The float64 reference gets the rounded inputs. In half precision,
# the error is due to rounding the result (unit roundoff 2^-9 and 2^-12 on a GPU, with a smaller root mean square;
# the interpreter truncates bf16, which doubles the error). In the joined operation, the rounding of h also affects y.
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 6e-4, torch.float32: 2e-6}
# Bounds of the largest single error divided by the largest reference, because the norm could hide one wrong element.
LARGEST = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def pairwise(*factors: tuple, allowed: Callable[..., bool] = lambda *row: True) -> list[tuple]:
    """Return rows that contain every allowed pair of values of any two factors (greedy, deterministic)."""
    rows = [row for row in itertools.product(*factors) if allowed(*row)]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def make_inputs(
    op: Operator,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    device="cpu",
    lengths: tuple | None = None,
    modulation_dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return ({argument: leaf tensor}, sample_of_row). The leaf "six" (B, 6 D) contains the chunks of the modulation.

    Every sample has its own modulation.

    Args:
        lengths: number of rows of each sample in the packed form; None for the usual form.
    """
    generator = torch.Generator(device).manual_seed(batch * 1_000_003 + length * 1009 + width)
    sample_of_row = None
    shape = (batch, length, 2 * width if op.halves else width)
    if lengths is not None:
        batch = len(lengths)
        sample_of_row = torch.repeat_interleave(torch.arange(batch), torch.tensor(lengths)).to(device, torch.int32)
        shape = (sum(lengths), width)
    random = functools.partial(torch.randn, generator=generator, device=device)
    vector_dtype, leaves = modulation_dtype or dtype, {}
    if op.modulated:
        leaves["six"] = random(batch, 6 * width).to(vector_dtype)
    if "bias" in op.arguments:
        leaves["bias"] = random(width).to(vector_dtype)
    for name in WEIGHTS:  # fp32 with autocast, where activations have a wider dtype than modulation
        if name in op.arguments:
            leaves[name] = random(width).to(dtype)
    for name in op.arguments:
        if name in ACTIVATIONS:
            # The mean is not zero, so that a kernel that ignores the mean fails.
            leaves[name] = (random(shape) * 1.5 + 0.5).to(dtype)
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, sample_of_row


def arguments_of(op: Operator, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Return the operator's arguments, with modulation as strided views."""
    views = {}
    if op.modulated:
        views = dict(zip(("shift", "scale", "gate"), leaves["six"].chunk(6, dim=1)[1:4], strict=True))
    return [leaves[name] if name in leaves else views[name] for name in op.arguments]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN inside the context, so that elements that a kernel does not write are detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def run(op: Operator, function: Callable, leaves: dict[str, Tensor], sample_of_row: Tensor | None, weights) -> dict:
    """Return name -> output, and "d" + name -> gradient of sum_k <output_k, weight_k> with respect to the leaf."""
    extra = {} if sample_of_row is None else {"sample_of_row": sample_of_row}
    outputs = function(*arguments_of(op, leaves), **extra)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [weight.to(output.dtype) for weight, output in zip(weights, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
    named = dict(zip(op.outputs, outputs, strict=True))
    named |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: value.detach() for name, value in named.items()}


def output_gradients(op: Operator, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Return random gradients of the outputs, representable in the activations' dtype."""
    x = leaves["x"]
    generator = torch.Generator(x.device).manual_seed(x.numel())
    shape = (*x.shape[:-1], x.shape[-1] // 2 if op.halves else x.shape[-1])
    return [torch.randn(shape, generator=generator, device=x.device).to(x.dtype) for _ in op.outputs]


def leaf_of(name: str, leaves: dict[str, Tensor]) -> Tensor:
    """Return the leaf whose gradient is called ``name``, or x for an output, which has the dtype of x."""
    return leaves.get(name.removeprefix("d"), leaves["x"])


def errors(op: Operator, leaves: dict[str, Tensor], sample_of_row: Tensor | None) -> dict[str, tuple[float, float]]:
    """Return output or gradient -> (relative error in norm, largest error / largest reference) against float64."""
    weights = output_gradients(op, leaves)
    with poisoned_memory():
        got = run(op, op.function, leaves, sample_of_row, weights)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    index = None if sample_of_row is None else sample_of_row.long()
    want = run(op, op.reference, exact, index, weights)
    result = {}
    for name, reference in want.items():
        dtype = leaf_of(name, leaves).dtype
        assert got[name].dtype == dtype and got[name].shape == reference.shape, name
        difference = got[name].double() - reference
        result[name] = (
            (difference.norm() / reference.norm()).item(),
            (difference.abs().max() / reference.abs().max()).item(),
        )
    return result


def check_split_heads(
    batch: int, length: int, heads: int, head_dim: int, dtype: torch.dtype, device="cpu", *, tokens_first=True,
    bias_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Assert that split_heads returns views with an exact gradient, and that the bias's gradient is within bounds.

    Args:
        tokens_first: True if dq, dk and dv lie in memory as (B, N, H, d), as attention kernels write them; False for
            (B, H, N, d).
    """
    generator = torch.Generator(device).manual_seed(length * 1009 + head_dim)
    random = functools.partial(torch.randn, generator=generator, device=device)
    qkv = random(batch, length, 3 * heads * head_dim).to(dtype).requires_grad_()
    bias = None if bias_dtype is None else random(3 * heads * head_dim).to(bias_dtype).requires_grad_()
    leaves = [qkv] if bias is None else [qkv, bias]
    shape = (batch, length, heads, head_dim) if tokens_first else (batch, heads, length, head_dim)
    # The three means differ, so that mixed-up sums are detected. The means are small, because fp16 must hold sums of
    # 32,768 rows.
    grads = [(random(shape) + offset).to(dtype) for offset in (-0.5, 0.25, 1.0)]
    grads = [grad.transpose(1, 2) for grad in grads] if tokens_first else grads
    outputs = split_heads(qkv, heads, bias)
    with poisoned_memory():
        got = torch.autograd.grad(outputs, leaves, grads)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = split_heads_reference(exact[0], heads, *exact[1:])
    want = torch.autograd.grad(wanted, exact, [grad.double() for grad in grads])
    for output, reference in zip(outputs, wanted, strict=True):
        assert output.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
        assert torch.equal(output.double(), reference)
    assert got[0].is_contiguous() and torch.equal(got[0].double(), want[0])
    if bias is not None:
        assert got[1].dtype == bias_dtype
        assert ((got[1].double() - want[1]).norm() / want[1].norm()).item() <= BOUNDS[bias_dtype]


def rotate_heads_inputs(
    batch: int, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: str | None, device="cpu",
    layout: str = "projection", weight_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return q and k, and with norms also the norms' weights.

    Args:
        layout: "projection" for views of one projection (B, N, (H + 2 K) d), "heads first" for heads before tokens;
            any other value for strided channels.
    """
    generator = torch.Generator(device).manual_seed(length * 1009 + head_dim)
    random = functools.partial(torch.randn, generator=generator, device=device)
    if layout == "projection":
        total = random(batch, length, (heads[0] + 2 * heads[1]) * head_dim).to(dtype).unflatten(-1, (-1, head_dim))
        found = list(total.split((*heads, heads[1]), dim=2)[:2])
    elif layout == "heads first":
        found = [random(batch, count, length, head_dim).to(dtype).transpose(1, 2) for count in heads]
    else:
        found = [random(head_dim, length, count, batch).to(dtype).permute(3, 1, 2, 0) for count in heads]
    if norm is not None:
        widths = [head_dim * (count if norm == "across" else 1) for count in heads]
        found += [random(width).to(weight_dtype or dtype) for width in widths]
    return found


def exact_rotated_heads(x: Tensor, weight: Tensor | None, table: Tensor | None, eps: float, across: bool) -> Tensor:
    """Normalise and rotate x (B, N, H, d) in float64, with products of complex numbers."""
    if weight is not None:
        over = (2, 3) if across else (3,)
        x = x / (x.square().mean(over, keepdim=True) + eps).sqrt() * (weight.view(x.shape[2:]) if across else weight)
    if table is not None:
        turns = torch.view_as_complex(table.double()).unsqueeze(-2)
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
    return x


def check_rotate_heads(
    batch: int, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: str | None,
    table: str | None, layout: str = "projection", device="cpu", weight_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Assert the bounds of rotate_heads for the results and every gradient.

    Args:
        norm: None, "head" or "across".
        table: None, "shared" or "of samples".
    """
    leaves = rotate_heads_inputs(batch, length, heads, head_dim, dtype, norm, device, layout, weight_dtype)
    turns, eps, across = None, 1e-5, norm == "across"
    if table is not None:
        angles = torch.randn(*((batch,) if table == "of samples" else ()), length, head_dim // 2, device=device) * 3
        turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
    for leaf in leaves:
        leaf.requires_grad_()
    names = ("q", "k", "q_weight", "k_weight")[: len(leaves)]
    weights = leaves[2:] or (None, None)
    grads = [torch.randn(batch, count, length, head_dim, device=device).to(dtype).transpose(1, 2) for count in heads]
    with poisoned_memory():
        outputs = rotate_heads(*leaves[:2], *weights, turns, eps, across)
        got = torch.autograd.grad(outputs, leaves, grads)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    pairs = zip(exact[:2], exact[2:] or (None, None), strict=True)
    wanted = [exact_rotated_heads(x, weight, turns, eps, across) for x, weight in pairs]
    want = torch.autograd.grad(wanted, exact, [grad.double() for grad in grads])
    named = zip(("y of q", "y of k", *(f"d{name}" for name in names)), (*outputs, *got), (*wanted, *want), strict=True)
    for (name, value, reference), leaf in zip(named, (*leaves[:2], *leaves), strict=True):
        assert value.dtype == leaf.dtype and value.is_contiguous() and value.shape == leaf.shape, name
        difference = value.double() - reference
        error, largest = difference.norm() / reference.norm(), difference.abs().max() / reference.abs().max()
        bounds = max(dtype, leaf.dtype, key=lambda t: BOUNDS[t])
        assert error <= BOUNDS[bounds] and largest <= max(LARGEST[bounds], BOUNDS[bounds]), (
            f"{name}: {error}, {largest}"
        )


def check_join_heads(
    batch: int, lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool,
    table: str | None, device="cpu", weight_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Assert the bounds of join_heads for streams of these lengths, and of every gradient; values are copied exactly.

    The q, k and v of a stream are views of one projection.
    """
    leaves, streams, exact_leaves, wanted, eps = [], [], [], [], 1e-5
    random = functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    for length in lengths:
        total = random(batch, length, (heads[0] + 2 * heads[1]) * head_dim).to(dtype)
        own = [total, *(random(head_dim).to(weight_dtype or dtype) for _ in range(2 if norm else 0))]
        turns = None
        if table is not None:
            angles = random(*((batch,) if table == "of samples" else ()), length, head_dim // 2) * 3
            turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
        exact = [leaf.double().requires_grad_() for leaf in own]
        own = [leaf.requires_grad_() for leaf in own]
        q, k, v = own[0].unflatten(-1, (-1, head_dim)).split((*heads, heads[1]), dim=2)
        streams.append(StreamHeads(q, k, v, *(own[1:] or (None, None)), turns))
        q, k, v = exact[0].unflatten(-1, (-1, head_dim)).split((*heads, heads[1]), dim=2)
        pairs = zip((q, k), exact[1:] or (None, None), strict=True)
        wanted.append([*(exact_rotated_heads(x, weight, turns, eps, False) for x, weight in pairs), v])
        leaves, exact_leaves = leaves + own, exact_leaves + exact
    want = [torch.cat(parts, dim=1) for parts in zip(*wanted, strict=True)]
    grads = [random(*x.shape).to(dtype) for x in want]
    with poisoned_memory():
        outputs = join_heads(streams, eps)
        got = torch.autograd.grad(outputs, leaves, grads)
    want_grads = torch.autograd.grad(want, exact_leaves, [grad.double() for grad in grads])
    assert torch.equal(outputs[2].double(), want[2])
    assert all(x.is_contiguous() and x.dtype == dtype for x in outputs)
    for value, reference in zip((*outputs, *got), (*want, *want_grads), strict=True):
        difference = value.double() - reference
        error, largest = difference.norm() / reference.norm(), difference.abs().max() / reference.abs().max()
        bounds = max(dtype, value.dtype, key=lambda t: BOUNDS[t])
        assert value.shape == reference.shape
        assert error <= BOUNDS[bounds] and largest <= max(LARGEST[bounds], BOUNDS[bounds]), f"{error}, {largest}"


def check_pack_heads(
    batch: int, length: int, heads: int, parts: int, head_dim: int, dtype: torch.dtype, norm: str | None,
    table: str | None, device="cpu",
) -> None:  # fmt: skip
    """Assert the bounds of pack_heads, and that values are copied exactly. norm: None, "head" or "across"."""
    random = functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    q, k, v = random(batch, length, 3, heads, head_dim).to(dtype).unbind(2)
    across, eps, turns = norm == "across", 1e-5, None
    weights = [random(head_dim * (heads if across else 1)).to(dtype) if norm else None for _ in range(2)]
    if table is not None:
        angles = random(*((batch,) if table == "of samples" else ()), length, head_dim // 2) * 3
        turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
    with poisoned_memory():
        packed = pack_heads(StreamHeads(q, k, v, *weights, turns), parts, eps, across)
    assert packed.shape == (parts, batch, length, 3, heads // parts, head_dim) and packed.dtype == dtype
    found = packed.permute(3, 1, 2, 0, 4, 5).flatten(3, 4)
    assert torch.equal(found[2], v)
    for x, weight, value in zip((q, k), weights, found[:2], strict=True):
        exact_weight = None if weight is None else weight.double()
        reference = exact_rotated_heads(x.double(), exact_weight, turns, eps, across)
        difference = value.double() - reference
        error, largest = difference.norm() / reference.norm(), difference.abs().max() / reference.abs().max()
        assert error <= BOUNDS[dtype] and largest <= max(LARGEST[dtype], BOUNDS[dtype]), (error, largest)


def check(op: Operator, leaves: dict[str, Tensor], sample_of_row: Tensor | None = None) -> None:
    """Assert the bounds for every result and gradient. A NaN fails."""
    for name, (norm, largest) in errors(op, leaves, sample_of_row).items():
        dtype = leaf_of(name, leaves).dtype
        # h and hhat are rounded to the activations' dtype, even if the modulation has a wider dtype.
        dtype = max(dtype, leaves["x"].dtype, key=BOUNDS.get)
        assert norm <= BOUNDS[dtype] and largest <= LARGEST[dtype], f"{name}: {norm:.2e} in norm, largest {largest:.2e}"
