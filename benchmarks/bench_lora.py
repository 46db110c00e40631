"""Compare LoRA's Triton kernels (opendit/kernels/lora.py) with torch's operations, for a frozen layer's products.

    python benchmarks/bench_lora.py [--rank 16] [--layers 32768x1152x4608 ...] [--seconds 0.2] [--results FILE]

A layer is ROWSxINxOUT. The program times:

    output                x W^T + thin b^T + bias, with thin = x a^T already computed
    input's gradient      dy W + dthin a
    thin gradients        the gradients of thin and b
    product of float8     x a^T with x in float8, for --fp8
    gradient of float8    the gradient of a with x in float8, for --fp8
    addition              a thin term added to the output, for --fp8
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from benchmarks.results import append
from opendit.kernels import lora
from opendit.models.layers import TORCH_PRODUCTS

DIT_XL = ["32768x1152x3456", "32768x1152x1152", "32768x1152x4608", "32768x4608x1152"]
FLUX = ["4608x3072x9216", "4608x3072x3072", "512x3072x9216", "4608x3072x12288", "4608x12288x3072", "4608x15360x3072"]
WAN = ["32760x1536x1536", "32760x1536x8960", "32760x8960x1536"]


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call in a CUDA graph, so that the host does not limit short kernels."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return 1e3 * cast(float, do_bench_cudagraph(call, rep=int(1e3 * seconds), return_mode="median"))


BOTH = lora.LORA_PRODUCTS, TORCH_PRODUCTS


def converted(x8: Tensor, descale: Tensor, factor: Tensor, turned: bool = False) -> Tensor:
    """Multiply a float8 activation by a thin factor in torch, which converts the activation first."""
    x = x8.to(factor.dtype)
    return ((x.t() if turned else x) @ factor) * descale.to(factor.dtype)


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
        x8, descale = (8 * x).to(torch.float8_e4m3fn), torch.full((1,), 0.125, device="cuda")
        calls: dict[str, list[Callable[[], object]]] = {
            "output": [partial(p.output, x, weight.t(), thin, b.t(), 1.0, bias) for p in BOTH],
            "input's gradient": [partial(p.output, dy, weight, dthin, a, 1.0) for p in BOTH],
            "thin gradients": [partial(p.gradients, dy, b, thin, 1.0) for p in BOTH],
            "product of float8": [partial(lora.thin_product, x8, descale, a), partial(converted, x8, descale, a.t())],
            "gradient of float8": [
                partial(lora.thin_gradient, dthin, x8, descale),
                partial(converted, x8, descale, dthin, turned=True),
            ],
            "addition": [partial(lora.add_low_rank, dy, thin, b.t(), 1.0), partial(dy.addmm_, thin, b.t())],
        }
        for work, pair in calls.items():
            kernel, plain = (microseconds(call, args.seconds) for call in pair)
            print(
                f"{layer:18s} {work:18s} kernel {kernel:7.1f} us, torch {plain:7.1f} us, {plain / kernel:.3f}",
                flush=True,
            )
            row = {"bench": "lora", "case": f"{layer} rank {rank} {work}", "metric": "us"}
            rows.append(row | {"value": f"{kernel:.1f}", "baseline": "torch", "baseline_value": f"{plain:.1f}"})
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
