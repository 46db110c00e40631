"""Time LoRA's two Triton kernels (kernels/lora.py) beside torch's operations, for a frozen layer's products.

    python benchmarks/bench_lora.py [--rank 16] [--layers 32768x1152x4608 ...] [--seconds 0.2] [--results FILE]

A layer is ROWSxINxOUT. "output" is the forward product without the thin product x a^T. "input's gradient" is dy W +
dthin a. "thin gradients" are those of x a^T and of b. Kernel and torch take turns, and medians are reported."""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.results import append
from opendit.kernels import lora
from opendit.models.layers import TORCH_PRODUCTS

DIT_XL = ["32768x1152x3456", "32768x1152x1152", "32768x1152x4608", "32768x4608x1152"]
FLUX = ["4608x3072x9216", "4608x3072x3072", "512x3072x9216", "4608x3072x12288", "4608x12288x3072", "4608x15360x3072"]
WAN = ["32760x1536x1536", "32760x1536x8960", "32760x8960x1536"]
TURNS = 5


def milliseconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return each call's median time over TURNS turns. In a turn, each call runs for about ``seconds / TURNS``."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            count = counts.get(name, 3)
            first.record()
            for _ in range(count):
                call()
            last.record()
            last.synchronize()
            taken = first.elapsed_time(last) / count
            counts[name] = max(3, int(1e3 * seconds / TURNS / taken))
            if turn:
                found[name].append(taken)
    return {name: statistics.median(times) for name, times in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", nargs="+", default=DIT_XL + FLUX + WAN, metavar="ROWSxINxOUT")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    rank, rows = args.rank, []
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    lora.LONGEST_SUM, lora.SMALLEST_OUTPUT = sys.maxsize, 0  # time the kernel also where it is not used
    for layer in args.layers:
        count, width, out = map(int, layer.split("x"))
        x, dy, weight, bias = normal(count, width), normal(count, out), normal(out, width), normal(out)
        a, b, thin, dthin = normal(rank, width), normal(out, rank), normal(count, rank), normal(count, rank)
        works: dict[str, tuple[str, tuple[object, ...]]] = {
            "output": ("output", (x, weight.t(), thin, b.t(), 1.0, bias)),
            "input's gradient": ("output", (dy, weight, dthin, a, 1.0)),
            "thin gradients": ("gradients", (dy, b, thin, 1.0)),
        }
        for work, (name, arguments) in works.items():
            of = {"kernel": lora.LORA_PRODUCTS, "torch": TORCH_PRODUCTS}
            calls = {how: partial(getattr(products, name), *arguments) for how, products in of.items()}
            kernel, torchs = (1e3 * time for time in milliseconds(calls, args.seconds).values())
            figures = f"kernel {kernel:7.1f} us, torch {torchs:7.1f} us, {torchs / kernel:.3f}"
            print(f"{layer:18s} {work:17s} {figures}", flush=True)
            row = {"bench": "lora", "case": f"{layer} rank {rank} {work}", "metric": "us"}
            row |= {"value": f"{kernel:.1f}", "baseline": "torch"}
            rows.append(row | {"baseline_value": f"{torchs:.1f}"})
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
