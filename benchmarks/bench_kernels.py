"""Compare the fused kernels with a copy, eager torch and torch.compile in one run on a GPU.

    python benchmarks/bench_kernels.py [--batch 512 --length 256 --width 1152 --dtype bf16] [--record]
    python benchmarks/bench_kernels.py --sweep        # launch shapes instead: rows, tiles, warps, stages, ...

An operation's bandwidth is the number of bytes that it must move, divided by its median time. Only activations count,
each of them once. "share of copy bandwidth" is this bandwidth divided by the bandwidth of a copy."""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch._functorch import config as functorch

from benchmarks.results import append
from opendit.kernels.common import Launch, forced_launch, interpreting, kernels_available
from opendit.kernels.rotate_heads import rotate_heads, rotate_heads_reference
from opendit.kernels.split_heads import split_heads, split_heads_reference
from tests.kernels.cases import OPERATORS, Operator, arguments_of, make_inputs, output_gradients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Function -> numbers of activation tensors that its forward and backward pass must read or write.
TENSORS = {
    "layernorm_modulate": (2, 3),
    "residual_layernorm_modulate": (2, 4),  # x is passed through; a second gradient of x is added
    "modulate": (2, 3),
    "gate_residual": (3, 3),
    "gate_residual_layernorm_modulate": (4, 6),
    "bias_gelu": (2, 3),
    "rmsnorm_modulate": (2, 3),
    "residual_rmsnorm_modulate": (2, 4),
    "gate_residual_rmsnorm_modulate": (4, 6),
    "gate_rmsnorm_residual": (3, 3),
    "gate_rmsnorm_residual_rmsnorm_modulate": (4, 6),
    "swiglu": (3, 5),  # x counts as two tensors
}
HEADS = 16  # heads for split_heads, whose forward pass is a view
HEAD = 128  # head size for rotate_heads, as in public models
CACHE = 60e6  # bytes, slightly more than an H200's L2 cache


def median_ms(function: Callable[[], object], milliseconds: int) -> float:
    from triton.testing import do_bench  # clears the L2 cache before each call

    return cast(float, do_bench(function, warmup=milliseconds // 4, rep=milliseconds, return_mode="median"))


@dataclass
class Inputs:
    """Sets of leaves and output gradients for one operator, together larger than the cache."""

    op: Operator
    sets: list[tuple[dict[str, Tensor], list[Tensor]]]

    @classmethod
    def make(cls, op: Operator, args) -> "Inputs":
        size = args.batch * args.length * args.width * DTYPES[args.dtype].itemsize
        count = max(1, min(16, int(2 * CACHE // size)))
        sets = []
        for _ in range(count):
            leaves, _ = make_inputs(op, args.batch, args.length, args.width, DTYPES[args.dtype], "cuda")
            sets.append((leaves, output_gradients(op, leaves)))
        return cls(op, sets)

    def forward(self, function: Callable) -> Callable[[], object]:
        turn = itertools.cycle([arguments_of(self.op, leaves) for leaves, _ in self.sets])

        def call():
            with torch.no_grad():
                return function(*next(turn))

        return call

    def backward(self, function: Callable) -> Callable[[], object]:
        graphs = []
        for leaves, weights in self.sets:
            # The modulation is a leaf, so that chunk()'s gradient is not timed.
            arguments = [
                a if a.is_leaf else a.detach().requires_grad_() for a in arguments_of(self.op, leaves)
            ]  # detach keeps the strides
            outputs = function(*arguments)
            graphs.append((outputs if isinstance(outputs, tuple) else (outputs,), arguments, weights))
        turn = itertools.cycle(graphs)

        def call():
            outputs, arguments, weights = next(turn)
            return torch.autograd.grad(outputs, arguments, weights, retain_graph=True)

        return call


def split_heads_calls(args) -> dict[str, Callable[[], object]]:
    """Return split_heads's backward passes, with the bias's gradient. dq, dk, dv have attention's layout."""
    shape = (args.batch, args.length, HEADS, args.width // HEADS)
    random = functools.partial(torch.randn, device="cuda", dtype=DTYPES[args.dtype])
    grads = [random(shape).transpose(1, 2) for _ in range(3)]
    leaves = [random(args.batch, args.length, 3 * args.width).requires_grad_(), random(3 * args.width).requires_grad_()]
    functions = {
        "ours": split_heads,
        "compile": torch.compile(split_heads_reference, dynamic=False),
        "eager": split_heads_reference,
    }
    outputs = {variant: function(leaves[0], HEADS, leaves[1]) for variant, function in functions.items()}
    return {
        variant: functools.partial(torch.autograd.grad, results, leaves, grads, retain_graph=True)
        for variant, results in outputs.items()
    }


def rotate_heads_calls(args) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Return the forward and backward passes of rotate_heads on views of one projection, with norms and a rotation."""
    heads = max(1, args.width // HEAD)
    random = functools.partial(torch.randn, device="cuda", dtype=DTYPES[args.dtype])
    qkv = random(args.batch, args.length, 3, heads, args.width // heads)
    leaves = [*qkv.unbind(2)[:2], *(random(args.width // heads) for _ in range(2))]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    table = torch.randn(args.length, args.width // heads // 2, 2, device="cuda")
    functions: dict[str, Callable[..., Any]] = {
        "ours": rotate_heads,
        "compile": torch.compile(rotate_heads_reference, dynamic=False),
        "eager": rotate_heads_reference,
    }

    def forward(function: Callable) -> object:
        with torch.no_grad():
            return function(*leaves, table)

    calls = {variant: functools.partial(forward, function) for variant, function in functions.items()}
    outputs = {variant: function(*leaves, table) for variant, function in functions.items()}
    grads = [random(args.batch, args.length, heads, args.width // heads) for _ in range(2)]
    return calls, {
        variant: functools.partial(torch.autograd.grad, results, leaves, grads, retain_graph=True)
        for variant, results in outputs.items()
    }


def operator_calls(name: str, args) -> Iterator[tuple[str, int, dict[str, Callable[[], object]]]]:
    """Yield (direction, tensors moved, {variant: call}) for an operator."""
    if name == "split_heads":
        yield "backward", 6, split_heads_calls(args)
        return
    if name == "rotate_heads":
        yield from zip(("forward", "backward"), (4, 6), rotate_heads_calls(args), strict=True)
        return
    op = OPERATORS[name]
    inputs = Inputs.make(op, args)
    functions = {"ours": op.function, "compile": torch.compile(op.reference, dynamic=False), "eager": op.reference}
    for direction, tensors in zip(("forward", "backward"), TENSORS[op.function.__name__], strict=True):
        yield direction, tensors, {variant: getattr(inputs, direction)(f) for variant, f in functions.items()}


def copy_ms(args) -> float:
    """Return the time of a copy of one activation tensor, which shows the card's memory bandwidth."""
    shape = (args.batch, args.length, args.width)
    size = args.batch * args.length * args.width * DTYPES[args.dtype].itemsize
    count = max(1, min(16, int(2 * CACHE // size)))
    turn = itertools.cycle(
        [[torch.randn(shape, device="cuda").to(DTYPES[args.dtype]) for _ in range(2)] for _ in range(count)]
    )

    def call():
        source, target = next(turn)
        target.copy_(source)

    return median_ms(call, args.milliseconds)


def compare(args) -> None:
    gigabytes = 2 * args.batch * args.length * args.width * DTYPES[args.dtype].itemsize / 1e9
    copies = [copy_ms(args)]
    lines, rows = [], []
    for name in args.operators:
        torch.compiler.reset()  # the same reference is compiled with and without bias
        for direction, tensors, calls in operator_calls(name, args):
            rounds = {variant: [] for variant in calls}
            for _ in range(args.rounds):  # in turns, so that clock drift affects all variants equally
                for variant, call in calls.items():
                    rounds[variant].append(median_ms(call, args.milliseconds))
                copies.append(copy_ms(args))
            times = {variant: statistics.median(values) for variant, values in rounds.items()}
            lines.append((name, direction, tensors, times))
            print(f"{name} {direction}: " + ", ".join(f"{k} {v:.4f} ms" for k, v in times.items()), flush=True)
            del calls
        torch.cuda.empty_cache()
    copy = statistics.median(copies)
    tokens = args.batch * args.length
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {tokens} x {args.width} {args.dtype}")
    print(f"copy {copy:.4f} ms = {gigabytes / copy:.2f} TB/s (spread {min(copies):.4f} to {max(copies):.4f})")
    print(
        f"{'share of copy bandwidth':46s} {'ours':>6s} {'compile':>8s} {'eager':>6s}  {'x compile':>9s} {'x eager':>8s}"
    )
    for name, direction, tensors, times in lines:
        share = {variant: tensors / 2 * copy / ms for variant, ms in times.items()}
        numbers = (*share.values(), times["compile"] / times["ours"], times["eager"] / times["ours"])
        print(f"{name + ' ' + direction:50s}" + "".join(f"{number:10.2f}" for number in numbers))
        case = f"{name} {direction} {tokens}x{args.width} {args.dtype}"
        for baseline in ("compile", "eager"):
            rows.append({
                "bench": "kernels", "case": case, "metric": "share of copy bandwidth", "value": f"{share['ours']:.3f}",
                "baseline": f"torch {baseline}", "baseline_value": f"{share[baseline]:.3f}",
            })  # fmt: skip
    if args.record:
        append(rows)


# ------------------------------------------------------------------------------------------------------------- sweep


def row_shapes(tiles: tuple[int, ...], shapes: tuple[tuple[int, int, int, bool], ...]) -> list[Launch]:
    """Return launch shapes for all ``tiles`` per program and all ``shapes`` (rows per tile, warps, stages, hold)."""
    return [Launch(r, t, w, s, h) for t in tiles for r, w, s, h in shapes]


SWEEP = {
    "layernorm_modulate_forward": row_shapes(
        (4, 8, 16, 32), ((1, 1, 1, False), (1, 1, 1, True), (1, 1, 2, True), (1, 2, 1, False), (1, 2, 3, True))
    ),
    "layernorm_modulate_backward": row_shapes(
        (32, 64, 128, 256),
        (
            (1, 1, 1, True), (1, 1, 2, True), (1, 2, 1, False), (1, 2, 1, True), (1, 2, 2, True), (1, 2, 3, True),
            (1, 4, 1, True), (1, 4, 2, True), (1, 4, 3, True), (1, 4, 4, True),
        ),
    ) + [Launch(2, 32, 2), Launch(1, 64, 1, 2, True, 168), Launch(1, 64, 2, 3, True, 96)],
    "gate_residual_forward": [
        Launch(32, 1, 4), Launch(32, 2, 4), Launch(64, 1, 4), Launch(16, 1, 4), Launch(8, 1, 1), Launch(8, 4, 1),
        Launch(16, 1, 2), Launch(64, 1, 8),
    ],
    "gate_residual_backward": [
        Launch(32, 2, 4), Launch(32, 4, 4), Launch(32, 8, 4), Launch(16, 8, 4), Launch(16, 8, 2), Launch(8, 8, 1),
        Launch(8, 16, 1), Launch(8, 32, 2), Launch(16, 16, 2), Launch(32, 4, 4, 2), Launch(16, 8, 4, 3),
        Launch(64, 2, 8),
    ],
    "bias_gelu_forward": [Launch(32, 1, 4), Launch(16, 1, 4), Launch(32, 2, 4), Launch(16, 1, 2), Launch(8, 1, 1)],
    "bias_gelu_backward": [
        Launch(16, 16, 4), Launch(16, 16, 4, 2), Launch(16, 8, 4), Launch(16, 32, 4), Launch(8, 16, 2),
        Launch(32, 4, 4), Launch(32, 4, 4, 2), Launch(32, 8, 4), Launch(32, 4, 8), Launch(64, 2, 8),
    ],
    "swiglu_forward": [
        Launch(32, 1, 4), Launch(16, 1, 4), Launch(32, 2, 4), Launch(16, 1, 2), Launch(8, 1, 1), Launch(64, 1, 8),
    ],
    "swiglu_backward": [
        Launch(16, 1, 4), Launch(32, 1, 4), Launch(8, 1, 4), Launch(16, 2, 4), Launch(16, 1, 2), Launch(8, 1, 1),
        Launch(8, 1, 2), Launch(32, 1, 8),
    ],
    "rotate_heads_forward": [
        Launch(16, 1, 4), Launch(8, 1, 2), Launch(8, 1, 4), Launch(32, 1, 4), Launch(32, 1, 8), Launch(16, 2, 4),
    ],
    "rotate_heads_backward": [
        Launch(16, 32, 4), Launch(16, 8, 4), Launch(16, 64, 4), Launch(8, 32, 2), Launch(8, 32, 4), Launch(32, 16, 8),
        Launch(16, 32, 4, 2), Launch(16, 32, 8),
    ],
    "gate_residual_layernorm_modulate_forward": row_shapes(
        (8, 16),
        (
            (1, 1, 1, False), (1, 2, 1, False), (1, 2, 1, True), (1, 2, 2, True), (1, 2, 3, True), (1, 4, 1, False),
            (1, 4, 1, True), (1, 4, 3, True),
        ),
    ),
    "gate_residual_layernorm_modulate_backward": row_shapes(
        (32, 64, 128, 256),
        (
            (1, 2, 1, False), (1, 2, 1, True), (1, 2, 2, True), (1, 2, 3, True), (1, 4, 1, False), (1, 4, 1, True),
            (1, 4, 2, True), (1, 4, 3, True), (1, 8, 1, True), (1, 8, 3, True),
        ),
    ),
}  # fmt: skip


def sweep(args) -> None:
    """Print the times of all launch shapes, the best first. Each kernel's first line is the default shape."""
    copy = copy_ms(args)
    print(f"copy {copy:.4f} ms")
    for kernel, launches in SWEEP.items():
        name, _, direction = kernel.rpartition("_")
        if name not in args.operators:
            continue
        if name == "rotate_heads":
            tensors, call = next(
                (moved, calls["ours"]) for way, moved, calls in operator_calls(name, args) if way == direction
            )
        else:
            op = OPERATORS.get(f"{name}_with_bias", OPERATORS[name])  # the form that models use
            tensors = TENSORS[name][direction == "backward"]
            call = getattr(Inputs.make(op, args), direction)(op.function)
        print(f"\n{kernel}: default {tensors / 2 * copy / median_ms(call, args.milliseconds):.3f} of copy", flush=True)
        results = []
        for launch in launches:
            with forced_launch(**{kernel: launch}):
                try:
                    results.append((median_ms(call, args.milliseconds), launch))
                except Exception as error:  # too little shared memory or registers is also a result
                    print(f"  {launch}: {type(error).__name__}: {str(error)[:80]}")
        for ms, launch in sorted(results, key=lambda result: result[0]):
            print(
                f"  {tensors / 2 * copy / ms:.3f} {ms:.4f} ms  rows {launch.rows} tiles {launch.tiles} "
                f"warps {launch.warps} stages {launch.stages} hold {int(launch.hold)} registers {launch.registers}"
            )
        del call
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    names = [*OPERATORS, "split_heads", "rotate_heads"]
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    parser.add_argument("--milliseconds", type=int, default=100, help="time for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--sweep", action="store_true", help="time launch shapes instead")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.csv")
    args = parser.parse_args()
    available, reason = kernels_available("cuda", DTYPES[args.dtype])
    if not available or interpreting():
        raise SystemExit(f"no GPU kernels to measure: {reason}")
    functorch.donated_buffer = False  # the compiled backward runs more than once here
    sweep(args) if args.sweep else compare(args)


if __name__ == "__main__":
    main()
