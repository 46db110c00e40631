"""Compare the fused operations on packs, modulated by segment, with the same operations on samples of one length.

    python benchmarks/bench_packed_modulation.py [--operators layernorm_modulate] [--width 1152] [--record]

Both have the same number of tokens, and read and write the same number of bytes. The ratio is dense time divided by
packed time. The mixes of bench_packed_attention.py are compared with dense samples of 8,192 tokens. The mix "short" has
only segments of 256 tokens, and is compared with dense samples of 256 tokens."""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench_attention import device_ms
from benchmarks.bench_packed_attention import LONGEST, MIXES, mixed
from benchmarks.results import add_flags, record
from opendit.kernels.common import kernels_available
from tests.kernels.cases import MODULATED, Operator, arguments_of, make_inputs, output_gradients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def lengths_of(mix: str, longest: int) -> tuple[list[int], int]:
    """Return (the segments' lengths, the dense samples' length)."""
    if mix != "short":
        return MIXES[mix](longest), longest
    length = max(1, longest // 32)
    return [length] * (sum(mixed(longest)) // length), length


def calls(op: Operator, lengths: list[int], length: int, args) -> dict[str, dict[str, Callable[[], object]]]:
    """Return {"forward", "backward": {"packed", "dense": call}}."""
    found: dict[str, dict] = {"forward": {}, "backward": {}}
    for name in ("packed", "dense"):
        how: dict[str, Any] = {"lengths": tuple(lengths)} if name == "packed" else {}
        shape = (0, 0) if name == "packed" else (sum(lengths) // length, length)
        leaves, rows = make_inputs(op, *shape, args.width, DTYPES[args.dtype], args.device, **how)
        arguments = [a if a.is_leaf else a.detach().requires_grad_() for a in arguments_of(op, leaves)]
        extra = {} if rows is None else {"sample_of_row": rows}
        weights = output_gradients(op, leaves)
        outputs = op.function(*arguments, **extra)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)

        def forward(arguments=arguments, extra=extra):
            with torch.no_grad():
                return op.function(*arguments, **extra)

        def backward(outputs=outputs, arguments=arguments, weights=weights):
            return torch.autograd.grad(outputs, arguments, weights, retain_graph=True)

        found["forward"][name], found["backward"][name] = forward, backward
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--operators", nargs="+", choices=MODULATED, default=[*MODULATED])
    parser.add_argument("--mixes", nargs="+", choices=[*MIXES, "short"], default=[*MIXES, "short"])
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the mix's longest samples")
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program, interpreted"
    )
    parser.add_argument("--milliseconds", type=int, default=50, help="time for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both")
    add_flags(parser)
    args = parser.parse_args(argv)
    available, reason = kernels_available(args.device, DTYPES[args.dtype])
    if not available:
        raise SystemExit(f"no kernels to measure: {reason}")
    rows = []
    print(f"{'ms':64s} {'packed':>8s} {'dense':>8s} {'speed':>6s}")
    for mix in args.mixes:
        lengths, length = lengths_of(mix, args.longest)
        for name in args.operators:
            for direction, pair in calls(MODULATED[name], lengths, length, args).items():
                times: dict[str, list[float]] = {"packed": [], "dense": []}
                for _ in range(args.rounds):  # in turns, so that clock drift affects both equally
                    for which, call in pair.items():
                        times[which].append(device_ms(call, args.milliseconds, args.device))
                packed, dense = (statistics.median(times[which]) for which in ("packed", "dense"))
                case = f"{name} {direction}, {mix} of {len(lengths)}, {sum(lengths)}x{args.width} {args.dtype}"
                print(f"{case:64s} {packed:8.4f} {dense:8.4f} {dense / packed:6.2f}", flush=True)
                rows.append({
                    "bench": "packed_modulation", "case": case, "metric": "calls/s", "value": f"{1000 / packed:.4g}",
                    "baseline": f"samples of {length} tokens", "baseline_value": f"{1000 / dense:.4g}",
                })  # fmt: skip
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    record(rows, args)


if __name__ == "__main__":
    main()
